"""Fit of measured seconds as a polynomial in the tokens and squared sequence lengths of a microbatch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from mmcompile.costmodel.load import Load, Polynomial


def fit_polynomial(loads: Sequence[Load], seconds: Sequence[float]) -> Polynomial:
    """Return the polynomial with coefficients >= 0 that has the least squared relative error at the measured points.

    minimise over a, b, c >= 0: sum_i ((a q_i + b t_i + c) / y_i - 1)^2, with tokens t, squared lengths q and seconds y of point
    i. Points of 0 s have no relative error and are left out; if all are, the polynomial is 0. Sequences of one length at all
    points (images of a fixed size) do not distinguish squares from tokens: then a = 0.
    """
    points = [(load, value) for load, value in zip(loads, seconds, strict=True) if value > 0]
    if not points:
        return Polynomial()
    values = np.array([value for _, value in points])
    columns = np.array([[1.0, load.tokens, load.squares] for load, _ in points])
    if len(points) > 1 and len({load.squares / load.tokens for load, _ in points if load.tokens}) < 2:
        columns[:, 2] = 0.0
    # Squares are a million times tokens: without a common scale the solver's tolerance drops the small column.
    scale = columns.max(axis=0)
    scale[scale == 0] = 1.0
    fixed, per_token, per_square = nnls(columns / scale / values[:, None], np.ones(len(points)))[0] / scale
    return Polynomial(fixed=float(fixed), per_token=float(per_token), per_square=float(per_square))
