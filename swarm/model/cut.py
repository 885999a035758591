"""Which layers make a stage: given by the user, or balanced so that the dearest stage is cheapest.

The balanced cut is the classic linear partition; ties go to the earliest cut, in integers, so every
peer finds the same one.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarm.errors import PipelineError


def balanced_cut(
    costs: Sequence[int], num_stages: int, latest: int | None = None
) -> tuple[int, ...]:
    """Layers per stage, at least one each, with the smallest possible largest stage cost.

    No boundary comes after more than `latest` layers, where there are stages few enough for that.
    """
    count = len(costs)
    latest = count - 1 if latest is None else max(latest, num_stages - 1)
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best = [[0] * (count + 1) for _ in range(num_stages + 1)]  # best[s][n]: n layers, s stages
    last = [[0] * (count + 1) for _ in range(num_stages + 1)]
    best[1] = list(sums)
    for stages in range(2, num_stages + 1):
        for layers in range(stages, count + 1):
            options = (
                (max(best[stages - 1][start], sums[layers] - sums[start]), start)
                for start in range(stages - 1, min(layers, latest + 1))
            )
            best[stages][layers], last[stages][layers] = min(options)
    cut: list[int] = []
    end = count
    for stages in range(num_stages, 0, -1):
        start = last[stages][end]
        cut.append(end - start)
        end = start
    return tuple(reversed(cut))


def choose_cut(
    costs: Sequence[int],
    num_stages: int,
    cut: Sequence[int] | None = None,
    latest: int | None = None,
) -> tuple[int, ...]:
    """The cut asked for, checked, or the balanced one (see there). Raises PipelineError."""
    layers = len(costs)
    if not 1 <= num_stages <= layers:
        raise PipelineError(
            f"{layers} layers cannot make {num_stages} stages",
            f"set [model] stages to a number from 1 to {layers}",
        )
    if cut is None:
        return balanced_cut(costs, num_stages, latest)
    if len(cut) != num_stages or sum(cut) != layers or min(cut) < 1:
        raise PipelineError(
            f"[model] cut = {list(cut)} does not divide {layers} layers into {num_stages} stages",
            f"give {num_stages} numbers of at least 1 that sum to {layers}, or leave cut out",
        )
    return tuple(cut)


def stage_range(cut: Sequence[int], stage: int) -> tuple[int, int]:
    """First layer of a stage, and the one after its last."""
    start = sum(cut[:stage])
    return start, start + cut[stage]
