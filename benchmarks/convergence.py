"""Convergence: what codecs, the subspace and *delayed* cost in loss, in paired runs.

One process trains the stages of a run one after another, and sends what crosses their boundaries
through the very code that a replica uses (`BoundaryCodecs`, `decode`, `StageState`). So a run here
ends with the sha256 of a swarm of that run.toml, which is written beside each result:

    swarm up DIR/NAME.toml --threads T --peers "0:1,1:1,2:1"

Runs are paired: a seed gives all settings the same first weights (where shapes agree) and the same
data. The gap is of the mean loss over the same validation tokens, against `exact` of equal hidden
size and seed; the table shows the mean and the largest of the seeds.

A run is kept in DIR once it has finished, and not made again: end the program at any time and start
it anew. A byte-level Llama of 6 layers in 3 stages; 1.2 M parameters at hidden 128. Runs on a GPU
(`--device cuda`) are compared among themselves, since their sha256 is that of a swarm of GPUs; few
large microbatches take less time there (`--microbatches 1 --microbatch-size 8` for the default 4
and 2, which makes equal steps).

    python benchmarks/convergence.py DIR [--all] [--seeds 0,1,2] [--hidden 128] [--settings exact,…]

Settings: `exact`; or any of these, joined by `+` in this order, as `subspace-8+int4+delayed-2`:
`subspace-K`, of the layers of all stages but the last; codecs for both directions (`bfloat16`,
`int8`, `int4`, …, or FORWARD/BACKWARD as `int4/int8`; with `~` at the end rounded stochastically),
of a subspace's coefficients where there is one; `delayed`, or `delayed-N` where only N of a step's
microbatches (`--microbatches`) are computed ahead of the commit before, from a tenth of the steps
on; `averaged-CODEC`, where each stage has two replicas that take the microbatches in turn and
average their gradients with the program's all-reduce (`wire.gradients`; in a swarm the router
decides which replica counts what, so with a codec that rounds it ends with other bits).
And `exact-table`, a plain model whose embedding begins as many times larger as the frozen table
of a subspace is, to see what that alone is worth (no run.toml says that, so no swarm trains it).
Each setting has the peak learning rate that suits it and the width: `--lr`; all with a subspace and
`exact-table` `--subspace-lr`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from _helpers import commit, print_results, result
from matplotlib.figure import Figure
from torch import Tensor

from peer.cli.checks import check_device_name
from peer.launch import be_exact, choose_device, plan_of
from swarm.averaging.all_reduce import GroupAllReduce
from swarm.config import RunConfig, parse_config
from swarm.config_text import DEMO_MODEL
from swarm.config_types import Codec
from swarm.data import build_dataset
from swarm.delayed_state import State, new_state
from swarm.errors import ConfigError, SwarmError
from swarm.model import build_pipeline, model_sha256
from swarm.model.subspace import FROZEN_SCALE
from swarm.net.memory import MemoryNetwork
from swarm.optim import clip_scale
from swarm.sim import virtual_time
from swarm.stage_state import Graph, StageState, rounded
from swarm.wire.boundaries import BACKWARD, FORWARD, BoundaryCodecs
from swarm.wire.codecs import WireTensor, decode

STAGES, SEQUENCE, SIZE, HEAD = 3, 128, 2, 32
SMOOTHED = 80_000  # tokens
VALIDATION_TOKENS = 204_800  # unless told; names of results say any other number
SUBSPACES, HIDDEN = ("subspace-8", "subspace-16", "subspace-32", "subspace-64"), (128, 256, 384)
GOALS = {"int8": 0.005, "int4": 0.01, "delayed-1": 0.005, "subspace-32": 0.02}  # at hidden 128
SHORT = ("exact", "int8", "int4", "delayed-1", "subspace-32")
FRESH_PART = 10  # of the steps of `delayed`, one in so many has nothing ahead
KEPT_LOSSES = 250  # of a run, about
# By width; docs/results.md says what was compared.
LR = {128: 1e-3, 256: 1e-3, 384: 1e-3, 1024: 3e-4}
SUBSPACE_LR = {128: 2e-3, 256: 2e-3, 384: 1e-3, 1024: 3e-4}
TOP_LOSS = 2.4  # of the plot
DELAYED = ("delayed-1", "delayed-2", "delayed")
TABLE, EMBEDDING = "exact-table", "model.embed_tokens.weight"
AVERAGED, REPLICAS = "averaged-", ("replica0", "replica1")
CODECS = ("bfloat16", "int8", "int4", "int8~", "int4~", "int4/int8")


def sections(
    setting: str,
    hidden: int,
    seed: int,
    steps: int,
    lr: float,
    microbatches: int,
    microbatch_size: int = SIZE,
) -> dict[str, Any]:
    """The run.toml of one run. ValueError for a setting that there is not."""
    model: dict[str, Any] = {"stages": STAGES}
    wire: dict[str, Any] = {}
    update: dict[str, Any] = {}
    parts = [] if setting in ("exact", TABLE) else setting.split("+")
    if parts and parts[0].startswith("subspace-"):
        k = parts.pop(0).removeprefix("subspace-")
        model["subspace"] = _number(setting, "subspace-K", k, hidden - 1)
        model["subspace_layers"] = DEMO_MODEL["num_hidden_layers"] // STAGES * (STAGES - 1)
    if parts and parts[-1].startswith(AVERAGED):
        wire["gradients"] = parts.pop().removeprefix(AVERAGED)
    if parts and parts[-1].partition("-")[0] == "delayed":
        _, only, n = parts.pop().partition("-")
        ahead = _number(setting, "delayed-N", n, microbatches) if only else microbatches
        share = ahead / microbatches
        update = {"policy": "delayed", "ahead": share, "ahead_since": steps // FRESH_PART}
    if parts:
        codecs = "+".join(parts)  # one may be `int8+zstd`
        forward, _, backward = codecs.removesuffix("~").partition("/")
        wire |= {"forward": forward, "backward": backward or forward}
        if not {forward, wire["backward"]} <= {*get_args(Codec)}:
            raise ValueError(
                f"there is no setting {setting!r}: use exact, {TABLE}, or some of subspace-K, a "
                f"codec or two as int4/int8, delayed-N, and {AVERAGED}CODEC, joined by + in this "
                "order"
            )
        wire["rounding"] = "stochastic" if codecs.endswith("~") else "nearest"
    sizes = {"hidden_size": hidden, "intermediate_size": hidden * 5 // 2}
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), hidden // HEAD)
    return {
        "run": {"name": f"convergence {setting}", "seed": seed},
        "model": {**model, "config": {**DEMO_MODEL, **sizes, **heads}},
        "data": {"source": "stdlib", "sequence": SEQUENCE},
        "batch": {"microbatches": microbatches, "microbatch_size": microbatch_size},
        "optimizer": {"lr": lr, "nesterov": True},
        "schedule": {"kind": "cosine", "warmup_steps": min(50, steps), "steps": steps},
        "wire": wire,
        "update": update,
    }


def _number(setting: str, kind: str, text: str, most: int) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= most):
        raise ValueError(
            f"there is no setting {setting!r}: in {kind} use a number from 1 to {most}"
        )
    return int(text)


def toml(tables: Mapping[str, Mapping[str, Any]], prefix: str = "") -> str:
    """Nested plain values as a TOML file."""
    lines = []
    for name, table in tables.items():
        lines.append(f"[{prefix}{name}]")
        inner = {key: value for key, value in table.items() if isinstance(value, dict)}
        lines += [f"{k} = {json.dumps(v)}" for k, v in table.items() if k not in inner]
        lines.append(toml(inner, f"{prefix}{name}."))
    return "\n".join(lines)


class Chain:
    """All stages of a run in one process and on one device, with the wire between them; each of
    `num_replicas` times, if its gradients are to be averaged."""

    def __init__(self, config: RunConfig, device: str = "cpu", num_replicas: int = 1) -> None:
        self.config, self.plan, self.device = config, plan_of(config), device
        self.pipeline, self.data = build_pipeline(config), build_dataset(config)
        self.codecs = BoundaryCodecs.of(config)
        self.replicas = [
            [
                new_state(
                    partial(self.pipeline.build_stage, stage, device),
                    config.optimizer,
                    ahead=self.plan.ahead,
                    accumulate=config.update.accumulate,
                    device=device,
                )
                for stage in range(self.pipeline.num_stages)
            ]
            for _ in range(num_replicas)
        ]
        self.states = self.replicas[0]  # all of a stage are equal between steps
        self.wire_bytes = {FORWARD: 0, BACKWARD: 0}

    def step(self, step: int) -> float:
        """Train one step; the loss."""
        plan, losses = self.plan, []
        batches = [self.data.batch(step, index) for index in range(plan.num_microbatches)]
        divisor = float(sum(self.pipeline.weight(batch) for batch in batches))
        for index, batch in enumerate(batches):
            states = self.replicas[index % len(self.replicas)]
            losses.append(self._microbatch(step, index, states, self._tensors(batch), divisor))
        gradients = [self._gradients(*replicas) for replicas in zip(*self.replicas, strict=True)]
        norms = [
            norm
            for state, (gradient, *_) in zip(self.states, gradients, strict=True)
            for norm in state.layout.squared_norms(gradient)
        ]
        if not all(map(math.isfinite, norms)):
            raise SystemExit(f"step {step}: a gradient is not finite")
        norm = math.sqrt(math.fsum(norms))
        scale = clip_scale(norm, plan.clip_norm)
        for replicas, averaged in zip(zip(*self.replicas, strict=True), gradients, strict=True):
            for state, gradient in zip(replicas, averaged, strict=True):
                state.apply(gradient, lr=plan.lr(step), scale=scale)
        return math.fsum(losses)

    def _gradients(self, *replicas: State) -> list[Tensor]:
        """The gradient of a step of one stage, as each of its replicas has it."""
        counted = [state.accumulator for state in replicas]
        if len(counted) == 1:
            return [rounded(counted[0])]
        codec = self.config.wire.gradients
        averaged = virtual_time.run(all_reduced([each.cpu() for each in counted], codec))
        return [each.to(self.device) for each in averaged]

    def _microbatch(
        self,
        step: int,
        index: int,
        states: Sequence[State],
        batch: Mapping[str, Tensor],
        divisor: float,
    ) -> float:
        graphs: list[Graph] = []
        between: Sequence[Tensor] = ()
        last = len(states) - 1
        for stage, state in enumerate(states):
            version = self._version(state, step, index)
            divided_by = divisor if stage == last else None
            graph = version.forward(step, index, between, batch, divided_by)
            graphs.append(graph)
            if stage < last:
                sent = self.codecs.encode(graph.outputs, stage, FORWARD, (step, index))
                between = self._arrive(sent, FORWARD)
        gradients: Sequence[Tensor] | None = None
        for stage in range(last, -1, -1):
            state = states[stage]
            version = self._version(state, step, index)
            answers = version.backward(graphs[stage], gradients, into=state.live[0])
            if stage:
                sent = self.codecs.encode(answers, stage - 1, BACKWARD, (step, index))
                gradients = self._arrive(sent, BACKWARD)
        return float(graphs[-1].outputs[0].detach())

    def _version(self, state: State, step: int, index: int) -> StageState:
        ahead = self.plan.ahead.of(step)
        return state.live[0] if index < ahead else state.waiting(ahead)

    def _arrive(self, sent: Sequence[WireTensor], direction: str) -> list[Tensor]:
        self.wire_bytes[direction] += sum(each.wire_bytes for each in sent)
        return [decode(each, self.device) for each in sent]

    def _tensors(self, batch: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        return {
            name: torch.from_numpy(np.ascontiguousarray(each)).to(self.device)
            for name, each in batch.items()
        }

    def validate(self, num_batches: int) -> float:
        """Mean loss over the first validation batches, through the same codecs."""
        losses, items, last = [], 0, len(self.states) - 1
        for index in range(num_batches):
            batch = self.data.validation_batch(index)
            between: Sequence[Tensor] = ()
            for stage, state in enumerate(self.states):
                outputs = state.evaluate(between, self._tensors(batch))
                if stage == last:
                    losses.append(float(outputs[0]))
                else:
                    sent = self.codecs.encode(outputs, stage, FORWARD, None)
                    between = [decode(each, self.device) for each in sent]
            items += self.pipeline.weight(batch)
        return math.fsum(losses) / items

    @torch.no_grad()
    def enlarge_embedding(self) -> None:
        """As the frozen table of a subspace is, before the first step."""
        embedding = dict(self.states[0].live[0].stage.named_parameters())[EMBEDDING]
        embedding.mul_(FROZEN_SCALE)

    def sha256(self) -> str:
        hashes: dict[str, str] = {}
        for state in self.states:
            hashes |= state.tensor_hashes()
        return model_sha256(hashes, self.pipeline.key_order)


async def all_reduced(terms: Sequence[Tensor], codec: str) -> list[Tensor]:
    """The sum of `terms` as each of the two members of a group has it after a round in memory,
    whose delays are skipped."""
    network = MemoryNetwork()
    reducers = [GroupAllReduce(network.transport(name), name) for name in REPLICAS]
    sums = [torch.empty(len(term)) for term in terms]
    try:
        for each in reducers:
            each.serve()
        async with asyncio.TaskGroup() as group:
            for reducer, term, out in zip(reducers, terms, sums, strict=True):
                group.create_task(reducer.all_reduce("1", REPLICAS, term, out, codec=codec))
    finally:
        for reducer in reducers:
            await reducer.aclose()
            await reducer.transport.close()
    return sums


def replicas_of(setting: str) -> int:
    """How many of each stage that setting is trained with."""
    return len(REPLICAS) if AVERAGED in setting else 1


def part_of(steps: int) -> int:
    """How many steps one kept loss is the mean of."""
    return max(1, steps // KEPT_LOSSES)


def thinned(losses: Sequence[float]) -> list[float]:
    """Means of as many equal parts as a picture shows; a rest that fills none is left out."""
    size = part_of(len(losses))
    whole = len(losses) // size * size
    return [round(float(each), 4) for each in np.reshape(losses[:whole], (-1, size)).mean(axis=1)]


def step_tokens_of(options: argparse.Namespace) -> int:
    tokens: int = options.microbatches * options.microbatch_size * SEQUENCE
    return tokens


def described_by(
    setting: str, hidden: int, seed: int, options: argparse.Namespace
) -> dict[str, Any]:
    """The run.toml of a run under these options; ValueError as `sections`."""
    steps = -(-options.tokens // step_tokens_of(options))
    lr, size = _lr(setting, hidden, options), options.microbatch_size
    return sections(setting, hidden, seed, steps, lr, options.microbatches, size)


def run(path: Path, setting: str, hidden: int, seed: int, options: argparse.Namespace) -> None:
    """Train one run and write its result; `path` exists only when all of it has been done."""
    described, made_by = described_by(setting, hidden, seed, options), commit()
    path.with_suffix(".toml").write_text(toml(described) + "\n")
    chain = Chain(parse_config(described, setting), options.device, replicas_of(setting))
    if setting == TABLE:
        chain.enlarge_embedding()
    step_tokens, steps = step_tokens_of(options), chain.plan.num_steps
    began, losses = time.perf_counter(), []
    for step in range(steps):
        losses.append(chain.step(step))
        if (step + 1) % 50 == 0:
            rate = (step + 1) * step_tokens / (time.perf_counter() - began)
            mean = statistics.fmean(losses[-50:])
            print(f"  {path.stem}: step {step + 1}/{steps}, loss {mean:.3f}, {rate:,.0f} tokens/s")
    wall_s = time.perf_counter() - began
    tokens = steps * step_tokens
    per_token = {way: sent / tokens / (STAGES - 1) for way, sent in chain.wire_bytes.items()}
    answer = {
        "commit": made_by,
        "setting": setting,
        "hidden": hidden,
        "seed": seed,
        "tokens": tokens,
        "parameters": sum(math.prod(s) for state in chain.states for s in state.layout.shapes),
        "validation": chain.validate(
            -(-options.validation_tokens // (options.microbatch_size * SEQUENCE))
        ),
        "final_loss": statistics.fmean(losses[-20:]),
        "wire_bytes_per_token": per_token,
        "sha256": chain.sha256(),
        "wall_s": wall_s,
        "losses": thinned(losses),
    }
    part = path.with_suffix(".part")
    part.write_text(json.dumps(answer))
    part.rename(path)


def show(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The table of what has finished, and its results."""
    exact = {(r["hidden"], r["seed"]): r["validation"] for r in runs if r["setting"] == "exact"}
    grouped: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
    for each in runs:
        grouped.setdefault((each["hidden"], each["setting"]), []).append(each)
    print(f"{'hidden':>6} {'setting':40} {'runs':>4} {'validation':>10} {'gap':>8} {'worst':>8}"
          f" {'B/token fwd':>12} {'back':>7}")  # fmt: skip
    results = []
    for (hidden, setting), members in sorted(grouped.items()):
        gaps = [
            r["validation"] / exact[hidden, r["seed"]] - 1
            for r in members
            if (hidden, r["seed"]) in exact
        ]
        loss = statistics.fmean(r["validation"] for r in members)
        mean, worst = (statistics.fmean(gaps), max(gaps)) if gaps else (math.nan, math.nan)
        sent = members[0]["wire_bytes_per_token"]
        print(f"{hidden:6} {setting:40} {len(members):4} {loss:10.4f} {mean:8.2%} {worst:8.2%}"
              f" {sent[FORWARD]:12.1f} {sent[BACKWARD]:7.1f}")  # fmt: skip
        results.append(result(f"validation loss, hidden {hidden}, {setting}", loss, "nats"))
        if setting != "exact" and gaps:
            goal = GOALS.get(setting.removesuffix("~")) if hidden == HIDDEN[0] else None
            metric = f"gap to exact, hidden {hidden}, {setting}, {len(gaps)} seeds"
            results.append(result(metric, mean, "ratio", goal, at_most=True))
    return results


def plot(runs: Sequence[Mapping[str, Any]], step_tokens: int, path: Path) -> None:
    """As a picture: loss over tokens at the least hidden size (seed 0), and the gaps over k."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    least = min(run["hidden"] for run in runs)
    for each in runs:
        if each["hidden"] == least and each["seed"] == 0:
            part_tokens = part_of(each["tokens"] // step_tokens) * step_tokens
            width = max(1, round(SMOOTHED / part_tokens))
            means = np.convolve(each["losses"], np.ones(width) / width, mode="valid")
            tokens = (np.arange(len(means)) + width) * part_tokens / 1e6
            left.plot(tokens, means, linewidth=1, label=each["setting"])
    left.set(xlabel="million tokens", ylabel="training loss", title=f"hidden {least}")
    left.set_ylim(top=TOP_LOSS)  # the first steps would squeeze the rest
    left.legend(fontsize="small")
    exact = {(r["hidden"], r["seed"]): r["validation"] for r in runs if r["setting"] == "exact"}
    for hidden in sorted({run["hidden"] for run in runs}):
        gaps: dict[int, list[float]] = {}
        for each in runs:
            _, narrow, k = each["setting"].partition("subspace-")
            paired = each["hidden"] == hidden and (hidden, each["seed"]) in exact
            if narrow and k.isdigit() and paired:  # without codecs
                gap = each["validation"] / exact[hidden, each["seed"]] - 1
                gaps.setdefault(int(k), []).append(100 * gap)
        if gaps:
            mean_gaps = [statistics.fmean(gaps[k]) for k in sorted(gaps)]
            right.plot(sorted(gaps), mean_gaps, marker="o", label=f"hidden {hidden}")
    right.axhline(
        100 * GOALS["subspace-32"], color="0.6", linestyle=":", label="goal at hidden 128"
    )
    right.set(xlabel="k", ylabel="gap of validation loss, %", title="subspace against exact")
    right.set_xscale("log", base=2)
    right.axhline(0, color="0.6", linewidth=1)
    right.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def _lr(setting: str, hidden: int, options: argparse.Namespace) -> float:
    has_large_table = setting.startswith("subspace-") or setting == TABLE
    told, by_width = options.lr, LR
    if has_large_table:
        told, by_width = options.subspace_lr, SUBSPACE_LR
    rate: float = told or by_width.get(hidden, 1e-3)
    return rate


def _ending(setting: str, hidden: int, options: argparse.Namespace) -> str:
    """Of the names of a setting's results that may be compared."""
    validated = options.validation_tokens
    counted = "" if validated == VALIDATION_TOKENS else f"-v{validated}"
    size = "" if options.microbatch_size == SIZE else f"x{options.microbatch_size}"
    device = "" if options.device == "cpu" else "-gpu"  # of other bits, so of other pairs
    rate = _lr(setting, hidden, options)
    return f"-m{options.microbatches}{size}-lr{rate:g}-t{options.tokens}{counted}{device}"


def _found(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What has finished before, of all settings."""
    found = []
    for path in sorted(options.directory.glob("*.json")):
        each = json.loads(path.read_text())
        if path.stem.endswith(_ending(each["setting"], each["hidden"], options)):
            found.append(each)
    return found


def _trained(
    wanted: Sequence[tuple[int, str]], options: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """All that is wanted, where it has not finished before; and the table, after each seed."""
    runs: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    options.directory.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        for hidden, setting in wanted:
            ending = _ending(setting, hidden, options)
            name = f"{setting.replace('/', '+')}-h{hidden}-s{seed}{ending}"
            path = options.directory / f"{name}.json"
            if not path.exists():
                run(path, setting, hidden, seed, options)
            runs.append(json.loads(path.read_text()))
        results = show(runs)
    return runs, results


def integers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path, nargs="?", default=Path("runs/convergence"))
    parser.add_argument("--settings", default=",".join(SHORT), help="comma-separated")
    parser.add_argument("--hidden", type=integers, default=[HIDDEN[0]], help="comma-separated")
    parser.add_argument(
        "--all", action="store_true", help="all subspaces and sizes, each codec and delay: hours"
    )
    parser.add_argument("--seeds", type=integers, default=[0], help="comma-separated")
    parser.add_argument("--tokens", type=int, default=2_000_000, help="trained per run")
    parser.add_argument("--validation-tokens", type=int, default=VALIDATION_TOKENS)
    parser.add_argument("--lr", type=float, help="whatever the width")
    parser.add_argument("--subspace-lr", type=float, help="the same")
    parser.add_argument("--microbatches", type=int, default=4, help="of a step")
    parser.add_argument(
        "--microbatch-size", type=int, default=SIZE, help=f"sequences of {SEQUENCE} tokens"
    )
    parser.add_argument("--device", default="cpu", help="auto, cpu, cuda or cuda:i")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--show", action="store_true", help="only what is in DIR; run nothing")
    parser.add_argument("--plot", type=Path, help="also draw it, as PNG")
    options = parser.parse_args()
    for name in ("tokens", "validation_tokens", "microbatches", "microbatch_size", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is at least 1")
    if options.show and not options.directory.is_dir():
        parser.error(f"--show: there is no directory {options.directory}")
    if any(hidden < HEAD or hidden % HEAD for hidden in options.hidden):
        parser.error(f"--hidden is of multiples of {HEAD}, the size of an attention head")
    wanted = [(h, s) for h in options.hidden for s in options.settings.split(",")]
    if options.all:
        wanted = [(h, s) for h in HIDDEN for s in ("exact", *SUBSPACES)]
        wanted += [(HIDDEN[0], s) for s in (*CODECS, *DELAYED)]
    try:
        if options.device == "auto" or not options.show:
            options.device = choose_device(options.device)
        elif options.device != "cpu":  # that the runs were made on; it need not be here
            check_device_name(options.device)
        if not options.show:
            for seed in options.seeds:
                for hidden, setting in wanted:  # all of them, before the first is trained
                    parse_config(described_by(setting, hidden, seed, options), setting)
    except SwarmError as error:
        parser.exit(error.exit_code, f"error: {error}\n")
    except ValueError as error:
        parser.exit(ConfigError.exit_code, f"error: {error}\n")
    if options.show:
        runs = _found(options)
        results = show(runs)
    else:
        be_exact(options.device, options.threads)
        runs, results = _trained(wanted, options)
    if options.plot:
        if not runs:
            raise SystemExit(
                f"error: nothing to draw: no run under these options has finished in "
                f"{options.directory}; leave out --show to train"
            )
        plot(runs, step_tokens_of(options), options.plot)
    print_results("convergence", results)


if __name__ == "__main__":
    main()
