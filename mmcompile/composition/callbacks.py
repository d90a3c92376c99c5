"""Callbacks: Python that runs inside a composed model's forward, and is captured with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from mmcompile.errors import ConfigError

Callback: TypeAlias = Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Callbacks:
    """Functions run before and after a part of a composed model.

    Each maps a value to its replacement and may be a module that trains.

    Encoders use the four fields named after encoder and projector, the language model `before` and `after`.
    """

    before_encoder: Callback | None = None
    """Function on the encoder's inputs, a dict by parameter name -> dict of the same form."""
    after_encoder: Callback | None = None
    """Function on the encoder's output -> output of the same form, or the features alone."""
    before_projector: Callback | None = None
    """Function on features [images, tokens, hidden] or [tokens, hidden] -> features."""
    after_projector: Callback | None = None
    """Function on projected features -> projected features."""
    before: Callback | None = None
    """Function on the language model's arguments, a dict by name (`inputs_embeds`, `attention_mask`, ...) -> the same form."""
    after: Callback | None = None
    """Function on the language model's output -> output of the same form."""

    def given(self) -> Iterator[tuple[str, Callback]]:
        """Yield (field name, callback) for each callback that is set."""
        for field in fields(self):
            callback = getattr(self, field.name)
            if callback is not None:
                yield field.name, callback

    def run(self, when: str, value: Any) -> Any:
        """Return the result of the callback in field `when` on `value`; `value` itself if the field is None."""
        callback = getattr(self, when)
        return value if callback is None else callback(value)


NONE = Callbacks()


def check_callbacks(callbacks: Mapping[str, Callbacks], encoders: Mapping[str, object], language_model: str) -> None:
    """Raise ConfigError for callbacks that would never run: of an unknown part, or in a field that the part does not use."""
    for part, own in callbacks.items():
        if part != language_model and part not in encoders:
            raise ConfigError(f"callbacks are for {part!r}; parts are {', '.join([*encoders, language_model])}")
        for when, _ in own.given():
            if (when in ("before", "after")) != (part == language_model):
                wanted = [f.name for f in fields(own) if (f.name in ("before", "after")) == (part == language_model)]
                raise ConfigError(f"callback {when} of {part!r} would never run; it has {', '.join(wanted)}")
