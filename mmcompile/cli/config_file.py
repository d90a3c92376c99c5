"""Options in a file: YAML or TOML, a section for each dataclass of `mmcompile.config`, a key for each field."""

from __future__ import annotations

import difflib
import tomllib
import typing
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import msgspec
import yaml

from mmcompile import config
from mmcompile.errors import ConfigError

SECTIONS: Mapping[str, type[Any]] = {
    "model": config.ModelConfig,
    "example": config.ExampleConfig,
    "plan": config.PlanRequest,
    "train": config.TrainConfig,
    "run": config.RunConfig,
    "elastic": config.ElasticConfig,
}
"""Section of a file -> its dataclass."""


def read_config(path: Path, section: str, names: Collection[str]) -> dict[str, Any]:
    """Return the values of one section; those of other commands' sections are checked too, but not used.

    Args:
        path: a .yaml, .yml or .toml file.
        section: a key of `SECTIONS`.
        names: fields that the command has.

    Raises:
        ConfigError: the file cannot be read, a section or key is unknown, a value has another type, or the command does not have
            the option.
    """
    found = _parsed(path)
    for name, keys in found.items():
        _check_name(name, SECTIONS, f"{path}: unknown section")
        if not isinstance(keys, dict):
            raise ConfigError(f"{path}: section {name} is {keys!r}; wanted keys with values")
        for key in keys:
            _check_name(key, [own.name for own in fields(SECTIONS[name])], f"{path}: unknown key {name}.", join="")
    kind = SECTIONS[section]
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in found.get(section, {}).items():
        values[key] = _converted(path, f"{section}.{key}", value, hints[key])
        if key not in names:
            default: Any = next(own.default for own in fields(kind) if own.name == key)
            if values[key] != default and values[key] != [*(default or ())]:
                raise ConfigError(
                    f"{path}: {section}.{key} has no effect on this command, which lacks the option; drop it"
                )
            del values[key]
    return values


def dump_config(sections: Mapping[str, Any]) -> None:
    """Print options as a YAML file that `--config` reads."""
    plain = {name: msgspec.to_builtins(asdict(value)) for name, value in sections.items()}
    print(yaml.safe_dump(plain, sort_keys=False), end="")


def _parsed(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text()
        if path.suffix == ".toml":
            return tomllib.loads(text)
        if path.suffix not in (".yaml", ".yml"):
            raise ConfigError(f"{path} is no configuration file: its name must end in .yaml, .yml or .toml")
        found = yaml.safe_load(text) or {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read options from {path}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} has no sections; write for example plan: and below it cluster: 8xH100")
    return found


def _check_name(name: str, known: Collection[str], what: str, join: str = " ") -> None:
    if name not in known:
        near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.4) or sorted(known)
        raise ConfigError(f"{what}{join}{name}; the nearest are {', '.join(near)}")


def _converted(path: Path, key: str, value: Any, hint: Any) -> Any:
    try:
        return msgspec.convert(value, hint, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {key} is {value!r}: {error}") from error
