"""A whole layout for given devices and links: cut, replicas of each stage, codec.

For every number of stages it balances the cut, places the devices as joiners (fastest first, each
where it helps most), lets the planner exchange them until nothing is gained, fits the cut to what
each stage got, and places again. The best throughput over all of these wins; of nearly equal ones
fewer stages, and the codecs that lose least, which are taken to be those with more bytes. The run
as it is written is among them. A heuristic: `bound` says what no layout with that cut could exceed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarm.model.cut import balanced_cut
from swarm.placement.joining import choose_among
from swarm.placement.memory import estimate_memory, least_slots
from swarm.placement.moves import plan_moves
from swarm.placement.optimum import best_cut, optimum
from swarm.placement.sketch import MovePolicy
from swarm.placement.table import LoadTable, PeerLoad, StageNeed
from swarm.wire.boundaries import BACKWARD, FORWARD, BoundaryCodecs

# Per value on the wire. What zstd will save is not known: it counts for nothing.
CODEC_BYTES = {
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "int8": 1.0 + 2 / 64,
    "int4": 0.5 + 1 / 8,
}
# float16 is as large as bfloat16, and int4 costs loss enough that only its run can choose it.
PROPOSED = ("float32", "bfloat16", "int8")
AS_GOOD = 0.98  # of the best throughput: then the simpler choice wins
MOST_STAGES = 64
_ROUNDS = 20
_FREE = MovePolicy(hysteresis_s=0.0, min_gain=0.001, effort=0.0)


@dataclass(frozen=True, slots=True)
class Device:
    """`flops`: sustained, per second. `up_bytes_per_s`: what it can send."""

    name: str
    flops: float
    memory_bytes: int
    up_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Work:
    """What a microbatch and a step are. Per layer: `flops` of forward and backward, `parameters`,
    `activation_bytes` held between them. `boundary_values`: numbers that cross a boundary, one
    way. `gradient_bytes` of a parameter when replicas are averaged, to whoever sums it and back.
    `microbatches` per step; `slots` in flight per replica (None: what every peer can hold).
    Averaging overlaps with the first `ahead` microbatches of the next step. No boundary may come
    after more than `latest_boundary` layers (None: any). `shared_bytes`: in every stage beside its
    own."""

    flops: tuple[float, ...]
    parameters: tuple[int, ...]
    activation_bytes: tuple[int, ...]
    boundary_values: int
    microbatches: int
    gradient_bytes: float = 8.0
    optimizer: str = "adamw"
    accumulate: str = "float64"
    slots: int | None = None
    ahead: int = 0
    latest_boundary: int | None = None
    shared_bytes: int = 0

    @property
    def most_stages(self) -> int:
        layers = len(self.flops)
        latest = layers - 1 if self.latest_boundary is None else self.latest_boundary
        return min(layers, latest + 1, MOST_STAGES)


@dataclass(frozen=True, slots=True)
class Layout:
    """`stages[name]` of each device, None where it fits nowhere. Throughputs in microbatches/s,
    averaging included; `rates` of the stages without it; `bound`: of any placement on this cut."""

    cut: tuple[int, ...]
    codecs: BoundaryCodecs
    stages: dict[str, int | None]
    needs: tuple[StageNeed, ...]
    rates: tuple[float, ...]
    throughput: float
    bound: float
    averaging_s: float

    @property
    def bytes_per_value(self) -> float:
        """Mean over boundaries and directions; of one stage, what a boundary would have."""
        boundaries = range(max(1, len(self.cut) - 1))
        both = [_bytes(self.codecs, b, way) for b in boundaries for way in (FORWARD, BACKWARD)]
        return sum(both) / len(both)


def propose(work: Work, devices: Sequence[Device], written: Layout | None = None) -> Layout | None:
    """The best layout found, or None where the model does not fit these devices at all.

    Slower than `written`, the run as it is, only where it loses less on the wire.
    """
    tried = [BoundaryCodecs(codec, codec) for codec in PROPOSED]
    found: list[Layout] = []
    if written is not None:
        tried = [written.codecs, *(each for each in tried if each != written.codecs)]
        found.append(written)
    for codecs in tried:
        for count in range(1, min(work.most_stages, len(devices)) + 1):
            if codecs.overrides and written is not None and count != len(written.cut):
                continue  # single boundaries are named: of another cut they are others
            found.append(place(work, devices, _balanced(work, count), codecs, fit_cut=True))
    most = max(layout.throughput for layout in found)
    if most <= 0:
        return None
    good = [each for each in found if each.throughput >= AS_GOOD * most]
    if written is not None:
        good = [
            each
            for each in good
            if each.throughput >= written.throughput
            or each.bytes_per_value > written.bytes_per_value
        ]
    return min(good, key=lambda each: (-each.bytes_per_value, len(each.cut), -each.throughput))


def place(
    work: Work,
    devices: Sequence[Device],
    cut: Sequence[int],
    codecs: BoundaryCodecs,
    *,
    fit_cut: bool = False,
) -> Layout:
    """The devices on a given cut; with `fit_cut` also on the one that suits that placement."""
    layout = _place(work, devices, tuple(cut), codecs)
    if fit_cut and layout.throughput > 0:
        capacity = [rate * need.cost for rate, need in zip(layout.rates, layout.needs, strict=True)]
        fitted = best_cut(work.flops, capacity, work.latest_boundary)
        if fitted != layout.cut:
            other = _place(work, devices, fitted, codecs)
            if other.throughput > layout.throughput:
                return other
    return layout


def _balanced(work: Work, stages: int) -> tuple[int, ...]:
    costs = [max(1, round(each)) for each in work.flops]
    return balanced_cut(costs, stages, work.latest_boundary)


def _bytes(codecs: BoundaryCodecs, boundary: int, direction: str) -> float:
    return CODEC_BYTES[codecs.name(boundary, direction).removesuffix("+zstd")]


def _sent_bytes(work: Work, codecs: BoundaryCodecs, stage: int, num_stages: int) -> float:
    """Of a microbatch, by a replica of `stage`: activations on, their gradients back."""
    sent = _bytes(codecs, stage, FORWARD) if stage < num_stages - 1 else 0.0
    if stage > 0:
        sent += _bytes(codecs, stage - 1, BACKWARD)
    return work.boundary_values * sent


def _place(
    work: Work, devices: Sequence[Device], cut: tuple[int, ...], codecs: BoundaryCodecs
) -> Layout:
    needs = _needs(work, cut)

    def load(device: Device) -> PeerLoad:
        rates = {}
        for stage, need in enumerate(needs):
            sent = _sent_bytes(work, codecs, stage, len(cut))
            link = device.up_bytes_per_s / sent if sent else math.inf
            rates[stage] = min(device.flops / need.cost, link)
        return PeerLoad(
            device.name, rates=rates, speed=device.flops, memory_bytes=device.memory_bytes
        )

    table = LoadTable(needs)
    settled, replicas = [0.0] * len(cut), [0] * len(cut)
    peers: dict[str, PeerLoad] = {}
    for device in sorted(devices, key=lambda each: (-each.flops, each.name)):
        peer = load(device)
        stage = choose_among(table, peer, settled, replicas).stage
        if stage is not None:
            settled[stage] += peer.rates[stage]
            replicas[stage] += 1
            peer = replace(peer, stages=(stage,))
        peers[device.name] = peer
    for _ in range(_ROUNDS):
        plan = plan_moves(LoadTable(needs, tuple(peers.values())), 0.0, _FREE)
        if plan.gain <= 0:
            break
        for move in plan.moves:
            peers[move.peer] = replace(peers[move.peer], stages=(move.to_stage,))
    table = LoadTable(needs, tuple(peers.values()))
    rates = table.present_rates(0.0)
    averaging_s = _averaging_s(work, cut, table, {d.name: d.up_bytes_per_s for d in devices})
    return Layout(
        cut,
        codecs,
        {name: peer.stages[0] if peer.stages else None for name, peer in peers.items()},
        needs,
        tuple(rates),
        _over_a_step(work, min(rates), averaging_s),
        optimum([need.cost for need in needs], [device.flops for device in devices]),
        averaging_s,
    )


def _needs(work: Work, cut: Sequence[int]) -> tuple[StageNeed, ...]:
    needs = []
    start = 0
    for layers in cut:
        part = slice(start, start + layers)
        parameters = sum(work.parameters[part])
        memory = estimate_memory(
            parameters,
            optimizer=work.optimizer,
            accumulate=work.accumulate,
            activation_bytes=sum(work.activation_bytes[part]),
            slots=work.slots or least_slots(len(cut)),
            steps_in_flight=2 if work.ahead else 1,
            shared_bytes=work.shared_bytes,
        )
        needs.append(StageNeed(sum(work.flops[part]), memory.total, 4 * parameters))
        start += layers
    return tuple(needs)


def _averaging_s(
    work: Work, cut: Sequence[int], table: LoadTable, up_bytes_per_s: dict[str, float]
) -> float:
    """Of the slowest stage: each of n members sends (n - 1) / n of its gradient to those who sum
    it, and (n - 1) / n of all sums in return."""
    longest, start = 0.0, 0
    for stage, layers in enumerate(cut):
        gradient_bytes = work.gradient_bytes * sum(work.parameters[start : start + layers])
        start += layers
        members = [peer.peer for peer in table.peers if peer.stages == (stage,)]
        if len(members) > 1:
            sent = (len(members) - 1) / len(members) * gradient_bytes
            longest = max(longest, sent / min(up_bytes_per_s[name] for name in members))
    return longest


def _over_a_step(work: Work, rate: float, averaging_s: float) -> float:
    if rate <= 0:
        return 0.0
    working_s = work.microbatches / rate
    hidden_s = min(averaging_s, working_s * work.ahead / work.microbatches)
    return work.microbatches / (working_s + averaging_s - hidden_s)
