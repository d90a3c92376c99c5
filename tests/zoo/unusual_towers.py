"""Language models beside towers of other kinds: two resolutions, convolutions, code books, protein sequences."""

from __future__ import annotations

from transformers import PretrainedConfig

from zoo.family import Batch, Draw, Family, Size
from zoo.llava_like import one_block
from zoo.parts import (
    AUDIO,
    IMAGE,
    PLACEHOLDERS,
    TEXT,
    TOWER,
    Pretrained,
    config,
    conversation,
    ones,
    repeat_rows,
    siglip_tower,
    text_config,
)

_END_OF_LINE = 993
_CODES = 64
_FIRST_PICTURE_CODE = 1000
_FIRST_SOUND_CODE = _FIRST_PICTURE_CODE + _CODES
_HOP = 8


def _deepseek_vl_hybrid_config() -> PretrainedConfig:
    return config(
        "deepseek_vl_hybrid",
        vision_config=siglip_tower(),
        high_res_vision_config=config(
            "sam_vision_model",
            hidden_size=64,
            output_channels=16,
            num_hidden_layers=3,
            num_attention_heads=4,
            image_size=128,
            patch_size=16,
            window_size=4,
            global_attn_indexes=[1, 2],
            num_pos_feats=16,
            mlp_dim=128,
        ),
        text_config=text_config(),
        image_token_id=IMAGE,
    )


def _deepseek_vl_hybrid_inputs(draw: Draw, size: Size) -> Batch:
    """Every picture small for one tower and large for the other; their features meet in 16 placeholders."""
    batch = one_block(16)(draw, size)
    if size.media:
        batch["high_res_pixel_values"] = draw.normal(size.samples * size.media, 3, 128, 128)
    return batch


def _convolutional_tower() -> PretrainedConfig:
    """A ConvNeXt that makes 4 x 4 features of width 64 from 32 x 32 pixels; it stands in for the FastViT of timm."""
    return config(
        "convnext",
        num_stages=2,
        hidden_sizes=[32, 64],
        depths=[1, 1],
        patch_size=4,
        drop_path_rate=0.0,
        hidden_size=64,
    )


def _fast_vlm_config() -> PretrainedConfig:
    return config("fast_vlm", vision_config=_convolutional_tower(), text_config=text_config("qwen2"), **PLACEHOLDERS)


def _apertus1p5_config() -> PretrainedConfig:
    """Pictures and sounds become tokens of a vocabulary that also holds their code books."""
    return config(
        "apertus1p5",
        vision_config=dict(
            codebook_size=_CODES,
            embed_dim=16,
            latent_channels=16,
            base_channels=32,
            channel_multiplier=[1, 1, 2],
            num_res_blocks=1,
            attn_resolutions=[4],
            resolution=16,
        ),
        audio_config=config(
            "wavtokenizer_encoder",
            num_filters=8,
            upsampling_ratios=[4, 2],
            num_lstm_layers=1,
            hidden_size=16,
            codebook_size=_CODES,
            codebook_dim=16,
        ),
        text_config=dict(
            TEXT,
            vocab_size=_FIRST_SOUND_CODE + _CODES,
            output_vocab_size=_FIRST_PICTURE_CODE,
            max_position_embeddings=16384,
        ),
        image_token_id=IMAGE,
        audio_token_id=AUDIO,
        image_token_offset=_FIRST_PICTURE_CODE,
        audio_token_offset=_FIRST_SOUND_CODE,
    )


def _apertus1p5_inputs(draw: Draw, size: Size) -> Batch:
    """`media` pairs of one picture (4 lines of 4 codes) and one sound (10 codes) a row."""
    batch = conversation(draw, size, [(IMAGE, 4 * 4 + 3), (AUDIO, 10)] * size.media)
    for pair in range(size.media):
        picture = 3 + pair * (19 + 3 + 10 + 3)
        batch["input_ids"][:, picture + 4 : picture + 19 : 5] = _END_OF_LINE
    media = size.samples * size.media
    if media:
        batch["pixel_values"] = draw.normal(media, 3, 16, 16)
        batch["image_sizes"] = repeat_rows([16, 16], media)
        batch["input_values"] = draw.normal(media, 1, 10 * _HOP)
        batch["padding_mask"] = ones(media, 10 * _HOP)
    return batch


def _evolla_config() -> PretrainedConfig:
    return config(
        "evolla",
        **TEXT,
        protein_encoder_config=dict(
            TOWER,
            vocab_size=446,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            max_position_embeddings=64,
        ),
        aligner_attention_probs_dropout_prob=0.0,
        aligner_num_add_layers=2,
        resampler_depth=2,
        resampler_dim_head=16,
        resampler_heads=4,
        resampler_num_latents=8,
    )


def _evolla_inputs(draw: Draw, size: Size) -> Batch:
    """A protein of 20 residues a row, read through cross-attention."""
    batch = conversation(draw, size, [])
    batch["labels"][:, :8] = -100
    if size.media:
        batch["protein_input_ids"] = draw.tokens(size.samples, 20) % 440 + 5
        batch["protein_attention_mask"] = ones(size.samples, 20)
    return batch


FAMILIES = (
    Family(
        name="deepseek_vl_hybrid",
        model=Pretrained(class_name="DeepseekVLHybridForConditionalGeneration", config=_deepseek_vl_hybrid_config),
        inputs=_deepseek_vl_hybrid_inputs,
        first=Size(samples=2, length=48, media=1),
        second=Size(samples=3, length=68, media=2),
        text_only=True,
    ),
    Family(
        name="fast_vlm",
        model=Pretrained(class_name="FastVlmForConditionalGeneration", config=_fast_vlm_config),
        inputs=one_block(16, pixels=32),
        first=Size(samples=2, length=48, media=1),
        second=Size(samples=3, length=68, media=2),
        text_only=True,
    ),
    Family(
        name="apertus1p5",
        model=Pretrained(class_name="Apertus1p5ForConditionalGeneration", config=_apertus1p5_config),
        inputs=_apertus1p5_inputs,
        first=Size(samples=2, length=48, media=1),
        second=Size(samples=3, length=90, media=2),
        text_only=True,
    ),
    Family(
        name="evolla",
        model=Pretrained(class_name="EvollaForProteinText2Text", config=_evolla_config),
        inputs=_evolla_inputs,
        first=Size(samples=2, length=32),
        second=Size(samples=3, length=40),
        text_only=True,
    ),
)
