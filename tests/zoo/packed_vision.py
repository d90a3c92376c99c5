"""More vision-language models that pack the patches of all pictures into one sequence, as Qwen2-VL does."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from zoo.family import Batch, Draw, Size
from zoo.parts import (
    IMAGE,
    TEXT,
    TOWER,
    VIDEO,
    VISION_END,
    VISION_START,
    config,
    text_config,
)
from zoo.qwen_like import (
    MROPE,
    QWEN_TOWER,
    VISION_TOKENS,
    WINDOWED_TOWER,
    packed,
    packed_family,
    pixtral_tower,
    sized,
)

GLM_TOKENS: dict[str, Any] = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "image_start_token_id": VISION_START,
    "image_end_token_id": VISION_END,
    "video_start_token_id": 995,
    "video_end_token_id": 996,
}
"""Special tokens of the GLM and ERNIE families."""

INTERLEAVED_ROPE: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 1e6,
    "mrope_section": [4, 2, 2],
    "mrope_interleaved": True,
}
DEEPSTACK_TOWER: dict[str, Any] = {
    **QWEN_TOWER,
    "patch_size": 16,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [1, 2],
}
"""Fields of a tower whose middle layers also feed the first layers of the language model."""


def _glm46v_config() -> PretrainedConfig:
    return config(
        "glm46v",
        vision_config=config("glm4v_vision", **QWEN_TOWER, patch_size=14, image_size=112),
        text_config=config("glm4v_text", **TEXT, rope_parameters={**MROPE, "partial_rotary_factor": 1.0}),
        **GLM_TOKENS,
    )


def _glm_ocr_config() -> PretrainedConfig:
    return config(
        "glm_ocr",
        vision_config=dict(QWEN_TOWER, patch_size=14, image_size=112),
        text_config=dict(TEXT, rope_parameters={**MROPE, "partial_rotary_factor": 1.0}),
        **GLM_TOKENS,
    )


def _paddleocr_vl_config() -> PretrainedConfig:
    return config(
        "paddleocr_vl",
        vision_config=dict(TOWER, patch_size=14, image_size=112),
        text_config=dict(TEXT, head_dim=16, rope_parameters=MROPE),
        **VISION_TOKENS,
    )


def _paddleocr_vl_inputs(draw: Draw, size: Size) -> Batch:
    batch = packed(14, frames=1)(draw, size)
    if size.media:
        batch["pixel_values"] = batch["pixel_values"].view(-1, 3, 14, 14)
    return batch


def _lighton_ocr_config() -> PretrainedConfig:
    return config(
        "lighton_ocr",
        vision_config=pixtral_tower(),
        text_config=text_config("qwen3", head_dim=16),
        image_token_id=IMAGE,
    )


def _cohere_compass_config() -> PretrainedConfig:
    return config(
        "cohere_compass",
        vision_config=dict(DEEPSTACK_TOWER),
        text_config=dict(
            TEXT,
            sliding_window=16,
            layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
            rope_parameters={"sliding_attention": INTERLEAVED_ROPE, "full_attention": None},
        ),
        **VISION_TOKENS,
    )


def _cosmos3_edge_config() -> PretrainedConfig:
    return config(
        "cosmos3_edge",
        vision_config=dict(TOWER, patch_size=16, num_patches=64),
        text_config=dict(
            TEXT,
            head_dim=16,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        ),
        projector_hidden_size=128,
        **VISION_TOKENS,
    )


def _cosmos3_omni_config() -> PretrainedConfig:
    return config(
        "cosmos3_omni",
        vision_config=dict(DEEPSTACK_TOWER),
        text_config=config("qwen3_vl_text", **TEXT, head_dim=16, rope_parameters=INTERLEAVED_ROPE),
        **VISION_TOKENS,
    )


def _exaone4_5_config() -> PretrainedConfig:
    return config(
        "exaone4_5",
        vision_config=dict(WINDOWED_TOWER, num_key_value_heads=2),
        text_config=text_config("exaone4", sliding_window=16),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )


FAMILIES = (
    packed_family("glm46v", "Glm46VForConditionalGeneration", _glm46v_config, packed(14)),
    packed_family("glm_ocr", "GlmOcrForConditionalGeneration", _glm_ocr_config, packed(14)),
    packed_family("paddleocr_vl", "PaddleOCRVLForConditionalGeneration", _paddleocr_vl_config, _paddleocr_vl_inputs),
    packed_family("lighton_ocr", "LightOnOcrForConditionalGeneration", _lighton_ocr_config, sized(16)),
    packed_family("cohere_compass", "CohereCompassForConditionalGeneration", _cohere_compass_config, packed(16)),
    packed_family("cosmos3_edge", "Cosmos3EdgeForConditionalGeneration", _cosmos3_edge_config, packed(16, frames=1)),
    packed_family("cosmos3_omni", "Cosmos3OmniForConditionalGeneration", _cosmos3_omni_config, packed(16)),
    packed_family("exaone4_5", "Exaone4_5_ForConditionalGeneration", _exaone4_5_config, packed(14, token_types=False)),
)
