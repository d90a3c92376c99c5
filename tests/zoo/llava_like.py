"""Vision-language models whose image features are one fixed-size block a picture: tower, projector, merge, decoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PretrainedConfig

from zoo.family import Batch, Draw, Family, Size
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
    repeat_rows,
    siglip_tower,
    text_config,
)


def one_block(
    tokens: int, *, before: int | None = None, after: int | None = None, pixels: int = 56
) -> Callable[[Draw, Size], Batch]:
    """Inputs of a model that turns every picture into `tokens` placeholders."""

    def inputs(draw: Draw, size: Size) -> Batch:
        batch = conversation(draw, size, [(IMAGE, tokens)] * size.media, before=before, after=after)
        if size.media:
            batch["pixel_values"] = draw.normal(size.samples * size.media, 3, pixels, pixels)
        return batch

    return inputs


def _family(name: str, class_name: str, make: Callable[[], PretrainedConfig], tokens: int, **options: Any) -> Family:
    return Family(
        name=name,
        model=Pretrained(class_name=class_name, config=make),
        inputs=one_block(tokens, **options),
        first=Size(samples=2, length=tokens + 32, media=1),
        second=Size(samples=3, length=2 * tokens + 36, media=2),
        text_only=True,
    )


def _llava_config() -> PretrainedConfig:
    return config("llava", vision_config=clip_tower(), text_config=text_config(), image_seq_length=16, **PLACEHOLDERS)


def _vipllava_config() -> PretrainedConfig:
    return config(
        "vipllava",
        vision_config=clip_tower(),
        text_config=text_config(),
        image_seq_length=16,
        vision_feature_layers=[-2, -3],
        vision_feature_layer=[-2, -3],
        **PLACEHOLDERS,
    )


def _video_llava_config() -> PretrainedConfig:
    return config(
        "video_llava",
        vision_config=clip_tower(),
        text_config=text_config(),
        video_token_id=VIDEO,
        video_token_index=VIDEO,
        image_seq_length=16,
        video_seq_length=136,
        **PLACEHOLDERS,
    )


def _video_llava_inputs(draw: Draw, size: Size) -> Batch:
    """One picture and one clip of 8 frames (17 tokens each) in every row."""
    batch = conversation(draw, size, [(IMAGE, 16), (VIDEO, 8 * 17)])
    batch["pixel_values"] = draw.normal(size.samples, 3, 56, 56)
    batch["pixel_values_videos"] = draw.normal(size.samples, 8, 3, 56, 56)
    return batch


def _internvl_config() -> PretrainedConfig:
    return config(
        "internvl",
        vision_config=dict(TOWER, image_size=[56, 56], patch_size=[14, 14]),
        text_config=text_config("qwen2"),
        image_token_id=IMAGE,
        image_seq_length=4,
    )


def _paligemma_config() -> PretrainedConfig:
    return config(
        "paligemma",
        vision_config=siglip_tower(projection_dim=64, vocab_size=VOCABULARY),
        text_config=text_config("gemma", head_dim=16),
        projection_dim=64,
        hidden_size=64,
        vocab_size=VOCABULARY,
        **PLACEHOLDERS,
    )


def _paligemma_inputs(draw: Draw, size: Size) -> Batch:
    """A bidirectional prefix of picture and question, then an answer that is read left to right."""
    batch = conversation(draw, size, [(IMAGE, 16)], start=1)
    position = (batch["input_ids"] * 0 + 1).cumsum(-1) - 1
    batch["token_type_ids"] = (position > 24).long()
    batch["pixel_values"] = draw.normal(size.samples, 3, 56, 56)
    return batch


def _gemma3_config() -> PretrainedConfig:
    text = dict(TEXT, num_hidden_layers=6, head_dim=16, sliding_window=16, query_pre_attn_scalar=16)
    return config(
        "gemma3",
        vision_config=siglip_tower(),
        text_config=text,
        mm_tokens_per_image=4,
        boi_token_index=VISION_START,
        eoi_token_index=VISION_END,
        **PLACEHOLDERS,
    )


def _gemma3_inputs(draw: Draw, size: Size) -> Batch:
    batch = one_block(4, before=VISION_START, after=VISION_END)(draw, size)
    batch["token_type_ids"] = (batch["input_ids"] == IMAGE).long()
    return batch


def _cohere_config(model_type: str) -> Callable[[], PretrainedConfig]:
    def make() -> PretrainedConfig:
        return config(
            model_type,
            vision_config=siglip_tower(),
            text_config=text_config("cohere2", head_dim=16, sliding_window=16),
            alignment_intermediate_size=128,
            **PLACEHOLDERS,
        )

    return make


def _ovis2_config() -> PretrainedConfig:
    return config(
        "ovis2",
        vision_config=dict(VISION, vocab_size=128, num_visual_indicator_tokens=5, hidden_stride=1),
        text_config=text_config("qwen2"),
        image_token_id=IMAGE,
        visual_indicator_token_ids=[993, 994, 995, 996, 997],
        vocab_size=VOCABULARY,
        hidden_size=64,
    )


def _janus_config() -> PretrainedConfig:
    return config(
        "janus",
        vision_config=dict(VISION, mlp_ratio=2.0, projection_dim=64, depth=2, num_image_tokens=16),
        vq_config=dict(
            embed_dim=8,
            num_embeddings=32,
            latent_channels=32,
            base_channels=32,
            channel_multiplier=[1, 1],
            num_res_blocks=1,
            num_patches=4,
            projection_dim=64,
            image_token_embed_dim=64,
            hidden_size=32,
        ),
        text_config=text_config(),
        image_token_id=IMAGE,
    )


def _got_ocr2_config() -> PretrainedConfig:
    return config(
        "got_ocr2",
        vision_config=dict(
            hidden_size=64,
            output_channels=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=64,
            patch_size=8,
            window_size=4,
            global_attn_indexes=[1],
            mlp_dim=128,
        ),
        text_config=text_config("qwen2"),
        image_seq_length=4,
        **PLACEHOLDERS,
    )


def _deepseek_vl_config() -> PretrainedConfig:
    return config("deepseek_vl", vision_config=siglip_tower(), text_config=text_config(), image_token_id=IMAGE)


_CODES = 10
_CODEBOOK = 900


def _chameleon_config() -> PretrainedConfig:
    return config(
        "chameleon",
        **TEXT,
        vq_config=dict(
            embed_dim=8,
            num_embeddings=_CODES,
            latent_channels=8,
            resolution=32,
            base_channels=32,
            channel_multiplier=[1, 1, 1],
            num_res_blocks=1,
        ),
        vocabulary_map={
            "<image>": IMAGE,
            **{f"IMGIMG{'ABCDEFGHIJ'[code]}Z": _CODEBOOK + code for code in range(_CODES)},
        },
    )


def _emu3_config() -> PretrainedConfig:
    return config(
        "emu3",
        vq_config=dict(
            codebook_size=_CODES,
            embed_dim=4,
            latent_channels=4,
            base_channels=32,
            channel_multiplier=[1, 1, 1],
            num_res_blocks=1,
            hidden_size=32,
            attn_resolutions=[2],
        ),
        text_config=dict(TEXT, attention_dropout=0.0),
        vocabulary_map={
            "<image>": IMAGE,
            "<|extra_200|>": _CODEBOOK + _CODES,
            **{f"<|visual token {code:06d}|>": _CODEBOOK + code for code in range(_CODES)},
        },
    )


def _emu3_inputs(draw: Draw, size: Size) -> Batch:
    """Pictures of 8 x 8 codes, each row of which ends in a token of its own."""
    batch = one_block(8 * 9, pixels=32)(draw, size)
    if size.media:
        batch["image_sizes"] = repeat_rows([32, 32], size.samples * size.media)
    return batch


FAMILIES = (
    _family("llava", "LlavaForConditionalGeneration", _llava_config, 16),
    _family("vipllava", "VipLlavaForConditionalGeneration", _vipllava_config, 16),
    Family(
        name="video_llava",
        model=Pretrained(class_name="VideoLlavaForConditionalGeneration", config=_video_llava_config),
        inputs=_video_llava_inputs,
        first=Size(samples=2, length=180),
        second=Size(samples=3, length=190),
    ),
    _family("internvl", "InternVLForConditionalGeneration", _internvl_config, 4),
    Family(
        name="paligemma",
        model=Pretrained(class_name="PaliGemmaForConditionalGeneration", config=_paligemma_config),
        inputs=_paligemma_inputs,
        first=Size(samples=2, length=48),
        second=Size(samples=3, length=60),
    ),
    Family(
        name="gemma3",
        model=Pretrained(class_name="Gemma3ForConditionalGeneration", config=_gemma3_config),
        inputs=_gemma3_inputs,
        first=Size(samples=2, length=48, media=1),
        second=Size(samples=3, length=60, media=2),
        text_only=True,
    ),
    _family("aya_vision", "AyaVisionForConditionalGeneration", _cohere_config("aya_vision"), 4),
    _family("cohere2_vision", "Cohere2VisionForConditionalGeneration", _cohere_config("cohere2_vision"), 4),
    _family("ovis2", "Ovis2ForConditionalGeneration", _ovis2_config, 16, before=993, after=994),
    _family("janus", "JanusForConditionalGeneration", _janus_config, 16),
    _family("got_ocr2", "GotOcr2ForConditionalGeneration", _got_ocr2_config, 4, pixels=64),
    _family("deepseek_vl", "DeepseekVLForConditionalGeneration", _deepseek_vl_config, 16),
    _family("chameleon", "ChameleonForConditionalGeneration", _chameleon_config, 64, pixels=32),
    Family(
        name="emu3",
        model=Pretrained(class_name="Emu3ForConditionalGeneration", config=_emu3_config),
        inputs=_emu3_inputs,
        first=Size(samples=2, length=90, media=1),
        second=Size(samples=3, length=170, media=2),
        text_only=True,
    ),
)
