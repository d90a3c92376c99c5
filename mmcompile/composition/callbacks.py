"""Callbacks: Python that runs inside a composed model's forward, and is captured with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from mmcompile.errors import ConfigError

Callback: TypeAlias = Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Callbacks:
    """Functions run around a part. Each takes one value and returns its replacement; a module's parameters train too.

    For an encoder: the first four. For the language model: `before` and `after`.
    """

    before_encoder: Callback | None = None
    """Inputs of the encoder by parameter, a dict -> the same."""
    after_encoder: Callback | None = None
    """Output of the encoder -> the same, or the features themselves."""
    before_projector: Callback | None = None
    """Features [images, tokens, hidden] or [tokens, hidden] -> features."""
    after_projector: Callback | None = None
    """Projected features -> projected features."""
    before: Callback | None = None
    """Arguments of the language model by name (`inputs_embeds`, `attention_mask`, ...), a dict -> the same."""
    after: Callback | None = None
    """Output of the language model -> the same."""

    def given(self) -> Iterator[tuple[str, Callback]]:
        """Yield (when, callback) of those that are set."""
        for field in fields(self):
            callback = getattr(self, field.name)
            if callback is not None:
                yield field.name, callback

    def run(self, when: str, value: Any) -> Any:
        """Return the result of the callback of that name on a value; the value itself if there is none."""
        callback = getattr(self, when)
        return value if callback is None else callback(value)


NONE = Callbacks()


def check_callbacks(callbacks: Mapping[str, Callbacks], encoders: Mapping[str, object], language_model: str) -> None:
    """Raise ConfigError for a callback that would never run."""
    for part, own in callbacks.items():
        if part != language_model and part not in encoders:
            raise ConfigError(f"callbacks are for {part!r}; parts are {', '.join([*encoders, language_model])}")
        for when, _ in own.given():
            if (when in ("before", "after")) != (part == language_model):
                wanted = [f.name for f in fields(own) if (f.name in ("before", "after")) == (part == language_model)]
                raise ConfigError(f"callback {when} of {part!r} would never run; it has {', '.join(wanted)}")
