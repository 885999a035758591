"""Makes a failing scenario as small as it can be while it fails in the same way.

Greedy: of the smaller scenarios next to the present one, the first that fails in the same way is
taken, until none does. The same way means the same kind of exception, raised in the same place,
with the same words apart from names and numbers: a smaller scenario that shows another defect
would send whoever reads it to the wrong place.
"""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.protocol.faults import LEADER, Fault
from tests.protocol.scenario import NothingHappenedError, Scenario

Failure = str
Fails = Callable[[Scenario], Failure | None]
MADE_PLAIN = (
    "poisoned",
    "slow",
    "kept_bytes",
    "slots",
    "seconds",
    "latency_s",
    "leases",
    "checkpoints",
    "chunk",
    "policy",
    "since",
    "twins_bps",
    "costs",
    "then",
    "pinned",
    "both",
    "second_share",
)


def failure_of(error: BaseException) -> Failure:
    """In which way something failed."""
    words = re.sub(r"\br?\d[\w.#]*|\b[0-9a-f]{8,}\b|\[.*?\]|\{.*?\}", "_", str(error))[:120]
    place = ""
    frames = list(traceback.extract_tb(error.__traceback__))
    if isinstance(error, AssertionError) and frames:
        place = frames[-1].name
    return f"{type(error).__name__} {place}: {words}".strip()


def fails(scenario: Scenario) -> Failure | None:
    """Run it; the failure, or None when all is well (or nothing was injected)."""
    try:
        scenario.run()
    except NothingHappenedError:
        return None
    except Exception as error:
        return failure_of(error)
    return None


def shrink(
    scenario: Scenario, failure: Failure, *, limit_s: float = 120.0, run: Fails = fails
) -> Scenario:
    """The smallest scenario found within `limit_s` real seconds that fails like this one."""
    ends = time.monotonic() + limit_s
    smaller = True
    while smaller:
        smaller = False
        for candidate in candidates(scenario):
            if time.monotonic() > ends:
                return scenario
            if run(candidate) == failure:
                scenario, smaller = candidate, True
                break
    return scenario


def candidates(scenario: Scenario) -> Iterator[Scenario]:
    """Smaller ones next to it: those first that leave out most."""
    faults = scenario.faults
    for half in (faults[: len(faults) // 2], faults[len(faults) // 2 :]):
        if 0 < len(half) < len(faults) - 1:
            yield replace(scenario, faults=half)
    if len(faults) > 1:
        for number in range(len(faults)):
            yield replace(scenario, faults=faults[:number] + faults[number + 1 :])
    for stage in reversed(range(len(scenario.replicas))):
        if len(scenario.replicas) > 1:
            yield _without_stage(scenario, stage)
    for stage, count in enumerate(scenario.replicas):
        if count > 1:
            fewer = (*scenario.replicas[:stage], count - 1, *scenario.replicas[stage + 1 :])
            yield _without_names(replace(scenario, replicas=fewer), {f"r{stage}.{count - 1}"})
    if scenario.trainers > 1:
        alone = replace(scenario, trainers=1, leases=())
        yield _without_names(alone, {*scenario.trainer_ids})
    for steps in range(1, scenario.steps):
        yield replace(scenario, steps=steps)
    for microbatches in {1, scenario.microbatches // 2, scenario.microbatches - 1}:
        if 0 < microbatches < scenario.microbatches:
            yield replace(scenario, microbatches=microbatches)
    plain = Scenario()
    for name in MADE_PLAIN:
        if getattr(scenario, name) != getattr(plain, name):
            yield replace(scenario, **{name: getattr(plain, name)})
    for number, fault in enumerate(faults):
        for simpler in _simpler(fault):
            yield replace(scenario, faults=(*faults[:number], simpler, *faults[number + 1 :]))


def _simpler(fault: Fault) -> Iterator[Fault]:
    if fault.count > 1:
        yield replace(fault, count=1)
    if fault.step is not None and fault.at_s is None:
        yield replace(fault, step=None)
    if fault.replica is not None and fault.victim is not None:
        yield replace(fault, replica=None)  # whoever passes the point
    if fault.at_s is not None and (fault.count, fault.step, fault.replica) != (1, None, None):
        yield replace(fault, count=1, step=None, replica=None)  # they mean nothing there
    for number in range(len(fault.side) if len(fault.side) > 1 else 0):
        yield replace(fault, side=fault.side[:number] + fault.side[number + 1 :])


def _without_stage(scenario: Scenario, stage: int) -> Scenario:
    """Those after it move up by one, also where they are named."""
    rest = scenario.replicas[:stage] + scenario.replicas[stage + 1 :]

    def moved(name: str) -> str:
        number = _stage_of(name)
        if number is None or number < stage:
            return name
        return f"gone {name}" if number == stage else f"r{number - 1}{name[name.index('.') :]}"

    renamed = _renamed(replace(scenario, replicas=rest), moved)
    for name in ("costs", "then"):
        of_stages = getattr(scenario, name)
        rest_of_them = of_stages[:stage] + of_stages[stage + 1 :]
        renamed = replace(renamed, **{name: rest_of_them})
    gone = {each for fault in renamed.faults for each in _named(fault) if each.startswith("gone ")}
    others = (*(name for name, _ in renamed.slow), *renamed.pinned, *renamed.both)
    gone |= {name for name in others if name.startswith("gone ")}
    faults = tuple(
        replace(fault, stage=fault.stage - 1)
        if fault.stage is not None and fault.stage > stage
        else fault
        for fault in renamed.faults
        if fault.stage != stage
    )
    return _without_names(replace(renamed, faults=faults), gone)


def _stage_of(name: str) -> int | None:
    found = re.fullmatch(r"r(\d+)\..+", name)
    return int(found[1]) if found else None


def _named(fault: Fault) -> set[str]:
    names = {fault.replica, fault.victim, fault.other, *fault.side}
    return {name for name in names if name is not None}


def _renamed(scenario: Scenario, moved: Callable[[str], str]) -> Scenario:
    def maybe(name: str | None) -> str | None:
        return None if name is None else moved(name)

    return replace(
        scenario,
        slow=tuple((moved(name), factor) for name, factor in scenario.slow),
        pinned=tuple(moved(name) for name in scenario.pinned),
        both=tuple(moved(name) for name in scenario.both),
        faults=tuple(
            replace(
                fault,
                replica=maybe(fault.replica),
                victim=maybe(fault.victim),
                other=maybe(fault.other),
                side=tuple(moved(name) for name in fault.side),
            )
            for fault in scenario.faults
        ),
    )


def _without_names(scenario: Scenario, gone: set[str]) -> Scenario:
    """Faults that need somebody who is gone go too; a partition goes on without him."""
    faults = []
    for fault in scenario.faults:
        side = tuple(name for name in fault.side if name not in gone)
        fault = replace(fault, side=side)
        if scenario.trainers == 1 and fault.victim in gone and fault.victim[:1] == "t":
            fault = replace(fault, victim=LEADER)
        if not _named(fault) & gone and (side or fault.action != "partition"):
            faults.append(fault)
    slow = tuple(each for each in scenario.slow if each[0] not in gone)
    pinned = tuple(name for name in scenario.pinned if name not in gone)
    both = tuple(name for name in scenario.both if name not in gone)
    return replace(scenario, faults=tuple(faults), slow=slow, pinned=pinned, both=both)
