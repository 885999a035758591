"""Which codec each boundary and direction of a run uses, and how a stage's tensors go through it.

Boundary b lies between stages b and b + 1. *Forward* are activations, *backward* their gradients.
A stage encodes and checks through this class, and so does whatever stands for a swarm in one
process (`benchmarks/convergence.py`), so that it is the same code.

Stochastic rounding must not make a repeated microbatch another one (DESIGN I1, I2). So its seed is
a function of run seed, step, index, boundary, direction and the tensor's place, and of nothing
that a replica has been through. Validation rounds to nearest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from swarm.wire.codecs import Packed, WireTensor, pack

if TYPE_CHECKING:
    from swarm.config_fields import RunConfig

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True, slots=True)
class BoundaryCodecs:
    """Codec names. `overrides` are (forward, backward) of single boundaries; `seed`, the run's,
    makes int8 and int4 round stochastically."""

    forward: str = "float32"
    backward: str = "float32"
    overrides: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    seed: int | None = None

    @classmethod
    def of(cls, config: RunConfig) -> BoundaryCodecs:
        wire = config.wire
        forward, backward = wire.forward or wire.activations, wire.backward or wire.activations
        overrides = {
            each.boundary: (each.forward or forward, each.backward or backward)
            for each in wire.boundaries
        }
        seed = config.run.seed if wire.rounding == "stochastic" else None
        return cls(forward, backward, overrides, seed)

    def name(self, boundary: int, direction: str) -> str:
        """The codec of one boundary and direction."""
        pair = self.overrides.get(boundary, (self.forward, self.backward))
        return pair[(FORWARD, BACKWARD).index(direction)]

    def encode(
        self,
        tensors: Sequence[Tensor],
        boundary: int,
        direction: str,
        microbatch: tuple[int, int] | None,
    ) -> list[WireTensor]:
        """What crosses `boundary` for a microbatch `(step, index)`; None: rounded to nearest.

        Raises WireError for a dtype that cannot be sent. Belongs on the compute thread.
        """
        packed = self.pack(tensors, boundary, direction, microbatch)
        return [each.seal(each.values.cpu()) for each in packed]

    def pack(
        self,
        tensors: Sequence[Tensor],
        boundary: int,
        direction: str,
        microbatch: tuple[int, int] | None,
    ) -> list[Packed]:
        """The half of `encode` that does not wait for the tensors' device."""
        codec, packed = self.name(boundary, direction), []
        for place, tensor in enumerate(tensors):
            seed = None
            if self.seed is not None and microbatch is not None:
                seed = _seed(self.seed, *microbatch, boundary, direction, place)
            packed.append(pack(tensor, codec, seed))
        return packed


LOSSLESS = BoundaryCodecs()


def _seed(*parts: int | str) -> int:
    """64 bits of the sha256 over the parts, joined by slashes (docs/protocol.md)."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
