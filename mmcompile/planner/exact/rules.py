"""Rules about a split. Chains and layers are indices; a cut at i lies between layers i-1 and i."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Cuts:
    """Require at least one cut, or none, after `first`, up to and including `last`."""

    chain: int
    first: int
    last: int
    some: bool
    """True to require at least one cut; False for none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InStage:
    """Require that layers `first` to `last` (excluded) lie in stage `stage` of their chain, counted from 0."""

    chain: int
    first: int
    last: int
    stage: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Cap:
    """Most bytes of a stage: of every stage, of every stage of a chain, or of one stage counted from 0."""

    num_bytes: int
    chain: int | None = None
    stage: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """Fewest and most stages of a chain."""

    chain: int
    low: int
    high: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SameTp:
    """Chains have the same tensor-parallel degree."""

    chains: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Devices:
    """Most devices of all stages together."""

    most: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Unsatisfiable:
    """Rule that holds for no split."""

    why: str


Rule = Cuts | InStage | Cap | Count | SameTp | Devices | Unsatisfiable


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """A rule with its words."""

    rule: Rule
    words: str
    asked: bool = True
    """True for demands of the user; False for those of the devices and the layout."""
