"""`ParameterGroup`: parameters with optimizer settings of their own, chosen by name; `matches`, by which `freeze` chooses too."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from mmcompile.errors import ConfigError

Settings: TypeAlias = dict[str, Any]
"""Settings of one parameter group of an optimizer: learning rate, betas, ... (all plain JSON)."""

_PROJECTOR_MODULES = frozenset({"merger", "deepstack_merger_list", "connector", "aligner", "language_projection"})
"""Names of modules that are projectors: the pattern "projector" matches them too."""
_SHARD = "@"
"""Separator between a parameter's name and the number of a part of it, if several ranks hold a part each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterGroup:
    """Optimizer settings for the parameters that match a pattern. A setting of None keeps the optimizer's value.

    `ParameterGroup(match="vision_tower", lr=1e-5)`, or `ParameterGroup(match=("*.bias", "*norm*"), weight_decay=0.0)`.
    """

    match: str | tuple[str, ...]
    """Patterns over parameter names, as for `freeze`: a component or module name, a glob, or "all".

    A parameter that several groups match belongs to the first one.
    """
    lr: float | None = None
    weight_decay: float | None = None
    settings: Settings = field(default_factory=dict)
    """Further settings by the optimizer's argument name: `{"betas": (0.9, 0.95)}`."""

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of `match` as a tuple, also for a single one."""
        return (self.match,) if isinstance(self.match, str) else self.match

    @property
    def own(self) -> Settings:
        """All settings of this group by the optimizer's argument name, including `lr` and `weight_decay` unless None."""
        named = {"lr": self.lr, "weight_decay": self.weight_decay}
        return {**{key: value for key, value in named.items() if value is not None}, **self.settings}


def group_of(name: str, groups: Sequence[ParameterGroup]) -> int:
    """Return the position of the first group that matches a parameter; `len(groups)` if none does."""
    whole = name.partition(_SHARD)[0]
    means = (any(matches(whole, pattern) for pattern in group.patterns) for group in groups)
    return next((index for index, found in enumerate(means) if found), len(groups))


def check_settings(groups: Iterable[ParameterGroup], known: Collection[str], optimizer: str) -> None:
    """Refuse groups without settings, and settings that the optimizer does not have and would ignore.

    Raises:
        ConfigError: names the group, the setting, and the optimizer's settings.
    """
    for group in groups:
        if not group.own:
            raise ConfigError(
                f"parameter group {group.match!r} has no settings, and no effect: give lr, or leave it out"
            )
        if twice := [key for key in ("lr", "weight_decay") if key in group.settings]:
            raise ConfigError(
                f"parameter group {group.match!r} has {twice[0]} among its settings: give it as {twice[0]}="
            )
        if unknown := sorted(group.own.keys() - set(known)):
            raise ConfigError(
                f"parameter group {group.match!r} sets {', '.join(unknown)}, which {optimizer} does not have; "
                f"choose among {', '.join(sorted(known))}"
            )


def check_matches(groups: Sequence[ParameterGroup], trainable: Collection[str], frozen: Collection[str]) -> None:
    """Refuse patterns that match no trainable parameter, and groups whose parameters all belong to earlier groups.

    Args:
        trainable, frozen: original names of all trainable, and of all frozen, parameters.

    Raises:
        ConfigError: names the pattern, and the known parameters.
    """
    for group in groups:
        for pattern in group.patterns:
            if any(matches(name, pattern) for name in trainable):
                continue
            if any(matches(name, pattern) for name in frozen):
                raise ConfigError(
                    f"pattern {pattern!r} of a parameter group means frozen parameters only: train them, or leave it out"
                )
            modules = {part for name in (*trainable, *frozen) for part in name.split(".")[:-1] if not part.isdigit()}
            raise ConfigError(
                f"pattern {pattern!r} of a parameter group matches no parameter; use 'all', a glob, or one of: "
                f"{', '.join(sorted(modules))}"
            )
    filled = {group_of(name, groups) for name in trainable}
    for index, group in enumerate(groups):
        if index not in filled:
            raise ConfigError(
                f"parameter group {group.match!r} gets no parameter, since groups before it have them all: put it before them"
            )


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
