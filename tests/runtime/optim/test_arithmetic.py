"""Fixed point against exact fractions: what it keeps, what it rounds, and that order and grouping do not matter."""

from __future__ import annotations

from fractions import Fraction
from itertools import permutations, product

import pytest
import torch
from torch import Tensor

from mmcompile.runtime.optim.arithmetic import Fixed, arithmetic_of

FIXED = Fixed()
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def zero(size: int) -> Tensor:
    return torch.zeros(size, *FIXED.width, dtype=FIXED.dtype(torch.float32))


def encoded(values: Tensor) -> Tensor:
    total = zero(len(values))
    FIXED.add(total, values)
    return total


def steps(total: Tensor) -> list[int]:
    """Sums as multiples of 2^-64."""
    return [high * 2**44 + low for high, low in total.tolist()]


def numbers(dtype: torch.dtype, count: int = 200) -> Tensor:
    """Of every size that can be added: from subnormal ones to the largest, and halfway between two steps of 2^-64."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.rand(count, generator=generator, dtype=torch.float64) * 2 - 1
    info = torch.finfo(dtype)
    exponents = torch.linspace(-140, min(23, torch.tensor(info.max).log2().item() - 1), count).int()
    edges = torch.tensor([0.0, -0.0, info.smallest_normal, -info.tiny, 2.0**-65, -(2.0**-65), 3 * 2.0**-65, 0.5])
    largest = torch.tensor([min(FIXED.limit * (1 - info.eps), info.max)] * 2, dtype=torch.float64)
    signs = torch.tensor([1.0, -1.0])
    return torch.cat([torch.ldexp(noise, exponents), edges.double(), largest * signs]).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_is_rounded_once_to_steps(dtype: torch.dtype) -> None:
    values = numbers(dtype)
    wanted = [round(Fraction(value) * 2**64) for value in values.double().tolist()]
    assert steps(encoded(values)) == wanted
    assert max(map(abs, wanted)) > 2**30


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_those_of_steps_and_rounded_once_more(dtype: torch.dtype) -> None:
    values = numbers(dtype).double()
    terms = [values, values.roll(1), -values.roll(7), values.flip(0), -values * 0.9999]
    total = FIXED.sum([encoded(term) for term in terms])
    exact = [sum(round(Fraction(term[i].item()) * 2**64) for term in terms) for i in range(len(values))]
    assert steps(total) == exact
    got = FIXED.rounded(total, torch.float64).tolist()
    for value, whole in zip(got, exact, strict=True):
        assert abs(Fraction(value) - Fraction(whole, 2**64)) <= Fraction(abs(whole), 2**64) / 2**52
    assert torch.equal(FIXED.rounded(total, dtype), torch.tensor(got, dtype=torch.float64).to(dtype))


@pytest.mark.parametrize(
    ("dtype", "exponent"), [(torch.float32, -41), (torch.bfloat16, -57), (torch.float64, -12), (torch.float16, -24)]
)
def test_what_loses_nothing(dtype: torch.dtype, exponent: int) -> None:
    """The module's docstring names these sizes. Half precision has its smallest number there."""
    eps = torch.finfo(dtype).eps
    fractions = torch.tensor([1.0, 1.0 + eps, 2.0 - eps, 1.0 + 4 * eps], dtype=torch.float64)
    kept = torch.cat([torch.ldexp(fractions, torch.tensor(e)) for e in range(exponent, 15)]).to(dtype)
    assert torch.equal(FIXED.rounded(encoded(kept), dtype), kept)
    if dtype != torch.float16:
        lost = torch.ldexp(fractions[1:2], torch.tensor(exponent - 2)).to(dtype)
        assert not torch.equal(FIXED.rounded(encoded(lost), dtype), lost)


def test_as_many_as_are_allowed_do_not_overflow() -> None:
    """The worst values: the largest high part, and a low part that is half a step of the high one."""
    values = torch.tensor([FIXED.limit * (1 - 2.0**-53), 2.0**-21, -(2.0**-21) - 1.0, -FIXED.limit * (1 - 2.0**-53)])
    values = values.double()
    count = int(FIXED.max_terms)
    one = encoded(values)
    assert [abs(part) * count < 2**63 for row in one.tolist() for part in row] == [True] * 8
    got = FIXED.rounded(one * count, torch.float64).tolist()
    assert got == pytest.approx([value * count for value in values.tolist()], rel=2.0**-52, abs=0)
    assert max(abs(part) for row in one.tolist() for part in row) * (count + 1) >= 2**63


def test_every_order_and_every_spread_over_ranks_give_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(3)
    terms = [torch.randn(3, generator=generator) * 10.0 ** (2 - 2 * i) for i in range(4)]
    bits = FIXED.rounded(FIXED.sum([encoded(term) for term in terms]), torch.float32)
    floats: set[tuple[float, ...]] = set()
    for order in permutations(range(len(terms))):
        one_by_one = terms[order[0]].clone()
        for index in order[1:]:
            one_by_one += terms[index]
        floats.add(tuple(one_by_one.tolist()))
        for spread in product(range(4), repeat=len(terms)):
            ranks = [zero(3) for _ in range(max(spread) + 1)]
            for index in order:
                FIXED.add(ranks[spread[index]], terms[index])
            assert torch.equal(FIXED.rounded(FIXED.sum(ranks), torch.float32), bits)
    assert len(floats) > 1, "float32 does depend on the order"


def test_float64_adds_without_rounding_to_the_parameter() -> None:
    double = arithmetic_of("fp64")
    total = torch.zeros(2, dtype=double.dtype(torch.bfloat16))
    for value in (1.0, 2.0**-20, 2.0**-20, -1.0):
        double.add(total, torch.tensor([value, 1.0]).bfloat16())
    assert double.rounded(double.sum([total, total]), torch.bfloat16).tolist() == [2.0**-18, 8.0]
