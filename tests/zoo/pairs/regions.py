"""Models that find things in pictures: a mask for a phrase (CLIPSeg), boxes with classes or with phrases (DETR)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from zoo.family import Batch, Draw, Family, Size
from zoo.pairs.fused import classes, text
from zoo.parts import BERT, TOWER, VISION, VOCABULARY, Pretrained, config, ones

_PIXELS = 64
_CLASSES = 3


def _clipseg_config() -> PretrainedConfig:
    return config(
        "clipseg",
        vision_config=dict(VISION),
        text_config=dict(
            TOWER, vocab_size=VOCABULARY, max_position_embeddings=77, bos_token_id=0, pad_token_id=1, eos_token_id=2
        ),
        projection_dim=32,
        extract_layers=[1, 2, 3],
        reduce_dim=16,
        decoder_intermediate_size=32,
    )


def _clipseg_inputs(draw: Draw, size: Size) -> Batch:
    """A picture, a phrase that ends in the end token, and the phrase's mask in the picture."""
    batch = text(draw, size)
    batch["input_ids"][:, -1] = 2
    batch["pixel_values"] = draw.normal(size.samples, 3, 56, 56)
    batch["labels"] = (draw.normal(size.samples, 56, 56) > 0).float()
    return batch


def _boxes(draw: Draw, samples: int) -> list[dict[str, Tensor]]:
    """Objects of each picture: class, and center, width and height in shares of the picture. One and two in turn."""
    found: list[dict[str, Tensor]] = []
    for row in range(samples):
        count = 1 + row % 2
        where = draw.normal(count, 4).sigmoid()
        boxes = torch.cat([0.25 + where[:, :2] / 2, 0.1 + where[:, 2:] / 3], dim=-1)
        found.append({"class_labels": classes(draw, 1, count, _CLASSES)[0], "boxes": boxes})
    return found


def _pictures(draw: Draw, size: Size) -> Batch:
    return {
        "pixel_values": draw.normal(size.samples, 3, _PIXELS, _PIXELS),
        "pixel_mask": ones(size.samples, _PIXELS, _PIXELS),
        "labels": _boxes(draw, size.samples),
    }


_DETECTOR: dict[str, Any] = {
    "d_model": 64,
    "num_queries": 10,
    "encoder_layers": 2,
    "encoder_ffn_dim": 128,
    "encoder_attention_heads": 4,
    "decoder_layers": 2,
    "decoder_ffn_dim": 128,
    "decoder_attention_heads": 4,
    "dropout": 0.0,
}


def _detr_config() -> PretrainedConfig:
    return config(
        "detr",
        **_DETECTOR,
        use_timm_backbone=False,
        backbone_config=config(
            "resnet",
            embedding_size=16,
            hidden_sizes=[16, 16, 32, 32],
            depths=[1, 1, 1, 1],
            layer_type="basic",
            out_features=["stage4"],
        ),
        num_labels=_CLASSES,
    )


_FULL_STOP, _START, _END = 1012, 101, 102


def _grounding_config(model_type: str) -> Callable[[], PretrainedConfig]:
    def make() -> PretrainedConfig:
        return config(
            model_type,
            **_DETECTOR,
            backbone_config=config(
                "swin",
                image_size=_PIXELS,
                embed_dim=16,
                depths=[1, 1, 1],
                num_heads=[2, 2, 4],
                window_size=4,
                out_indices=[2, 3],
                drop_path_rate=0.0,
            ),
            text_config=config("bert", **{**BERT, "vocab_size": 1100}),
            num_feature_levels=3,
            encoder_n_points=2,
            decoder_n_points=2,
            max_text_len=32,
            fusion_droppath=0.0,
        )

    return make


def _grounding_inputs(draw: Draw, size: Size) -> Batch:
    """A picture, the phrases to find, each of up to three tokens and a full stop, and their boxes."""
    batch = {**text(draw, size), **_pictures(draw, size)}
    ids = batch["input_ids"].clamp(min=_END + 1)
    ids[:, 4::4] = _FULL_STOP
    ids[:, 0], ids[:, -2], ids[:, -1] = _START, _FULL_STOP, _END
    return {**batch, "input_ids": ids, "token_type_ids": torch.zeros_like(ids)}


def _family(
    name: str, class_name: str, make: Callable[[], PretrainedConfig], inputs: Callable[[Draw, Size], Batch]
) -> Family:
    return Family(
        name=name,
        model=Pretrained(class_name=class_name, config=make),
        inputs=inputs,
        first=Size(samples=2, length=16),
        second=Size(samples=3, length=20),
    )


FAMILIES = (
    _family("clipseg", "CLIPSegForImageSegmentation", _clipseg_config, _clipseg_inputs),
    _family("detr", "DetrForObjectDetection", _detr_config, _pictures),
    _family(
        "grounding_dino",
        "GroundingDinoForObjectDetection",
        _grounding_config("grounding-dino"),
        _grounding_inputs,
    ),
    _family(
        "mm_grounding_dino",
        "MMGroundingDinoForObjectDetection",
        _grounding_config("mm-grounding-dino"),
        _grounding_inputs,
    ),
)
