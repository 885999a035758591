"""How much memory a stage needs on a device, and how many microbatches then fit beside it.

A stated estimate, not a measurement. A replica holds the activations of every microbatch between
its forward and its backward, and on long lines that is what limits throughput: with 150 ms of round
trip and small microbatches, dozens have to be under way to keep devices busy. So a device that has
the memory holds more than the least that every replica is counted on for. The planner counts on
that least alone, so that nobody is refused a stage because another holds more there.
"""

from __future__ import annotations

from dataclasses import dataclass

OPTIMIZER_TENSORS = {"adamw": 2, "sgd": 1}  # as large as the parameters; others are taken as 2
# One part in so many of what the state leaves free is for activations. A microbatch also lies here
# in wire form, as it came and as it was sent on: with recomputation that is twice what its graph
# holds, so three parts go to it at worst. The fourth is for what the estimate leaves out (what
# an allocator keeps, workspaces, copies of the state for joiners) and for other programs.
SLOTS_PART = 4
# However much memory there is. So many cover lines of a second and a half at forty microbatches a
# second; what a replica that dies had under way is computed again, and an estimate of the
# activations that is far too small cannot fill a device.
MOST_SLOTS = 64


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes, by what they hold."""

    parameters: int
    optimizer: int
    accumulator: int
    gradients: int
    activations: int
    shared: int

    @property
    def total(self) -> int:
        state = self.parameters + self.optimizer + self.accumulator + self.gradients
        return state + self.activations + self.shared


def estimate_memory(
    parameters: int,
    *,
    optimizer: str = "adamw",
    accumulate: str = "float64",
    activation_bytes: int = 0,
    slots: int = 1,
    steps_in_flight: int = 1,
    shared_bytes: int = 0,
) -> MemoryEstimate:
    """Bytes a replica of a stage of `parameters` parameters holds while it trains.

    parameters        4 n   float32 master weights; at most three of them with two `steps_in_flight`
    optimizer         8 n   two moments (adamw); 4 n for sgd's momentum
    accumulator       8 n   float64, or 4 n for float32; for each of the `steps_in_flight`
    gradients         4 n   of the microbatch whose backward runs, or of the step that is averaged
    activations       a s   `activation_bytes` of one microbatch between its forward and its
                            backward, times the `slots` that may be so at once
    shared                  `shared_bytes`, the same in every stage: the frozen table of a subspace

    What torch's allocator keeps for itself and the workspaces of kernels are not in it, nor are
    the kept answers, which lie in the host's memory under their own limit (`memory.kept_mib`).
    """
    return MemoryEstimate(
        parameters=4 * parameters * (3 if steps_in_flight > 1 else 1),
        optimizer=4 * parameters * OPTIMIZER_TENSORS.get(optimizer, 2),
        accumulator=(8 if accumulate == "float64" else 4) * parameters * steps_in_flight,
        gradients=4 * parameters,
        activations=activation_bytes * slots,
        shared=shared_bytes,
    )


def least_slots(num_stages: int) -> int:
    """Microbatches that every replica can hold between forward and backward, whatever its memory.

    1F1B has as many under way as there are stages; twice that, for hops that take as long as the
    work, and two to spare.
    """
    return 2 * num_stages + 2


def slots_that_fit(
    least: int | None, memory_bytes: int | None, state_bytes: int, activation_bytes: int
) -> int | None:
    """Microbatches that a replica may hold between forward and backward, from `least` on.

    `memory_bytes` there are for it in all (None: not known), `state_bytes` its state takes
    (`estimate_memory` without activations), `activation_bytes` one microbatch (0: not known).
    Where something is not known it is the least. None, no limit at all (AFAB), stays None.
    """
    if least is None or memory_bytes is None or activation_bytes <= 0:
        return least
    free_bytes = max(memory_bytes - state_bytes, 0)
    return max(least, min(free_bytes // SLOTS_PART // activation_bytes, MOST_SLOTS))
