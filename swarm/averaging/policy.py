"""What one commit means: the interface of update policies, *exact* and *delayed* (DESIGN).

A policy says what the replicas of a stage agree on before a record is proposed (`prepare`), and
what the record then does to the parameters (`apply`). Everything between, that is attempts, aborts,
hashes and the record itself, is the step protocol's and the same for all policies. Each says its
unit of commit and what a death costs, since that is what a user chooses between.

The contract behind I4: `prepare` only reads the state. Whatever it makes lives in what it returns,
so an aborted attempt costs its time and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from swarm.ahead import NONE, Ahead
from swarm.averaging.plan import EXACT
from swarm.averaging.progress import Rates
from swarm.compute import Compute, Kind
from swarm.delayed_state import State
from swarm.device import host_memory, to_host
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


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """What a member has prepared. `facts` go to the leader, and their hash into the record."""

    gradient: Tensor  # flat float32, on the CPU: others may ask for it, and a device has no room
    facts: GradientFacts
    rates: Rates = ()


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
        local, averaged = await _brought(state, compute, alone=len(members) == 1)
        rates: Rates = (0,)
        if local is not averaged:
            rates = await self._reducer.all_reduce(
                round_id, members, local, averaged, shares=shares, codec=self._codec
            )
        return Update(averaged, await _facts(averaged, state, compute), rates)

    def apply(self, state: State, update: Update, *, lr: float, scale: float) -> None:
        gradient = update.gradient.to(state.device, non_blocking=True)
        state.apply(gradient, lr=lr, scale=scale)


async def _brought(state: State, compute: Compute, *, alone: bool) -> tuple[Tensor, Tensor]:
    """What is summed up here, on the CPU, and memory for the average. The two are one where a
    device has rounded the sum of a member that is alone."""
    if state.device.type == "cpu":  # no need to wait for what it computes
        return state.accumulator, torch.empty(state.layout.total)

    def bring() -> tuple[Tensor, Tensor]:
        if alone:
            averaged = to_host(rounded(state.accumulator))
            return averaged, averaged
        averaged = host_memory((state.layout.total,), torch.float32, state.device)
        return to_host(state.accumulator), averaged

    return (await compute.run(Kind.UPDATE, bring)).value


async def _facts(averaged: Tensor, state: State, compute: Compute) -> GradientFacts:
    layout, device = state.layout, state.device
    if device.type == "cpu":
        return (await compute.run(Kind.UPDATE, lambda: GradientFacts.of(layout, averaged))).value
    # Of the same bits wherever they are computed, but hashing needs no device to wait for it.
    norms, sha256 = await asyncio.gather(
        compute.run(Kind.UPDATE, lambda: layout.squared_norms(averaged.to(device))),
        asyncio.to_thread(gradient_sha256, averaged),
    )
    return GradientFacts.made(sha256, norms.value)


class DelayedPolicy(ExactPolicy):
    """The same update, averaged while the next step's first `ahead` microbatches go round, which
    therefore are computed one step stale (`swarm.delayed_state`, docs/decisions/delayed.md).

    Unit of commit: one step. A death costs computing again what the dead replica had counted in at
    most two steps."""

    name = "delayed"


POLICIES = {policy.name: policy for policy in (ExactPolicy, DelayedPolicy)}
