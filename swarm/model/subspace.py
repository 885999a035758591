"""A residual stream that lives in k dimensions, so that k numbers per token cross a boundary.

Protocol Models (Ramasinghe et al. 2025, arXiv 2506.01260, section 4): every projection that writes
to the residual stream writes into one shared subspace with the orthonormal basis `U` (hidden, k),
and token embeddings are a frozen table that every stage knows plus a trained part inside the
subspace. The residual stream is then `frozen(tokens) + r Uᵀ` everywhere, and only `r` need be
sent, in both directions: what lies outside the span of `U` never changes, so its gradient is of no
use to any parameter before.

The paper trains full matrices and keeps their rows in the subspace by a changed optimizer. Here
the constraint is the parametrization: a writer holds `A` (k, in) and computes `U (A x)`, the token
embedding holds (tokens, k). So any optimizer keeps it exactly, its state is hidden/k times smaller
too, and there is nothing to repair. `U` stays what the seed made it; the paper also turns it now
and then, which would have to change the parameters of all stages at one commit.

The last layers, behind which there is no boundary, write to all of the stream as in a plain model:
where none did, what reads the output would have only k numbers to tell tokens by.

A cut must change no bit (DESIGN I6). So *between every two layers*, cut there or not, the stream
goes through `r` (`project`, `rebuild`), by the same kernels on the same shapes.

`U` is made of correctly rounded elementwise float64 operations (random plane rotations of unit
vectors), since a QR would give each machine other bits.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarm.errors import PipelineError
from swarm.model.hf_carve import Anatomy
from swarm.model.randomness import derive_seed
from swarm.model.stage import seam

# The frozen table's standard deviation in those of the other weights. What a layer can tell a token
# by, outside the subspace, must last while the stream inside grows: 1 to 10 learn worse.
FROZEN_SCALE = 20.0

# What families call the projections that write to the residual stream.
WRITERS = ("o_proj", "down_proj", "c_proj", "out_proj", "dense", "dense_4h_to_h", "fc2", "fc_out",
           "w2")  # fmt: skip
NOT_WRITERS = (
    "use llama, qwen3 or the like, or gpt2 with embd_pdrop, attn_pdrop and resid_pdrop of 0; or "
    "leave subspace out"
)


class Basis:
    """`U` and the frozen token table, on one device. Not parameters: the seed says all of them.

    The first `layers` layers of the model write into the subspace. `std` is the table's standard
    deviation.
    """

    def __init__(
        self, hidden: int, k: int, vocab_size: int, std: float, seed: int, layers: int
    ) -> None:
        if not 1 <= k < hidden:
            raise PipelineError(
                f"[model] subspace is {k} but the model's hidden size is {hidden}",
                f"set it to a number from 1 to {hidden - 1}" if hidden > 1 else "leave it out",
            )
        self.hidden, self.k, self.vocab_size, self.layers = hidden, k, vocab_size, layers
        self.u = orthonormal(hidden, k, derive_seed(seed, "subspace", "basis"))
        self.ut = self.u.T.contiguous()
        self._on: dict[torch.device, Basis] = {}
        self._std, self._table_seed = std, derive_seed(seed, "subspace", "tokens")

    @cached_property
    def table(self) -> Tensor:
        """(vocab_size, hidden). Made when a stage is built: a leader, which builds none, has no
        use for what may be a gigabyte. Raises PipelineError if there is no memory for it."""
        generator = torch.Generator().manual_seed(self._table_seed)
        try:
            table = torch.empty(self.vocab_size, self.hidden)
        except RuntimeError:
            raise PipelineError(
                f"no memory for the frozen table of a subspace: {self.vocab_size} tokens of "
                f"{self.hidden} numbers are {self.table_bytes / 2**20:,.0f} MiB",
                "free memory, or take a smaller vocabulary",
            ) from None
        return table.normal_(0.0, self._std, generator=generator)

    @property
    def table_bytes(self) -> int:
        return 4 * self.vocab_size * self.hidden

    def check_layers(self, cut: Sequence[int]) -> None:
        """Raises PipelineError unless all that crosses a boundary of this cut is inside."""
        total, sending = sum(cut), sum(cut[:-1])
        if self.layers > total:
            raise PipelineError(
                f"[model] subspace_layers is {self.layers} but the model has {total} layers",
                f"set it to at most {total}, or leave it out",
            )
        if self.layers < sending:
            remedy = f"set it to {sending} in a new run"
            if self.layers >= len(cut) - 1:  # one for each stage before the last
                remedy += f", or let the last stage begin after at most {self.layers} layers"
            raise PipelineError(
                f"[model] subspace_layers is {self.layers}, but with {list(cut)} layers a stage "
                f"{sending} come before the last",
                remedy,
            )

    def to(self, device: str | torch.device) -> Basis:
        """The same on another device; all stages that are built there share its one copy."""
        device = torch.device(device)
        if device not in self._on:
            moved = copy.copy(self)
            moved.u, moved.ut = self.u.to(device), self.ut.to(device)
            if device.type == "meta":
                moved.table = torch.empty(self.vocab_size, self.hidden, device=device)
            else:
                moved.table = self.table.to(device)
            self._on[device] = moved
        return self._on[device]

    def frozen(self, tokens: Tensor) -> Tensor:
        """(batch, seq) token ids of any integer dtype to (batch, seq, hidden) float32.

        An id outside the vocabulary raises IndexError on a CPU and costs the process its device on
        a GPU; `swarm.wire.frames.check_indices` refuses it where it arrives.
        """
        return F.embedding(tokens.long(), self.table)

    def project(self, hidden: Tensor, frozen: Tensor) -> Tensor:
        """`r`, (batch, seq, k) float32, of a residual stream (batch, seq, hidden)."""
        with torch.autocast(hidden.device.type, enabled=False):
            return seam((hidden.float() - frozen) @ self.u)

    def rebuild(self, r: Tensor, frozen: Tensor) -> Tensor:
        """The residual stream (batch, seq, hidden) of an `r` (batch, seq, k), as `project` gave it.

        All float32, under autocast too; torch raises RuntimeError for an `r` of another dtype.
        """
        with torch.autocast(r.device.type, enabled=False):
            return frozen + seam(r) @ self.ut

    def widen(self, r: Tensor) -> Tensor:
        """(…, k) in any dtype to (…, hidden) in float32."""
        with torch.autocast(r.device.type, enabled=False):
            return r.float() @ self.ut


class SubspaceLinear(nn.Linear):
    """A residual writer: `weight` (k, in) and `bias` (k), output (…, hidden)."""

    def __init__(self, inputs: int, basis: Basis, *, bias: bool) -> None:
        super().__init__(inputs, basis.k, bias, device="meta")
        self.basis = basis

    def forward(self, input: Tensor) -> Tensor:
        return self.basis.widen(F.linear(input, self.weight, self.bias))


class SubspaceEmbedding(nn.Embedding):
    """`weight` (entries, k), output (…, hidden); of tokens, on top of the frozen table."""

    def __init__(self, entries: int, basis: Basis, *, padding: int | None, tokens: bool) -> None:
        super().__init__(entries, basis.k, padding, device="meta")
        self.basis, self.tokens = basis, tokens

    def forward(self, input: Tensor) -> Tensor:
        trained = self.basis.widen(super().forward(input))
        return self.basis.frozen(input) + trained if self.tokens else trained


def constrain(model: Any, anatomy: Anatomy, basis: Basis) -> None:
    """Replaces what writes to the residual stream in the first layers of a whole, empty model.

    Raises PipelineError where it is not found. That nothing else writes to the stream, and that
    what is found does so linearly, is for `swarm.model.subspace_check` to prove.
    """
    tokens = model.get_input_embeddings()
    for name in anatomy.before:
        module = model.get_submodule(name)
        if type(module) is not nn.Embedding:  # a subclass may scale what it gives
            raise PipelineError(
                f"subspace: {name} ({type(module).__name__}) comes before the layers and is no "
                "plain embedding",
                NOT_WRITERS,
            )
        _replace(
            model,
            name,
            SubspaceEmbedding(
                module.num_embeddings, basis, padding=module.padding_idx, tokens=module is tokens
            ),
        )
    for index, layer in enumerate(model.get_submodule(anatomy.layers)[: basis.layers]):
        writers = [
            (name, module)
            for name, module in layer.named_modules()
            if name.rpartition(".")[2] in WRITERS and _outputs(module) == basis.hidden
        ]
        if len(writers) < 2:
            raise PipelineError(
                f"subspace: in layer {index} of {type(model).__name__} {len(writers)} of what "
                "writes to the residual stream could be found, and 2 or more should be",
                NOT_WRITERS,
            )
        for name, module in writers:
            bias = getattr(module, "bias", None) is not None
            writer = SubspaceLinear(_inputs(module), basis, bias=bias)
            _replace(model, f"{anatomy.layers}.{index}.{name}", writer)


def fold(model: nn.Module, tensors: Mapping[str, Tensor], basis: Basis) -> dict[str, Tensor]:
    """Plain parameters by name from those of a constrained `model`: `U A`, `U b`, `frozen + T Uᵀ`.

    The products are taken in float64 and rounded once, to float32.
    """
    plain = dict(tensors)
    u = basis.u.double().cpu()
    for name, module in model.named_modules():
        if isinstance(module, SubspaceEmbedding):
            table = tensors[f"{name}.weight"].double() @ u.T
            if module.tokens:
                table += basis.table.double().cpu()
            plain[f"{name}.weight"] = table.float()
        elif isinstance(module, SubspaceLinear):
            weight = u @ tensors[f"{name}.weight"].double()
            transposed = getattr(module, "transposed", False)
            plain[f"{name}.weight"] = (weight.T if transposed else weight).float().contiguous()
            if module.bias is not None:
                plain[f"{name}.bias"] = (u @ tensors[f"{name}.bias"].double()).float()
    return plain


def orthonormal(rows: int, columns: int, seed: int) -> Tensor:
    """A random (rows, columns) matrix with orthonormal columns, float32; the same bits everywhere.

    Unit vectors turned by random angles in random disjoint planes, until every entry has met every
    other: log2(rows) rounds mix all rows, three times that many leave no structure.
    """
    generator = torch.Generator().manual_seed(seed)
    u = torch.zeros(rows, columns, dtype=torch.float64)
    u[torch.randperm(rows, generator=generator)[:columns], torch.arange(columns)] = 1.0
    half = rows // 2
    for _ in range(3 * max(1, (rows - 1).bit_length())):
        order = torch.randperm(rows, generator=generator)
        first, second = order[:half], order[half : 2 * half]
        tangent = torch.rand(half, 1, generator=generator, dtype=torch.float64) * 2 - 1
        square = tangent * tangent  # of half the angle: no sine, whose bits differ
        norm = square + 1
        cosine, sine = (1 - square) / norm, (tangent + tangent) / norm
        a, b = u[first], u[second]
        u[first], u[second] = cosine * a - sine * b, sine * a + cosine * b
    return u.float()


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    holder = model.get_submodule(parent)
    former = getattr(holder, child)
    if isinstance(module, SubspaceLinear):
        module.transposed = not isinstance(former, nn.Linear)  # type: ignore[assignment]
    setattr(holder, child, module)


def _outputs(module: nn.Module) -> int | None:
    if isinstance(module, nn.Linear):
        return module.out_features
    width = getattr(module, "nf", None)  # transformers' Conv1D, as GPT-2 has it
    return width if isinstance(width, int) else None


def _inputs(module: nn.Module) -> int:
    if isinstance(module, nn.Linear):
        return module.in_features
    weight = module.weight
    assert isinstance(weight, Tensor)
    return int(weight.shape[0])
