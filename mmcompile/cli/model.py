"""From what a user typed to a model: a config, a folder, a cached id, or a Python function."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from torch import nn

from mmcompile.errors import ConfigError
from mmcompile.ir.graph import torch_dtype
from mmcompile.ir.meta_model import read_config, skeleton


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


def load_model(text: str, weights: Weights, dtype: str | None = None) -> Loaded:
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
    empty = skeleton(text, dtype)
    if weights is Weights.NONE:
        return Loaded(model=empty.train())
    model_class: Any = type(empty)
    if weights is Weights.RANDOM:
        wanted = next(parameter.dtype for parameter in empty.parameters())
        return Loaded(model=model_class._from_config(read_config(text), dtype=wanted).train())
    return Loaded(model=_stored(text, model_class, dtype))


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


def _stored(text: str, model_class: Any, dtype: str | None) -> nn.Module:
    source = str(Path(text).parent) if Path(text).is_file() else text
    wanted = "auto" if dtype is None else torch_dtype(dtype)
    try:
        return model_class.from_pretrained(source, dtype=wanted, local_files_only=True).train()
    except OSError as error:
        raise ConfigError(
            f"{source} holds no weights for its config; add --random-weights to start from random ones"
        ) from error
