"""An encoder in a composed model: the inputs it takes from a batch, and the place of features in its output."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from typing import Any

from torch import Tensor, nn

from mmcompile.errors import BatchError, ConfigError

_LAST_HIDDEN_STATE = "last_hidden_state"

_PROCESSOR_NAMES = {"grid_thw": "image_grid_thw"}
"""Parameter name of an encoder -> name under which Hugging Face processors return the value."""
_ANONYMOUS = "hidden_states"
"""Name that patch encoders give their main input; Hugging Face processors return it as `pixel_values` or `input_features`."""


@dataclass(frozen=True, slots=True)
class Encoder:
    """An encoder with the options that `compose` cannot derive from its module. `compose` also takes a bare module."""

    module: nn.Module
    _: KW_ONLY
    output: str = _LAST_HIDDEN_STATE
    """Field of the encoder's output that holds the features."""
    layer: int | None = None
    """Index into the output's `hidden_states` whose entry is used as features, for example -2 as in LLaVA; None for `output`."""
    drop_tokens: int = 0
    """Number of leading tokens of each image or audio clip that are not patches (class token, registers)."""
    inputs: Mapping[str, str] | None = None
    """Parameter name of the encoder's forward -> name of the input in a batch.

    By default the parameter name, prefixed with the encoder's name if another part takes an input of the same name.
    """
    example: Mapping[str, Tensor] | None = field(default=None, repr=False)
    """Parameter name -> value for two images or audio clips, to probe the encoder. By default made from its config."""

    def __post_init__(self) -> None:
        if self.layer is not None and self.output != _LAST_HIDDEN_STATE:
            raise ConfigError(f"layer {self.layer} and output {self.output!r} exclude each other; give one of them")
        if self.drop_tokens < 0:
            raise ConfigError(
                f"drop_tokens is {self.drop_tokens}; the number of leading tokens to leave out, 0 or more"
            )


class FeatureLayout(StrEnum):
    """Layout of an encoder's features: a row of tokens per image, images end to end, or one token per image."""

    MEDIA = "media"  # [images, tokens, hidden]
    PACKED = "packed"  # all tokens of all images end to end
    POOLED = "pooled"  # [images, hidden], one token an image


@dataclass(frozen=True, kw_only=True, slots=True)
class Features:
    """Features of a batch's images or audio clips, from an encoder or its projector."""

    values: Tensor
    """Features [images, tokens, hidden]; or [tokens, hidden] with images end to end."""
    valid: Tensor | None = None
    """Mask of real tokens, bool [images, tokens], False at padding; None if all tokens are real."""

    @property
    def packed(self) -> bool:
        """True if images are end to end: `values` is [tokens, hidden]."""
        return self.values.dim() == 2

    def rows(self) -> Tensor:
        """Return the real tokens in order: [real tokens, hidden]."""
        if self.valid is None:
            return self.values.reshape(-1, self.values.shape[-1])
        return self.values[self.valid]


def parameters_of(module: nn.Module) -> dict[str, inspect.Parameter]:
    """Return named parameters of a module's forward; under a peft wrapper, of the module in it."""
    module = getattr(module, "get_base_model", lambda: module)()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: p for name, p in inspect.signature(module.forward).parameters.items() if p.kind in named}


def modality(module: nn.Module) -> str:
    """Return `"image"` or `"audio"`, from `input_modalities` of a Hugging Face encoder; `"image"` by default."""
    said: Any = getattr(module, "input_modalities", None)
    first = said if isinstance(said, str) else (said or ("image",))[0]
    return "audio" if first == "audio" else "image"


def default_inputs(module: nn.Module) -> dict[str, str]:
    """Return parameter of the encoder's forward -> default name in a batch, main input first; not unique among encoders."""
    names = {name: _PROCESSOR_NAMES.get(name, name) for name in parameters_of(module)}
    if _ANONYMOUS in names:
        names[_ANONYMOUS] = "input_features" if modality(module) == "audio" else "pixel_values"
    return names


def input_names(encoders: Mapping[str, Encoder], taken: frozenset[str]) -> dict[str, dict[str, str]]:
    """Return encoder -> parameter -> batch name; every batch name belongs to one encoder.

    Args:
        taken: names that the language model takes.

    Raises:
        ConfigError: `inputs` of an encoder names a parameter it does not have, or a batch name given twice.
    """
    for name, encoder in encoders.items():
        unknown = set(encoder.inputs or ()) - set(parameters_of(encoder.module))
        if unknown:
            raise ConfigError(
                f"inputs of encoder {name!r} names {', '.join(sorted(unknown))}, which "
                f"{type(encoder.module).__name__}.forward does not take; it takes {', '.join(parameters_of(encoder.module))}"
            )
    wished = {name: {**default_inputs(e.module), **(e.inputs or {})} for name, e in encoders.items()}
    found: dict[str, dict[str, str]] = {}
    for name, names in wished.items():
        given = encoders[name].inputs or {}
        others = taken.union(*(own.values() for other, own in wished.items() if other != name))
        found[name] = {
            p: batch if p in given or batch not in others else f"{name}_{batch}" for p, batch in names.items()
        }
    every = [batch for names in found.values() for batch in names.values()]
    twice = {batch for batch in every if every.count(batch) > 1 or batch in taken}
    if twice:
        raise ConfigError(
            f"batch input {', '.join(sorted(twice))} belongs to two parts; give them other names in `inputs`"
        )
    return found


def select(encoder: Encoder, output: Any, name: str) -> Tensor:
    """Return the features in an encoder's output; feature maps [images, C, h, w] become [images, h * w, C].

    Raises:
        ConfigError: the output has no features in the field or layer that the encoder's options name.
    """
    if isinstance(output, Tensor):
        found: Any = output
    elif encoder.layer is not None:
        states = getattr(output, "hidden_states", None)
        if states is None or not -len(states) <= encoder.layer < len(states):
            have = "no hidden_states" if states is None else f"{len(states)} hidden states"
            raise ConfigError(f"encoder {name!r} has layer={encoder.layer}, but returned {have}")
        found = states[encoder.layer]
    else:
        found = getattr(output, encoder.output, None)
    if not isinstance(found, Tensor) or not found.is_floating_point() or found.dim() not in (2, 3, 4):
        fields = ", ".join(key for key, value in vars(output).items() if isinstance(value, Tensor)) or "none"
        raise ConfigError(
            f"encoder {name!r} returned {type(output).__name__} without features in {encoder.output!r} (wanted floats "
            f"[images, tokens, hidden]); its tensors: {fields}. Name one: Encoder(module, output=...)"
        )
    return found.flatten(2).transpose(1, 2) if found.dim() == 4 else found


def arrange(encoder: Encoder, layout: FeatureLayout, found: Tensor, inputs: Mapping[str, Tensor]) -> Features:
    """Return the features `found` by `select` as `Features`, without `drop_tokens` leading tokens, with a mask of padding."""
    if layout is FeatureLayout.PACKED:
        return Features(values=found.reshape(-1, found.shape[-1]))
    if layout is FeatureLayout.POOLED:
        return Features(values=found.unsqueeze(1))
    valid = _valid(encoder.module, found, inputs)
    return Features(
        values=found[:, encoder.drop_tokens :], valid=None if valid is None else valid[:, encoder.drop_tokens :]
    )


def _valid(module: nn.Module, found: Tensor, inputs: Mapping[str, Tensor]) -> Tensor | None:
    """Return which features are real and not padding, bool [images, tokens]; None if the inputs have no attention mask."""
    mask = next((value for name, value in inputs.items() if name.endswith("attention_mask")), None)
    if mask is None:
        return None
    if mask.shape == found.shape[:2]:
        return mask.bool()
    shorten = getattr(module, "_get_feature_vector_attention_mask", None)  # transformers' name for it in speech models
    return None if shorten is None else shorten(found.shape[1], mask).bool()


def given_inputs(name: str, names: Mapping[str, str], module: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of one encoder in a batch, by parameter; empty if the batch has no images or sounds for it.

    Raises:
        BatchError: the batch has some, but not all, of the inputs that the encoder needs.
    """
    given = {parameter: batch[key] for parameter, key in names.items() if batch.get(key) is not None}
    needed = [p for p, value in parameters_of(module).items() if value.default is inspect.Parameter.empty]
    # Some main inputs have a default of None; without pixels there is nothing to encode.
    needed = needed or [next(iter(names))]
    missing = [names[parameter] for parameter in needed if parameter not in given]
    if given and missing:
        raise BatchError(
            f"the batch has {', '.join(names[p] for p in given)} but no {', '.join(missing)}, which encoder {name!r} needs too; "
            "add what its processor returns, or leave all of them out"
        )
    return given


def run(encoder: Encoder, inputs: Mapping[str, Any]) -> Any:
    """Call the encoder's module on inputs by parameter name, and return its output."""
    options = {} if encoder.layer is None else {"output_hidden_states": True}
    return encoder.module(**inputs, **options)
