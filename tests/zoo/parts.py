"""Pieces the families share: special tokens, tiny sub-configurations, conversations with placeholders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from zoo.family import IGNORE, Batch, Draw, Size

VOCABULARY = 1000
IMAGE, VIDEO, AUDIO = 990, 991, 992
VISION_START, VISION_END, AUDIO_START, AUDIO_END = 993, 994, 995, 996
_FIRST_SPECIAL = 990

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Fields of a four-layer language model."""

TOWER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
"""Fields of a four-layer encoder."""

VISION: dict[str, Any] = {**TOWER, "image_size": 56, "patch_size": 14}
"""Fields of a four-layer vision tower over 4 x 4 patches."""

BERT: dict[str, Any] = {
    **TOWER,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 80,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
"""Fields of a four-layer BERT without dropout."""

PLACEHOLDERS: dict[str, Any] = {"image_token_id": IMAGE, "image_token_index": IMAGE}
"""The image placeholder under both names transformers gives it."""

QFORMER: dict[str, Any] = {
    **TOWER,
    "num_hidden_layers": 2,
    "encoder_hidden_size": 64,
    "cross_attention_frequency": 2,
    "vocab_size": VOCABULARY,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Pretrained:
    """A transformers model made from a configuration, with random weights."""

    class_name: str
    config: Callable[[], PretrainedConfig]

    def __call__(self) -> nn.Module:
        return getattr(transformers, self.class_name)(self.config())


def config(model_type: str, **fields: Any) -> PretrainedConfig:
    """The configuration class registered for `model_type`, with `fields`."""
    return CONFIG_MAPPING[model_type](**fields)


def text_config(model_type: str = "llama", **fields: Any) -> PretrainedConfig:
    """A four-layer language model of `model_type`."""
    return config(model_type, **{**TEXT, **fields})


def clip_tower() -> PretrainedConfig:
    """A CLIP vision tower."""
    return config("clip_vision_model", **VISION, projection_dim=64)


def siglip_tower(**fields: Any) -> PretrainedConfig:
    """A SigLIP vision tower without its pooling head."""
    return config("siglip_vision_model", **VISION, vision_use_head=False, **fields)


def opt_config() -> PretrainedConfig:
    """A four-layer OPT."""
    return config(
        "opt",
        hidden_size=64,
        word_embed_proj_dim=64,
        ffn_dim=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def conversation(
    draw: Draw,
    size: Size,
    segments: Sequence[tuple[int, int]],
    *,
    start: int = 3,
    before: int | None = None,
    after: int | None = None,
) -> Batch:
    """Text with runs of placeholders, and its labels.

    Args:
        draw: Source of text tokens.
        size: Rows and tokens a row.
        segments: (placeholder, count) of every run, in order; the same for every row, two or three text tokens apart.
        start: Position of the first run.
        before: Token put just before every run.
        after: Token put just after every run.

    Returns:
        input_ids, attention_mask and labels [samples, length], int64. Special tokens carry no loss.
    """
    ids = draw.tokens(size.samples, size.length)
    position = start
    for placeholder, count in segments:
        if before is not None:
            ids[:, position - 1] = before
        ids[:, position : position + count] = placeholder
        if after is not None:
            ids[:, position + count] = after
        position += count + 3
    if position > size.length:
        raise ValueError(f"segments end at {position}, beyond the {size.length} tokens of a row")
    labels = ids.masked_fill(ids >= _FIRST_SPECIAL, IGNORE)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def repeat_rows(row: Sequence[int], rows: int) -> Tensor:
    """[rows, len(row)] of the same integers."""
    return torch.tensor([list(row)] * rows)


def ones(*shape: int) -> Tensor:
    """An all-true mask as int64."""
    return torch.ones(*shape, dtype=torch.long)
