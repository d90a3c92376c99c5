"""Violations of the structure rules that are still in the product; the lists only shrink."""

from __future__ import annotations

from collections.abc import Callable, Iterable

KNOWN_CIRCLES: frozenset[str] = frozenset()
KNOWN_PAIRS: frozenset[str] = frozenset(
    {
        "mmcompile.runtime <-> mmcompile.runtime.optim",
    }
)


def new_among(known: Iterable[str], found: Iterable[str], key: Callable[[str], str] = str) -> list[str]:
    """Return the violations found that the list does not name; print those that are gone from the product."""
    lines = {key(line): line for line in found}
    for gone in sorted(set(known) - set(lines)):
        print(f"remove from the known violations: {gone}")
    return [line for name, line in lines.items() if name not in set(known)]
