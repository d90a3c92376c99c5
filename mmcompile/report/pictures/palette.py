"""Colours of components, the same in every picture."""

from __future__ import annotations

from collections.abc import Iterable

_COLOURS = ("#4477aa", "#cc6677", "#228833", "#aa7700", "#7755aa", "#117788", "#bb3388", "#667722")
"""Colours distinguishable with common colour blindness, dark enough for white text (qualitative schemes of Paul Tol)."""


def chain_of(stage: str) -> str:
    """Return the chain of components of a stage: `"language_model.1"` -> `"language_model"`."""
    return stage.rpartition(".")[0] or stage


def colours(stages: Iterable[str]) -> dict[str, str]:
    """Return chain name -> `#rrggbb`, by order of first appearance; after eight chains colours repeat."""
    chains = dict.fromkeys(chain_of(stage) for stage in stages)
    return {chain: _COLOURS[index % len(_COLOURS)] for index, chain in enumerate(chains)}


def lighter(colour: str, share: float) -> str:
    """Mix `share` (0..1) of white into `#rrggbb`."""
    channels = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{round(value + (255 - value) * share):02x}" for value in channels)
