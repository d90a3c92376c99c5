"""Polynomials of a layer's costs as text."""

from __future__ import annotations

import sympy

from mmcompile.costmodel.load import Load, Polynomial
from mmcompile.report.layer_work import polynomial_text


def test_a_polynomial_is_what_its_text_says() -> None:
    polynomial = Polynomial(fixed=3, per_token=2, per_square=0.5)
    text = polynomial_text(polynomial)
    assert text == "0.5*q + 2*t + 3"
    tokens, squares = sympy.symbols("t q")
    assert sympy.sympify(text).subs([(tokens, 10), (squares, 40)]) == polynomial.at(Load(tokens=10, squares=40))
