"""`MMCOMPILE_DEBUG`: amount of output of the pipeline between passes. The only place that reads it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import IntEnum

from mmcompile.errors import ConfigError

_VARIABLE = "MMCOMPILE_DEBUG"


class DebugLevel(IntEnum):
    """Each level prints what the lower ones print, and more."""

    OFF = 0
    TIME = 1
    """Each pass and its time."""
    DIFF = 2
    """Changes of a pass in the number of each op."""
    VERIFY = 3
    """The verifier's summary."""
    GRAPH = 4
    """The graph as text after each pass."""
    PROVENANCE = 5
    """Module of origin of each node, and the pass that made it."""


def debug_level(environment: Mapping[str, str] = os.environ) -> DebugLevel:
    """Return the level in `MMCOMPILE_DEBUG`; off if unset or empty.

    Raises:
        ConfigError: the variable is not one of the levels.
    """
    text = environment.get(_VARIABLE, "") or "0"
    levels = {str(level.value): level for level in DebugLevel}
    if text not in levels:
        choices = ", ".join(f"{value} ({level.name.lower()})" for value, level in levels.items())
        raise ConfigError(f"{_VARIABLE} is {text!r}; valid values are {choices}")
    return levels[text]
