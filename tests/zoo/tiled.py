"""Vision-language models that cut pictures into tiles, carry a picture dim, or mask patches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PretrainedConfig
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from zoo.family import Batch, Draw, Family, Size
from zoo.llava_like import one_block
from zoo.parts import (
    IMAGE,
    PLACEHOLDERS,
    TEXT,
    TOWER,
    VIDEO,
    VISION,
    VISION_END,
    VISION_START,
    VOCABULARY,
    Pretrained,
    clip_tower,
    config,
    conversation,
    ones,
    repeat_rows,
    siglip_tower,
    text_config,
)

_GRID_POINTS = [[56, 112], [112, 56], [112, 112]]

# Llama4ForConditionalGeneration reads `image_outputs` of its language model's output, whose class lacks it
# (transformers 5.24, modeling_llama4.py): without this line it cannot be trained with labels.
MoeCausalLMOutputWithPast.image_outputs = None  # pyright: ignore[reportAttributeAccessIssue]


def _llava_next_config() -> PretrainedConfig:
    return config(
        "llava_next",
        vision_config=clip_tower(),
        text_config=text_config(),
        image_seq_length=16,
        image_grid_pinpoints=_GRID_POINTS,
        **PLACEHOLDERS,
    )


def _llava_onevision_config() -> PretrainedConfig:
    return config(
        "llava_onevision",
        vision_config=siglip_tower(),
        text_config=text_config("qwen2"),
        video_token_id=VIDEO,
        video_token_index=VIDEO,
        image_grid_pinpoints=_GRID_POINTS,
        vision_feature_layer=-1,
        **PLACEHOLDERS,
    )


def _anyres_inputs(draw: Draw, size: Size) -> Batch:
    """A 112 x 112 picture a row: a thumbnail (16 tokens), 2 x 2 tiles (64) and 8 newline tokens."""
    batch = conversation(draw, size, [(IMAGE, 88)] * size.media)
    if size.media:
        batch["pixel_values"] = draw.normal(size.samples * size.media, 5, 3, 56, 56)
        batch["image_sizes"] = repeat_rows([112, 112], size.samples * size.media)
    return batch


def _anyres(name: str, class_name: str, make: Callable[[], PretrainedConfig]) -> Family:
    return Family(
        name=name,
        model=Pretrained(class_name=class_name, config=make),
        inputs=_anyres_inputs,
        first=Size(samples=2, length=100),
        second=Size(samples=3, length=110),
        text_only=True,
    )


def _idefics_config(model_type: str) -> Callable[[], PretrainedConfig]:
    def make() -> PretrainedConfig:
        return config(
            model_type, vision_config=dict(VISION), text_config=text_config(), image_token_id=IMAGE, scale_factor=2
        )

    return make


def _idefics2_config() -> PretrainedConfig:
    return config(
        "idefics2",
        vision_config=dict(VISION),
        text_config=text_config("mistral", sliding_window=None),
        image_token_id=IMAGE,
        perceiver_config=dict(
            hidden_size=64,
            resampler_n_latents=8,
            resampler_depth=2,
            resampler_n_heads=4,
            resampler_head_dim=16,
            num_key_value_heads=2,
        ),
    )


def _per_sample_pictures(tokens: int) -> Callable[[Draw, Size], Batch]:
    """Inputs with a picture dim, [samples, pictures, 3, 56, 56], and a mask over pixels."""

    def inputs(draw: Draw, size: Size) -> Batch:
        batch = conversation(draw, size, [(IMAGE, tokens)] * size.media)
        if size.media:
            batch["pixel_values"] = draw.normal(size.samples, size.media, 3, 56, 56)
            batch["pixel_attention_mask"] = ones(size.samples, size.media, 56, 56)
        return batch

    return inputs


def _idefics(name: str, class_name: str, make: Callable[[], PretrainedConfig], tokens: int) -> Family:
    return Family(
        name=name,
        model=Pretrained(class_name=class_name, config=make),
        inputs=_per_sample_pictures(tokens),
        first=Size(samples=2, length=40, media=2),
        second=Size(samples=3, length=60, media=3),
        text_only=True,
        aligned_media=True,
    )


def _gemma4_config() -> PretrainedConfig:
    return config(
        "gemma4",
        vision_config=dict(
            TOWER,
            num_key_value_heads=4,
            head_dim=16,
            global_head_dim=16,
            patch_size=16,
            position_embedding_size=64,
            pooling_kernel_size=2,
            default_output_length=16,
        ),
        text_config=dict(
            TEXT,
            num_hidden_layers=6,
            head_dim=16,
            global_head_dim=16,
            sliding_window=16,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=VOCABULARY,
        ),
        audio_config=None,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        audio_token_id=992,
        boi_token_id=VISION_START,
        eoi_token_id=VISION_END,
    )


def _gemma4_inputs(draw: Draw, size: Size) -> Batch:
    """8 x 8 patches a picture with their (column, row), pooled 2 x 2 into 16 placeholders."""
    batch = conversation(draw, size, [(IMAGE, 16)] * size.media, before=VISION_START, after=VISION_END)
    batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).long()
    pictures, side = size.samples * size.media, torch.arange(8)
    if pictures:
        columns_rows = torch.stack(torch.meshgrid(side, side, indexing="xy"), dim=-1).reshape(1, 64, 2)
        batch["pixel_values"] = draw.normal(pictures, 64, 3 * 16 * 16)
        batch["image_position_ids"] = columns_rows.repeat(pictures, 1, 1)
    return batch


def _mllama_config() -> PretrainedConfig:
    return config(
        "mllama",
        vision_config=dict(
            VISION,
            num_global_layers=2,
            attention_heads=4,
            max_num_tiles=4,
            intermediate_layers_indices=[1, 2],
            vision_output_dim=64 * 3,
            supported_aspect_ratios=[[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
        ),
        text_config=dict(TEXT, cross_attention_layers=[1, 3]),
        **PLACEHOLDERS,
    )


def _mllama_inputs(draw: Draw, size: Size) -> Batch:
    """Pictures of 2 x 2 tiles, read by every token through cross-attention."""
    batch = conversation(draw, size, [(IMAGE, 1)] * size.media)
    samples, media = size.samples, size.media
    if media:
        batch["pixel_values"] = draw.normal(samples, media, 4, 3, 56, 56)
        batch["aspect_ratio_ids"] = torch.full((samples, media), 6)
        batch["aspect_ratio_mask"] = ones(samples, media, 4)
        batch["cross_attention_mask"] = ones(samples, size.length, media, 4)
    return batch


def _llama4_config() -> PretrainedConfig:
    return config(
        "llama4",
        vision_config=dict(
            VISION,
            intermediate_size=256,
            vision_output_dim=64,
            projector_input_dim=64,
            projector_output_dim=64,
            pixel_shuffle_ratio=0.5,
        ),
        text_config=dict(
            TEXT,
            head_dim=16,
            intermediate_size_mlp=128,
            num_local_experts=4,
            num_experts_per_tok=1,
            attention_chunk_size=16,
        ),
        boi_token_index=VISION_START,
        eoi_token_index=VISION_END,
        **PLACEHOLDERS,
    )


def _lfm2_vl_config() -> PretrainedConfig:
    return config(
        "lfm2_vl",
        vision_config=config("siglip2_vision_model", **TOWER, patch_size=14, num_patches=64, vision_use_head=False),
        text_config=text_config("lfm2", layer_types=["conv", "full_attention"] * 2, full_attn_idxs=None),
        image_token_id=IMAGE,
        projector_hidden_size=64,
        downsample_factor=2,
    )


def _lfm2_vl_inputs(draw: Draw, size: Size) -> Batch:
    batch = conversation(draw, size, [(IMAGE, 16)] * size.media)
    pictures = size.samples * size.media
    if pictures:
        batch["pixel_values"] = draw.normal(pictures, 64, 3 * 14 * 14)
        batch["spatial_shapes"] = repeat_rows([8, 8], pictures)
        batch["pixel_attention_mask"] = ones(pictures, 64)
    return batch


def _fuyu_config() -> PretrainedConfig:
    return config(
        "fuyu",
        text_config=config("persimmon", **TOWER, vocab_size=VOCABULARY, pad_token_id=0),
        image_token_id=IMAGE,
        patch_size=14,
        image_size=56,
        hidden_size=64,
        vocab_size=VOCABULARY,
    )


def _fuyu_inputs(draw: Draw, size: Size) -> Batch:
    batch = conversation(draw, size, [(IMAGE, 16)])
    batch["image_patches"] = draw.normal(size.samples, 16, 3 * 14 * 14)
    return batch


FAMILIES = (
    _anyres("llava_next", "LlavaNextForConditionalGeneration", _llava_next_config),
    _anyres("llava_onevision", "LlavaOnevisionForConditionalGeneration", _llava_onevision_config),
    _idefics("idefics2", "Idefics2ForConditionalGeneration", _idefics2_config, 8),
    _idefics("idefics3", "Idefics3ForConditionalGeneration", _idefics_config("idefics3"), 4),
    _idefics("smolvlm", "SmolVLMForConditionalGeneration", _idefics_config("smolvlm"), 4),
    Family(
        name="gemma4",
        model=Pretrained(class_name="Gemma4ForConditionalGeneration", config=_gemma4_config),
        inputs=_gemma4_inputs,
        first=Size(samples=2, length=48, media=1),
        second=Size(samples=3, length=60, media=2),
        text_only=True,
    ),
    Family(
        name="mllama",
        model=Pretrained(class_name="MllamaForConditionalGeneration", config=_mllama_config),
        inputs=_mllama_inputs,
        first=Size(samples=2, length=24, media=1),
        second=Size(samples=3, length=40, media=2),
        text_only=True,
        aligned_media=True,
    ),
    Family(
        name="llama4",
        model=Pretrained(class_name="Llama4ForConditionalGeneration", config=_llama4_config),
        inputs=one_block(4),
        first=Size(samples=2, length=48, media=1),
        second=Size(samples=3, length=64, media=2),
        text_only=True,
    ),
    Family(
        name="lfm2_vl",
        model=Pretrained(class_name="Lfm2VlForConditionalGeneration", config=_lfm2_vl_config),
        inputs=_lfm2_vl_inputs,
        first=Size(samples=2, length=48, media=1),
        second=Size(samples=3, length=60, media=2),
        text_only=True,
    ),
    Family(
        name="fuyu",
        model=Pretrained(class_name="FuyuForCausalLM", config=_fuyu_config),
        inputs=_fuyu_inputs,
        first=Size(samples=2, length=48),
        second=Size(samples=3, length=60),
    ),
)
