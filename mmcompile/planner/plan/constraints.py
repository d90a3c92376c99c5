"""Constraints of a user on a plan, as text: `together:A,B`, `on:A=0`, `memory:40GiB`, `stages:C=2..4`, `equal-tp`.

    together:A,B[,...]        these are in one stage
    apart:A,B                 no stage holds layers of both
    on:A=INDEX                A is in this stage of its chain, counted from 0
    on:A=rankR                A runs on this rank
    memory:SIZE[@WHERE]       a stage needs at most SIZE (40GiB, 40GB, 512MiB); WHERE: a chain, a stage `chain.index`, rankR
    stages:CHAIN=LOW..HIGH    so many stages; also CHAIN=3, CHAIN=2.., CHAIN=..4
    equal-tp[:A,B,...]        components, or all chains, with one tensor-parallel degree

A and B are layers, or components standing for all their layers. A layer is named by its module path, as `component.index`
(negative from the end), or by a glob that matches exactly one module path. No constraint changes the order of layers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mmcompile.errors import ConfigError
from mmcompile.units import counted

_UNITS = {"B": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for unit, base in (("iB", 1024), ("B", 1000))
}
_FORMS = (
    "together:A,B | apart:A,B | on:A=STAGE | on:A=rankR | memory:SIZE[@WHERE] | stages:CHAIN=LOW..HIGH | equal-tp[:A,B]"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SameStage:
    """Constraint that layers are all in one stage (`same`, for example an embedding and the head tied to it), or all apart."""

    layers: tuple[str, ...]
    same: bool
    """True if one stage must hold all of `layers`; False if no stage may hold layers of two entries of `layers`."""

    def __str__(self) -> str:
        return f"{'together' if self.same else 'apart'}:{','.join(self.layers)}"

    @property
    def words(self) -> str:
        """Text of the constraint for notes and error messages."""
        return f"{_listed(self.layers)} {'share a stage' if self.same else 'are in different stages'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class On:
    """Constraint that puts a layer or component on a stage or on a rank; exactly one of `stage` and `rank` is set."""

    layer: str
    stage: int | None = None
    """Index of the stage within its chain, from 0."""
    rank: int | None = None

    def __str__(self) -> str:
        return f"on:{self.layer}={self.stage if self.rank is None else f'rank{self.rank}'}"

    @property
    def words(self) -> str:
        """Text of the constraint for notes and error messages."""
        return f"{self.layer} is on {f'stage {self.stage}' if self.rank is None else f'rank {self.rank}'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryCap:
    """Constraint on the most bytes that a stage may need."""

    num_bytes: int
    where: str = ""
    """Chain, stage `chain.index`, or `rankR` that the cap applies to; "" for every stage."""

    def __str__(self) -> str:
        return f"memory:{_size(self.num_bytes)}{'@' if self.where else ''}{self.where}"

    @property
    def words(self) -> str:
        """Text of the constraint for notes and error messages."""
        return f"memory <= {_size(self.num_bytes, ' ')}{' on ' if self.where else ''}{self.where}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRange:
    """Constraint on the number of stages of a chain: from `low` to `high`."""

    chain: str
    low: int = 1
    high: int | None = None

    def __str__(self) -> str:
        if self.low == self.high:
            return f"stages:{self.chain}={self.low}"
        return f"stages:{self.chain}={self.low if self.low > 1 else ''}..{'' if self.high is None else self.high}"

    @property
    def words(self) -> str:
        """Text of the constraint for notes and error messages."""
        if self.low == self.high:
            return f"{self.chain} has {counted(self.low, 'stage')}"
        if self.high is None:
            return f"{self.chain} has at least {counted(self.low, 'stage')}"
        return f"{self.chain} has {self.low} to {counted(self.high, 'stage')}"


@dataclass(frozen=True, kw_only=True, slots=True)
class EqualTp:
    """Constraint that the chains of the given components have equal tensor-parallel degrees; no components: all chains."""

    components: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"equal-tp{':' if self.components else ''}{','.join(self.components)}"

    @property
    def words(self) -> str:
        """Text of the constraint for notes and error messages."""
        return f"{_listed(self.components) if self.components else 'all chains'} have equal tp"


Constraint = SameStage | On | MemoryCap | StageRange | EqualTp


def parse_constraint(text: str) -> Constraint:
    """Return the constraint that a text describes, the inverse of `str(constraint)`; the module's docstring lists the forms.

    Raises:
        ConfigError: the text has none of the forms; the message shows the most similar form.
    """
    kind, _, rest = text.strip().partition(":")
    rest = rest.strip()
    if kind == "equal-tp":
        return EqualTp(components=_names(text, rest) if rest else ())
    if kind in ("together", "apart"):
        layers = _names(text, rest)
        if kind == "apart" and len(layers) > 2:
            raise _bad(text, "it takes two: apart:A,B, one constraint a pair")
        return SameStage(layers=layers, same=kind == "together")
    if kind == "on":
        return _on(text, rest)
    if kind == "memory":
        return _memory(text, rest)
    if kind == "stages":
        return _stage_range(text, rest)
    raise _bad(text, f"its forms are {_FORMS}")


def decided_stages(constraints: Sequence[Constraint]) -> dict[str, int]:
    """Return chain name -> number of stages, for chains whose constraints leave only one number.

    Raises:
        ConfigError: two constraints demand different numbers.
    """
    found: dict[str, int] = {}
    for constraint in constraints:
        if not isinstance(constraint, StageRange) or constraint.low != constraint.high:
            continue
        count = found.setdefault(constraint.chain, constraint.low)
        if count != constraint.low:
            raise ConfigError(f"{constraint.chain} cannot have {count} and {counted(constraint.low, 'stage')} at once")
    return found


def _on(text: str, rest: str) -> On:
    match = re.fullmatch(r"(.+?)\s*=\s*(rank\s*)?(\d+)", rest)
    if match is None:
        raise _bad(text, "write on:A=0 for the first stage of A's chain, on:A=rank3 for a rank")
    if match[2]:
        return On(layer=match[1], rank=int(match[3]))
    return On(layer=match[1], stage=int(match[3]))


def _memory(text: str, rest: str) -> MemoryCap:
    size, _, where = (part.strip() for part in rest.partition("@"))
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B)", size)
    if match is None or match[2] not in _UNITS:
        raise _bad(text, f"write memory:40GiB or memory:40GiB@language_model.1; units are {', '.join(_UNITS)}")
    num_bytes = round(float(match[1]) * _UNITS[match[2]])
    if num_bytes < 1:
        raise _bad(text, "the size must be at least one byte")
    return MemoryCap(num_bytes=num_bytes, where=where)


def _stage_range(text: str, rest: str) -> StageRange:
    match = re.fullmatch(r"(.+?)\s*=\s*(\d*)\s*(\.\.)?\s*(\d*)", rest)
    if match is None or not (match[2] or match[4]):
        raise _bad(text, "write stages:CHAIN=3, stages:CHAIN=2..4, stages:CHAIN=2.. or stages:CHAIN=..4")
    low = int(match[2] or 1)
    high = int(match[4]) if match[4] else None if match[3] else low
    if low < 1 or (high is not None and high < low):
        raise _bad(text, f"{low} to {high} stages is empty; a chain has at least 1")
    return StageRange(chain=match[1], low=low, high=high)


def _names(text: str, rest: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in rest.split(","))
    if not all(names) or len(set(names)) < max(2, len(names)):
        raise _bad(text, "it needs 2 or more different names, separated by commas")
    return names


def _bad(text: str, hint: str) -> ConfigError:
    return ConfigError(f"constraint {text!r} cannot be read: {hint}")


def _size(num_bytes: int, space: str = "") -> str:
    """Return bytes as text in the largest unit that divides them, which parses back exactly. `space`: text before the unit."""
    unit = next(unit for unit, size in sorted(_UNITS.items(), key=lambda item: -item[1]) if num_bytes % size == 0)
    return f"{num_bytes // _UNITS[unit]}{space}{unit}"


def _listed(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
