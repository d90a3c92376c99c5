"""A Hugging Face model without weights: real classes, fake parameters, any size in a few seconds and little memory."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmcompile.errors import ConfigError
from mmcompile.ir.compat import FakeTensorMode
from mmcompile.ir.graph import torch_dtype

_AUTO_CLASSES = (
    "AutoModelForImageTextToText",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForMultimodalLM",
    "AutoModelForCausalLM",
)


def skeleton(config: str | Path | Any, dtype: str | None = None) -> nn.Module:
    """Build the model of a config with fake parameters on CPU.

    Never on device "meta": there the backward of cross-entropy is lost without an error.

    Args:
        config: a transformers config, a `config.json`, a folder holding one, or a Hugging Face id in the local cache.
        dtype: dtype of the parameters; the config's own by default, bfloat16 if it has none.

    Raises:
        ConfigError: the config cannot be read, or transformers has no model for it.
    """
    config = read_config(config)
    model_class = _model_class(config)
    wanted = torch_dtype(dtype) if dtype else (getattr(config, "dtype", None) or torch.bfloat16)
    return without_weights(model_class, config, wanted)


def without_weights(model_class: Any, config: Any, dtype: torch.dtype | None) -> nn.Module:
    """Return a transformers model of class `model_class` with fake parameters on CPU."""
    with FakeTensorMode(), _no_init():
        return model_class._from_config(config, dtype=dtype)


def read_config(source: str | Path | Any) -> Any:
    """Return the transformers config at a path or in the local cache; a config object is returned unchanged."""
    if not isinstance(source, (str, Path)):
        return source
    import transformers  # heavy, and only needed for Hugging Face models

    try:
        if str(source).endswith(".json"):
            fields = json.loads(Path(source).read_text())
            return transformers.CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
        return transformers.AutoConfig.from_pretrained(source, local_files_only=True)
    except KeyError as error:
        raise ConfigError(
            f"{str(source)!r} has model_type {error.args[0]!r}, which transformers {transformers.__version__} does not know; "
            "check the spelling, or install a newer transformers"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no model configuration at {str(source)!r}: {str(error).splitlines()[0]}; "
            "pass a config.json, a folder with one, or a model id that is in the local cache"
        ) from error


def _model_class(config: Any) -> Any:
    import transformers

    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    for auto in _AUTO_CLASSES:
        mapping = getattr(getattr(transformers, auto, None), "_model_mapping", {})
        if type(config) in mapping:
            return mapping[type(config)]
    raise ConfigError(
        f"transformers {transformers.__version__} has no trainable multimodal model for model_type {config.model_type!r}; "
        "name one in the config's `architectures`"
    )


@contextlib.contextmanager
def _no_init() -> Generator[None]:
    from transformers.initialization import no_init_weights

    with no_init_weights():
        yield
