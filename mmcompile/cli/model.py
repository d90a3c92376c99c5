"""From what a user typed to a model: a config, a folder, a cached id, or a Python function."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mmcompile.errors import ConfigError
from mmcompile.ir.compat import FakeTensorMode

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_AUTO_CLASSES = (
    "AutoModelForMultimodalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
)
"""Where a class is looked up when the config names none."""


class Weights(StrEnum):
    """What parameters hold."""

    NONE = "none"
    """Nothing: shapes and dtypes only, so that any size fits this machine."""
    RANDOM = "random"
    STORED = "stored"
    """What lies beside the config."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A model, with the batch its function returned or None."""

    model: nn.Module = field(repr=False)
    batch: Mapping[str, Any] | None = field(repr=False, default=None)


def load_model(text: str, weights: Weights, dtype: torch.dtype | None = None) -> Loaded:
    """Make the model that `text` names (see `MODEL_HELP`).

    Args:
        text: a path, a cached Hugging Face id, or `package.module:function`. A function's model is taken as it comes.
        weights: what parameters shall hold.
        dtype: of the parameters; the config's by default.

    Raises:
        ConfigError: nothing by that name, an unknown family, no stored weights, or a function that returns something else.
    """
    function = function_of(text)
    if function is not None:
        return _checked(text, function())
    folder = Path(text).parent if Path(text).is_file() else Path(text)
    if weights is Weights.STORED:
        source = str(folder) if folder.is_dir() else text
        return Loaded(model=_from_pretrained(source, _read_config(text), dtype))
    config = _read_config(text)
    with _without_storage() if weights is Weights.NONE else contextlib.nullcontext():
        return Loaded(model=_from_config(config, dtype))


def function_of(text: str) -> Any | None:
    """The function that `package.module:function` names, None for text of another form.

    The current folder is searched too, as `python -m` does.

    Raises:
        ConfigError: no such module or function, or it is not callable.
    """
    module_name, colon, name = text.partition(":")
    if not colon or Path(text).exists() or not all(part.isidentifier() for part in (*module_name.split("."), name)):
        return None
    try:
        module = _import(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{text}: no module named {error.name!r} here or among the installed ones") from error
    function = vars(module).get(name)
    if not callable(function):
        raise ConfigError(f"{text}: module {module_name} has no function {name!r}")
    return function


def _import(name: str) -> Any:
    # Last, so that a folder here never hides an installed package.
    sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop()


def _checked(text: str, made: object) -> Loaded:
    model, batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module) or not (batch is None or isinstance(batch, Mapping)):
        got = f"({type(model).__name__}, {type(batch).__name__})" if isinstance(made, tuple) else type(made).__name__
        raise ConfigError(f"{text} returned {got}; wanted an nn.Module, or (nn.Module, batch by input name)")
    return Loaded(model=model, batch=batch)


def _read_config(text: str) -> PretrainedConfig:
    from transformers import AutoConfig

    path = Path(text) / "config.json" if Path(text).is_dir() else Path(text)
    if path.is_file():
        values = _read_json(path)
        kind = values.pop("model_type", None)
        try:
            return AutoConfig.for_model(kind, **values)
        except ValueError as error:
            raise ConfigError(
                f"{path} has model_type {kind!r}, which this transformers does not know; give a class of your own as "
                "package.module:function, or update transformers"
            ) from error
    if Path(text).is_dir():
        raise ConfigError(f"folder {text} has no config.json")
    try:
        return AutoConfig.from_pretrained(text, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no model {text!r}: it is no file, no folder, no package.module:function, and no Hugging Face id in the local "
            "cache (nothing is downloaded here)"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read model config {path}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"model config {path} holds a {type(values).__name__}, wanted an object with a model_type")
    return values


def _class_of(config: PretrainedConfig) -> Any:
    import transformers

    for name in config.architectures or ():
        found = vars(transformers).get(name) or getattr(transformers, name, None)
        if found is not None:
            return found
    for auto in _AUTO_CLASSES:
        mapping = getattr(transformers, auto)._model_mapping
        if type(config) in mapping:
            return mapping[type(config)]
    raise ConfigError(
        f"no model class for {type(config).__name__}: the config's architectures are {config.architectures}; name a class "
        "of transformers there, or give package.module:function"
    )


def _from_config(config: PretrainedConfig, dtype: torch.dtype | None) -> nn.Module:
    if dtype is not None:
        _set_dtype(config, dtype)
    return _class_of(config)._from_config(config, dtype=dtype or config.dtype or torch.float32).train()


def _set_dtype(config: PretrainedConfig, dtype: torch.dtype) -> None:
    """Also in sub-configs: each part of a model asks its own."""
    config.dtype = dtype
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            _set_dtype(part, dtype)


def _from_pretrained(source: str, config: PretrainedConfig, dtype: torch.dtype | None) -> nn.Module:
    try:
        model = _class_of(config).from_pretrained(source, config=config, dtype=dtype or "auto", local_files_only=True)
    except OSError as error:
        raise ConfigError(f"{source} holds no weights for its config; add --random-weights to start from random ones") from error
    return model.train()


@contextlib.contextmanager
def _without_storage() -> Iterator[None]:
    from transformers.initialization import no_init_weights

    with FakeTensorMode(allow_non_fake_inputs=True), no_init_weights():
        yield
