"""The bits of the portable optimizers, against exact arithmetic and against literals.

Other tests compare machines with this one. These say what is right, so that a machine that rounds
otherwise than IEEE 754 fails here, alone, before it meets a replica.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from peer import launch
from swarm import optim
from swarm.config import OptimizerSection, load_config
from swarm.errors import DeviceError
from swarm.optim import SGD, AdamW, _root, numerics_fingerprint, power

EXAMPLE = Path(__file__).parents[2] / "examples" / "exact.toml"


@dataclass(frozen=True)
class Settings:
    name: str
    nesterov: bool = False
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1


KINDS = {
    "adamw": Settings("adamw"),
    "adamw-nesterov": Settings("adamw", nesterov=True),
    "sgd": Settings("sgd"),
    "sgd-nesterov": Settings("sgd", nesterov=True),
}
GOLDEN = {
    "adamw": "911911bf246729f7f7f7e470e964337ddfcbbe4656999998d573e2bffe23cfd6",
    "adamw-nesterov": "ea7aae05c2e3e31429a1022230e4bf5ccd165fb85f9c8d8a9658ac86ffc4a79b",
    "sgd": "ea630c01aa7a049d725db8713df5550ccb9d0070313c7136509c4643a97133c0",
    "sgd-nesterov": "3574132b40f9cbdc9fa774f42ef08d42aeec0d43d484174923c933e4582766fb",
}


@pytest.mark.parametrize("kind", KINDS)
def test_golden_value(kind: str) -> None:
    """If this fails where the tests below pass, the formula is another one: replicas of unlike
    versions would part, so `PROTOCOL_VERSION` is to grow."""
    assert numerics_fingerprint(KINDS[kind]) == GOLDEN[kind]


def test_a_device_that_rounds_otherwise_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, before it joins."""
    assert GOLDEN["adamw-nesterov"] == launch.BITS_OF_HARDEST
    config = load_config(EXAMPLE)
    assert launch.numerics_of(config, "cpu") == ""
    monkeypatch.setattr(
        optim, "_root", lambda values, out: torch.sqrt(values, out=out).mul_(1 + 2**-23)
    )
    with pytest.raises(DeviceError, match="as IEEE 754 has it"):
        launch.numerics_of(config, "cpu")
    other = config.model_copy(update={"optimizer": OptimizerSection(name="RMSprop")})
    assert len(launch.numerics_of(other, "cpu")) == 64, "it is compared with its twins' instead"


# ---- float32 in exact arithmetic ----------------------------------------------------------------


def nearest(exact: Fraction | float) -> Fraction:
    """Rounded to float32, ties to even; subnormals too, but nothing overflows here."""
    exact = Fraction(exact)
    if not exact:
        return exact
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if size < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    return round(exact / unit) * unit


def nearest_root(value: Fraction) -> Fraction:
    """The float32 nearest to the square root of a float32, by integers alone."""
    if not value:
        return value
    exponent = (value.numerator.bit_length() - value.denominator.bit_length()) // 2
    unit = Fraction(2) ** (exponent - 30)  # finer than half of the result's last bit
    scaled = value / unit**2
    assert scaled.denominator == 1
    floor = math.isqrt(scaled.numerator)
    # Whatever is cut off decides between above and at a middle, and its size does not matter.
    return nearest(unit * (Fraction(floor) + (Fraction(1, 2) if floor**2 != scaled else 0)))


def float_of(bits: int) -> float:
    value: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return value


def roots_to_take() -> list[float]:
    """Of all exponents; squares and what is beside them; and the hardest, whose roots lie as close
    to the middle between two float32 as they can."""
    draw = random.Random(1)
    bits = [0, 1, 2, 3, 0x7FFFFF, 0x7F7FFFFF]
    for exponent in range(255):
        mantissas = [0, 1, 2, 0x400000, 0x7FFFFE, 0x7FFFFF]
        mantissas += [draw.randrange(1 << 23) for _ in range(6)]
        mantissas += [draw.randrange(1 << draw.randrange(1, 23)) for _ in range(6)]
        bits += [exponent << 23 | each for each in mantissas]
    values = [float_of(each) for each in bits]
    for _ in range(2000):
        root = draw.randrange(1 << 23, 1 << 24)
        for square in (Fraction(root) ** 2, (root + Fraction(1, 2)) ** 2):
            close = float(nearest(square))
            (middle,) = struct.unpack("<I", struct.pack("<f", close))
            values += [float_of(middle + beside) for beside in (-1, 0, 1)]
    return values


def test_the_root_is_the_nearest_float32() -> None:
    values = roots_to_take()
    exact = torch.tensor([float(nearest_root(Fraction(each))) for each in values])
    given, total = torch.tensor(values), len(values)
    assert given.tolist() == values
    assert total > 10_000
    for start, size in ((0, total), (0, 1), (1, total - 1), (3, 7), (5, 4097), (total - 1, 1)):
        for before in (0, 1, 7):  # views that begin anywhere, as chunks of a tensor may
            out = torch.full((before + size + 9,), -1.0)
            _root(given[start : start + size], out=out[before : before + size])
            expected = torch.full_like(out, -1.0)
            expected[before : before + size] = exact[start : start + size]
            assert torch.equal(out, expected), (start, size, before)
    assert given.tolist() == values
    _root(given, out=given)
    assert torch.equal(given, exact)
    _root(torch.tensor([math.inf, math.nan]), out=given[:2])
    assert given[0] == math.inf
    assert given[1].isnan()


# ---- the optimizers, one element at a time ------------------------------------------------------

LR, SCALE, STEPS = 0.01, 0.37, 12


def float32(number: float) -> Fraction:
    """What a Python float is beside a float32 tensor."""
    return nearest(Fraction(number))


def adamw(
    start: float, gradients: list[float], settings: Settings, decayed: bool
) -> list[Fraction]:
    """Parameter and both moments after the steps."""
    beta1, beta2 = settings.betas
    p, mean, square = nearest(start), Fraction(0), Fraction(0)
    for step, gradient in enumerate(gradients, 1):
        lr = LR / step
        left = 1.0 - power(beta1, step)
        rest = float32(1.0 / math.sqrt(1.0 - power(beta2, step)))
        g = nearest(nearest(gradient) * float32(SCALE))
        mean = nearest(nearest(mean * float32(beta1)) + nearest(g * float32(1.0 - beta1)))
        part = nearest(nearest(g * g) * float32(1.0 - beta2))
        square = nearest(nearest(square * float32(beta2)) + part)
        bottom = nearest(nearest(nearest_root(square) * rest) + float32(settings.eps))
        if settings.nesterov:
            ahead = float32(beta1 / (1.0 - power(beta1, step + 1)))
            top = nearest(
                nearest(nearest(g * float32(1.0 - beta1)) * float32(1.0 / left))
                + nearest(mean * ahead)
            )
            update = nearest(nearest(top / bottom) * float32(lr))
        else:
            update = nearest(nearest(mean / bottom) * float32(lr / left))
        if decayed:
            p = nearest(p * float32(1.0 - lr * settings.weight_decay))
        p = nearest(p - update)
    return [p, mean, square]


def sgd(start: float, gradients: list[float], settings: Settings, decayed: bool) -> list[Fraction]:
    """Parameter and momentum after the steps."""
    momentum = float32(settings.momentum)
    p, velocity = nearest(start), Fraction(0)
    for step, gradient in enumerate(gradients, 1):
        g = nearest(nearest(gradient) * float32(SCALE))
        if decayed:
            g = nearest(g + nearest(p * float32(settings.weight_decay)))
        velocity = nearest(nearest(velocity * momentum) + g)
        update = nearest(g + nearest(velocity * momentum)) if settings.nesterov else velocity
        p = nearest(p - nearest(update * float32(LR / step)))
    return [p, velocity]


REFERENCES: dict[str, Callable[[float, list[float], Settings, bool], list[Fraction]]] = {
    "adamw": adamw,
    "sgd": sgd,
}
OPTIMIZERS: dict[str, type[AdamW] | type[SGD]] = {"adamw": AdamW, "sgd": SGD}


def float32_numbers(count: int, draw: random.Random) -> Iterator[float]:
    for _ in range(count):
        # 2^-75: its square is subnormal, which a processor may be told to take for zero
        size = 2.0 ** draw.choice([0, -1, -7, -20, -60, -75, -140])
        yield float(nearest(draw.uniform(-1.0, 1.0) * size))


@pytest.mark.parametrize("kind", KINDS)
def test_every_operation_rounds_as_ieee_754_says(kind: str) -> None:
    settings, (num, num_decayed), draw = KINDS[kind], (90, 53), random.Random(kind)
    start = list(float32_numbers(num, draw))
    gradients = [list(float32_numbers(num, draw)) for _ in range(STEPS)]
    optimizer = OPTIMIZERS[settings.name](num, num_decayed, settings, chunk_elements=32)
    parameters = torch.tensor(start)
    for step, gradient in enumerate(gradients, 1):
        optimizer.step(parameters, torch.tensor(gradient), lr=LR / step, scale=SCALE, step=step)
    found = [parameters, *optimizer.state().values()]
    for place in range(num):
        of_it = [each[place] for each in gradients]
        exact = REFERENCES[settings.name](start[place], of_it, settings, place < num_decayed)
        assert [each[place].item() for each in found] == [float(each) for each in exact], place
