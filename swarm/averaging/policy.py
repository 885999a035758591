"""What one commit means: the interface of update policies, *exact* and *delayed* (DESIGN).

A policy says what the replicas of a stage agree on before a record is proposed (`prepare`), and
what the record then does to the parameters (`apply`). Everything between, that is attempts, aborts,
hashes and the record itself, is the step protocol's and the same for all policies. Each says its
unit of commit and what a death costs, since that is what a user chooses between.

The contract behind I4: `prepare` only reads the state. Whatever it makes lives in what it returns,
so an aborted attempt costs its time and nothing else.

Where a policy keeps what is neither parameter nor gradient: what all replicas of a stage share and
a joiner needs (PowerSGD's last factor, DiLoCo's outer momentum) is a tensor of its `State`, as the
second version of *delayed* is, so it travels, is hashed and is saved with the stage. What is one
replica's own (an error-feedback residual) rides in a subclass of `Update`, and becomes true in
`apply`; who fetched the averaged gradient instead of preparing it has a plain `Update`, and none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from swarm.ahead import NONE, Ahead
from swarm.averaging.plan import EXACT
from swarm.averaging.progress import Rates
from swarm.compute import Compute, Kind
from swarm.delayed_state import State
from swarm.device import Landing, host_memory, to_host
from swarm.errors import StageFailedError
from swarm.model.layout import gradient_sha256
from swarm.stage_state import GradientFacts, rounded


class Reducer(Protocol):
    """The group all-reduce, `GroupAllReduce` or a stand-in."""

    async def all_reduce(
        self,
        round_id: str,
        members: Sequence[str],
        local: Tensor,
        out: Tensor,
        *,
        shares: Sequence[int] | None = None,
        codec: str = EXACT,
    ) -> Rates: ...


@dataclass(slots=True, eq=False)
class Update:
    """What a member has prepared. `facts` go to the leader, and their hash into the record."""

    gradient: Tensor  # flat float32, on the CPU: others may ask for it, and a device has no room
    facts: GradientFacts
    rates: Rates = ()
    # `gradient` once more, while nothing else needs the room: it may be dropped at any time.
    on_device: Tensor | None = None


class UpdatePolicy(Protocol):
    """How the members of a stage's group turn what they counted into one update."""

    name: str
    ahead: Ahead  # which microbatches are computed before the commit of the step before

    async def prepare(
        self,
        round_id: str,
        members: Sequence[str],
        state: State,
        compute: Compute,
        shares: Sequence[int] | None = None,
    ) -> Update:
        """Agree with `members`, who sum parts in proportion to `shares`, on the update.

        Raises RoundFailedError; changes nothing.
        """

    def apply(self, state: State, update: Update, *, lr: float, scale: float) -> None:
        """Make the committed update real. Blocking; belongs on the compute thread."""


class ExactPolicy:
    """The gradient of the step, summed over the group in the accumulator's dtype, rounded once;
    on the wire in `codec`, float32 meaning without loss.

    Unit of commit: one step. A death costs computing again what the dead replica had counted in
    that step."""

    name = "exact"

    def __init__(self, reducer: Reducer, codec: str = EXACT, ahead: Ahead = NONE) -> None:
        self._reducer, self._codec, self.ahead = reducer, codec, ahead

    async def prepare(
        self,
        round_id: str,
        members: Sequence[str],
        state: State,
        compute: Compute,
        shares: Sequence[int] | None = None,
    ) -> Update:
        keep = not self.ahead.microbatches  # else the next step's gradients take the room
        brought = await _brought(state, compute, alone=len(members) == 1, keep=keep)
        rates: Rates = (0,)
        if brought.local is not brought.averaged:
            rates = await self._reducer.all_reduce(
                round_id,
                members,
                brought.local,
                brought.averaged,
                shares=shares,
                codec=self._codec,
            )
        facts, on_device = await _facts(brought, state, compute, keep=keep)
        return Update(brought.averaged, facts, rates, on_device)

    def apply(self, state: State, update: Update, *, lr: float, scale: float) -> None:
        gradient = update.on_device
        if gradient is None:
            gradient = update.gradient.to(state.device, non_blocking=True)
        state.apply(gradient, lr=lr, scale=scale)


@dataclass(frozen=True, slots=True, eq=False)
class _Brought:
    """What is summed up here, on the CPU, and memory for the average. The two are one where a
    device has rounded the sum of a member that is alone: then the first n elements are there after
    `wait(n)`, and it is also `on_device` or, where it must not be kept there, its norms are known.
    """

    local: Tensor
    averaged: Tensor
    wait: Callable[[int], None] = lambda num_elements: None
    on_device: Tensor | None = None
    norms: list[float] | None = None


async def _brought(state: State, compute: Compute, *, alone: bool, keep: bool) -> _Brought:
    if state.device.type == "cpu":  # no need to wait for what it computes
        return _Brought(state.accumulator, torch.empty(state.layout.total))

    def bring() -> _Brought:
        if not alone:
            averaged = host_memory((state.layout.total,), torch.float32, state.device)
            return _Brought(to_host(state.accumulator), averaged)
        on_device = rounded(state.accumulator)
        landing = Landing(on_device)
        brought = _Brought(landing.tensor, landing.tensor, landing.wait, on_device)
        if keep:
            return brought
        return replace(brought, on_device=None, norms=state.layout.squared_norms(on_device))

    return (await compute.run(Kind.UPDATE, bring)).value


async def _facts(
    brought: _Brought, state: State, compute: Compute, *, keep: bool
) -> tuple[GradientFacts, Tensor | None]:
    """Of the average, and to `keep` that on the device where it is not the CPU."""
    layout, averaged, wait = state.layout, brought.averaged, brought.wait
    if state.device.type == "cpu":
        facts = await compute.run(Kind.UPDATE, lambda: GradientFacts.of(layout, averaged))
        return facts.value, None
    # Of the same bits wherever they are computed, but hashing needs no device to wait for it.
    (norms, on_device), sha256 = await asyncio.gather(
        _norms(brought, state, compute, keep=keep),
        asyncio.to_thread(gradient_sha256, averaged, lambda count: _arrived(wait, count)),
    )
    return GradientFacts.made(sha256, norms), on_device


async def _norms(
    brought: _Brought, state: State, compute: Compute, *, keep: bool
) -> tuple[list[float], Tensor | None]:
    if brought.norms is not None:
        return brought.norms, None

    def norms() -> tuple[list[float], Tensor | None]:
        on_device = brought.on_device
        if on_device is None:
            on_device = brought.averaged.to(state.device)
        return state.layout.squared_norms(on_device), on_device if keep else None

    return (await compute.run(Kind.UPDATE, norms)).value


def _arrived(wait: Callable[[int], None], num_elements: int) -> None:
    try:
        wait(num_elements)
    except RuntimeError as error:  # of the device
        raise StageFailedError(f"its gradient did not arrive: {str(error)[:200]}") from error


class DelayedPolicy(ExactPolicy):
    """The same update, averaged while the next step's first `ahead` microbatches go round, which
    therefore are computed one step stale (`swarm.delayed_state`, docs/decisions/delayed.md).

    Unit of commit: one step. A death costs computing again what the dead replica had counted in at
    most two steps."""

    name = "delayed"


POLICIES = {policy.name: policy for policy in (ExactPolicy, DelayedPolicy)}
