"""Vision-language models whose language model routes tokens to experts."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig

from zoo.family import Batch, Draw, Family, Size
from zoo.llava_like import one_block
from zoo.packed_vision import DEEPSTACK_TOWER, GLM_TOKENS, INTERLEAVED_ROPE
from zoo.parts import (
    IMAGE,
    TEXT,
    TOWER,
    VISION,
    Pretrained,
    config,
    conversation,
    ones,
)
from zoo.qwen_like import MROPE, QWEN_TOWER, VISION_TOKENS, packed, packed_family

EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _aria_config() -> PretrainedConfig:
    return config(
        "aria",
        vision_config=config("idefics3_vision", **VISION),
        text_config=dict(TEXT, moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
        projector_patch_to_query_dict={16: 8},
        image_token_index=IMAGE,
    )


def _aria_inputs(draw: Draw, size: Size) -> Batch:
    batch = one_block(8)(draw, size)
    if size.media:
        batch["pixel_mask"] = ones(size.samples * size.media, 56, 56)
    return batch


def _qwen3_vl_moe_config() -> PretrainedConfig:
    return config(
        "qwen3_vl_moe",
        vision_config=dict(DEEPSTACK_TOWER),
        text_config=dict(TEXT, **EXPERTS, head_dim=16, mlp_only_layers=[0], rope_parameters=INTERLEAVED_ROPE),
        **VISION_TOKENS,
    )


def _qwen3_vl_moe_balanced_config() -> PretrainedConfig:
    """With the loss that keeps the experts equally busy."""
    made = _qwen3_vl_moe_config()
    made.text_config.output_router_logits = True
    made.text_config.router_aux_loss_coef = 0.1
    return made


def _qwen3_5_moe_config() -> PretrainedConfig:
    return config(
        "qwen3_5_moe",
        vision_config=dict(QWEN_TOWER, patch_size=16, num_position_embeddings=64),
        text_config=dict(
            TEXT,
            **EXPERTS,
            shared_expert_intermediate_size=32,
            head_dim=32,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            rope_parameters={**INTERLEAVED_ROPE, "partial_rotary_factor": 0.5},
        ),
        **VISION_TOKENS,
    )


def _glm4v_moe_config() -> PretrainedConfig:
    return config(
        "glm4v_moe",
        vision_config=dict(QWEN_TOWER, patch_size=14, image_size=112),
        text_config=dict(
            TEXT,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            rope_parameters={**MROPE, "partial_rotary_factor": 1.0},
        ),
        **GLM_TOKENS,
    )


def _ernie4_5_vl_moe_config() -> PretrainedConfig:
    return config(
        "ernie4_5_vl_moe",
        vision_config=dict(depth=4, hidden_size=64, intermediate_size=128, num_heads=4, patch_size=14),
        text_config=dict(
            TEXT,
            moe_num_experts=4,
            moe_k=2,
            moe_num_shared_experts=1,
            moe_intermediate_size=[32, 16],
            rope_parameters={"rope_type": "default", "rope_theta": 5e5, "mrope_section": [3, 3, 2]},
        ),
        **GLM_TOKENS,
    )


def _ernie4_5_vl_moe_inputs(draw: Draw, size: Size) -> Batch:
    """Tokens of pictures, and the marks around them, have experts of their own."""
    batch = packed(14, frames=1)(draw, size)
    batch["moe_mm_token_type_ids"] = (batch["input_ids"] >= IMAGE).int()
    return batch


def _glm5_next_config() -> PretrainedConfig:
    """Linear attention, then latent attention over the tokens an indexer picks; four residual streams."""
    return config(
        "glm5_next",
        vision_config=dict(QWEN_TOWER, patch_size=14, image_size=112, projection_intermediate_size=128),
        text_config=dict(
            TEXT,
            num_key_value_heads=4,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
            kv_lora_rank=16,
            q_lora_rank=32,
            v_head_dim=16,
            qk_nope_head_dim=16,
            index_topk=16,
            index_kpool=4,
            index_head_dim=16,
            index_n_heads=2,
            linear_head_dim=16,
            linear_num_heads=4,
            hc_sinkhorn_iters=3,
        ),
        **GLM_TOKENS,
    )


def _deepseek_ocr2_config() -> PretrainedConfig:
    return config(
        "deepseek_ocr2",
        vision_config=dict(
            sam_config=dict(
                hidden_size=32,
                output_channels=16,
                downsample_channels=[32, 64],
                num_hidden_layers=2,
                num_attention_heads=2,
                image_size=64,
                patch_size=4,
                window_size=4,
                global_attn_indexes=[1],
                mlp_dim=64,
            ),
            encoder_config=dict(TOWER, num_key_value_heads=2),
        ),
        text_config=dict(
            TEXT,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        ),
        image_token_id=IMAGE,
    )


def _deepseek_ocr2_inputs(draw: Draw, size: Size) -> Batch:
    """Pictures as a whole and in two tiles, 144 queries each, and a separator."""
    batch = conversation(draw, size, [(IMAGE, 3 * 144 + 1)] * size.media)
    pictures = size.samples * size.media
    if pictures:
        batch["pixel_values"] = draw.normal(pictures, 3, 64, 64)
        batch["pixel_values_local"] = draw.normal(pictures * 2, 3, 48, 48)
        batch["num_local_patches"] = torch.full((pictures,), 2)
    return batch


FAMILIES = (
    Family(
        name="aria",
        model=Pretrained(class_name="AriaForConditionalGeneration", config=_aria_config),
        inputs=_aria_inputs,
        first=Size(samples=2, length=40, media=1),
        second=Size(samples=3, length=52, media=2),
        text_only=True,
    ),
    packed_family("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", _qwen3_vl_moe_config, packed(16)),
    packed_family(
        "qwen3_vl_moe_balanced", "Qwen3VLMoeForConditionalGeneration", _qwen3_vl_moe_balanced_config, packed(16)
    ),
    packed_family("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", _qwen3_5_moe_config, packed(16)),
    packed_family("glm4v_moe", "Glm4vMoeForConditionalGeneration", _glm4v_moe_config, packed(14)),
    packed_family(
        "ernie4_5_vl_moe",
        "Ernie4_5_VLMoeForConditionalGeneration",
        _ernie4_5_vl_moe_config,
        _ernie4_5_vl_moe_inputs,
    ),
    packed_family("glm5_next", "Glm5NextForConditionalGeneration", _glm5_next_config, packed(14)),
    Family(
        name="deepseek_ocr2",
        model=Pretrained(class_name="DeepseekOcr2ForConditionalGeneration", config=_deepseek_ocr2_config),
        inputs=_deepseek_ocr2_inputs,
        first=Size(samples=2, length=450),
        second=Size(samples=3, length=460),
        text_only=True,
    ),
)
