"""The steps under way at one replica, each with its ledger, its kept answers and its first state.

There are as many as the state has versions, one with the exact policy; they take turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from peer.kept import KeptAnswers, Work
from swarm.ahead import Ahead
from swarm.delayed_state import State
from swarm.errors import RefusedError
from swarm.ledger import Ledger
from swarm.stage_state import StageState
from swarm.terms import Term

COMMIT_WAIT_S = 60.0


@dataclass(slots=True, eq=False)
class Part:
    """What a replica holds of one step under way."""

    state: StageState
    ledger: Ledger
    kept: KeptAnswers
    clearing: asyncio.Task[None] | None = None  # for the last reset
    nonfinite: bool = False  # something counted in this step was no number when it came
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # replaced at every change

    def tell_changed(self) -> None:
        """Something was counted, or the ledger is that of another step."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


class Parts:
    """Of one replica, whose `state` they begin with. The microbatches that `ahead` names need not
    wait for the commit before theirs. `release(work)` is told of what is dropped."""

    def __init__(
        self, state: State, kept_bytes: int, ahead: Ahead, release: Callable[[Work], None]
    ) -> None:
        self.state, self.ahead, self._release = state, ahead, release
        versions = state.live
        self._parts = [
            Part(version, Ledger(step, len(versions)), KeptAnswers(kept_bytes // len(versions)))
            for step, version in enumerate(versions)
        ]
        self.advanced = asyncio.Event()  # replaced at every commit

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def of(self, step: int) -> Part:
        """Of that step, if it is under way; its ledger says so."""
        return self._parts[step % len(self._parts)]

    def version(self, part: Part, index: int) -> StageState:
        """What a microbatch of `part` is computed with: those that need not wait for the commit
        before theirs do not see what it makes."""
        ahead = self.ahead.of(part.ledger.step)
        return part.state if index < ahead else self.state.waiting(ahead)

    @property
    def oldest(self) -> Part:
        """Of the next step to be committed, which is the state's step."""
        return min(self._parts, key=lambda part: part.ledger.step)

    @property
    def ledger(self) -> Ledger:
        """Of the oldest step under way."""
        return self.oldest.ledger

    @property
    def kept(self) -> KeptAnswers:
        """Of the oldest step under way."""
        return self.oldest.kept

    def see(self, term: Term) -> bool:
        """Take notice of a term; False when a higher one has been seen: refuse what carried it."""
        heeded = [part.ledger.see(term) for part in self._parts]
        return all(heeded)

    def drop(self, part: Part, index: int) -> None:
        """Forget one microbatch and stop what is under way for it."""
        part.kept.drop(index, self._release)

    def drop_works(self, part: Part) -> None:
        """Forget a step's answers and stop what is under way."""
        part.kept.clear(self._release)
        part.nonfinite = False

    def committed(self) -> None:
        """The oldest step is: its part is that of a later step now, with an empty ledger. What
        is under way of the others goes on."""
        part = self.oldest
        self._begin(part, part.ledger.step + len(self._parts))
        self._tell_advanced()

    def advance(self, step: int) -> None:
        """The state was replaced, and is that of `step` now, with empty ledgers."""
        for number, version in enumerate(self.state.live, start=step):
            part = self.of(number)
            part.state = version
            self._begin(part, number)
        self._tell_advanced()

    async def commit_of(self, step: int) -> None:
        """Wait until `step` is committed here. Raises RefusedError when that takes too long."""
        try:
            async with asyncio.timeout(COMMIT_WAIT_S):
                while self.ledger.step <= step:
                    await self.advanced.wait()
        except TimeoutError:
            raise RefusedError(f"the commit of step {step} did not arrive") from None

    def _begin(self, part: Part, step: int) -> None:
        self.drop_works(part)
        part.ledger.advance(step)
        part.tell_changed()

    def _tell_advanced(self) -> None:
        advanced, self.advanced = self.advanced, asyncio.Event()
        advanced.set()
