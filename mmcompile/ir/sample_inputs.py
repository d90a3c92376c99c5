"""Example batches for models that are only a configuration, by the conventions of their forward signature."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mmcompile.errors import ConfigError
from mmcompile.ir.compat import VALUES_NEEDED, fake_mode_of, shape_hint

_DEFAULT_TEXT_TOKENS = 1024
_DEFAULT_IMAGE_SIZE = 448
IGNORE = -100


def example_batch(
    model: nn.Module,
    *,
    batch_size: int = 2,
    text_tokens: int = _DEFAULT_TEXT_TOKENS,
    images: int = 1,
    image_size: int = _DEFAULT_IMAGE_SIZE,
    audios: int = 1,
) -> dict[str, torch.Tensor]:
    """Return a batch of random tokens with images and audio clips if the model takes them, labels on the text.

    Args:
        model: a Hugging Face model, real or a skeleton; or one that makes example batches itself (composed models do).
        batch_size: number of samples.
        text_tokens: text tokens per sample, before image and audio placeholders.
        images: images per sample, for models with `pixel_values`.
        image_size: height and width in pixels, for models that take any size.
        audios: audio clips per sample, for models with `input_features`.

    Raises:
        ConfigError: the model takes inputs that have no common convention (tiles, crops); pass a batch of your own.
    """
    own: Any = getattr(model, "example_batch", None)
    if own is not None:
        return own(batch_size=batch_size, text_tokens=text_tokens, images=images, image_size=image_size, audios=audios)
    config = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise _unknown(f"{type(model).__name__} is no transformers model")
    takes = inspect.signature(model.forward).parameters
    spans: list[PlaceholderSpan] = []
    batch: dict[str, torch.Tensor] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if "pixel_values" in takes and images:
            features = _images(model, batch, batch_size * images, image_size)
            spans += [_span(config, "image", features)] * images
        if "input_features" in takes and audios:
            features = _audios(model, batch, batch_size * audios)
            spans += [_span(config, "audio", features)] * audios
        batch.update(random_text(_num_plain_tokens(config), batch_size, text_tokens, spans))
    if "mm_token_type_ids" in takes and spans:
        batch["mm_token_type_ids"] = (batch["labels"] == IGNORE).int()
    if "token_type_ids" in takes and spans:
        batch["token_type_ids"] = (batch["labels"] == IGNORE).long()
    return batch


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceholderSpan:
    """Placeholder tokens of one image or audio clip in a text, and the tokens that enclose them if the model has any."""

    token: int
    count: int
    before: int | None = None
    after: int | None = None


def _span(config: Any, modality: str, count: int) -> PlaceholderSpan:
    kind = "vision" if modality == "image" else modality
    return PlaceholderSpan(
        token=_token(config, modality),
        count=count,
        before=getattr(config, f"{kind}_start_token_id", None),
        after=getattr(config, f"{kind}_end_token_id", None),
    )


def _num_plain_tokens(config: Any) -> int:
    # Token ids below this number are no special tokens, except those up to 16.
    special = [
        value
        for name, value in vars(config).items()
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    ]
    return min([config.get_text_config().vocab_size, *(value for value in special if value > 16)])


def random_text(
    vocabulary: int, batch_size: int, text_tokens: int, spans: Sequence[PlaceholderSpan]
) -> dict[str, torch.Tensor]:
    """Return random `input_ids`, `attention_mask` and `labels`, each int64 [batch_size, tokens].

    A row is two text tokens, then each span of placeholders followed by two text tokens, then all other text tokens.

    Args:
        vocabulary: number of token ids, of which text tokens are drawn; the first few are left out.
        text_tokens: text tokens of a row, besides placeholders.
    """
    length = text_tokens + sum(span.count for span in spans)
    ids = torch.randint(min(10, vocabulary - 1), vocabulary, (batch_size, length))
    labels = ids.clone()
    position = 2
    for span in spans:
        end = position + span.count
        ids[:, position:end] = span.token
        labels[:, position:end] = IGNORE
        for place, mark in ((position - 1, span.before), (end, span.after)):
            if mark is not None and place < length:
                ids[:, place] = labels[:, place] = mark
        position = end + 2
    if spans and position - 1 > length:
        raise ConfigError(
            f"{text_tokens} text tokens are too few around {len(spans)} images or sounds; use at least {2 * len(spans) + 1}"
        )
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def _token(config: Any, modality: str) -> int:
    for name in (f"{modality}_token_id", f"{modality}_token_index"):
        if isinstance(getattr(config, name, None), int):
            return getattr(config, name)
    raise _unknown(f"its config names no {modality} placeholder token")


def _images(model: nn.Module, batch: dict[str, torch.Tensor], count: int, image_size: int) -> int:
    """Add the inputs for `count` random images to `batch`, in place. Return the number of placeholder tokens per image."""
    vision = getattr(model.config, "vision_config", None)
    if vision is None:
        raise _unknown("it takes pixel_values but has no vision_config")
    takes = inspect.signature(model.forward).parameters
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    channels = first_field(vision, "num_channels", "in_channels", "in_chans", default=3)
    if "image_grid_thw" in takes:
        patch, merge = vision.patch_size, getattr(vision, "spatial_merge_size", 1)
        side = max(1, image_size // (patch * merge)) * merge
        depth = getattr(vision, "temporal_patch_size", 1)
        batch["image_grid_thw"] = torch.tensor([[1, side, side]] * count)
        batch["pixel_values"] = torch.randn(count * side * side, channels * depth * patch * patch, dtype=dtype)
        return side * side // merge**2
    if unusual := {"aspect_ratio_ids", "pixel_attention_mask", "spatial_shapes"} & set(takes):
        raise _unknown(f"it takes {', '.join(sorted(unusual))}")
    if getattr(vision, "model_type", "") == "pixtral":
        raise _unknown("it takes images of any size (image_sizes)")
    size = first_field(vision, "image_size", default=image_size)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    pinpoints = getattr(model.config, "image_grid_pinpoints", None)
    if pinpoints:
        tiles = 1 + _num_tiles((image_size, image_size), pinpoints, height)
        batch["image_sizes"] = torch.tensor([[image_size, image_size]] * count)
        batch["pixel_values"] = torch.randn(count, tiles, channels, height, width, dtype=dtype)
        # As lists: sizes are read by Python, and tensors have no values among fake ones.
        sizes = {"image_sizes": batch["image_sizes"].tolist()}
        return _num_features(model, "get_image_features", {"pixel_values": batch["pixel_values"]}, sizes) // count
    batch["pixel_values"] = torch.randn(count, channels, height, width, dtype=dtype)
    return _num_features(model, "get_image_features", {"pixel_values": batch["pixel_values"]}) // count


def _num_tiles(image_size: tuple[int, int], pinpoints: list[Any], tile: int) -> int:
    from transformers.image_processing_utils import select_best_resolution  # only needed for these models

    height, width = select_best_resolution(image_size, pinpoints)
    return -(-height // tile) * -(-width // tile)


def _audios(model: nn.Module, batch: dict[str, torch.Tensor], count: int) -> int:
    """Add the inputs for `count` random audio clips to `batch`, in place. Return the number of placeholder tokens per clip."""
    audio = getattr(model.config, "audio_config", None)
    if audio is None:
        raise _unknown("it takes input_features but has no audio_config")
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    frames = 2 * first_field(audio, "max_source_positions", default=1500)
    batch["input_features"] = torch.randn(count, audio.num_mel_bins, frames, dtype=dtype)
    mask = torch.ones(count, frames, dtype=torch.long)
    takes = inspect.signature(model.forward).parameters
    for name in ("feature_attention_mask", "input_features_mask"):
        if name in takes:
            batch[name] = mask
    towers = (getattr(owner, "audio_tower", None) for owner in (model, getattr(model, "model", None)))
    rules = (getattr(tower, "_get_feat_extract_output_lengths", None) for tower in towers)
    lengths = next((rule for rule in rules if rule is not None), None)
    if lengths is not None:  # of what the convolutions leave, and of what the tower returns
        return int(lengths(torch.tensor([frames]))[1])
    return _num_features(model, "get_audio_features", {k: v for k, v in batch.items() if "feature" in k}) // count


def _num_features(
    model: nn.Module, accessor: str, inputs: Mapping[str, torch.Tensor], values: Mapping[str, object] | None = None
) -> int:
    owner = model if hasattr(model, accessor) else getattr(model, "model", None)
    if owner is None or not hasattr(owner, accessor):
        raise _unknown(f"it has no {accessor}")
    mode = fake_mode_of(model)
    parameters = inspect.signature(getattr(owner, accessor)).parameters
    arguments = {name: value for name, value in inputs.items() if name in parameters}
    with mode or contextlib.nullcontext(), torch.no_grad():
        if mode is not None:
            arguments = {name: mode.from_tensor(value, static_shapes=True) for name, value in arguments.items()}
        try:
            output = getattr(owner, accessor)(**arguments, **(values or {}))
        except VALUES_NEEDED as error:
            raise _unknown(f"how many rows {accessor} makes depends on values of its inputs") from error
    features = getattr(output, "pooler_output", output)
    parts = features if isinstance(features, (list, tuple)) else [features]
    shapes = [shape_hint(part) for part in parts]
    return sum(shape[0] * shape[1] if len(shape) == 3 else shape[0] for shape in shapes)


def first_field(config: Any, *names: str, default: Any) -> Any:
    """Return the first of some fields of a config that is there and not None, else `default`."""
    return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), default)


def _unknown(reason: str) -> ConfigError:
    return ConfigError(
        f"no example batch can be made for this model: {reason}; pass a batch (on the command line, give MODEL as "
        "package.module:function returning (model, batch))"
    )
