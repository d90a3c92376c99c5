"""`MMCOMPILE_DEBUG`: the variable that sets how much the pipeline prints between passes. Only this module reads it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import IntEnum

from mmcompile.errors import ConfigError

_VARIABLE = "MMCOMPILE_DEBUG"


class DebugLevel(IntEnum):
    """Level of `MMCOMPILE_DEBUG`; each level also prints the output of the lower ones."""

    OFF = 0
    TIME = 1
    """Level that prints each pass and its seconds."""
    DIFF = 2
    """Level that prints how a pass changed the number of nodes of each op."""
    VERIFY = 3
    """Level that prints the verifier's summary after each pass."""
    GRAPH = 4
    """Level that prints the graph as text after each pass."""
    PROVENANCE = 5
    """Level that prints each node's module of origin, and the pass that made the node."""


def debug_level(environment: Mapping[str, str] = os.environ) -> DebugLevel:
    """Return the level in `MMCOMPILE_DEBUG`; the lowest, off, if the variable is unset or empty.

    Raises:
        ConfigError: the variable is not one of the levels.
    """
    text = environment.get(_VARIABLE, "") or "0"
    levels = {str(level.value): level for level in DebugLevel}
    if text not in levels:
        choices = ", ".join(f"{value} ({level.name.lower()})" for value, level in levels.items())
        raise ConfigError(f"{_VARIABLE} is {text!r}; valid values are {choices}")
    return levels[text]
