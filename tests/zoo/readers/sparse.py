"""Vision-language models whose decoders choose: mixtures of experts, attention to chosen keys, several residual streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PretrainedConfig

from zoo.family import Batch, Draw, Family, Size
from zoo.parts import (
    AUDIO,
    IMAGE,
    TEXT,
    TOWER,
    VIDEO,
    VISION,
    VISION_END,
    VISION_START,
    VOCABULARY,
    Pretrained,
    config,
    conversation,
    ones,
    repeat_rows,
)

_SIDE = 8
"""Patches a side of a picture."""

EXPERTS: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
"""Two of four experts for each token."""

INDEXER: dict[str, Any] = {"index_topk": 16, "index_head_dim": 32, "index_n_heads": 2}
"""Attention to the 16 keys of a query that a small indexer scores highest."""

LATENT: dict[str, Any] = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
"""Keys and values from a latent vector of 32."""

_INKLING_TEXT: dict[str, Any] = {
    **TEXT,
    **EXPERTS,
    "head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "sliding_window_size": 16,
    "d_rel": 8,
    "rel_extent": 32,
    "unpadded_vocab_size": VOCABULARY - 3,
    "layer_types": ["hybrid_sliding", "hybrid"] * 2,
}


def grid_inputs(
    tokens: int, features: int, *, grid: int = _SIDE, token_types: bool = False, before: int | None = None
) -> Callable[[Draw, Size], Batch]:
    """Inputs of `grid` x `grid` patches of `features` numbers a picture, all in one sequence, and each picture's grid.

    Args:
        tokens: Placeholders a picture.
        features: Numbers a patch.
        grid: Patches a side.
        token_types: Whether the batch says which tokens are of pictures.
        before: Token put just before every picture.
    """

    def inputs(draw: Draw, size: Size) -> Batch:
        batch = conversation(draw, size, [(IMAGE, tokens)] * size.media, before=before)
        pictures = size.samples * size.media
        if pictures:
            batch["pixel_values"] = draw.normal(pictures * grid**2, features)
            batch["image_grid_thw"] = repeat_rows([1, grid, grid], pictures)
        if token_types:
            batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).int()
        return batch

    return inputs


def _hy_v4_vl_config() -> PretrainedConfig:
    return config(
        "hy_v4_vl",
        vision_config=dict(TOWER, out_hidden_size=64, max_image_size=128),
        text_config=dict(
            TEXT,
            **EXPERTS,
            **INDEXER,
            **LATENT,
            q_lora_rank=32,
            hc_mult=2,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
            indexer_types=["full", "shared", "full", "shared"],
        ),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )


def _inkling_config() -> PretrainedConfig:
    return config(
        "inkling_mm_model",
        text_config=dict(
            _INKLING_TEXT,
            mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
            n_shared_experts=1,
            logits_mup_width_multiplier=2.0,
        ),
        vision_config=dict(hidden_size=64, num_hidden_layers=4, num_attention_heads=4, patch_size=4),
        audio_config=dict(n_mel_bins=8, mel_vocab_size=16),
        image_token_id=IMAGE,
        audio_token_id=AUDIO,
    )


def _inkling_inputs(draw: Draw, size: Size) -> Batch:
    """`media` pairs of a picture (9 patches of two 4 x 4 frames) and a clip (8 frames of 8 quantised bins) a row."""
    batch = conversation(draw, size, [(IMAGE, 9), (AUDIO, 8)] * size.media)
    media = size.samples * size.media
    if media:
        batch["pixel_values"] = draw.normal(media * 9, 2, 4, 4, 3)
        batch["audio_input_ids"] = draw.tokens(media, 64).view(media, 8, 8) % 16
        batch["audio_input_ids_mask"] = ones(media, 8)
    return batch


def _inkling2_config(model_type: str, **text: Any) -> Callable[[], PretrainedConfig]:
    def make() -> PretrainedConfig:
        fields = {**_INKLING_TEXT, "n_layers_per_attn_res_block": 2, **text}
        del fields["intermediate_size"]  # another name of `moe_intermediate_size`
        return config(
            model_type,
            text_config=fields,
            vision_config=config(
                "inkling2_vision",
                **TOWER,
                patch_size=4,
                posemb_grid_size=8,
                projection_hidden_dim=64,
                text_hidden_size=64,
            ),
            image_token_id=IMAGE,
        )

    return make


def _inkling2_inputs(draw: Draw, size: Size) -> Batch:
    """Pictures of 3 x 4 placeholders, each 2 x 2 patches of 4 x 4 pixels."""
    batch = conversation(draw, size, [(IMAGE, 12)] * size.media)
    pictures = size.samples * size.media
    if pictures:
        batch["pixel_values"] = draw.normal(pictures * 12, 8, 8, 3)
        batch["image_grid_thw"] = repeat_rows([1, 3, 4], pictures)
    return batch


def _minimax_m3_vl_config() -> PretrainedConfig:
    return config(
        "minimax_m3_vl",
        vision_config=dict(VISION, image_size=112),
        text_config=dict(
            TEXT,
            head_dim=16,
            rotary_dim=8,
            num_experts_per_tok=2,
            num_local_experts=4,
            dense_intermediate_size=128,
            shared_intermediate_size=32,
            mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
            layer_types=["full_attention", "minimax_m3_sparse"] * 2,
            index_n_heads=2,
            index_head_dim=16,
            index_block_size=8,
            index_topk_blocks=2,
        ),
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        projector_hidden_size=64,
    )


def _mistral_large4_config() -> PretrainedConfig:
    return config(
        "mistral_large4",
        vision_config=config("pixtral", **TOWER, head_dim=16, image_size=112, patch_size=14),
        text_config=dict(
            {**TEXT, "num_key_value_heads": 4},
            **EXPERTS,
            **INDEXER,
            **LATENT,
            indexer_types=["full", "full", "shared", "full"],
            kv_source_layers=[0, 1, 1, 3],
        ),
        image_token_index=IMAGE,
    )


def _mistral_large4_inputs(draw: Draw, size: Size) -> Batch:
    batch = conversation(draw, size, [(IMAGE, 16)] * size.media)
    pictures = size.samples * size.media
    if pictures:
        batch["pixel_values"] = draw.normal(pictures, 3, 112, 112)
        batch["image_sizes"] = repeat_rows([112, 112], pictures)
    return batch


def _qwen4_exp_config() -> PretrainedConfig:
    return config(
        "qwen4_exp",
        vision_config=dict(
            depth=4,
            hidden_size=64,
            intermediate_size=128,
            num_heads=4,
            out_hidden_size=64,
            patch_size=16,
            num_position_embeddings=64,
        ),
        text_config=dict(
            TEXT,
            head_dim=32,
            layer_types=["linear_attention", "indexed_attention"] * 2,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            linear_num_key_heads=4,
            linear_num_value_heads=4,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            hc_count=2,
            hc_lowrank=8,
            ple_layer_ids=[1],
            heads_per_ngram=2,
            ngram_vocab_size_base=100,
            make_ngram_vocab_size_divisible_by=8,
            split_ngram_parts=4,
            indexer_n_heads=2,
            indexer_kv_heads=1,
            indexer_head_dim=16,
            indexer_budget=16,
            indexer_compress_ratio=4,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 3, 3],
                "mrope_interleaved": True,
            },
        ),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )


def _family(
    name: str,
    class_name: str,
    make: Callable[[], PretrainedConfig],
    inputs: Callable[[Draw, Size], Batch],
) -> Family:
    return Family(
        name=name,
        model=Pretrained(class_name=class_name, config=make),
        inputs=inputs,
        first=Size(samples=2, length=40, media=1),
        second=Size(samples=3, length=60, media=2),
        text_only=True,
    )


FAMILIES = (
    _family(
        "hy_v4_vl", "HYV4VLForConditionalGeneration", _hy_v4_vl_config, grid_inputs(20, 3 * 16 * 16, token_types=True)
    ),
    _family("inkling_mm_model", "InklingForConditionalGeneration", _inkling_config, _inkling_inputs),
    _family("inkling2", "Inkling2ForConditionalGeneration", _inkling2_config("inkling2"), _inkling2_inputs),
    _family(
        "inkling2_loop",
        "Inkling2LoopForConditionalGeneration",
        _inkling2_config(
            "inkling2_loop",
            num_hidden_layers=6,
            layer_types=["hybrid_sliding", "hybrid"] * 3,
            loop_layer_index_start=2,
            loop_layer_index_end=4,
            loop_num_passes=2,
            loop_gate_rank=8,
        ),
        _inkling2_inputs,
    ),
    _family(
        "minimax_m3_vl",
        "MiniMaxM3SparseForConditionalGeneration",
        _minimax_m3_vl_config,
        grid_inputs(16, 3 * 2 * 14 * 14),
    ),
    _family("mistral_large4", "MistralLarge4ForConditionalGeneration", _mistral_large4_config, _mistral_large4_inputs),
    _family(
        "qwen4_exp",
        "Qwen4ExpForConditionalGeneration",
        _qwen4_exp_config,
        grid_inputs(16, 3 * 2 * 16 * 16, token_types=True, before=VISION_START),
    ),
)
