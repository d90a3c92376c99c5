"""Two towers and a contrastive loss over the batch: CLIP, SigLIP, CLAP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PretrainedConfig

from zoo.family import Batch, Draw, Family, Size
from zoo.parts import TOWER, VISION, VOCABULARY, Pretrained, config, ones

_END = 2
_CAPTIONS: dict[str, Any] = {
    **TOWER,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 77,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": _END,
}


def _clip_config() -> PretrainedConfig:
    return config(
        "clip",
        vision_config=dict(VISION, projection_dim=32),
        text_config=dict(_CAPTIONS, projection_dim=32),
        projection_dim=32,
    )


def _siglip_config() -> PretrainedConfig:
    return config("siglip", vision_config=dict(VISION), text_config=dict(_CAPTIONS, projection_size=64))


def _captions(draw: Draw, size: Size) -> Batch:
    """Captions that end in the end token, from whose position CLIP reads its text embedding."""
    ids = draw.tokens(size.samples, size.length)
    ids[:, -1] = _END
    return {"input_ids": ids, "attention_mask": ones(size.samples, size.length), "return_loss": True}


def _picture_pairs(draw: Draw, size: Size) -> Batch:
    return {**_captions(draw, size), "pixel_values": draw.normal(size.samples, 3, 56, 56)}


def _clap_config() -> PretrainedConfig:
    return config(
        "clap",
        text_config=dict(
            TOWER,
            vocab_size=VOCABULARY,
            num_hidden_layers=2,
            max_position_embeddings=80,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            projection_dim=32,
        ),
        audio_config=dict(
            spec_size=64,
            num_mel_bins=16,
            patch_size=4,
            patch_stride=[4, 4],
            depths=[1, 1],
            num_attention_heads=[2, 4],
            patch_embeds_hidden_size=16,
            hidden_size=32,
            window_size=4,
            projection_dim=32,
            enable_fusion=False,
            drop_path_rate=0.0,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            projection_dropout_prob=0.0,
        ),
        projection_dim=32,
    )


def _clip_pairs(draw: Draw, size: Size) -> Batch:
    features = draw.normal(size.samples, 1, 250, 16)
    longer = torch.zeros(size.samples, 1, dtype=torch.bool)
    return {**_captions(draw, size), "input_features": features, "is_longer": longer}


def _family(
    name: str, class_name: str, make: Callable[[], PretrainedConfig], inputs: Callable[[Draw, Size], Batch]
) -> Family:
    return Family(
        name=name,
        model=Pretrained(class_name=class_name, config=make),
        inputs=inputs,
        first=Size(samples=3, length=16),
        second=Size(samples=4, length=20),
    )


FAMILIES = (
    _family("clip", "CLIPModel", _clip_config, _picture_pairs),
    _family("siglip", "SiglipModel", _siglip_config, _picture_pairs),
    _family("clap", "ClapModel", _clap_config, _clip_pairs),
)
