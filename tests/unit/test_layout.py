"""The flat layout: views, alignment, gradients, norms, hashes, fingerprint."""

from __future__ import annotations

import hashlib
import math
import struct
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from swarm.errors import PipelineError
from swarm.model import ParameterLayout, fingerprint, layout, model_sha256, sha256_of
from swarm.model.layout import gradient_sha256, squared_norm_of
from swarm.optim import make_optimizer
from tests.protocol.tiny import OPTIMIZER


def a_module() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Conv1d(5, 2, 3))


def test_decayed_first_each_on_a_64_byte_boundary() -> None:
    layout = ParameterLayout.of(a_module())
    assert layout.names == ("0.weight", "2.weight", "0.bias", "1.weight", "1.bias", "2.bias")
    assert layout.offsets == (0, 16, 48, 64, 80, 96)
    assert layout.num_decayed == 48
    assert layout.total == 112


def test_what_is_frozen_is_not_decayed() -> None:
    module = a_module()
    module[0].weight.requires_grad_(False)
    layout = ParameterLayout.of(module)
    assert layout.names[:2] == ("2.weight", "0.weight")
    assert layout.num_decayed == 32


class HeadNorm(nn.Module):
    """A norm of its own for every head, and something beside it that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 8))
        self.scale = nn.Linear(8, 4)


class Experts(nn.Module):
    """As in gpt-oss, all in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(2, 3, 4))
        self.up_bias = nn.Parameter(torch.zeros(2, 4))
        self.bias = nn.Parameter(torch.zeros(2, 4))
        self.bias_k = nn.Parameter(torch.zeros(1, 1, 4))  # as torch.nn.MultiheadAttention names it


def test_norms_and_biases_are_not_decayed_whatever_their_dimensions() -> None:
    parts = {"layer": nn.LayerNorm((8, 8)), "rms": nn.RMSNorm((2, 3)), "group": nn.GroupNorm(2, 4)}
    module = nn.ModuleDict({**parts, "own": HeadNorm(), "x": Experts()})
    layout = ParameterLayout.of(module)
    places = dict(zip(layout.names, layout.offsets, strict=True))
    decayed = {name for name, offset in places.items() if offset < layout.num_decayed}
    assert decayed == {"own.scale.weight", "x.up"}
    assert places.keys() == {name for name, _ in module.named_parameters()}
    optimizer = make_optimizer(OPTIMIZER, layout)
    flat = torch.ones(layout.total)
    optimizer.step(flat, torch.zeros_like(flat), lr=0.1, scale=1.0, step=1)
    shrunk = {name for name, part in layout.slices(flat).items() if bool((part < 1).any())}
    assert shrunk == decayed


def test_parameters_become_views_that_keep_their_values() -> None:
    module = a_module()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    layout = ParameterLayout.of(module)
    flat = layout.flatten(module)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.data_ptr() % 64 == 0
    flat.zero_()
    assert all(not p.any() for p in module.parameters())
    other = torch.ones(layout.total)
    layout.attach(module, other)
    assert all(bool((p == 1).all()) for p in module.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_added_and_cleared(dtype: torch.dtype) -> None:
    module = nn.Sequential(nn.Linear(300, 400), nn.Linear(400, 1))  # larger than one chunk
    module[1].bias.requires_grad_(False)
    layout = ParameterLayout.of(module)
    layout.flatten(module)
    accumulator = torch.zeros(layout.total, dtype=dtype)
    expected = {name: torch.zeros_like(p, dtype=dtype) for name, p in module.named_parameters()}
    for scale in (1.0, 2.0**-20):
        (module(torch.randn(2, 300)).sum() * scale).backward()
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                expected[name] += parameter.grad
        layout.grad_into(module, accumulator)
        assert all(p.grad is None for p in module.parameters())
    for name, part in layout.slices(accumulator).items():
        assert torch.equal(part, expected[name])
    assert not expected["1.bias"].any()
    assert math.fsum(accumulator.abs().tolist()) == pytest.approx(
        sum(float(e.abs().sum()) for e in expected.values())
    )


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(PipelineError, match=r"0.weight is float64 - make all parameters float32"):
        ParameterLayout.of(nn.Sequential(nn.Linear(2, 2).double()))


def test_the_norm_is_a_function_of_the_tensor_alone() -> None:
    big = torch.randn(1 << 21 | 12345, generator=torch.Generator().manual_seed(0))
    values, threads = set(), torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            values.add(squared_norm_of(big))
            values.add(squared_norm_of(torch.cat([torch.zeros(16), big])[16:]))
    finally:
        torch.set_num_threads(threads)
    assert len(values) == 1
    assert values.pop() == pytest.approx(float(big.double().pow(2).sum()), rel=1e-13)


def numbers(count: int) -> torch.Tensor:
    """Of integers: what `torch.randn` draws differs between kinds of CPU."""
    draw = torch.Generator().manual_seed(4)
    return torch.randint(-(2**24), 2**24, (count,), generator=draw).float() * 2.0**-24


def norm_by_definition(values: list[float]) -> float:
    """docs/protocol.md, in additions of Python."""
    sums = []
    for start in range(0, len(values), 1 << 16):
        row = [value * value for value in values[start : start + (1 << 16)]]
        row += [0.0] * ((1 << 16) - len(row))
        while len(row) > 64:
            half = len(row) // 2
            row = [a + b for a, b in zip(row[:half], row[half:], strict=True)]
        sums += row
    return math.fsum(sums)


def test_the_norm_is_added_as_defined() -> None:
    """Replicas of a stage are compared by it, on whatever machines."""
    values = numbers(150_000)
    for count in (0, 1, 63, 65, 1000, 1 << 14, (1 << 14) + 1, 1 << 15, 40_001, 150_000):
        part = values[:count]
        assert squared_norm_of(part) == norm_by_definition(part.tolist()), count
    tiny = values[:1000] * 2.0**-140  # subnormal; their squares are not, in float64
    assert squared_norm_of(tiny) == norm_by_definition(tiny.tolist()) > 0.0
    assert squared_norm_of(values).hex() == "0x1.866679349de65p+15"


@given(
    st.lists(st.integers(0, 5).map(lambda rows: rows * layout.NORM_ROW // 2), max_size=5), st.data()
)
@settings(deadline=None, max_examples=25)
def test_the_norms_that_a_gpu_adds_up_together_are_those_of_each(
    sizes: list[int], data: st.DataObject
) -> None:
    sizes = [max(0, size + data.draw(st.integers(-65, 65))) for size in sizes] + [3]
    draw = torch.Generator().manual_seed(7)
    tensors = [torch.randn(size, generator=draw) for size in sizes]
    with mock.patch.object(layout, "GPU_NORM_ROWS", 3):
        sums = layout._sums_of_rows(tensors)
    assert [math.fsum(each.tolist()) for each in sums] == [*map(squared_norm_of, tensors)]


@pytest.mark.parametrize("num", [0, 5, 1 << 20, (1 << 20) + 1, 3 << 20])
def test_a_gradients_hash_is_as_defined_whatever_the_threads(num: int) -> None:
    """docs/protocol.md; those of the parts may come in any order."""
    gradient, part = numbers(num), 1 << 20
    digests = [
        hashlib.sha256(gradient[start : start + part].numpy().tobytes()).digest()
        for start in range(0, max(num, 1), part)
    ]
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            expected = hashlib.sha256(b"".join(digests)).hexdigest()
            assert gradient_sha256(gradient) == expected
    finally:
        torch.set_num_threads(before)


def test_a_gradient_is_hashed_as_it_arrives() -> None:
    expected = torch.randn(2 * layout.HASHED_PART + 5, generator=torch.Generator().manual_seed(1))
    gradient, asked = torch.zeros_like(expected), []

    def wait(num_elements: int) -> None:
        asked.append(num_elements)
        gradient[:num_elements] = expected[:num_elements]

    assert gradient_sha256(gradient, wait) == gradient_sha256(expected)
    assert asked == [layout.HASHED_PART, 2 * layout.HASHED_PART, len(expected)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_norm_shows_what_is_not_finite(bad: float) -> None:
    assert not math.isfinite(squared_norm_of(torch.tensor([1.0, bad])))
    assert not math.isfinite(squared_norm_of(torch.tensor([float("inf"), bad])))


def test_hashes_follow_their_definition_and_combine_in_key_order() -> None:
    tensor = torch.tensor([[1.0, -2.0]])
    raw = hashlib.sha256(struct.pack("<2f", 1, -2)).hexdigest()
    assert sha256_of(tensor) == raw
    layout = ParameterLayout.from_shapes({"b": (), "a": (1, 2)})
    flat = torch.zeros(layout.total)
    layout.slices(flat)["a"].copy_(tensor)
    hashes = layout.tensor_sha256(flat)
    assert hashes["a"] == f"1x2:{raw}"
    text = f"b {hashes['b']}\na 1x2:{raw}\n"
    assert model_sha256(hashes, ["b", "a"]) == hashlib.sha256(text.encode()).hexdigest()
    assert model_sha256(hashes, ["a", "b"]) != model_sha256(hashes, ["b", "a"])


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 20_000), st.data())
def test_the_fingerprint_sees_every_single_change_and_swap(count: int, data: st.DataObject) -> None:
    tensor = numbers(count)  # of whole mantissas: a swap of two small integers may escape
    first = fingerprint(tensor)
    assert 0 <= first < 2**64
    assert first == fingerprint(tensor.clone())
    index = data.draw(st.integers(0, count - 1))
    changed = tensor.clone()
    changed.view(torch.int32)[index] ^= 1 << data.draw(st.integers(0, 30))
    assert fingerprint(changed) != first
    other = data.draw(st.integers(0, count - 1))
    if tensor[other] != tensor[index]:
        swapped = tensor.clone()
        swapped[index], swapped[other] = tensor[other], tensor[index]
        assert fingerprint(swapped) != first
    assert fingerprint(tensor, changed) != fingerprint(changed, tensor)


def test_the_fingerprint_is_the_same_number_everywhere() -> None:
    values = numbers(150_001)
    assert f"{fingerprint(values, values[:77]):016x}" == "2d17c64086f3aa16"
