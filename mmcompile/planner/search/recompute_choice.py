"""Recomputation of each layer of a rank: as much as its memory requires, for the least time, exactly.

A stage holds, beside what does not depend on the choice,

    bytes = sum over layers l of bytes[l, mode(l)] + max over layers l of working[l, mode(l)]

and takes the sum of seconds[l, mode(l)], where working bytes are those held only while a layer runs. A rank with several stages
holds and takes the sum of theirs. The goal is the fastest choice of modes whose bytes are within a limit: a multiple-choice
knapsack. It is solved with Pareto fronts (points that no other beats in bytes and seconds). Of equal layers, only the number in
each mode is chosen. The fronts of two kinds of layers are combined to all sums of two points, less those that are beaten or too
large. The maximum is fixed first, in turn at each possible value.

Source: Nemhauser and Ullmann, Discrete Dynamic Programming and Capital Allocation (1969), for the fronts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from mmcompile.config import Recompute


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerVariant:
    """Seconds and bytes of one layer in one recomputation mode."""

    mode: Recompute | None
    """Recomputation mode; None for a layer where recomputation frees no memory."""
    num_bytes: int
    """Bytes held for the backward, over all microbatches in flight."""
    working_bytes: int
    """Bytes held only while the layer runs its backward."""
    seconds: float


LayerWays = tuple[LayerVariant, ...]
StageWays = Sequence[LayerWays]
"""Variants of each layer of a stage to choose from, one tuple for each layer; equal layers have equal tuples."""
Modes = tuple[Recompute | None, ...]
"""Chosen recomputation mode of each layer of a stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageChoices:
    """Recomputation modes to choose from for each layer of one stage, with a layer's seconds and bytes in each mode."""

    mixed: StageWays
    """Possible modes of each layer, with its seconds and bytes, when at least one layer of the stage recomputes."""
    kept: StageWays
    """Seconds and bytes of each layer when none recomputes; the bytes may be fewer than those of mode "none" in `mixed`."""
    limit_bytes: int
    """Most bytes that the stage's layers may hold."""


def cheapest(stages: Sequence[StageChoices], limit_bytes: int) -> list[Modes] | None:
    """Return the modes of the layers of each of a rank's stages that take the least time within `limit_bytes` of all together.

    Among equally fast choices, the one that holds the least bytes is taken; None if no choice fits. Among equal layers the first
    ones recompute more, as later layers have finished their backward by then.
    """
    fronts = [_stage_front(stage, min(stage.limit_bytes, limit_bytes)) for stage in stages]
    together = reduce(lambda one, other: _added(one, other, limit_bytes), fronts, _NOTHING)
    if not len(together.num_bytes):
        return None
    picks = together.picks[-1].tolist()  # points rise in bytes and fall in seconds
    found: list[Modes] = []
    for stage, front in zip(stages, fronts, strict=True):
        own, picks = picks[: front.picks.shape[1]], picks[front.picks.shape[1] :]
        found.append(_modes(stage, own))
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Front:
    """Choices of recomputation modes for some layers of a rank, none with both fewer bytes and less time than another.

    Each array has one entry a choice, [points]; bytes rise and seconds fall.
    """

    num_bytes: NDArray[np.int64]
    seconds: NDArray[np.float64]
    picks: NDArray[np.int32]
    """Number of layers in each mode, one row for each choice, [points, columns].

    A stage has one column that is 1 if none of its layers recomputes, else 0, and then columns for each set of equal layers, one
    for each mode: [0, 1, 0, 2] if one of 3 equal layers is in the first of three modes and two are in the third.
    """

    @classmethod
    def of(
        cls, num_bytes: NDArray[np.int64], seconds: NDArray[np.float64], picks: NDArray[np.int32], limit: int
    ) -> _Front:
        """Return the Pareto front of given points: those within the limit of bytes that no other point beats."""
        order = np.lexsort((seconds, num_bytes))
        order = order[num_bytes[order] <= limit]
        falling = np.minimum.accumulate(seconds[order])
        kept = order[np.concatenate([[True], seconds[order][1:] < falling[:-1]])[: len(order)]]
        return cls(num_bytes=num_bytes[kept], seconds=seconds[kept], picks=picks[kept])


_NOTHING = _Front(num_bytes=np.zeros(1, np.int64), seconds=np.zeros(1), picks=np.zeros((1, 0), np.int32))


def _added(one: _Front, other: _Front, limit: int) -> _Front:
    first, second = np.meshgrid(np.arange(len(one.seconds)), np.arange(len(other.seconds)), indexing="ij")
    first, second = first.ravel(), second.ravel()
    return _Front.of(
        one.num_bytes[first] + other.num_bytes[second],
        one.seconds[first] + other.seconds[second],
        np.concatenate([one.picks[first], other.picks[second]], axis=1),
        limit,
    )


def _stage_front(stage: StageChoices, limit: int) -> _Front:
    kinds = _kinds(stage.mixed)
    columns = sum(len(ways) for ways in kinds)
    kept = np.zeros((1, 1 + columns), np.int32)
    kept[0, 0] = 1
    fronts = [
        _Front(
            num_bytes=np.array([_held(stage.kept)], np.int64),
            seconds=np.array([sum(ways[0].seconds for ways in stage.kept)]),
            picks=kept,
        )
    ]
    for working in sorted({way.working_bytes for ways in kinds for way in ways}):
        fronts += _with_working(kinds, working, limit)
    return _Front.of(
        np.concatenate([front.num_bytes for front in fronts]),
        np.concatenate([front.seconds for front in fronts]),
        np.concatenate([front.picks for front in fronts]),
        limit,
    )


def _with_working(kinds: dict[LayerWays, list[int]], working: int, limit: int) -> Iterator[_Front]:
    # The front of modes with which each layer needs at most `working` bytes while it runs, if there are such modes for all.
    front = _NOTHING
    for ways, members in kinds.items():
        counts = _counts(len(members), [way.working_bytes <= working for way in ways])
        if not len(counts):
            return
        each = _Front.of(
            counts @ np.array([way.num_bytes for way in ways], np.int64),
            counts @ np.array([way.seconds for way in ways], np.float64),
            counts,
            limit - working,
        )
        front = _added(front, each, limit - working)
    yield _Front(
        num_bytes=front.num_bytes + working,
        seconds=front.seconds,
        picks=np.concatenate([np.zeros((len(front.seconds), 1), np.int32), front.picks], axis=1),
    )


def _counts(number: int, possible: Sequence[bool]) -> NDArray[np.int32]:
    """Return all ways to distribute `number` equal layers over the variants that are `possible`, as counts [ways, variants]."""
    rows = [[]] if any(possible) else []
    last = max((index for index, may in enumerate(possible) if may), default=0)
    for index, may in enumerate(possible):
        rows = [
            [*row, taken]
            for row in rows
            for left in [number - sum(row)]
            for taken in ([left] if index == last else range(left + 1) if may else [0])
        ]
    return np.array(rows, np.int32).reshape(-1, len(possible))


def _held(ways: StageWays) -> int:
    return sum(own[0].num_bytes for own in ways) + max(own[0].working_bytes for own in ways)


def _kinds(layers: StageWays) -> dict[LayerWays, list[int]]:
    found: dict[LayerWays, list[int]] = {}
    for index, ways in enumerate(layers):
        found.setdefault(ways, []).append(index)
    return found


_ORDER: tuple[Recompute | None, ...] = ("full", "selective", "none", None)


def _modes(stage: StageChoices, picks: Sequence[int]) -> Modes:
    """Return the recomputation mode of each layer of a stage, from the stage's numbers of layers in each mode (`picks`)."""
    if picks[0]:
        return tuple(ways[0].mode for ways in stage.kept)
    modes: list[Recompute | None] = [None] * len(stage.mixed)
    position = 1
    for ways, members in _kinds(stage.mixed).items():
        numbers = picks[position : position + len(ways)]
        position += len(ways)
        left = iter(members)
        for way, number in sorted(zip(ways, numbers, strict=True), key=lambda own: _ORDER.index(own[0].mode)):
            for member in islice(left, number):
                modes[member] = way.mode
    return tuple(modes)
