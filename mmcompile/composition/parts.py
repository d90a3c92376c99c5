"""Parts on disk: models of transformers in folders of their own, with the adapters around them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mmcompile.composition.manifest import SavedPart
from mmcompile.errors import CheckpointError, ConfigError
from mmcompile.ir.meta_model import without_weights

_ADAPTER = "adapter"


def saved_part(name: str, module: nn.Module) -> SavedPart:
    """Return the manifest entry of an encoder or language model. Raises ConfigError unless its class is in transformers."""
    base, adapter = _without_adapter(module)
    owner = type(base).__module__
    transformers: Any = sys.modules.get("transformers")
    if (
        transformers is None
        or not isinstance(base, transformers.PreTrainedModel)
        or not owner.startswith("transformers.")
    ):
        raise ConfigError(
            f"part {name!r} is a {owner}.{type(base).__qualname__}, which does not load without code; wanted a model of "
            "transformers. Save its state_dict() yourself and compose again after loading"
        )
    return SavedPart(module=owner, name=type(base).__qualname__, adapter=adapter)


def _without_adapter(module: nn.Module) -> tuple[nn.Module, bool]:
    """Return (the model inside a peft wrapper, True), or (the module itself, False) if it is not wrapped."""
    peft: Any = sys.modules.get("peft")
    wrapped = peft is not None and isinstance(module, peft.PeftModel)
    return (module.get_base_model() if wrapped else module), wrapped  # type: ignore[operator]


def save_part(name: str, module: nn.Module, part: SavedPart, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write an encoder or language model with `weights` to its folder, and its peft adapter, if any, to a sub-folder."""
    base: Any = _without_adapter(module)[0]
    if part.adapter:
        wrapper: Any = module
        wrapper.save_pretrained(folder / _ADAPTER, state_dict=dict(weights))
        prefix = next(key for key, value in wrapper.named_modules() if value is base) + "."
        weights = {key.removeprefix(prefix): value for key, value in weights.items()}
    wanted = set(without_weights(type(base), base.config, base.dtype).state_dict())
    plain = {_plain(key): value for key, value in weights.items() if _plain(key) in wanted}
    foreign = set() if part.adapter else set(weights) - wanted
    if foreign or wanted - set(plain):
        odd = sorted(foreign or wanted - set(plain))
        raise ConfigError(
            f"part {name!r} does not load from its config: {', '.join(odd[:3])} ({len(odd)} in all) is not what a fresh "
            f"{type(base).__name__} has; add adapters with peft.get_peft_model, or merge them before saving"
        )
    base.save_pretrained(folder, state_dict=plain)


def _plain(key: str) -> str:
    """Return a weight's name without what peft's adapters insert: `q_proj.weight` for `q_proj.base_layer.weight`."""
    return key.replace(".base_layer.", ".").replace(".original_module.", ".")


def load_part(folder: Path, part: SavedPart) -> nn.Module:
    """Load a part and its adapter from a folder. Raises CheckpointError for a class outside transformers."""
    if not part.module.startswith("transformers."):  # a manifest names classes, and must not make us import others
        raise CheckpointError(f"{folder} names a class of {part.module}; wanted one of transformers")
    owner: Any = importlib.import_module(part.module)
    model = getattr(owner, part.name).from_pretrained(folder, dtype="auto")
    if part.adapter:
        from peft import PeftModel  # only for models that were saved with it

        model = PeftModel.from_pretrained(model, folder / _ADAPTER, is_trainable=True)
    return model.train()
