"""What makes a swarm quick on thin lines, in a whole swarm: who sums how much, and bytes counted.

The all-reduce alone is in `test_all_reduce.py`, codecs under faults are in `test_exactness.py`, the
setting that is recommended for homes is in `tests/unit/test_subspace.py`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from torch import nn

from peer.baseline import Baseline
from peer.members import Traffic
from swarm.averaging.all_reduce import GroupAllReduce
from swarm.averaging.progress import Rates
from swarm.model.custom import CustomPipeline
from swarm.model.definition import Pipeline
from swarm.wire.boundaries import BoundaryCodecs
from swarm.wire.codecs import WireTensor
from swarm.wire.frames import encode_frame
from tests.protocol.simulated import OPTIMIZER, Swarm, TinyBatches, plan
from tests.protocol.tiny import TINY, Block

# ---- who sums how much ---------------------------------------------------------------------------

WIDE = Pipeline(
    layers={
        "enter": lambda: nn.Linear(6, 384),
        "one": lambda: Block(384),
        "leave": lambda: nn.Linear(384, 2),
    },
    inputs=TINY.inputs,
    loss=TINY.loss,
    weight=TINY.weight,
    data=TINY.data,
)
LINE_BPS, THIN_BPS = 20e6, 4e6


@pytest.mark.parametrize(
    ("members", "thin", "takes"),
    [(4, "up", 8 / 9), (4, "down", 4 / 9), (2, "up", 4 / 6)],
    ids=["four, up", "four, down", "two, up"],
)
def test_the_sums_spare_a_thin_line(
    members: int, thin: str, takes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From what members measure to what they are ordered to sum, by way of the leader: the tiny
    model's gradients are too few bytes to say anything of a line, so this one is wider.

    An element is 8 bytes on its way to who sums it, and 4 back to each. So one of four sends 9 and
    receives 9 where all sum alike, 8 and 4 where it sums nothing. But one of two sends least, 4 and
    not 6, where it sums everything: a thin uplink's owner does that.
    """
    names = [f"r0.{number}" for number in range(members)]
    owner = names[members // 2]
    monkeypatch.setattr("swarm.averaging.progress.MIN_MEASURED_BYTES", 1 << 16)
    usual, ordered = GroupAllReduce.all_reduce, {}

    async def all_reduce(
        self: GroupAllReduce,
        round_id: str,
        group: Sequence[str],
        *tensors: Any,
        shares: Sequence[int] | None = None,
        codec: str,
    ) -> Rates:
        assert [member.split("#")[0] for member in group] == names
        assert ordered.setdefault(round_id, shares) == shares, "its members disagree"
        return await usual(self, round_id, group, *tensors, shares=shares, codec=codec)

    monkeypatch.setattr(GroupAllReduce, "all_reduce", all_reduce)
    pipeline = CustomPipeline(WIDE, seed=3, num_stages=1, microbatch_size=4)
    swarm = Swarm(num_stages=1, replicas=(members,))
    swarm.pipeline = pipeline
    for source, target in itertools.permutations(names, 2):
        bps = THIN_BPS if owner == (source if thin == "up" else target) else LINE_BPS
        swarm.network.rates[source, target] = bps / (members - 1)
    whole = Baseline(plan(), pipeline, TinyBatches(), OPTIMIZER)
    list(whole.steps(3))
    assert swarm.run(3)["sha256"] == whole.report()["sha256"]
    assert len(ordered) == 3
    first, *later = ordered.values()
    assert first is None, "nothing has been measured before the first round"
    for shares in later:
        assert shares is not None
        others = [*shares]
        mine = others.pop(members // 2)
        assert mine < min(others) / 2 if members == 4 else mine > 2 * max(others), shares
    took = []
    for step in range(3):
        at = [
            at
            for at, _, point, told in swarm.events
            if point in ("average", "prepared") and told["step"] == step
        ]
        took.append(max(at) - min(at))
    assert max(took[1:]) == pytest.approx(takes * took[0], rel=0.1), took


# ---- bytes ---------------------------------------------------------------------------------------


class Confirmed(Swarm):
    """Ends when the leader has heard of the last commit, too, what each has sent until then."""

    async def settle(self) -> bool:
        calm = await super().settle()
        await asyncio.sleep(1.0)
        assert self.leader is not None
        assert {each.confirmed for each in self.leader.members} == {self.leader.next_step}
        return calm


def test_the_bytes_reported_are_those_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each boundary and direction, before and after a codec of its own. 32 float32 values cross
    for each microbatch: to int8 a part of a block of 64, to int4 4 rows of 8."""
    sent: Counter[str] = Counter()

    def encode(header: Mapping[str, Any], tensors: Sequence[WireTensor] = ()) -> list[Any]:
        for tensor in tensors:
            sent[tensor.meta.codec] += len(tensor.data)
        return encode_frame(header, tensors)

    monkeypatch.setattr("swarm.net.channel.encode_frame", encode)
    codecs = BoundaryCodecs("int8", "bfloat16", {1: ("float16+zstd", "int4")})
    swarm, told = Confirmed(codecs=codecs), {}

    def note() -> None:
        assert swarm.leader is not None
        told.update({stage: swarm.leader.traffic(stage) for stage in range(3)})

    swarm.at_end = note
    swarm.run(3)
    crossings = 3 * swarm.plan.num_microbatches
    raw = crossings * 32 * 4
    assert told == {
        0: Traffic(sent["int8"], raw, 0, 0),
        1: Traffic(sent["float16+zstd"], raw, sent["bfloat16"], raw),
        2: Traffic(0, 0, sent["int4"], raw),
    }
    assert sent["int8"] == crossings * (64 + 2)
    assert sent["bfloat16"] == crossings * 32 * 2
    assert sent["int4"] == (crossings * 4 * (1 + 4) + crossings)
    assert 0 < sent["float16+zstd"] < raw
