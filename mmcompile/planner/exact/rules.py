"""Rules about a split. Chains and layers are indices; a cut at i lies between layers i-1 and i."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Cuts:
    """Rule that there is at least one cut, or no cut, at a layer i with `first` < i <= `last`; a cut at i lies before layer i."""

    chain: int
    first: int
    last: int
    some: bool
    """True to require at least one cut at these layers; False to forbid all cuts there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InStage:
    """Rule that layers `first` to `last` (excluded) lie in stage `stage` of their chain, counted from 0."""

    chain: int
    first: int
    last: int
    stage: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Cap:
    """Rule that limits the bytes of every stage, of every stage of one chain, or of one stage counted from 0."""

    num_bytes: int
    chain: int | None = None
    stage: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """Rule that a chain has at least `low` and at most `high` stages."""

    chain: int
    low: int
    high: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Devices:
    """Rule that limits the number of devices of all stages together."""

    most: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Unsatisfiable:
    """Rule that no split can meet, with the reason."""

    why: str


Rule = Cuts | InStage | Cap | Count | Devices | Unsatisfiable


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """Rule about a split, with its description in the user's words."""

    rule: Rule
    words: str
    asked: bool = True
    """True for a demand of the user; False for one that follows from the devices or the layout."""
