"""`matches`: whether a pattern matches a parameter's name. Shared by `freeze` and `ParameterGroup`."""

from __future__ import annotations

import fnmatch

_PROJECTOR_MODULES = frozenset({"merger", "deepstack_merger_list", "connector", "aligner", "language_projection"})
"""Names of modules that are projectors: the pattern "projector" matches them too."""


def matches(name: str, pattern: str) -> bool:
    """Return True if a pattern matches the name of a parameter.

    Args:
        name: original name of the parameter, as `named_parameters` has it.
        pattern: "all"; or a glob (`*.lora_*`), for the whole name; or a component or module name (`projector`,
            `language_model`, `layers.0`), for all parameters in a module of that name.
    """
    if pattern == "all":
        return True
    if any(mark in pattern for mark in "*?["):
        return fnmatch.fnmatchcase(name, pattern)
    parts = name.split(".")
    if pattern == "projector" and not _PROJECTOR_MODULES.isdisjoint(parts):
        return True
    wanted = pattern.split(".")
    inside = any(parts[i : i + len(wanted)] == wanted for i in range(len(parts)))
    return inside or any(part.endswith("_" + pattern) for part in parts)
