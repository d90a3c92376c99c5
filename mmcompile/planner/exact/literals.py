"""Boundaries and stage count of one chain as Z3 Booleans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import z3
from numpy.typing import NDArray

from mmcompile.planner.exact.split_problem import ExactChain
from mmcompile.planner.search.partition import Split, Table

Bit = z3.BoolRef | bool
"""Z3 literal, or a Python bool, which simplifies a clause before Z3 gets it."""
Bad = NDArray[np.bool_]
"""Table [N+1, N+1] over the chain's N layers: entry [i, j] is True where a stage of layers i..j-1 is forbidden."""


def negated(bit: Bit) -> Bit:
    """Return the negation of a literal."""
    return not bit if isinstance(bit, bool) else cast(z3.BoolRef, z3.Not(bit))


@dataclass(frozen=True, slots=True)
class ChainLiterals:
    """Literals of a chain. Boundary k is the first layer of the k-th stage from the end; `at_most(k, i)`: it is at most i."""

    add: Callable[..., None]
    """Function that adds a clause, a disjunction of literals, to the solver."""
    index: int
    num_layers: int
    most: int
    """Largest number of stages of the chain; boundary `most`, the first layer of the `most`-th stage from the end, is layer 0."""
    boundaries: tuple[tuple[z3.BoolRef, ...], ...]

    @classmethod
    def of(cls, add: Callable[..., None], index: int, chain: ExactChain) -> ChainLiterals:
        """Return the literals of a chain, with the clauses that order its boundaries."""
        count, most = chain.num_layers, min(chain.high, chain.num_layers)
        found = cls(
            add=add,
            index=index,
            num_layers=count,
            most=most,
            boundaries=tuple(tuple(z3.Bool(f"x{index}_{k}_{i}") for i in range(count)) for k in range(most)),
        )
        found._order(chain.low)
        return found

    def _order(self, low: int) -> None:
        for k in range(1, self.most + 1):
            for i in range(self.num_layers - 1):
                self.add(negated(self.at_most(k, i)), self.at_most(k, i + 1))
                # Each stage has a layer, until the beginning is reached.
                self.add(negated(self.at_most(k - 1, i + 1)), self.at_most(k, i))
        self.add(negated(self.fewer_than(low)))

    def at_most(self, k: int, i: int) -> Bit:
        """Return the literal that the k-th boundary from the end is at most layer i."""
        if i < 0:
            return False
        if k == 0:
            return i >= self.num_layers
        if k >= self.most or i >= self.num_layers - k:
            return True
        return self.boundaries[k][i]

    def between(self, k: int, first: int, last: int) -> Bit:
        """Return the literal that the k-th boundary from the end lies after layer `first`, up to and including `last`."""
        return _both(negated(self.at_most(k, first)), self.at_most(k, last))

    def fewer_than(self, count: int) -> Bit:
        """Return the literal that there are fewer stages than `count`."""
        return self.at_most(count - 1, 0)

    def is_count(self, count: int) -> Bit:
        """Return the literal that the chain has exactly `count` stages."""
        return _both(self.at_most(count, 0), negated(self.fewer_than(count)))

    def forbid(self, k: int, bad: Bad, unless: tuple[Bit, ...]) -> None:
        """Add clauses: no layer range that is True in `bad` is the k-th stage from the end, unless one of `unless` holds."""
        size = self.num_layers
        ends = [size] if k == 1 else range(1, size - k + 2)
        # Where each end lets the stage begin at the earliest; the end itself where it is not possible at all.
        allowed = ~bad
        first = {j: int(np.argmax(allowed[:j, j])) if allowed[:j, j].any() else j for j in ends}
        at_least: dict[int, int] = {}
        lowest = size
        for j in reversed(ends):
            lowest = at_least[j] = min(lowest, first[j])
        reached = 0
        for j in ends:
            later = self.at_most(k - 1, j - 1)
            if at_least[j] > reached:
                reached = at_least[j]
                self.add(*unless, later, negated(self.at_most(k, reached - 1)))
            # What is not monotone is said pair by pair: sends make some cuts dearer than others.
            here = (later, negated(self.at_most(k - 1, j)))
            if first[j] > at_least[j]:
                self.add(*unless, *here, negated(self.at_most(k, first[j] - 1)))
            for i in np.flatnonzero(bad[first[j] : j, j]):
                start = first[j] + int(i)
                self.add(*unless, *here, negated(self.at_most(k, start)), self.at_most(k, start - 1))

    def value(self, k: int, table: Table) -> z3.ArithRef:
        """Return a Z3 number that equals `table[i]` where i is the layer of the k-th boundary from the end."""
        found = z3.FreshReal("value")
        for i, value in enumerate(table):
            self.add(negated(self.at_most(k, i)), self.at_most(k, i - 1), found == int(value))
        return found

    def largest(self, k: int, values: Sequence[int]) -> z3.ArithRef:
        """Return a Z3 number that is at least 0 and at least the value of every layer in the k-th stage from the end."""
        found = z3.FreshReal("largest")
        self.add(found >= 0)
        for layer, value in enumerate(values):
            self.add(negated(self.at_most(k, layer)), self.at_most(k - 1, layer), found >= int(value))
        return found

    def read(self, model: z3.ModelRef) -> Split:
        """Return the split that a solution found by Z3 describes."""
        boundaries = [self.num_layers]
        k = 0
        while boundaries[0] > 0:
            k += 1
            boundaries.insert(0, next(i for i in range(self.num_layers) if _true(model, self.at_most(k, i))))
        return Split(boundaries=tuple(boundaries))


def _both(one: Bit, other: Bit) -> Bit:
    if isinstance(one, bool):
        return one and other
    if isinstance(other, bool):
        return other and one
    return cast(z3.BoolRef, z3.And(one, other))


def _true(model: z3.ModelRef, bit: Bit) -> bool:
    return bit if isinstance(bit, bool) else z3.is_true(model.eval(bit, model_completion=True))
