"""Vision-language models on clips: frames pooled, queried or packed."""

from __future__ import annotations

from transformers import PretrainedConfig

from zoo.family import Batch, Draw, Family, Size
from zoo.parts import (
    IMAGE,
    PLACEHOLDERS,
    QFORMER,
    TEXT,
    VIDEO,
    VISION,
    VISION_END,
    VISION_START,
    Pretrained,
    clip_tower,
    config,
    conversation,
    ones,
    opt_config,
    repeat_rows,
    text_config,
)
from zoo.qwen_like import MROPE, VISION_TOKENS


def _llava_next_video_config() -> PretrainedConfig:
    return config(
        "llava_next_video",
        vision_config=clip_tower(),
        text_config=text_config(),
        image_grid_pinpoints=[[56, 112], [112, 56], [112, 112]],
        image_seq_length=16,
        video_seq_length=8,
        video_token_index=VIDEO,
        **PLACEHOLDERS,
    )


def _llava_next_video_inputs(draw: Draw, size: Size) -> Batch:
    """A picture in 2 x 2 tiles and a thumbnail (88 tokens) and a clip of 3 frames (2 x 2 tokens each) a row."""
    batch = conversation(draw, size, [(IMAGE, 88), (VIDEO, 12)] * size.media)
    media = size.samples * size.media
    if media:
        batch["pixel_values"] = draw.normal(media, 5, 3, 56, 56)
        batch["image_sizes"] = repeat_rows([112, 112], media)
        batch["pixel_values_videos"] = draw.normal(media, 3, 3, 56, 56)
    return batch


def _instructblipvideo_config() -> PretrainedConfig:
    return config(
        "instructblipvideo",
        vision_config=dict(VISION),
        qformer_config=dict(QFORMER),
        text_config=opt_config(),
        num_query_tokens=8,
        video_token_index=VIDEO,
    )


def _instructblipvideo_inputs(draw: Draw, size: Size) -> Batch:
    """A clip of 4 frames (8 queries each) a row, and the question once more for the Q-Former."""
    batch = conversation(draw, size, [(VIDEO, 4 * 8)], start=1)
    batch["pixel_values"] = draw.normal(size.samples, 4, 3, 56, 56)
    batch["qformer_input_ids"] = draw.tokens(size.samples, size.length // 4)
    batch["qformer_attention_mask"] = ones(size.samples, size.length // 4)
    return batch


def _qwen2_vl_video_config() -> PretrainedConfig:
    return config(
        "qwen2_vl",
        vision_config=dict(depth=4, embed_dim=64, hidden_size=64, num_heads=4, patch_size=14),
        text_config=dict(TEXT, rope_parameters=MROPE),
        **VISION_TOKENS,
    )


def _qwen2_vl_video_inputs(draw: Draw, size: Size) -> Batch:
    """Clips of 2 pairs of frames, 4 x 4 patches each, merged 2 x 2 into 8 placeholders."""
    batch = conversation(draw, size, [(VIDEO, 8)] * size.media, before=VISION_START, after=VISION_END)
    batch["mm_token_type_ids"] = 2 * (batch["input_ids"] == VIDEO).int()
    clips = size.samples * size.media
    if clips:
        batch["pixel_values_videos"] = draw.normal(clips * 2 * 4 * 4, 3 * 2 * 14 * 14)
        batch["video_grid_thw"] = repeat_rows([2, 4, 4], clips)
    return batch


FAMILIES = (
    Family(
        name="llava_next_video",
        model=Pretrained(class_name="LlavaNextVideoForConditionalGeneration", config=_llava_next_video_config),
        inputs=_llava_next_video_inputs,
        first=Size(samples=2, length=120, media=1),
        second=Size(samples=3, length=230, media=2),
        text_only=True,
    ),
    Family(
        name="instructblipvideo",
        model=Pretrained(class_name="InstructBlipVideoForConditionalGeneration", config=_instructblipvideo_config),
        inputs=_instructblipvideo_inputs,
        first=Size(samples=2, length=48),
        second=Size(samples=3, length=60),
    ),
    Family(
        name="qwen2_vl_video",
        model=Pretrained(class_name="Qwen2VLForConditionalGeneration", config=_qwen2_vl_video_config),
        inputs=_qwen2_vl_video_inputs,
        first=Size(samples=2, length=32, media=1),
        second=Size(samples=3, length=48, media=2),
        text_only=True,
    ),
)
