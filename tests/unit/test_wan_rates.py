"""The figures of the lab of home connections (`benchmarks/wan`), from what was heard and counted.

With stand-ins for the lab, the swarm in it, torch's ranks and the clock; no root.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "wan"))  # scripts

import _paced_torch
import averaging
import throughput
import wire_bytes
from _lab import Host
from _measured import Traffic
from _profiles import FIBRE, HOME, POOR


class Swarm:
    """Its steps end at these times of a clock that goes on while it is waited for."""

    now = 1000.0

    def __init__(self, ends: Sequence[float]) -> None:
        self.ends, self.is_stopped = [self.now + end for end in ends], False
        self._on_step: Callable[[Mapping[str, Any]], None] = lambda step: None

    def monotonic(self) -> float:
        return self.now

    async def start(self) -> None:
        pass

    async def until_serving(self, peers: Mapping[int, int]) -> None:
        pass

    async def until(self, condition: Callable[[], Any], what: str, limit: float) -> None:
        while not condition():
            self.now += 1.0
            if self.ends and self.ends[0] <= self.now:
                self.ends.pop(0)
                self._on_step({})

    def status(self) -> dict[str, Any]:
        return {"bytes": {"boundaries": [{"boundary": 0}]}}

    async def stop(self) -> None:
        self.is_stopped = True


def options(**more: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{
            "real": False, "microbatches": 16, "microbatch_size": 4, "policy": "exact",
            "ahead": 1.0, "parameters": 0, "seconds": 20.0, "steps": 20, "limit": 1800.0, **more
        }
    )  # fmt: skip


TOKENS = 16 * 4 * 1024  # of a step


# ---- throughput ---------------------------------------------------------------------------------


def swarm_rate(
    monkeypatch: pytest.MonkeyPatch, ends: Sequence[float], **more: Any
) -> tuple[float, int]:
    """Seconds and steps of the rate that a swarm has whose steps end so."""
    swarm = Swarm(ends)
    monkeypatch.setenv("SWARM_BENCH_WIDE", "")  # which it exports
    monkeypatch.setattr(throughput, "time", swarm)
    monkeypatch.setattr(throughput, "lab_swarm", lambda *_: contextlib.nullcontext(swarm))
    lab: Any = None
    setting = throughput.SETTINGS["int4"]
    row = asyncio.run(throughput.swarm_rate(lab, setting, options(**more)))
    assert swarm.is_stopped
    return TOKENS * max(row["steps"], 1) / row["tokens_per_s"], row["steps"]


@pytest.mark.parametrize(
    ("ends", "more", "seconds", "steps"),
    [
        (range(9, 99, 3), {}, 21, 7),  # the first that is more than 20 s after the first
        (range(9, 99, 3), {"steps": 4}, 12, 4),
        (range(9, 99, 3), {"limit": 16}, 6, 2),
        ([30, 40, 50], {}, 30, 1),  # so long that its start does not matter
        ([9, 99], {"limit": 50}, 9, 1),
        ([99], {"limit": 50}, 50, 0),  # less than one in this time
    ],
    ids=["long enough", "steps enough", "late", "a long one", "only one", "none"],
)
def test_the_rate_of_a_swarm_is_that_of_the_steps_after_its_first(
    ends: Sequence[float],
    more: dict[str, Any],
    seconds: float,
    steps: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert swarm_rate(monkeypatch, ends, **more) == (pytest.approx(seconds), steps)


class Rank:
    """In place of a process of torch: `steps` is how long each takes; then it says no more."""

    made: list[Rank]
    steps: Sequence[float]

    def __init__(self, *command: str) -> None:
        self.command, self.number = command, len(self.made)
        self.made.append(self)
        self.answers = iter([{}, *({"seconds": each + self.number / 10} for each in self.steps)])
        self.told, self.killed, self.is_closed = 0, threading.Event(), False
        self.process = SimpleNamespace(kill=self.killed.set)

    def tell(self, *, step: bool) -> None:
        self.told += step

    def hear(self) -> dict[str, float]:
        for answer in self.answers:
            return answer
        assert self.killed.wait(60.0)
        raise RuntimeError("it ended")

    def close(self) -> None:
        self.is_closed = True

    def option(self, name: str) -> str:
        return self.command[self.command.index(name) + 1]


def torch_rate(
    monkeypatch: pytest.MonkeyPatch, steps: Sequence[float], **more: Any
) -> tuple[float, int]:
    monkeypatch.setattr(Rank, "made", [], raising=False)
    monkeypatch.setattr(Rank, "steps", steps, raising=False)
    monkeypatch.setattr(throughput, "Helper", Rank)
    lab: Any = SimpleNamespace(hosts=[Host(f"lab-{n}", f"10.77.0.{n}", HOME) for n in range(1, 8)])
    row = throughput.torch_rate(lab, options(**more))
    assert all(rank.is_closed for rank in Rank.made)
    return TOKENS * max(row["steps"], 1) / row["tokens_per_s"], row["steps"]


@pytest.mark.parametrize(
    ("taken", "seconds", "steps"),
    [
        ([9.5, 4.5, 5.5, 9.5, 1.0], 21.0, 3),  # the first opens connections
        ([20.0, 1.0], 20.5, 1),  # so long that this does not matter
    ],
)
def test_the_rate_of_torch_is_that_of_its_slowest_rank(
    taken: Sequence[float], seconds: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is half a second behind the first here."""
    assert torch_rate(monkeypatch, taken) == (pytest.approx(seconds), steps)
    assert {rank.told for rank in Rank.made} == {steps + (steps > 1)}


def test_a_limit_ends_torch_and_what_it_has_done_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_rate(monkeypatch, [], limit=0.01) == (pytest.approx(0.01), 0)
    assert torch_rate(monkeypatch, [5.0], limit=0.01) == (pytest.approx(5.5), 1)
    assert torch_rate(monkeypatch, [5.0, 6.0], limit=0.01) == (pytest.approx(6.5), 1)
    assert all(rank.killed.is_set() for rank in Rank.made)


def test_a_rank_that_dies_of_something_else_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(self: Rank) -> dict[str, float]:
        raise RuntimeError("no memory")

    monkeypatch.setattr(Rank, "hear", die)
    with pytest.raises(RuntimeError, match="no memory"):
        torch_rate(monkeypatch, [])


def test_torch_has_the_stages_the_microbatches_and_the_pace_of_the_swarm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Replicas of a stage are neighbours among the hosts, behind the leader's; a pipeline has one
    of each."""
    torch_rate(monkeypatch, [99.0], microbatch_size=2, parameters=7)
    assert [rank.command[1] for rank in Rank.made] == [
        "lab-2", "lab-4", "lab-6", "lab-3", "lab-5", "lab-7"
    ]  # fmt: skip
    for number, rank in enumerate(Rank.made):
        assert rank.option("--rank") == str(number)
        assert rank.option("--master").startswith("tcp://10.77.0.2:")  # of rank 0
        pipelines, sequences = _paced_torch.PIPELINES, int(rank.option("--microbatch-size"))
        assert pipelines * int(rank.option("--microbatches")) * sequences * 1024 == TOKENS
        assert float(rank.option("--forward-s")) == pytest.approx(2 * 0.030 / 4)
        assert float(rank.option("--backward-s")) == pytest.approx(2 * 0.060 / 4)
        assert rank.option("--parameters") == "7"
    assert (_paced_torch.STAGES, _paced_torch.PIPELINES) == (throughput.STAGES, throughput.REPLICAS)


@pytest.mark.parametrize("first", [False, True], ids=["middle", "first"])
def test_a_paced_stage_takes_its_time_in_both_directions(
    first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(_paced_torch, "time", SimpleNamespace(sleep=slept.append))
    stage = _paced_torch._Stage(argparse.Namespace(forward_s=0.3, backward_s=0.6, parameters=5))
    x = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).requires_grad_(not first)
    y = stage(x)
    assert slept == [0.3]
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, x)
    y.backward(torch.full_like(y, 2.0))
    assert slept == [0.3, 0.6]
    if first:
        assert x.grad is None
    else:
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full_like(x, 2.0))
    assert stage.weight.shape == (5,)
    assert stage.weight.grad is not None, "DDP averages what has a gradient"
    assert stage.weight.grad.tolist() == [2.0 * 15, 0, 0, 0, 0]


def test_stages_alone_are_busy_but_for_filling_the_pipeline() -> None:
    """Of 16 microbatches each of two pipelines has 8, of 90 ms: with three stages that is 10 of
    them. Smaller ones fill it sooner."""
    assert throughput.ideal(options()) == pytest.approx(TOKENS / (10 * 0.090))
    assert throughput.ideal(options(microbatch_size=1)) == pytest.approx(TOKENS / (34 * 0.0225))


# ---- averaging ----------------------------------------------------------------------------------


def test_the_payload_alone_takes_what_the_slowest_uplink_or_all_together_need() -> None:
    least_s = averaging.least_s
    assert least_s("home", 2, 1.0) == pytest.approx(0.4)  # 1 MB at 20 Mbit/s
    assert least_s("home", 4, 16.0) == pytest.approx(1.5 * 6.4)
    assert least_s("home", 8, 16.0) == pytest.approx(1.75 * 6.4)
    # 20, 100 and 5 Mbit/s: together they could do it in 0.26 s, the third not.
    assert least_s("mixed", 3, 1.0) == pytest.approx(1.6)
    assert least_s("lan", 4, 16.0) == 0.0


def test_the_busiest_uplink_is_that_which_took_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    homes = (HOME, FIBRE, POOR)
    hosts = [Host(f"lab-{n}", "", home) for n, home in enumerate(homes)]
    sent = {"lab-0": 1_002_000, "lab-1": 4_001_000, "lab-2": 300_500}
    monkeypatch.setattr(averaging, "traffic_of", lambda host: Traffic(7, sent[host.namespace]))
    lab: Any = SimpleNamespace(hosts=hosts)
    before = [2_000, 1_000, 500]
    # 8 Mbit at 20, 32 Mbit at 100, 2.4 Mbit at 5 Mbit/s
    assert averaging.busiest_s(lab, before) == pytest.approx(0.48)
    lab.hosts = hosts[:2]
    assert averaging.busiest_s(lab, before[:2]) == pytest.approx(0.4)
    lab.hosts = [Host(host.namespace, "", None) for host in hosts]
    assert averaging.busiest_s(lab, before) == 0.0, "a bridge has no rate"


def test_a_line_of_the_table_is_of_its_own_connections(capsys: pytest.CaptureFixture[str]) -> None:
    medians = {"1": 9.0, "4": 3.0, "gloo": 4.0, "1 busy": 5.0, "4 busy": 2.5, "gloo busy": 2.0}
    found = averaging.compared("home", 4, "cubic", 4, medians, 1.0)
    assert {each["metric"]: each["value"] for each in found} == {
        f"{what}, home, 4 members, 1 MB, cubic, 4 connections": value
        for what, value in (
            ("all-reduce / gloo", 0.75),
            ("all-reduce", 3.0),
            ("gloo", 4.0),
            ("uplink busy, all-reduce", 2.5),
            ("uplink busy, gloo", 2.0),
            ("least possible", 0.6),
        )
    }
    assert [each["met"] for each in found] == [True, *[None] * 5]
    assert "3.000 (2.50)    4.000 (2.00)       0.75x         0.60" in capsys.readouterr().out


def test_a_line_of_unlike_parts(capsys: pytest.CaptureFixture[str]) -> None:
    medians = {"1": 9.0, "split": 6.0, "gloo": 12.0, "split busy": 5.0}
    found = averaging.split_compared("mixed", 4, "bbr", medians, 2.0)
    assert {each["metric"]: each["value"] for each in found} == {
        f"{what}, mixed, 4 members, 2 MB, bbr": value
        for what, value in (
            ("all-reduce in unlike parts / in even ones", 0.6667),
            ("all-reduce in unlike parts / gloo", 0.5),
            ("all-reduce in unlike parts", 6.0),
            ("uplink busy, all-reduce in unlike parts", 5.0),
        )
    }
    assert "6.000 (5.00)   0.67x even parts' 9.000, 0.50x gloo's" in capsys.readouterr().out


# ---- wire_bytes ---------------------------------------------------------------------------------


def test_bytes_are_those_between_the_ends_of_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of warm-up before; the leader's host is not among them."""
    swarm = Swarm(range(1, 20))
    looked: list[str] = []

    def traffic_of(host: Host) -> Traffic:
        """The nth look at a host shows `n * n` times its number, and twice that sent."""
        looked.append(host.namespace)
        seen = int(host.namespace) * looked.count(host.namespace) ** 2
        return Traffic(seen, 2 * seen)

    @contextlib.contextmanager
    def lab(profile: str, num: int, *, bursts: bool) -> Iterator[Any]:
        assert (profile, bursts) == ("lan", False), "each packet counts by itself"
        yield SimpleNamespace(hosts=[Host(str(n), "", None) for n in range(num)])

    monkeypatch.setattr(wire_bytes, "Lab", lab)
    monkeypatch.setattr(wire_bytes, "given", lambda lab: [{"line": "lan"}])
    monkeypatch.setattr(wire_bytes, "lab_swarm", lambda *_: contextlib.nullcontext(swarm))
    monkeypatch.setattr(wire_bytes, "traffic_of", traffic_of)
    config: Any = None
    counted = asyncio.run(wire_bytes.count(config, {0: 1, 1: 1}, 4))
    assert swarm.is_stopped
    grown = 7 * 7 - 3 * 3  # from the end of the third step to that of the seventh
    assert counted.hosts == [Traffic(grown, 2 * grown), Traffic(2 * grown, 4 * grown)]
    assert counted.reported == [{"boundary": 0}]
    assert counted.lines == [{"line": "lan"}]


def counting(monkeypatch: pytest.MonkeyPatch, *found: wire_bytes.Counted) -> None:
    """Each measurement finds the next of these."""
    left = itertools.chain(found)

    async def count(config: Any, peers: Mapping[int, int], steps: int) -> wire_bytes.Counted:
        return next(left)

    monkeypatch.setattr(wire_bytes, "count", count)


LINES = [{"line": "lan", "round_trip_ms": 0.1, "up_mbps": 9000.0}]


def test_bytes_of_a_boundary_are_per_token(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the host of the last stage receives, and sends back; beside that the tensors' share of
    float32, as it is reported for the last boundary."""
    tokens = 4 * wire_bytes.MICROBATCHES * wire_bytes.MICROBATCH_TOKENS
    reported = {"raw_bytes": 400.0, "back_raw_bytes": 200.0}
    wide, thin = (
        wire_bytes.Counted(
            [Traffic(1, 1), Traffic(1, 1), Traffic(received * tokens, sent * tokens)],
            [{}, {**reported, "wire_bytes": 100.0, "back_wire_bytes": 100.0}],
            LINES,
        )
        for received, sent in ((300, 260), (75, 65))
    )
    counting(monkeypatch, wide, thin, *[thin] * (len(wire_bytes.THIN) - 1))
    asked = argparse.Namespace(codecs=["bfloat16"], subspace=[32], steps=4)
    values = {each["metric"]: each["value"] for each in wire_bytes.boundaries(asked)}
    assert (values["bfloat16: forward"], values["bfloat16: back"]) == (300.0, 260.0)
    assert values["bfloat16: both, of bfloat16"] == 1.0
    assert values["subspace-32 int4: forward"] == 75.0
    assert values["subspace-32 int4: both, of bfloat16"] == 0.25
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    # A quarter and a half of 4 bytes times the width, which of a subspace is 32.
    assert shown[1][:5] == ["bfloat16", "300.0", "260.0", "128.0", "256.0"]
    assert shown[2][2:6] == ["75.0", "65.0", "32.0", "64.0"]


def test_bytes_of_averaging_are_of_one_replica_and_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counted = wire_bytes.Counted([Traffic(0, 40_000), Traffic(0, 48_000)], [], LINES)
    counting(monkeypatch, *[counted] * len(wire_bytes.GRADIENTS))
    monkeypatch.setattr(wire_bytes, "num_parameters", lambda config: 1100)
    found = wire_bytes.averaging(argparse.Namespace(steps=4))
    assert [each["value"] for each in found] == [11_000.0] * len(wire_bytes.GRADIENTS)
    assert found[0]["metric"] == "float32, summed in float64: sent"
    assert "11,000" in capsys.readouterr().out
