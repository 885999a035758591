"""The bodies of microbatch calls: what a hop is asked to do, validated before anything else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from swarm.errors import WireError
from swarm.terms import MAX_COUNTER, Term

MAX_STAGES = 1024
FIELDS_CODEC = "raw+zstd"  # of a microbatch's fields; floating-point ones therefore travel raw


@dataclass(frozen=True, slots=True)
class MicrobatchCall:
    """One hop's part of one try of one microbatch (DESIGN, "The path of one microbatch").

    `attempt` is the leader's averaging attempt so far; `divisor` the loss items of the whole step;
    `replay` says that some hop has done its part before, so the call must not wait for a slot.
    With `nonfinite` results that are no numbers are let through (`swarm.finite`).
    """

    term: Term
    step: int
    index: int
    try_: int
    attempt: int
    route: tuple[str, ...]
    hop: int
    divisor: float
    replay: bool
    nonfinite: bool = False

    @property
    def is_last(self) -> bool:
        return self.hop == len(self.route) - 1

    def next_hop(self) -> MicrobatchCall:
        return replace(self, hop=self.hop + 1)

    def body(self) -> dict[str, Any]:
        return {
            "term": list(self.term),
            "step": self.step,
            "index": self.index,
            "try": self.try_,
            "attempt": self.attempt,
            "route": list(self.route),
            "hop": self.hop,
            "divisor": self.divisor,
            "replay": self.replay,
            "nonfinite": self.nonfinite,
        }

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> MicrobatchCall:
        """Raises WireError."""
        try:
            call = cls(
                term=Term.read(body["term"]),
                step=count(body["step"]),
                index=count(body["index"]),
                try_=count(body["try"]),
                attempt=count(body["attempt"]),
                route=names(body["route"]),
                hop=count(body["hop"]),
                divisor=float(body["divisor"]),
                replay=body["replay"] is True,
                nonfinite=body.get("nonfinite") is True,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"not a microbatch call: {error}") from None
        if not call.hop < len(call.route) or not 0 < call.divisor < float("inf"):
            raise WireError("a microbatch call that contradicts itself")
        return call


def count(value: object) -> int:
    """A bounded non-negative integer from the wire. Raises WireError."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MAX_COUNTER:
        raise WireError("not a count")
    return value


def names(value: object) -> tuple[str, ...]:
    """A bounded list of names from the wire. Raises WireError."""
    if not isinstance(value, list) or len(value) > MAX_STAGES:
        raise WireError("not a list of names")
    for name in value:
        if not isinstance(name, str) or len(name) > 200:
            raise WireError("not a name")
    return tuple(value)
