"""`swarm plan`: layouts that fit, follow the machines' speeds, and spare slow links."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

from peer.cli.swarm_program import app
from peer.plan import of_run, read_machines, text_of, work_of
from swarm.config import parse_config
from swarm.config_text import DEMO_MODEL
from swarm.config_types import Codec
from swarm.errors import ConfigError
from swarm.model import build_pipeline
from swarm.placement.proposal import CODEC_BYTES, Device, Work, place, propose
from swarm.wire.boundaries import LOSSLESS, BoundaryCodecs
from swarm.wire.codecs import get_codec

ROOT = Path(__file__).parents[2]
GIB = 2**30


def work(layers: int = 8, boundary: int = 1000) -> Work:
    return Work(
        flops=(1e9,) * layers,
        parameters=(1_000_000,) * layers,
        activation_bytes=(1000,) * layers,
        boundary_values=boundary,
        microbatches=64,
    )


def devices(*tflops: float, memory_gib: float = 1.0, up: float = 1e12) -> list[Device]:
    return [
        Device(f"d{at}", each * 1e12, int(memory_gib * GIB), up) for at, each in enumerate(tflops)
    ]


def test_one_machine_that_holds_the_model_needs_no_cut() -> None:
    layout = propose(work(), devices(1.0))
    assert layout is not None
    assert (layout.cut, layout.codecs) == ((8,), LOSSLESS)
    assert layout.throughput == pytest.approx(1e12 / 8e9)


def test_the_cut_follows_speed_where_memory_forbids_less() -> None:
    # 24 bytes a parameter: no device holds more than six layers.
    layout = propose(work(), devices(3.0, 1.0, memory_gib=6.5 * 24e6 / GIB))
    assert layout is not None
    assert layout.cut in ((6, 2), (2, 6))
    assert sorted(layout.rates) == pytest.approx([500.0, 500.0])
    assert layout.stages["d0"] == layout.cut.index(6)


def test_what_does_not_fit_is_said() -> None:
    assert propose(work(), devices(1.0, memory_gib=0.01)) is None


def test_a_slow_link_asks_for_a_smaller_codec() -> None:
    memory_gib = 5 * 24e6 / GIB
    fast = propose(work(), devices(1.0, 1.0, memory_gib=memory_gib))
    slow = propose(work(), devices(1.0, 1.0, memory_gib=memory_gib, up=6e5))
    assert fast is not None
    assert slow is not None
    assert (fast.codecs.forward, slow.codecs.forward) == ("float32", "bfloat16")


def test_placements_come_near_the_bound() -> None:
    layout = place(work(), devices(*[1.0, 2.0, 1.5, 0.5] * 4), (2, 2, 2, 2), LOSSLESS)
    assert min(layout.rates) >= 0.95 * layout.bound


def test_the_command_proposes_for_a_run(tmp_path: Path) -> None:
    machines = ROOT / "examples/scenarios/machines.toml"
    words = ["plan", str(ROOT / "examples/exact.toml"), "--machines", str(machines)]
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    named = [name for stage in found["proposal"]["stages"] for name in stage["machines"]]
    assert sorted(named) == sorted([*(f"home-{n}" for n in range(1, 7)), "server-1", "server-2"])
    assert found["proposal"]["tokens_per_s"] >= found["as_written"]["tokens_per_s"] * 0.98 > 0
    text = CliRunner().invoke(app, words).output
    assert "cut = [" in text
    assert "tokens/s" in text


def test_codecs_are_as_large_as_they_are() -> None:
    assert set(CODEC_BYTES) == {name.removesuffix("+zstd") for name in get_args(Codec)}
    for name, size in CODEC_BYTES.items():
        exact, _ = get_codec(name).nbytes_bounds("float32", (64, 64))
        assert size * 64 * 64 == pytest.approx(exact, rel=0.001)


def rate(codecs: BoundaryCodecs, cut: tuple[int, ...] = (4, 4)) -> float:
    """Of a run on machines as slow as their links."""
    return place(work(boundary=100_000), devices(*[1.0] * len(cut), up=1e5), cut, codecs).throughput


def test_what_crosses_a_boundary_is_counted_as_the_run_says() -> None:
    plain = rate(LOSSLESS)
    for codec, size in CODEC_BYTES.items():
        for name in (codec, f"{codec}+zstd"):
            assert rate(BoundaryCodecs(name, name)) == pytest.approx(plain * 4 / size)
    # Each of two stages sends one way; of three, the middle one sends both, by two boundaries.
    assert rate(BoundaryCodecs("int8", "float32")) == plain
    cut, thin = (3, 3, 2), {0: ("float32", "int4"), 1: ("int4", "float32")}
    assert rate(BoundaryCodecs(overrides=thin), cut) == pytest.approx(plain)
    thin = {0: ("int4", "float32"), 1: ("float32", "int4")}
    assert rate(BoundaryCodecs(overrides=thin), cut) == pytest.approx(plain / 2)


@pytest.mark.parametrize("cut", [(4, 4), (2, 6), (1, 6, 1)])
@pytest.mark.parametrize("up", [1e4, 1e6, 1e9])
@pytest.mark.parametrize(
    "codecs",
    [
        BoundaryCodecs("int4", "int4"),
        BoundaryCodecs("float16", "float16"),
        BoundaryCodecs("int8+zstd", "int4", {0: ("int4", "bfloat16")}),
    ],
    ids=["int4", "float16", "mixed"],
)
def test_a_proposal_is_no_worse_than_what_is_written(
    codecs: BoundaryCodecs, up: float, cut: tuple[int, ...]
) -> None:
    asked, machines = work(boundary=10_000), devices(1.0, 1.0, 0.9, memory_gib=0.15, up=up)
    written = place(asked, machines, cut, codecs)
    best = propose(asked, machines, written)
    assert best is not None
    assert written.throughput > 0
    assert best.throughput >= 0.98 * written.throughput
    faster = best.throughput >= written.throughput
    assert faster or best.bytes_per_value > written.bytes_per_value


def test_averaging_is_of_what_the_run_sends() -> None:
    def averaging_s(**sections: dict[str, str]) -> float:
        run = {"model": {"stages": 1, "config": DEMO_MODEL}, "schedule": {"steps": 1}}
        asked = work_of(parse_config({**run, **sections}))
        return place(asked, devices(1.0, 1.0, up=1e6), (6,), LOSSLESS).averaging_s

    plain = averaging_s(update={"accumulate": "float32"})
    # Contributions in float64, sums in float32.
    assert averaging_s() == pytest.approx(plain * 1.5)
    assert averaging_s(wire={"gradients": "bfloat16"}) == pytest.approx(plain / 2)
    assert averaging_s(wire={"gradients": "int8"}) == pytest.approx(plain * 66 / 256)


@pytest.mark.parametrize(
    "wire",
    [
        {"activations": "int4"},
        {"forward": "int8", "backward": "int8"},
        {
            "activations": "int8+zstd",
            "boundaries": [{"boundary": 0, "backward": "int4"}],
            "rounding": "stochastic",
        },
    ],
    ids=["int4", "both", "boundary"],
)
@pytest.mark.parametrize("up", [1e4, 1e6, 1e12])
def test_a_proposal_is_what_to_write_into_the_run(wire: dict[str, Any], up: float) -> None:
    """As it is printed, whatever stands there."""
    run = {"model": {"stages": 2, "config": DEMO_MODEL}, "schedule": {"steps": 1}, "wire": wire}
    config, machines = parse_config(run), devices(1.0, 1.0, memory_gib=0.2, up=up)
    found = of_run(config, machines)
    [line] = [each for each in text_of(found).splitlines() if each.startswith("[model] cut")]
    cut, said = line.removeprefix("[model] cut = ").split("    [wire] ")
    model = {"cut": json.loads(cut), "config": DEMO_MODEL}
    new = parse_config(
        {**run, "model": model, "wire": {**wire, **tomllib.loads(f"new = {{ {said} }}")["new"]}}
    )
    again = of_run(new, machines)
    assert again["as_written"]["tokens_per_s"] == found["proposal"]["tokens_per_s"]
    assert found["proposal"]["tokens_per_s"] >= 0.98 * found["as_written"]["tokens_per_s"]
    assert ("int4" in said) == (wire == {"activations": "int4"} and up < 1e12)


def test_a_subspace_makes_boundaries_thin_and_not_what_layers_hold() -> None:
    def described(**more: int) -> Work:
        model = {"stages": 2, "config": DEMO_MODEL, **more}
        return work_of(parse_config({"model": model, "schedule": {"steps": 1}}))

    plain, thin = described(), described(subspace=8)
    assert thin.boundary_values == plain.boundary_values * 8 // DEMO_MODEL["hidden_size"]
    assert thin.activation_bytes == plain.activation_bytes


@pytest.mark.parametrize("layers", [None, 2, 6])
def test_parameters_of_a_subspace_are_those_that_will_be_built(layers: int | None) -> None:
    model = {"stages": 2, "subspace": 8, "config": DEMO_MODEL}
    model |= {} if layers is None else {"subspace_layers": layers}
    config = parse_config({"model": model, "schedule": {"steps": 1}})
    work, pipeline = work_of(config), build_pipeline(config)
    built = [pipeline.build_stage(stage, "meta").parameters() for stage in (0, 1)]
    assert sum(work.parameters) == sum(each.numel() for stage in built for each in stage)


@pytest.mark.parametrize(("latest", "cut"), [(None, (3, 1)), (2, (2, 2))])
def test_no_cut_is_proposed_that_the_run_would_refuse(
    latest: int | None, cut: tuple[int, ...]
) -> None:
    """The last layer alone is as dear as the rest."""
    dear = Work((1.0, 1.0, 1.0, 3.0), (1,) * 4, (1,) * 4, 1, 8, latest_boundary=latest)
    devices = [Device(name, 1.0, 1 << 30, 1e9) for name in "abcd"]
    assert place(dear, devices, (2, 2), LOSSLESS, fit_cut=True).cut == cut
    assert dear.most_stages == cut[0] + 1


def test_mistakes_in_the_machines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "machines.toml"
    path.write_text("[[machines]]\nname = 'a'\ntflops = 0.0\nmemory_gib = 1.0\nup_mbps = 1.0\n")
    with pytest.raises(ConfigError, match=r"machines\[0\]\.tflops should be greater"):
        read_machines(path)
    path.write_text("[[machines]]\ntflops = 1.0\nmemory_gib = 1.0\nup_mbps = 1.0\n")
    with pytest.raises(ConfigError, match=r"machines\[0\]\.name is missing - docs/simulate\.md"):
        read_machines(path)
