"""Passes named in text: `gradient-flow,tensor-parallel{degrees=language_model:2},gradient-flow,cost`.

    passes = pass ("," pass)*        pass = name | name "{" option (" " option)* "}"        option = field "=" value

Fields have dashes for underscores. A value is an int or a word; items of a tuple are joined by "+"; a pair is written
"name:number".
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields
from typing import Any, cast, get_type_hints

from mmcompile.errors import ConfigError
from mmcompile.passes.base import AnyPass
from mmcompile.passes.catalog import pass_entry

_PASS = re.compile(r"([\w-]+)(?:\{([^{}]*)\})?\s*(?:,\s*|$)")
_PAIRS = tuple[tuple[str, int], ...]
_TYPES: dict[Any, str] = {int: "3", int | None: "3", str: "word", tuple[str, ...]: "a+b", _PAIRS: "a:2+b:4"}
"""Type of a pass's field -> example of a value of this type as text."""


def parse_passes(text: str) -> tuple[AnyPass, ...]:
    """Return the passes that a text names, in its order.

    Raises:
        ConfigError: the text has another form, or names a pass, a field or a value that does not exist.
    """
    passes: list[AnyPass] = []
    at = 0
    while at < len(text):
        found = _PASS.match(text, at)
        if found is None:
            raise ConfigError(
                f"cannot read passes at {text[at:]!r}; write name or name{{field=value}}, joined by commas"
            )
        passes.append(_parsed(found[1], found[2] or ""))
        at = found.end()
    if not passes:
        raise ConfigError("no pass is named; write for example 'gradient-flow,cost'")
    return tuple(passes)


def format_passes(passes: Iterable[AnyPass]) -> str:
    """Return the text from which `parse_passes` reads these passes; fields that have their default value are left out."""
    return ",".join(map(_formatted, passes))


def _parsed(name: str, options: str) -> AnyPass:
    entry = pass_entry(name)
    made = entry.load()
    hints = get_type_hints(made)
    known = {field.name.replace("_", "-"): field for field in _fields(made)}
    values: dict[str, Any] = {}
    for option in options.split():
        key, _, value = option.partition("=")
        if key not in known:
            raise ConfigError(f"pass {name} has no field {key!r}; its fields are {', '.join(known) or 'none'}")
        values[known[key].name] = _value(name, key, value, hints[known[key].name])
    missing = [key for key, field in known.items() if _default(field) is MISSING and field.name not in values]
    if missing:
        example = _TYPES.get(hints[known[missing[0]].name])
        if example is None:
            raise ConfigError(f"pass {name} has a field {missing[0]} that text cannot give; make the pass in Python")
        raise ConfigError(f"pass {name} needs {missing[0]}; write {name}{{{missing[0]}={example}}}")
    return cast(AnyPass, made(**values))


def _value(name: str, key: str, text: str, hint: Any) -> Any:
    example = _TYPES.get(hint)
    try:
        if hint in (int, int | None):
            return int(text)
        if hint == _PAIRS:
            return tuple((item.split(":")[0], int(item.split(":")[1])) for item in text.split("+"))
    except (ValueError, IndexError) as error:
        raise ConfigError(f"field {key} of pass {name} is {text!r}; write it as {key}={example}") from error
    if example is None:
        raise ConfigError(f"pass {name} has a field {key} that text cannot give; make the pass in Python")
    return text if hint is str else tuple(text.split("+"))


def _formatted(pass_: AnyPass) -> str:
    options = []
    for field in _fields(type(pass_)):
        value = getattr(pass_, field.name)
        if value != _default(field):
            items = value if isinstance(value, tuple) else (value,)
            text = "+".join(":".join(map(str, item)) if isinstance(item, tuple) else str(item) for item in items)
            options.append(f"{field.name.replace('_', '-')}={text}")
    return f"{pass_.name}{{{' '.join(options)}}}" if options else pass_.name


def _fields(made: Any) -> tuple[Field[Any], ...]:
    return fields(made)


def _default(field: Field[Any]) -> object:
    return field.default if field.default_factory is MISSING else field.default_factory()
