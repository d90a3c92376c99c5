"""From what a user typed to a model: a config, a folder, a cached id, or a Python function."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from torch import nn

from mmcompile import api
from mmcompile.captured_model import CapturedModel
from mmcompile.cli.console import busy
from mmcompile.config import ExampleConfig, ModelConfig
from mmcompile.errors import ConfigError
from mmcompile.ir.graph import torch_dtype
from mmcompile.ir.meta_model import read_config, skeleton
from mmcompile.ir.sample_inputs import example_batch

Weights = Literal["none", "random", "stored"]
"""Content of parameters: none, so that any size fits this machine; random; or the files beside the config."""


def load_captured(text: str, config: ModelConfig, example: ExampleConfig) -> CapturedModel:
    """Return the model that `text` names, without weights, and a batch for its capture: of the user's function, or an example."""
    with busy(f"building {text}"):
        model, batch = load_model(text, "none", config.dtype)
        set_trainable(model, config.train)
        return CapturedModel(model=model, batch=example_batch(model, **asdict(example)) if batch is None else batch)


def set_trainable(model: nn.Module, train: Sequence[str]) -> None:
    """Train the parameters that match `train` (`--train`), freeze the others; without patterns, change nothing."""
    if train:
        api.freeze(model, train)


def load_model(text: str, weights: Weights, dtype: str | None = None) -> tuple[nn.Module, Mapping[str, Any] | None]:
    """Return the model that `text` names (see `MODEL_HELP`), with the batch that its function returned or None.

    Args:
        text: a path, a cached Hugging Face id, or `package.module:function`. A function's model is not changed.
        weights: content of the parameters of a model that is made from a config.
        dtype: dtype of its parameters; the config's by default.

    Raises:
        ConfigError: nothing by that name, an unknown family, no stored weights, or a function that returns something else.
    """
    function = function_of(text)
    if function is not None:
        return _checked(text, function())
    empty = skeleton(text, dtype)
    if weights == "none":
        return empty.train(), None
    model_class: Any = type(empty)
    if weights == "random":
        own_dtype = next(parameter.dtype for parameter in empty.parameters())
        return model_class._from_config(read_config(text), dtype=own_dtype).train(), None
    return _stored(text, model_class, dtype), None


def function_of(text: str) -> Any | None:
    """Return the function that `package.module:function` names, None for text of another form.

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


def _checked(text: str, made: object) -> tuple[nn.Module, Mapping[str, Any] | None]:
    model, batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module) or not (batch is None or isinstance(batch, Mapping)):
        got = f"({type(model).__name__}, {type(batch).__name__})" if isinstance(made, tuple) else type(made).__name__
        raise ConfigError(f"{text} returned {got}; wanted an nn.Module, or (nn.Module, batch by input name)")
    return model, batch


def _stored(text: str, model_class: Any, dtype: str | None) -> nn.Module:
    source = str(Path(text).parent) if Path(text).is_file() else text
    wanted = "auto" if dtype is None else torch_dtype(dtype)
    try:
        return model_class.from_pretrained(source, dtype=wanted, local_files_only=True).train()
    except OSError as error:
        raise ConfigError(
            f"{source} holds no weights for its config; add --random-weights to start from random ones"
        ) from error
