"""Models that see and hear in one batch."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from zoo.audio import MELS, picture_clip_pairs
from zoo.family import Batch, Draw, Family, Size
from zoo.mixture_of_experts import EXPERTS
from zoo.packed_vision import DEEPSTACK_TOWER, INTERLEAVED_ROPE
from zoo.parts import (
    AUDIO,
    AUDIO_END,
    AUDIO_START,
    IMAGE,
    TEXT,
    TOWER,
    VIDEO,
    VISION_END,
    VISION_START,
    Pretrained,
    config,
    conversation,
    repeat_rows,
)
from zoo.qwen_like import VISION_TOKENS

_STRETCH = 40


def _qwen3_omni_moe_config() -> PretrainedConfig:
    return config(
        "qwen3_omni_moe_thinker",
        vision_config=dict(DEEPSTACK_TOWER),
        audio_config=dict(
            d_model=64,
            encoder_layers=2,
            encoder_attention_heads=4,
            encoder_ffn_dim=128,
            num_mel_bins=MELS,
            max_source_positions=64,
            n_window_infer=100,
            output_dim=64,
            downsample_hidden_size=16,
        ),
        text_config=dict(TEXT, **EXPERTS, head_dim=16, rope_parameters=INTERLEAVED_ROPE),
        audio_token_id=AUDIO,
        audio_start_token_id=AUDIO_START,
        audio_end_token_id=AUDIO_END,
        **VISION_TOKENS,
    )


def _dots3_note_config() -> PretrainedConfig:
    """Experts in the vision tower and the language model, whose layers pick tokens or slide a window."""
    return config(
        "dots3_note",
        vision_config=dict(
            TOWER,
            moe_intermediate_size=32,
            num_experts_per_tok=2,
            pyramid_num_routed=[-1, -1, 3, 4],
            adapter_in_dim=64,
            adapter_out_dim=64,
        ),
        audio_config=dict(
            TOWER,
            num_hidden_layers=2,
            feature_size=MELS,
            downsample_hidden_size=16,
            adapter_input_size=64,
            adapter_out_dim=64,
        ),
        text_config=dict(
            TEXT,
            num_key_value_heads=4,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_experts_intermediate_size=32,
            kv_lora_rank=16,
            q_lora_rank=32,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=16,
            head_dim=32,
            index_topk=16,
            index_head_dim=16,
            index_n_heads=2,
            sliding_window=16,
            swa_num_attention_heads=4,
            swa_num_key_value_heads=4,
            swa_q_lora_rank=32,
            swa_kv_lora_rank=16,
            swa_head_dim=24,
            swa_qk_nope_head_dim=16,
            swa_v_head_dim=16,
        ),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        audio_token_id=AUDIO,
    )


def _dots3_note_inputs(draw: Draw, size: Size) -> Batch:
    """`media` pairs of one picture (8 x 8 patches, 16 tokens) and one clip (80 frames, 10 tokens) a row."""
    batch = conversation(draw, size, [(IMAGE, 16), (AUDIO, 10)] * size.media)
    media = size.samples * size.media
    if media:
        batch["pixel_values"] = draw.normal(media * 64, 3 * 14 * 14)
        batch["image_grid_thw"] = repeat_rows([1, 8, 8], media)
        batch["input_features"] = draw.normal(media, MELS, 80)
        batch["chunk_sample_lengths"] = torch.full((media,), 80 * 160)
    return batch


def _gemma4_unified_config() -> PretrainedConfig:
    """No towers: patches and stretches of sound go through one linear layer each."""
    return config(
        "gemma4_unified",
        vision_config=dict(
            patch_size=4, pooling_kernel_size=3, mm_embed_dim=64, mm_posemb_size=16, output_proj_dims=64
        ),
        audio_config=dict(audio_embed_dim=_STRETCH),
        text_config=dict(TEXT, num_hidden_layers=6, head_dim=16, global_head_dim=32, sliding_window=16),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        audio_token_id=AUDIO,
        boi_token_id=VISION_START,
        eoi_token_id=VISION_END,
        boa_token_id=AUDIO_START,
        eoa_token_index=AUDIO_END,
    )


def _gemma4_unified_inputs(draw: Draw, size: Size) -> Batch:
    """`media` pairs of one picture (4 x 4 patches with their column and row) and one clip (10 stretches) a row."""
    batch = conversation(draw, size, [(IMAGE, 16), (AUDIO, 10)] * size.media)
    batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).long() + 3 * (batch["input_ids"] == AUDIO).long()
    media, side = size.samples * size.media, torch.arange(4)
    if media:
        columns_rows = torch.stack(torch.meshgrid(side, side, indexing="xy"), dim=-1).reshape(1, 16, 2)
        batch["pixel_values"] = draw.normal(media, 16, 3 * 12 * 12)
        batch["image_position_ids"] = columns_rows.repeat(media, 1, 1)
        batch["input_features"] = draw.normal(media, 10, _STRETCH)
        batch["input_features_mask"] = torch.ones(media, 10, dtype=torch.bool)
    return batch


FAMILIES = (
    Family(
        name="qwen3_omni_moe",
        model=Pretrained(class_name="Qwen3OmniMoeThinkerForConditionalGeneration", config=_qwen3_omni_moe_config),
        inputs=picture_clip_pairs(16, clip_tokens=18, frames=140),
        first=Size(samples=2, length=60, media=1),
        second=Size(samples=3, length=100, media=2),
        text_only=True,
    ),
    Family(
        name="dots3_note",
        model=Pretrained(class_name="Dots3NoteForConditionalGeneration", config=_dots3_note_config),
        inputs=_dots3_note_inputs,
        first=Size(samples=2, length=48, media=1),
        second=Size(samples=3, length=80, media=2),
        text_only=True,
    ),
    Family(
        name="gemma4_unified",
        model=Pretrained(class_name="Gemma4UnifiedForConditionalGeneration", config=_gemma4_unified_config),
        inputs=_gemma4_unified_inputs,
        first=Size(samples=2, length=48, media=1),
        second=Size(samples=3, length=80, media=2),
        text_only=True,
    ),
)
