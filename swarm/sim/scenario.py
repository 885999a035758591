"""SCENARIO.toml: the stages, who comes and goes, what is compared. docs/simulate.md explains it."""

from __future__ import annotations

import random
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from swarm.errors import ConfigError
from swarm.placement import MovePolicy, StageNeed
from swarm.sim.churn import (
    Life,
    Stay,
    constant,
    diurnal,
    exponential,
    preemptible,
    read_trace,
)
from swarm.sim.fluid import Step
from swarm.sim.outcome import EXACT_PEERS
from swarm.sim.policies import Joiners, Nothing, PaperRule, Planner, Policy

GIB = 2**30
_DEFAULT = MovePolicy()
Positive = Annotated[float, Field(gt=0)]
Positives = Annotated[
    tuple[Positive, ...], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)
]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Stages(_Section):
    """`cost`: seconds a device of speed 1 takes for a microbatch, of all stages or of each.
    `second_cost`: share of its time that a second stage costs whoever holds one."""

    count: int = Field(ge=1, le=1024)
    cost: Positive | Positives = 1.0
    memory_gib: float = Field(default=0.0, ge=0)
    download_mib: float = Field(default=0.0, ge=0)
    second_cost: float = Field(default=0.0, ge=0, lt=1)

    @model_validator(mode="after")
    def _as_many(self) -> Self:
        if isinstance(self.cost, tuple) and len(self.cost) != self.count:
            raise ValueError(f"cost lists {len(self.cost)} stages but count is {self.count}")
        return self

    @property
    def needs(self) -> tuple[StageNeed, ...]:
        costs = self.cost if isinstance(self.cost, tuple) else (self.cost,) * self.count
        memory, download = int(self.memory_gib * GIB), int(self.download_mib * 2**20)
        return tuple(StageNeed(cost, memory, download) for cost in costs)


class Steps(_Section):
    """Without `microbatches` there are no steps: work flows on and on (fluid only)."""

    microbatches: int = Field(default=0, ge=0)
    averaging_s: float = Field(default=0.0, ge=0)
    hop_s: float = Field(default=0.0, ge=0)
    slots: int = Field(default=0, ge=0)


class Constant(_Section):
    kind: Literal["constant"]


class Exponential(_Section):
    kind: Literal["exponential"]
    lifetime_h: Positive
    away_h: float = Field(default=0.0, ge=0)


class Preemptible(_Section):
    kind: Literal["preemptible"]
    lifetime_h: Positive
    burst_every_h: Positive
    burst_share: float = Field(gt=0, le=1)
    open_h: Positive
    gap_h: Positive
    grants_per_h: Positive


class Diurnal(_Section):
    kind: Literal["diurnal"]
    evening_h: float = Field(default=20.0, ge=0, lt=24)
    spread_h: float = Field(default=3.0, ge=0)
    hours_on: Positive = 6.0


class Trace(_Section):
    """Lives from a CSV file; speeds, memory and links are those of the file."""

    kind: Literal["trace"]
    path: str


Churn = Annotated[
    Constant | Exponential | Preemptible | Diurnal | Trace, Field(discriminator="kind")
]


class Peers(_Section):
    """A group of peers alike. `speed` is one number, or two between which each is drawn."""

    count: int = Field(default=0, ge=0, le=100_000)
    speed: Positive | Positives = 1.0
    memory_gib: Positive | None = None
    down_mbps: Positive = 1000.0
    notice_s: float = Field(default=0.0, ge=0)
    churn: Churn = Constant(kind="constant")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if isinstance(self.speed, tuple) and (
            len(self.speed) != 2 or self.speed[0] > self.speed[1]
        ):
            raise ValueError("speed is a number, or [slowest, fastest]")
        if (self.count == 0) != isinstance(self.churn, Trace):
            raise ValueError("count is needed, unless the churn is a trace")
        return self

    def lives(self, group: int, seed: int, seconds: float, folder: Path) -> list[Life]:
        """Drawn from the seed; a trace is as it is written."""
        if isinstance(self.churn, Trace):
            return read_trace(folder / self.churn.path)
        draw = random.Random(f"churn/{seed}/{group}")
        memory = None if self.memory_gib is None else int(self.memory_gib * GIB)
        return [
            Life(
                f"{group}.{number:05}", since, until, self.notice_s, self._speed(draw), memory,
                self.down_mbps * 125_000,
            )
            for number, (since, until) in enumerate(sorted(self._stays(draw, seconds)))
        ]  # fmt: skip

    def _speed(self, draw: random.Random) -> float:
        return draw.uniform(*self.speed) if isinstance(self.speed, tuple) else self.speed

    def _stays(self, draw: random.Random, seconds: float) -> list[Stay]:
        match self.churn:
            case Exponential(lifetime_h=life, away_h=away):
                return exponential(
                    draw, seconds, count=self.count, lifetime_s=life * 3600, away_s=away * 3600
                )
            case Preemptible() as cloud:
                return preemptible(
                    draw,
                    seconds,
                    count=self.count,
                    lifetime_s=cloud.lifetime_h * 3600,
                    burst_every_s=cloud.burst_every_h * 3600,
                    burst_share=cloud.burst_share,
                    open_s=cloud.open_h * 3600,
                    gap_s=cloud.gap_h * 3600,
                    grants_per_s=cloud.grants_per_h / 3600,
                )
            case Diurnal(evening_h=evening, spread_h=spread, hours_on=hours):
                return diurnal(
                    draw,
                    seconds,
                    count=self.count,
                    evening_h=evening,
                    spread_h=spread,
                    hours_on=hours,
                )
        return constant(self.count)


class PolicySection(_Section):
    """`none`: nobody moves. `paper`: one move every `every_s`. `planner`: swarm.placement."""

    kind: Literal["none", "paper", "planner"]
    every_s: Positive = 30.0
    joiners: Joiners = "slowest"
    hysteresis_s: float = Field(default=_DEFAULT.hysteresis_s, ge=0)
    horizon_s: Positive = _DEFAULT.horizon_s
    min_gain: float = Field(default=_DEFAULT.min_gain, ge=0)
    keeps_serving: bool = _DEFAULT.keeps_serving
    second_share: float = Field(default=_DEFAULT.second_share, ge=0, le=1)

    def build(self, seed: int) -> Policy:
        if self.kind == "none":
            return Nothing(self.joiners, seed)
        if self.kind == "paper":
            return PaperRule(self.every_s, self.joiners, seed)
        policy = MovePolicy(
            hysteresis_s=self.hysteresis_s,
            horizon_s=self.horizon_s,
            min_gain=self.min_gain,
            keeps_serving=self.keeps_serving,
            second_share=self.second_share,
        )
        return Planner(self.every_s, policy)


class Scenario(_Section):
    """A whole file. `lifetime_h` is what planners are told of how long peers stay."""

    name: str = Field(default="scenario", min_length=1, max_length=100)
    hours: Positive
    seeds: int = Field(default=1, ge=1, le=1000)
    resolution: Literal["fluid", "microbatch"] = "fluid"
    lifetime_h: Positive | None = None
    stages: Stages
    step: Steps = Steps()
    peers: Annotated[list[Peers], Field(min_length=1, max_length=100)]
    policies: Annotated[list[PolicySection], Field(min_length=1, max_length=100)]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.resolution == "microbatch" and not self.step.microbatches:
            raise ValueError('resolution = "microbatch" needs step.microbatches')
        names = [each.build(0).name for each in self.policies]
        if len(set(names)) < len(names):
            raise ValueError("two policies are the same but for parameters that are not shown")
        return self

    @property
    def seconds(self) -> float:
        return self.hours * 3600

    @property
    def divisible(self) -> bool:
        """Whether some peers hold second stages, so that all is measured against peers that divide
        their time as they like."""
        return any(each.second_share > 0 for each in self.policies)

    @property
    def step_of(self) -> Step:
        return Step(**self.step.model_dump())

    def lives(self, seed: int, folder: Path) -> list[Life]:
        """Everybody's. Raises ConfigError."""
        lives = [
            life
            for group, peers in enumerate(self.peers)
            for life in peers.lives(group, seed, self.seconds, folder)
        ]
        if self.resolution == "microbatch" and len(lives) > EXACT_PEERS:
            raise ConfigError(
                f"{len(lives)} peers are too many to simulate microbatches (at most {EXACT_PEERS})",
                'set resolution = "fluid"',
            )
        return lives


def read_scenario(path: Path) -> Scenario:
    """Raises ConfigError."""
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text())
    except OSError as error:
        what = f"cannot read {path}: {(error.strerror or str(error)).lower()}"
        raise ConfigError(what, "docs/simulate.md shows how to write one") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        what = f"{path} is no TOML: {error}"
        raise ConfigError(what, "docs/simulate.md shows how to write one") from None
    try:
        return Scenario.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ConfigError(
            f"{path}: {where}: {first['msg']}", "docs/simulate.md lists the keys"
        ) from None
