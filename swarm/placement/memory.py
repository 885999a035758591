"""How much memory a stage needs on a device: a stated estimate, not a measurement."""

from __future__ import annotations

from dataclasses import dataclass

OPTIMIZER_TENSORS = {"adamw": 2, "sgd": 1}  # as large as the parameters; others are taken as 2


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes, by what they hold."""

    parameters: int
    optimizer: int
    accumulator: int
    gradients: int
    activations: int

    @property
    def total(self) -> int:
        return (
            self.parameters + self.optimizer + self.accumulator + self.gradients + self.activations
        )


def estimate_memory(
    parameters: int,
    *,
    optimizer: str = "adamw",
    accumulate: str = "float64",
    activation_bytes: int = 0,
    slots: int = 1,
    steps_in_flight: int = 1,
) -> MemoryEstimate:
    """Bytes a replica of a stage of `parameters` parameters holds while it trains.

    parameters        4 n   float32 master weights, for each of the `steps_in_flight`
    optimizer         8 n   two moments (adamw); 4 n for sgd's momentum
    accumulator       8 n   float64, or 4 n for float32; for each of the `steps_in_flight`
    gradients         4 n   of the microbatch whose backward runs
    activations       a s   `activation_bytes` of one microbatch between its forward and its
                            backward, times the `slots` that may be so at once

    What torch's allocator keeps for itself and the workspaces of kernels are not in it, nor are
    the kept answers, which lie in the host's memory under their own limit (`memory.kept_mib`).
    """
    return MemoryEstimate(
        parameters=4 * parameters * steps_in_flight,
        optimizer=4 * parameters * OPTIMIZER_TENSORS.get(optimizer, 2),
        accumulator=(8 if accumulate == "float64" else 4) * parameters * steps_in_flight,
        gradients=4 * parameters,
        activations=activation_bytes * slots,
    )
