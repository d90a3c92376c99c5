"""Vision-language models that pack the patches of all pictures into one sequence and name each picture's grid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PretrainedConfig

from zoo.family import Batch, Draw, Family, Size
from zoo.parts import (
    IMAGE,
    PLACEHOLDERS,
    TEXT,
    TOWER,
    VIDEO,
    VISION_END,
    VISION_START,
    Pretrained,
    config,
    conversation,
    repeat_rows,
    text_config,
)

_PATCHES_A_SIDE = 8
_MERGE = 2
_TOKENS = (_PATCHES_A_SIDE // _MERGE) ** 2

MROPE: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 1e6,
    "mrope_section": [2, 3, 3],
    "type": "mrope",
}
VISION_TOKENS: dict[str, Any] = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
QWEN_TOWER: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "out_hidden_size": 64,
}
WINDOWED_TOWER: dict[str, Any] = {**QWEN_TOWER, "patch_size": 14, "fullatt_block_indexes": [1, 3], "window_size": 56}


def packed(patch: int, *, frames: int = 2, token_types: bool = True) -> Callable[[Draw, Size], Batch]:
    """Inputs with 8 x 8 patches of `frames` x `patch` x `patch` pixels a picture, merged 2 x 2 into 16 placeholders."""

    def inputs(draw: Draw, size: Size) -> Batch:
        segments = [(IMAGE, _TOKENS)] * size.media
        batch = conversation(draw, size, segments, before=VISION_START, after=VISION_END)
        pictures = size.samples * size.media
        if pictures:
            batch["pixel_values"] = draw.normal(pictures * _PATCHES_A_SIDE**2, 3 * frames * patch * patch)
            batch["image_grid_thw"] = repeat_rows([1, _PATCHES_A_SIDE, _PATCHES_A_SIDE], pictures)
        if token_types:
            batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).int()
        return batch

    return inputs


def packed_family(
    name: str,
    class_name: str,
    make: Callable[[], PretrainedConfig],
    inputs: Callable[[Draw, Size], Batch],
) -> Family:
    """A family of one picture of 16 placeholders a row, two in the second batch, none in text."""
    return Family(
        name=name,
        model=Pretrained(class_name=class_name, config=make),
        inputs=inputs,
        first=Size(samples=2, length=40, media=1),
        second=Size(samples=3, length=60, media=2),
        text_only=True,
    )


def _qwen2_vl_config() -> PretrainedConfig:
    return config(
        "qwen2_vl",
        vision_config=dict(depth=4, embed_dim=64, hidden_size=64, num_heads=4, patch_size=14),
        text_config=dict(TEXT, rope_parameters=MROPE),
        **VISION_TOKENS,
    )


def _qwen2_5_vl_config() -> PretrainedConfig:
    return config(
        "qwen2_5_vl", vision_config=WINDOWED_TOWER, text_config=dict(TEXT, rope_parameters=MROPE), **VISION_TOKENS
    )


def _qwen3_vl_config() -> PretrainedConfig:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    return config(
        "qwen3_vl",
        vision_config=dict(QWEN_TOWER, patch_size=16, num_position_embeddings=64, deepstack_visual_indexes=[1, 2]),
        text_config=dict(TEXT, head_dim=16, rope_parameters=rope),
        **VISION_TOKENS,
    )


def _qwen3_5_config() -> PretrainedConfig:
    rope = {
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 3, 3],
        "mrope_interleaved": True,
    }
    return config(
        "qwen3_5",
        vision_config=dict(QWEN_TOWER, patch_size=16, num_position_embeddings=64),
        text_config=dict(
            TEXT,
            head_dim=32,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            linear_num_key_heads=4,
            linear_num_value_heads=4,
            rope_parameters=rope,
        ),
        **VISION_TOKENS,
    )


def _glm4v_config() -> PretrainedConfig:
    return config(
        "glm4v",
        vision_config=dict(QWEN_TOWER, patch_size=14, image_size=112),
        text_config=dict(TEXT, rope_parameters={**MROPE, "partial_rotary_factor": 1.0}),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        image_start_token_id=VISION_START,
        image_end_token_id=VISION_END,
        video_start_token_id=995,
        video_end_token_id=996,
    )


def _video_llama_3_config() -> PretrainedConfig:
    return config(
        "video_llama_3",
        vision_config=dict(TOWER, patch_size=14),
        text_config=text_config("qwen2"),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )


def _video_llama_3_inputs(draw: Draw, size: Size) -> Batch:
    batch = packed(14, frames=1, token_types=False)(draw, size)
    if size.media:
        batch["image_merge_sizes"] = torch.full((size.samples * size.media,), _MERGE)
    return batch


def _kimi_k25_config() -> PretrainedConfig:
    return config(
        "kimi_k25",
        vision_config=dict(TOWER, patch_size=14, init_pos_emb_height=8, init_pos_emb_width=8),
        projection_hidden_size=64,
        text_config=text_config(),
        image_token_id=IMAGE,
    )


def _kimi_k25_inputs(draw: Draw, size: Size) -> Batch:
    batch = packed(14, frames=1, token_types=False)(draw, size)
    if size.media:
        batch["pixel_values"] = batch["pixel_values"].view(-1, 3, 14, 14)
    return batch


def pixtral_tower() -> PretrainedConfig:
    """A Pixtral tower over 8 x 8 patches."""
    return config("pixtral", **TOWER, head_dim=16, image_size=112, patch_size=14)


def _pixtral_config() -> PretrainedConfig:
    return config(
        "llava",
        vision_config=pixtral_tower(),
        text_config=text_config("mistral", head_dim=16, sliding_window=None),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        **PLACEHOLDERS,
    )


def _mistral3_config() -> PretrainedConfig:
    return config(
        "mistral3",
        vision_config=pixtral_tower(),
        text_config=text_config("mistral", head_dim=16, sliding_window=None),
        spatial_merge_size=_MERGE,
        vision_feature_layer=-1,
        **PLACEHOLDERS,
    )


def sized(tokens: int) -> Callable[[Draw, Size], Batch]:
    """Inputs whose pictures come whole, each with its height and width in pixels."""

    def inputs(draw: Draw, size: Size) -> Batch:
        batch = conversation(draw, size, [(IMAGE, tokens)] * size.media)
        pictures, side = size.samples * size.media, 14 * _PATCHES_A_SIDE
        if pictures:
            batch["pixel_values"] = draw.normal(pictures, 3, side, side)
            batch["image_sizes"] = repeat_rows([side, side], pictures)
        return batch

    return inputs


FAMILIES = (
    packed_family("qwen2_vl", "Qwen2VLForConditionalGeneration", _qwen2_vl_config, packed(14)),
    packed_family("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", _qwen2_5_vl_config, packed(14)),
    packed_family("qwen3_vl", "Qwen3VLForConditionalGeneration", _qwen3_vl_config, packed(16)),
    packed_family("qwen3_5", "Qwen3_5ForConditionalGeneration", _qwen3_5_config, packed(16)),
    packed_family("glm4v", "Glm4vForConditionalGeneration", _glm4v_config, packed(14)),
    packed_family("video_llama_3", "VideoLlama3ForConditionalGeneration", _video_llama_3_config, _video_llama_3_inputs),
    packed_family("kimi_k25", "Kimi_K25ForConditionalGeneration", _kimi_k25_config, _kimi_k25_inputs),
    packed_family("mistral3", "Mistral3ForConditionalGeneration", _mistral3_config, sized(_TOKENS)),
    Family(
        name="pixtral",
        model=Pretrained(class_name="LlavaForConditionalGeneration", config=_pixtral_config),
        inputs=sized(_PATCHES_A_SIDE**2),
        first=Size(samples=2, length=80, media=1),
        second=Size(samples=3, length=150, media=2),
        text_only=True,
    ),
)
