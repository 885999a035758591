"""Whether numbers are numbers, and where they stopped being so.

A NaN spreads through a whole step: forward to the loss, back to every stage before it. Whoever got
numbers and made something else of them is where it began, and may be broken: nothing is counted,
and the microbatch goes to another replica. Where nobody of the stage does better it is the data's
or the model's doing, the numbers are let through, and the step commits as `skipped`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from swarm.errors import StageFailedError


class NotFiniteError(StageFailedError):
    """A computation was given numbers and made of them what is no number."""


def finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all values of all floating point tensors are numbers, neither NaN nor infinite.

    A finite sum proves it, in one pass without memory; one that is not may only have overflowed.
    """
    return all(
        math.isfinite(each.sum().item()) or bool(torch.isfinite(each).all())
        for each in tensors
        if each.is_floating_point()
    )
