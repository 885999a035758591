"""`swarm plan`: cut, replicas and codec for given machines and links."""

from __future__ import annotations

import json
import tomllib
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swarm.averaging.plan import contribution_bytes
from swarm.config import RunConfig, WireSection, load_config
from swarm.config_errors import describe
from swarm.errors import ConfigError
from swarm.model import ModelPipeline, build_pipeline
from swarm.placement.proposal import Device, Layout, Work, place, propose
from swarm.wire.boundaries import BoundaryCodecs
from swarm.words import count_text

GIB = 2**30
FLOPS_PER_COST = 6  # a multiply and an add, forward, and twice that backward
HELD_PER_LAYER = 12  # tensors as large as the hidden states that a layer holds for its backward


class _Machine(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    name: str = Field(min_length=1, max_length=64)
    count: int = Field(default=1, ge=1, le=10_000)
    tflops: float = Field(gt=0)
    memory_gib: float = Field(gt=0)
    up_mbps: float = Field(gt=0)


class _Machines(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    machines: Annotated[list[_Machine], Field(min_length=1, max_length=1000)]


def plan(run: Path, machines: Path) -> dict[str, Any]:
    """The proposal, and what the run as written would do. Raises SwarmError."""
    return of_run(load_config(run), read_machines(machines))


def of_run(config: RunConfig, devices: list[Device]) -> dict[str, Any]:
    """As `plan`, of what its files say."""
    work = work_of(config)
    written = place(work, devices, build_pipeline(config).cut, BoundaryCodecs.of(config))
    best = propose(work, devices, written)
    if best is None:
        raise ConfigError(
            "the model does not fit these machines, however it is cut",
            "add machines or memory; a smaller batch.microbatch_size needs less",
        )
    tokens = config.batch.microbatch_size * config.data.sequence
    return {
        "proposal": _row(best, config.wire, tokens),
        "as_written": _row(written, config.wire, tokens),
    }


def read_machines(path: Path) -> list[Device]:
    """`[[machines]]` with name, count, tflops, memory_gib, up_mbps. Raises ConfigError."""
    try:
        read = _Machines.model_validate(tomllib.loads(path.read_text()))
    except OSError as error:
        what = f"cannot read {path}: {(error.strerror or str(error)).lower()}"
        raise ConfigError(what, "docs/simulate.md shows how to list machines") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        what = f"{path} is no TOML: {error}"
        raise ConfigError(what, "docs/simulate.md shows how to list machines") from None
    except ValidationError as error:
        what, _ = describe(error, _Machines)  # its remedies are of run.toml
        raise ConfigError(
            f"{path}: {what}", "docs/simulate.md shows how to list machines"
        ) from None
    return [
        Device(
            machine.name if machine.count == 1 else f"{machine.name}-{number}",
            machine.tflops * 1e12,
            int(machine.memory_gib * GIB),
            machine.up_mbps * 125_000,
        )
        for machine in read.machines
        for number in range(1, machine.count + 1)
    ]


def work_of(config: RunConfig) -> Work:
    """What the run's model costs, layer by layer: it is cut into stages of one layer each, whose
    parameters are counted without memory for them."""
    whole = config.model.model_copy(update={"stages": 1, "cut": None})
    one = build_pipeline(config.model_copy(update={"model": whole}))
    costs, given = one.layer_costs, config.model.subspace_layers
    narrow = len(costs) - 1 if given is None else given
    # With a boundary behind every layer but the last, all those must write into the subspace; the
    # ones that will not, in the run, are counted in a plain model below.
    apart = config.model.model_copy(
        update={
            "stages": len(costs),
            "cut": None,
            "subspace_layers": None if given is None else max(given, len(costs) - 1),
        }
    )
    pipeline: ModelPipeline = build_pipeline(config.model_copy(update={"model": apart}))
    tokens = config.batch.microbatch_size * config.data.sequence
    boundary = pipeline.boundary(0) if len(costs) > 1 else ()
    wide = pipeline  # what a layer holds is not thinner in a subspace, nor are the last layers
    if boundary and config.model.subspace is not None:
        plain = apart.model_copy(update={"subspace": None})
        wide = build_pipeline(config.model_copy(update={"model": plain}))
    full = wide.boundary(0) if boundary else ()
    parameters = tuple(
        _num_parameters(wide if narrow <= stage < len(costs) - 1 else pipeline, stage)
        for stage in range(len(costs))
    )
    held = 1 if config.model.recompute else HELD_PER_LAYER
    codec = config.wire.gradients
    gradient_bytes = sum(  # per value, of a block of int8 and of more
        contribution_bytes(64, dtype, codec) / 64 for dtype in (config.update.accumulate, "float32")
    )
    per_layer = held * sum(spec.num_bytes for spec in full)
    return Work(
        flops=tuple(float(FLOPS_PER_COST * cost * tokens) for cost in costs),
        parameters=parameters,
        activation_bytes=(per_layer,) * len(costs),
        boundary_values=sum(spec.numel for spec in boundary),
        microbatches=config.batch.microbatches,
        gradient_bytes=gradient_bytes,
        optimizer=config.optimizer.name,
        accumulate=config.update.accumulate,
        ahead=config.ahead.microbatches,
        latest_boundary=one.latest_boundary,
        shared_bytes=one.shared_bytes,
    )


def _num_parameters(pipeline: ModelPipeline, stage: int) -> int:
    return sum(each.numel() for each in pipeline.build_stage(stage, "meta").parameters())


def _wire(codecs: BoundaryCodecs, written: WireSection) -> dict[str, Any]:
    """What to write under [wire] for these codecs, whatever is written there."""
    alike = codecs.forward == codecs.backward and not (written.forward or written.backward)
    keys: dict[str, Any] = (
        {"activations": codecs.forward}
        if alike
        else {"forward": codecs.forward, "backward": codecs.backward}
    )
    if written.boundaries:
        keys["boundaries"] = [
            {"boundary": boundary, "forward": forward, "backward": backward}
            for boundary, (forward, backward) in sorted(codecs.overrides.items())
        ]
    used = [codecs.forward, codecs.backward, *chain(*codecs.overrides.values())]
    if written.rounding == "stochastic" and not any(each.startswith("int") for each in used):
        keys["rounding"] = "nearest"  # a run that rounds nothing may not say how
    return keys


def _row(layout: Layout, written: WireSection, tokens: int) -> dict[str, Any]:
    return {
        "cut": list(layout.cut),
        "wire": _wire(layout.codecs, written),
        "tokens_per_s": round(layout.throughput * tokens, 3),
        "microbatches_per_s": round(layout.throughput, 6),
        "bound_microbatches_per_s": round(layout.bound, 6),
        "averaging_s": round(layout.averaging_s, 3),
        "stages": [
            {
                "layers": layers,
                "memory_gib": round(need.memory_bytes / GIB, 3),
                "microbatches_per_s": round(rate, 6),
                "machines": sorted(n for n, s in layout.stages.items() if s == stage),
            }
            for stage, (layers, need, rate) in enumerate(
                zip(layout.cut, layout.needs, layout.rates, strict=True)
            )
        ],
        "unused": sorted(name for name, stage in layout.stages.items() if stage is None),
    }


def text_of(found: dict[str, Any]) -> str:
    """For a terminal."""
    best, written = found["proposal"], found["as_written"]
    lines = [f"{'stage':>5} {'layers':>6} {'memory':>9} {'microb./s':>10}  machines"]
    for number, stage in enumerate(best["stages"]):
        lines.append(
            f"{number:>5} {stage['layers']:>6} {stage['memory_gib']:>5.2f} GiB "
            f"{stage['microbatches_per_s']:>10.4g}  {_names(stage['machines'])}"
        )
    if best["unused"]:
        lines.append(f"too small for any stage: {_names(best['unused'])}")
    lines += [
        "",
        f"[model] cut = {best['cut']}    [wire] {_toml(best['wire'])}",
        f"about {_speed(best)} tokens/s; averaging {best['averaging_s']:.3g} s a step",
        f"the run as written, cut {written['cut']}, {_toml(written['wire'])}: "
        + (
            f"about {_speed(written)} tokens/s"
            if written["tokens_per_s"]
            else "does not fit these machines"
        ),
    ]
    return "\n".join(lines)


def _toml(keys: dict[str, Any]) -> str:
    return ", ".join(f"{key} = {_value(value)}" for key, value in keys.items())


def _value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(f"{{ {_toml(table)} }}" for table in value) + "]"
    return json.dumps(value)


def _speed(layout: dict[str, Any]) -> str:
    tokens_per_s = layout["tokens_per_s"]
    return count_text(tokens_per_s) if tokens_per_s >= 100 else f"{tokens_per_s:.3g}"


def _names(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:5])} and {len(names) - 5}"
