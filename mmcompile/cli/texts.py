"""Texts of options as values: counts, degrees and components by name."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mmcompile.errors import ConfigError

_ALL_COMPONENTS = "all"
SEARCH = "search"


def parse_components(option: str, texts: Sequence[str]) -> bool | tuple[str, ...]:
    """Return the names in `["vision_tower,language_model"]`; True for `["all"]`.

    Raises:
        ConfigError: a name is empty, or `all` stands beside others.
    """
    names = tuple(name.strip() for text in texts for name in text.split(","))
    if names == (_ALL_COMPONENTS,):
        return True
    if "" in names or _ALL_COMPONENTS in names:
        raise ConfigError(f"{option} {', '.join(texts)!r} is neither names of components nor {_ALL_COMPONENTS!r} alone")
    return names


def parse_degrees(option: str, texts: Sequence[str]) -> int | dict[str, int]:
    """Return 2 for `["2"]`, a mapping for `["language_model=2", "vision_tower=3"]`.

    Raises:
        ConfigError: a part has another form, or a name comes twice.
    """
    if any("=" in text for text in texts):
        return parse_counts(option, texts)
    if len(texts) > 1:
        raise ConfigError(f"{option} is given {' and '.join(texts)}; give one number, or NAME=N for each chain")
    if not texts[0].isdecimal() or int(texts[0]) < 1:
        raise ConfigError(f"{option} is {texts[0]!r}; give a number from 1 on, or {SEARCH}")
    return int(texts[0])


def parse_counts(option: str, texts: Sequence[str]) -> dict[str, int]:
    """Return `{"vision_tower": 1, "language_model": 2}` for `["vision_tower=1,language_model=2"]`.

    Raises:
        ConfigError: a part has another form, or a name comes twice.
    """
    counts: dict[str, int] = {}
    for part in (part for text in texts for part in text.split(",")):
        match = re.fullmatch(r"\s*([^=\s]+)=(\d+)\s*", part)
        if match is None or int(match[2]) < 1:
            raise ConfigError(f"{option} {part!r} is not NAME=N with N at least 1, for example language_model=2")
        if match[1] in counts:
            raise ConfigError(f"{option} names {match[1]!r} twice: {counts[match[1]]} and {match[2]}")
        counts[match[1]] = int(match[2])
    return counts
