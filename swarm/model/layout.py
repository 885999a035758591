"""All parameters of a stage in one flat float32 tensor, and what is computed over it.

Averaging, the optimizer and snapshots work on flat tensors; the module's parameters are views.
Every parameter starts on a 64-byte boundary, because kernels may round by alignment and a stage
must compute the same bits wherever its parameters lie. What weight decay acts on comes first:
parameters with two or more dimensions but for norms and biases, which may have as many (a LayerNorm
over planes, a bias per expert). Then the others and what is frozen (it has no gradient).
Everything here that yields a number to be compared (norms, hashes, fingerprint) depends on the
tensors alone, not on cut, threads or processor: replicas must say the same of the same gradient.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import islice

import numpy as np
import torch
from torch import Tensor, nn

from swarm.errors import PipelineError

ALIGNMENT = 16  # float32 elements, 64 bytes
CHUNK = 1 << 16  # elements converted at a time: their float64 copy stays in the cache
NORM_ROW = 1 << 16  # in float64 they stay in the cache
NORM_LEFT = 64
GPU_NORM_ROWS = 256  # as much memory as they take in float64
HASHED_PART = 1 << 20  # elements
FINGERPRINT_ROW = 1 << 12
FINGERPRINT_ROWS = 64
GPU_FINGERPRINT_ROWS = 4096
MASK64 = (1 << 64) - 1


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def _is_norm(module: nn.Module) -> bool:
    """By its class; most families have their own. Batch and group norms have one dimension."""
    return isinstance(module, nn.LayerNorm | nn.RMSNorm) or type(module).__name__.endswith("Norm")


def _is_bias(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last == "bias" or last.endswith("_bias") or last.startswith("bias_")


@dataclass(frozen=True)
class ParameterLayout:
    """Where each parameter lies in the flat tensor; counts and offsets are in elements.

    `names` are in layout order: decayed first (`num_decayed` elements with padding), then the rest.
    The gaps between parameters are zero and stay zero under any elementwise optimizer.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    total: int
    num_decayed: int

    @classmethod
    def of(cls, module: nn.Module) -> ParameterLayout:
        """The layout of a module's parameters. Raises PipelineError if one is not float32."""
        parameters = list(module.named_parameters())
        for name, parameter in parameters:
            if parameter.dtype != torch.float32:
                raise PipelineError(
                    f"parameter {name} is {str(parameter.dtype).removeprefix('torch.')}",
                    "make all parameters float32; [model] dtype sets what they compute in",
                )
        norms = {
            id(p) for m in module.modules() if _is_norm(m) for p in m.parameters(recurse=False)
        }
        undecayed = {
            name
            for name, p in parameters
            if not p.requires_grad or id(p) in norms or _is_bias(name)
        }
        return cls.from_shapes({name: tuple(p.shape) for name, p in parameters}, undecayed)

    @classmethod
    def from_shapes(
        cls, shapes: Mapping[str, tuple[int, ...]], undecayed: Container[str] = ()
    ) -> ParameterLayout:
        """The layout for parameters given by name and shape, in key order. Of less than two
        dimensions or `undecayed` are those that weight decay leaves alone."""
        names = [n for n, shape in shapes.items() if len(shape) >= 2 and n not in undecayed]
        num_decayed_names = len(names)
        names += [n for n, shape in shapes.items() if len(shape) < 2 or n in undecayed]
        offsets, total, num_decayed = [], 0, 0
        for position, name in enumerate(names):
            offsets.append(total)
            total += _aligned(math.prod(shapes[name]))
            if position < num_decayed_names:
                num_decayed = total
        return cls(
            tuple(names), tuple(shapes[n] for n in names), tuple(offsets), total, num_decayed
        )

    def slices(self, flat: Tensor) -> dict[str, Tensor]:
        """Each parameter's part of a flat tensor, in its shape, by name."""
        return {
            name: flat[offset : offset + math.prod(shape)].view(shape)
            for name, shape, offset in zip(self.names, self.shapes, self.offsets, strict=True)
        }

    def flatten(self, module: nn.Module) -> Tensor:
        """Moves the module's parameters into one new flat tensor and makes them views of it."""
        parameters = dict(module.named_parameters())
        device = next(iter(parameters.values())).device if parameters else torch.device("cpu")
        flat = torch.zeros(self.total, dtype=torch.float32, device=device)
        for name, view in self.slices(flat).items():
            view.copy_(parameters[name].data)
        self.attach(module, flat)
        return flat

    def attach(self, module: nn.Module, flat: Tensor) -> None:
        """Makes the module's parameters views of `flat`, whatever they were before."""
        parameters = dict(module.named_parameters())
        for name, view in self.slices(flat).items():
            parameters[name].data = view

    def grad_into(self, module: nn.Module, accumulator: Tensor) -> None:
        """Adds every parameter's gradient into the flat accumulator and clears it.

        The accumulator is float32 or float64. A parameter without a gradient (frozen, or not
        reached) adds nothing.
        """
        offsets, found = dict(zip(self.names, self.offsets, strict=True)), []
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                found.append((offsets[name], parameter.grad.reshape(-1)))
                parameter.grad = None
        if accumulator.device.type != "cpu":
            there = [accumulator[start : start + each.numel()] for start, each in found]
            if there:  # in float32 one launch for many
                torch._foreach_add_(there, [each for _, each in found])
            return
        for offset, gradient in found:
            # What is converted goes through a buffer, to be kept in the cache.
            size = max(gradient.numel(), 1) if gradient.dtype == accumulator.dtype else CHUNK
            for start in range(0, gradient.numel(), size):
                part = gradient[start : start + size]
                accumulator[offset + start : offset + start + part.numel()].add_(part)

    def squared_norms(self, flat: Tensor) -> list[float]:
        """The sum of squares of each parameter's part, in layout order, in float64.

        Add several with `math.fsum`, which no order can change.
        """
        return _squared_norms(list(self.slices(flat).values()))

    def tensor_sha256(self, flat: Tensor) -> dict[str, str]:
        """`{"shape:sha256"}` by name: the hash is of the tensor's little-endian float32 bytes."""
        return {
            name: "x".join(map(str, shape)) + ":" + sha256_of(part)
            for (name, part), shape in zip(self.slices(flat).items(), self.shapes, strict=True)
        }


def sha256_of(tensor: Tensor) -> str:
    """sha256 (hex) of a tensor's bytes."""
    data = tensor.detach().to("cpu").contiguous().reshape(-1)
    return hashlib.sha256(data.numpy().data.cast("B") if data.numel() else b"").hexdigest()


def gradient_sha256(flat: Tensor, wait: Callable[[int], None] = lambda num_elements: None) -> str:
    """sha256 (hex) over the digests of a flat gradient's parts of `HASHED_PART` elements, which as
    many threads compute as torch uses: of a billion elements one would take seconds a step.

    `wait(n)` is called before any of the first `n` elements is read."""
    parts = flat.detach().split(HASHED_PART)
    threads = min(torch.get_num_threads(), len(parts))

    def arrived() -> Iterator[Tensor]:
        for number, part in enumerate(parts):
            wait(number * HASHED_PART + part.numel())
            yield part

    if threads > 1:
        with ThreadPoolExecutor(threads, "sha256") as pool:
            digests = list(pool.map(sha256_of, arrived()))
    else:
        digests = list(map(sha256_of, arrived()))
    return hashlib.sha256(bytes.fromhex("".join(digests))).hexdigest()


def model_sha256(hashes: Mapping[str, str], key_order: Sequence[str]) -> str:
    """One hash of a model (or a stage) from its tensors' `tensor_sha256`, whichever stage had them.

    Names of `key_order` that `hashes` lacks are left out, so it serves for one stage as well.
    """
    digest = hashlib.sha256()
    for name in key_order:
        if name in hashes:
            digest.update(f"{name} {hashes[name]}\n".encode())
    return digest.hexdigest()


def squared_norm_of(tensor: Tensor) -> float:
    """Sum of squares in float64, a function of float32 values and their order alone.

    torch's own sum has as many lanes as the processor's vectors, and so rounds otherwise on ARM
    than on x86. Here each addition is one of two elements: of rows of a fixed length, the last
    filled up with zeros, half is added to half, and `math.fsum` takes what is left. Squares are
    exact.
    """
    return _squared_norms([tensor])[0]


def _squared_norms(tensors: Sequence[Tensor]) -> list[float]:
    """Of all of them before the first is waited for: a GPU has its kernels queued."""
    flat = [each.detach().reshape(-1) for each in tensors]
    if flat and flat[0].device.type != "cpu":
        by_tensor = _sums_of_rows(flat)
    else:
        by_tensor = [torch.cat([*_sums_of_squares(each)]) for each in flat]
    values: list[float] = torch.cat(by_tensor).tolist() if by_tensor else []
    left = iter(values)
    return [_exact_sum([*islice(left, each.numel())]) for each in by_tensor]


def _sums_of_squares(values: Tensor) -> Iterator[Tensor]:
    """`NORM_LEFT` sums for each row of the values, row by row."""
    whole = values.numel() // NORM_ROW * NORM_ROW
    if whole:
        for row in values[:whole].split(NORM_ROW):
            yield _halved(row.view(1, NORM_ROW).double().square())
    if rest := values.numel() - whole:
        enough = max(NORM_LEFT, 1 << rest.bit_length())  # of zeros: more would change no bit
        padded = values.new_zeros(1, enough, dtype=torch.float64)
        padded[0, :rest] = values[whole:]
        yield _halved(padded.square_())
    if not values.numel():
        yield values.new_zeros(0, dtype=torch.float64)


def _sums_of_rows(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same of flat tensors on one device, each filled up with zeros to whole rows, and the rows
    of several at a time: a launch costs more there than what a parameter takes to compute."""
    rows = [-(-each.numel() // NORM_ROW) for each in tensors]
    size = NORM_ROW * min(sum(rows), GPU_NORM_ROWS)
    block, filled = tensors[0].new_empty(size, dtype=torch.float64), 0
    sums = [block.new_empty(0)]
    for each, count in zip(tensors, rows, strict=True):
        left = count * NORM_ROW
        while left:
            place = block[filled : filled + left]
            values, each = each[: place.numel()], each[place.numel() :]
            place[: values.numel()] = values
            place[values.numel() :].zero_()
            filled, left = filled + place.numel(), left - place.numel()
            if filled == size:
                sums.append(_halved(block.view(-1, NORM_ROW).square_()))
                filled = 0
    if filled:
        sums.append(_halved(block[:filled].view(-1, NORM_ROW).square_()))
    return list(torch.cat(sums).split([count * NORM_LEFT for count in rows]))


def _halved(rows: Tensor) -> Tensor:
    """`NORM_LEFT` sums of each row, of a power of two elements, flat."""
    while rows.shape[1] > NORM_LEFT:
        half = rows.shape[1] // 2
        rows = rows[:, :half].add_(rows[:, half:])
    return rows.flatten().clone()  # not a view of the rows


def _exact_sum(values: Sequence[float]) -> float:
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # infinities or NaN among them: the caller must see it
        return sum(values)


@cache
def _odd_weights(count: int, device: torch.device) -> Tensor:
    """Odd numbers of 64 bits (so a change of any one element shows), from a Weyl sequence."""
    weights = torch.arange(1, count + 1, dtype=torch.int64) * (0x9E3779B97F4A7C15 - (1 << 64))
    return ((weights ^ (weights >> 29)) | 1).to(device)


def fingerprint(*tensors: Tensor) -> int:
    """A 64-bit number of the exact bits of some flat float32 tensors, in order; cheap, not secret.

    A change of one element always shows. Of two that are swapped one pair in 2^27 goes unseen, of
    values whose mantissas end in many zeros, as small integers' do, more: one in 2^8 at the worst.
    Wraparound integer arithmetic gives the same number in any order of addition, so on any device.
    """
    result = 0
    for tensor in tensors:
        result = (result * 0x100000001B3 + _fingerprint_of(tensor)) & MASK64
    return result


def _fingerprint_of(tensor: Tensor) -> int:
    flat = tensor.detach().reshape(-1)
    if flat.numel() % 2:
        flat = torch.cat([flat, flat.new_zeros(1)])
    words = flat.view(torch.int64)
    weights = _odd_weights(FINGERPRINT_ROW, words.device)
    rows = FINGERPRINT_ROWS if words.device.type == "cpu" else GPU_FINGERPRINT_ROWS
    whole = words.numel() // FINGERPRINT_ROW * FINGERPRINT_ROW
    sums = [words.new_empty(0)]
    if whole:
        blocks = words[:whole].split(FINGERPRINT_ROW * rows)
        sums += [(block.view(-1, FINGERPRINT_ROW) * weights).sum(dim=1) for block in blocks]
    if whole < words.numel():
        rest = words[whole:]
        sums.append((rest * weights[: rest.numel()]).sum().view(1))
    by_row = torch.cat(sums).cpu().numpy().view(np.uint64)
    numbers = np.arange(1, len(by_row) + 1, dtype=np.uint64)
    weighted = by_row * (2 * numbers + 1) * np.uint64(0xD1B54A32D192ED03)
    return (words.numel() + int(weighted.sum())) & MASK64
