"""Whether numbers are numbers, and where they stopped being so.

A NaN spreads through a whole step: forward to the loss, back to every stage before it. Whoever got
numbers and made something else of them is where it began, and may be broken: nothing is counted,
and the microbatch goes to another replica (a GPU tells when its gradients have been added: then all
that this replica has counted of the step is computed again). Where nobody of the stage does better
it is the data's or the model's doing, the numbers are let through, and the step commits as
`skipped`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from swarm.errors import StageFailedError


class NotFiniteError(StageFailedError):
    """A computation was given numbers and made of them what is no number."""


def totals(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The sum of each floating point tensor, on its device: one that is finite proves that all
    values are numbers, in one pass without memory."""
    return [
        each.sum(dtype=torch.float32) if each.itemsize < 4 else each.sum()
        for each in tensors
        if each.is_floating_point()
    ]


def proven(sums: Iterable[float], tensors: Iterable[Tensor]) -> bool:
    """Whether all values of all floating point tensors, whose `totals` these are, are numbers,
    neither NaN nor infinite. A sum that is not may only have overflowed."""
    floating = [each for each in tensors if each.is_floating_point()]
    return all(
        math.isfinite(total) or bool(torch.isfinite(each).all())
        for total, each in zip(sums, floating, strict=True)
    )


def finite(tensors: Sequence[Tensor]) -> bool:
    """The two in one."""
    return proven([each.item() for each in totals(tensors)], tensors)
