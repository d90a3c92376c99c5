"""Multimodal models that mix kinds of layers: windows, short convolutions, state spaces, experts; some of them hear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PretrainedConfig

from zoo.family import Batch, Draw, Family, Size
from zoo.parts import (
    AUDIO,
    IMAGE,
    TEXT,
    TOWER,
    VIDEO,
    VISION_END,
    VISION_START,
    VOCABULARY,
    Pretrained,
    config,
    conversation,
    ones,
    repeat_rows,
    text_config,
)
from zoo.readers.sparse import EXPERTS, grid_inputs

_MUSE_TOWER: dict[str, Any] = {
    **TOWER,
    "patch_size": 14,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
    "layer_types": ["window_attention", "full_attention"] * 2,
}
_MUSE_TEXT: dict[str, Any] = {
    **TEXT,
    "head_dim": 16,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_MUSE: dict[str, Any] = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "out_hidden_size": 256,
    "projector_hidden_size": 64,
}

NEMOTRON_H: dict[str, Any] = {
    "hidden_size": 64,
    "vocab_size": VOCABULARY,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "ssm_state_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "chunk_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
}
"""A state-space layer, a mixture of experts, an attention layer and a feed-forward layer."""

QUIET: dict[str, Any] = {
    "dropout": 0.0,
    "layerdrop": 0.0,
    "activation_dropout": 0.0,
    "attention_dropout": 0.0,
}
"""An audio encoder without anything random."""


def _lfm3_vl_config() -> PretrainedConfig:
    return config(
        "lfm3_vl",
        vision_config=dict(TOWER, num_key_value_heads=2),
        text_config=text_config(
            "lfm3",
            head_dim=16,
            conv_L_cache=3,
            sliding_window=16,
            layer_types=["conv", "sliding_attention", "full_attention", "conv"],
        ),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        projector_hidden_size=64,
    )


def _muse_glimmer_config() -> PretrainedConfig:
    return config("muse_glimmer", vision_config=dict(_MUSE_TOWER), text_config=dict(_MUSE_TEXT), **_MUSE)


def _muse_spark_config() -> PretrainedConfig:
    return config(
        "muse_spark",
        vision_config=dict(_MUSE_TOWER),
        audio_config=dict(
            patch_sizes=[4, 5], hidden_sizes=[16, 32], depths=[1, 1], num_hidden_layers=2, out_hidden_size=64
        ),
        text_config=dict(
            _MUSE_TEXT,
            moe_hidden_size=32,
            moe_intermediate_size=32,
            num_local_experts=4,
            num_experts_per_tok=2,
            mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        ),
        audio_token_id=AUDIO,
        **_MUSE,
    )


def _muse_spark_inputs(draw: Draw, size: Size) -> Batch:
    """`media` pairs of a picture (16 tokens) and a waveform of 200 samples (10 tokens) a row."""
    batch = conversation(draw, size, [(IMAGE, 16), (AUDIO, 10)] * size.media)
    media = size.samples * size.media
    if media:
        batch["pixel_values"] = draw.normal(media * 64, 3 * 2 * 14 * 14)
        batch["image_grid_thw"] = repeat_rows([1, 8, 8], media)
        batch["input_values"] = draw.normal(media, 200)
        batch["input_values_mask"] = ones(media, 200)
    return batch


def _nemotron_h_omni_config() -> PretrainedConfig:
    return config(
        "nemotron_h_omni",
        vision_config=config(
            "radio",
            hidden_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            mlp_ratio=2.0,
            image_size=128,
            max_img_size=128,
            video_temporal_patch_size=2,
        ),
        audio_config=dict(
            TOWER,
            **QUIET,
            num_mel_bins=16,
            subsampling_conv_channels=16,
            conv_kernel_size=5,
            convolution_bias=False,  # a bias before a batch norm has only rounding for a gradient
            max_position_embeddings=64,
            projection_hidden_size=64,
            projection_bias=False,
        ),
        text_config=config("nemotron_h", **NEMOTRON_H),
        vision_hidden_size=64,
        projector_hidden_size=64,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        audio_token_id=AUDIO,
    )


def _nemotron_h_omni_inputs(draw: Draw, size: Size) -> Batch:
    """`media` pairs of a picture (16 tokens) and a clip of 64 frames, the last of them padding (8 tokens), a row."""
    batch = conversation(draw, size, [(IMAGE, 16), (AUDIO, 8)] * size.media)
    media = size.samples * size.media
    if media:
        batch["pixel_values"] = draw.normal(media * 64, 3 * 16 * 16)
        batch["image_grid_hw"] = repeat_rows([8, 8], media)
        batch["input_features"] = draw.normal(media, 64, 16)
        batch["input_features_mask"] = torch.arange(64).repeat(media, 1) < 63
    return batch


def _step3p7_config() -> PretrainedConfig:
    return config(
        "step3p7",
        vision_config=dict(TOWER, image_size=112, max_position_embeddings=64, mlp_ratio=2.0),
        text_config=dict(
            TEXT,
            **EXPERTS,
            head_dim=16,
            share_expert_dim=32,
            sliding_window=16,
            layer_types=["full_attention", "sliding_attention"] * 2,
            mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        ),
        image_token_id=IMAGE,
    )


def _step3p7_inputs(draw: Draw, size: Size) -> Batch:
    """Every picture has two local views (1 token each) before its overview (4 tokens)."""
    batch = conversation(draw, size, [(IMAGE, 6)] * size.media)
    pictures = size.samples * size.media
    if pictures:
        batch["pixel_values"] = draw.normal(pictures, 3, 112, 112)
        batch["pixel_values_local"] = draw.normal(2 * pictures, 3, 56, 56)
        batch["num_local_patches"] = torch.full((pictures,), 2)
    return batch


def _family(
    name: str,
    class_name: str,
    make: Callable[[], PretrainedConfig],
    inputs: Callable[[Draw, Size], Batch],
    lengths: tuple[int, int],
) -> Family:
    return Family(
        name=name,
        model=Pretrained(class_name=class_name, config=make),
        inputs=inputs,
        first=Size(samples=2, length=lengths[0], media=1),
        second=Size(samples=3, length=lengths[1], media=2),
        text_only=True,
    )


FAMILIES = (
    _family(
        "lfm3_vl",
        "Lfm3VlForConditionalGeneration",
        _lfm3_vl_config,
        grid_inputs(16, 3 * 2 * 16 * 16, before=VISION_START),
        (40, 60),
    ),
    _family(
        "muse_glimmer",
        "MuseGlimmerForConditionalGeneration",
        _muse_glimmer_config,
        grid_inputs(16, 3 * 2 * 14 * 14),
        (40, 60),
    ),
    _family("muse_spark", "MuseSparkForConditionalGeneration", _muse_spark_config, _muse_spark_inputs, (48, 80)),
    _family(
        "nemotron_h_omni", "NemotronH_Omni_Reasoning_V3", _nemotron_h_omni_config, _nemotron_h_omni_inputs, (48, 80)
    ),
    _family("step3p7", "Step3p7ForConditionalGeneration", _step3p7_config, _step3p7_inputs, (40, 60)),
)
