"""Names of layers in a user's words: a module path, `component.index`, a component, or a glob that matches one layer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from mmcompile.errors import ConfigError
from mmcompile.planner.pricing.chains import ChainLayer

_MAX_LISTED = 6

LayersByChain = Mapping[str, Sequence[ChainLayer]]
"""Chain name -> its layers, first to last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Result of a look-up: layers `first` (included) to `last` (excluded) of a chain, one layer or a whole component."""

    chain: int
    first: int
    last: int


def find(text: str, chains: LayersByChain, *, where: str) -> Place:
    """Return the layers that a text names: one layer or a whole component.

    Args:
        text: module path, `component.index`, component, or glob that matches one layer.
        where: constraint that contains the text, for error messages.

    Raises:
        ConfigError: the text names no layer, or a glob matches several; the message lists candidates.
    """
    if any(mark in text for mark in "*?["):
        return _only(text, [place for place, label in _layers(chains) if fnmatchcase(label.name, text)], chains, where)
    exact = [place for place, label in _layers(chains) if label.name == text]
    if exact:
        return _only(text, exact, chains, where)
    component, _, number = text.rpartition(".")
    own = _component(component, chains) if re.fullmatch(r"-?\d+", number) else None
    if own is not None:
        count, index = own.last - own.first, int(number)
        if not -count <= index < count:
            raise ConfigError(
                f"{where}: {component} has {count} layers, {component}.0 to {component}.{count - 1}; got {text!r}"
            )
        first = own.first + index % count
        return Place(chain=own.chain, first=first, last=first + 1)
    whole = _component(text, chains)
    return _only(text, [whole] if whole else [], chains, where)


def chain_index(text: str, chains: LayersByChain, *, where: str) -> int:
    """Return the index of a chain by its name. An unknown name raises ConfigError, which lists the names of all chains."""
    for index, name in enumerate(chains):
        if name == text:
            return index
    raise ConfigError(f"{where}: there is no chain {text!r}; chains are {', '.join(chains)}")


def _layers(chains: LayersByChain) -> list[tuple[Place, ChainLayer]]:
    return [
        (Place(chain=index, first=position, last=position + 1), label)
        for index, layers in enumerate(chains.values())
        for position, label in enumerate(layers)
    ]


def _component(name: str, chains: LayersByChain) -> Place | None:
    own = [place for place, label in _layers(chains) if label.component == name]
    return Place(chain=own[0].chain, first=own[0].first, last=own[-1].last) if own else None


def _only(text: str, found: Sequence[Place], chains: LayersByChain, where: str) -> Place:
    if len(found) == 1:
        return found[0]
    if found:
        lines = list(chains.values())
        names = [lines[place.chain][place.first].name for place in found]
        raise ConfigError(f"{where}: {text!r} matches {len(found)} layers, name one: {_few(names)}")
    raise ConfigError(f"{where}: {text!r} names no layer or component; {_known(text, chains)}")


def _known(text: str, chains: LayersByChain) -> str:
    labels = [label for _, label in _layers(chains)]
    names = [*(label.name for label in labels), *(f"{label.component}.{label.index}" for label in labels)]
    close = get_close_matches(text, dict.fromkeys(names), n=_MAX_LISTED, cutoff=0.6)
    counts = Counter(label.component for label in labels)
    components = ", ".join(f"{name} (layers {name}.0 to {name}.{count - 1})" for name, count in counts.items())
    return f"{f'did you mean {_few(close)}? ' if close else ''}components are {components}"


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return f"{', '.join(names[:_MAX_LISTED])}{more}"
