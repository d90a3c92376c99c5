"""Loads add up, and so do polynomials in them."""

from __future__ import annotations

import pytest

from mmcompile.costmodel.load import NO_LOAD, Load, Polynomial


def test_loads_of_sequences_add_up() -> None:
    image = Load(tokens=64, squares=64**2)
    assert image + image == image * 2 == Load(tokens=128, squares=2 * 64**2)
    assert image + NO_LOAD == image
    assert image * 0.5 == Load(tokens=32, squares=2048)


def test_a_polynomial_is_worth_what_its_terms_are() -> None:
    polynomial = Polynomial(fixed=3, per_token=2, per_square=0.5)
    assert polynomial.at(Load(tokens=10, squares=40)) == 3 + 20 + 20


@pytest.mark.parametrize("load", [NO_LOAD, Load(tokens=7, squares=49)])
def test_polynomials_add_and_scale(load: Load) -> None:
    first, second = Polynomial(fixed=1, per_token=2, per_square=3), Polynomial(fixed=5, per_token=7)
    assert (first + second).at(load) == first.at(load) + second.at(load)
    assert (first * 3).at(load) == 3 * first.at(load)
