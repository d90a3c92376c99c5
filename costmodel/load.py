"""`Load`: rows and squared lengths that one microbatch gives a component, and polynomials in them.

Every cost of a layer (FLOPs, bytes) is, at fixed widths, a polynomial in the rows it processes and in the pairs of rows
that attend to each other: fixed + per_token * tokens + per_square * squares. So one capture prices every shape.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Work that one microbatch gives one component."""

    tokens: float
    """Rows: image patches, audio frames, text tokens; padding included if the model pads."""
    squares: float
    """Sum of squared lengths over sequences (images, audio clips, samples)."""

    def __add__(self, other: Load) -> Load:
        return Load(tokens=self.tokens + other.tokens, squares=self.squares + other.squares)

    def __mul__(self, factor: float) -> Load:
        """Return the load of `factor` times as many sequences of the same lengths."""
        return Load(tokens=self.tokens * factor, squares=self.squares * factor)


NO_LOAD = Load(tokens=0.0, squares=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Polynomial:
    """Polynomial in a load: `fixed + per_token * tokens + per_square * squares`."""

    fixed: float = 0.0
    per_token: float = 0.0
    per_square: float = 0.0

    def at(self, load: Load) -> float:
        """Return the value of the polynomial at a load."""
        return self.fixed + self.per_token * load.tokens + self.per_square * load.squares

    def __add__(self, other: Polynomial) -> Polynomial:
        return Polynomial(
            fixed=self.fixed + other.fixed,
            per_token=self.per_token + other.per_token,
            per_square=self.per_square + other.per_square,
        )

    def __mul__(self, factor: float) -> Polynomial:
        return Polynomial(
            fixed=self.fixed * factor, per_token=self.per_token * factor, per_square=self.per_square * factor
        )
