"""Models whose towers sit inside other modules: an action expert over a vision-language model, a multimodal encoder before a
decoder, and towers whose projectors feed several layers of the decoder."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PretrainedConfig

from zoo.family import IGNORE, Batch, Draw, Family, Size
from zoo.parts import (
    IMAGE,
    QFORMER,
    TEXT,
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

_ACTIONS = 4
_ACTION_SIZE = 8


def _pi0_config() -> PretrainedConfig:
    vision_language = config(
        "paligemma",
        vision_config=siglip_tower(projection_dim=64, vocab_size=VOCABULARY),
        text_config=text_config("gemma", head_dim=16),
        projection_dim=64,
        hidden_size=64,
        image_token_id=IMAGE,
        image_token_index=IMAGE,
    )
    return config(
        "pi0",
        vlm_config=vision_language,
        dit_config=text_config("gemma", head_dim=16, hidden_size=32, intermediate_size=64),
        chunk_size=_ACTIONS,
        max_state_dim=_ACTION_SIZE,
        max_action_dim=_ACTION_SIZE,
    )


def _pi0_inputs(draw: Draw, size: Size) -> Batch:
    """`media` cameras (16 tokens each) and an instruction; actions, their noise and its level are given, none is drawn."""
    batch = conversation(draw, size, [(IMAGE, 16 * size.media)], start=0)
    del batch["labels"]
    batch["pixel_values"] = draw.normal(size.samples, size.media, 3, 56, 56)
    batch["pixel_attention_mask"] = torch.ones(size.samples, size.media, dtype=torch.bool)
    batch["state"] = draw.normal(size.samples, _ACTION_SIZE)
    batch["actions"] = draw.normal(size.samples, _ACTIONS, _ACTION_SIZE)
    batch["noise"] = draw.normal(size.samples, _ACTIONS, _ACTION_SIZE)
    batch["timestep"] = draw.normal(size.samples).sigmoid()
    return batch


def _t5gemma2_config() -> PretrainedConfig:
    text = dict(
        TEXT,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    return config(
        "t5gemma2",
        encoder=config(
            "t5gemma2_encoder",
            text_config=text,
            vision_config=siglip_tower(),
            mm_tokens_per_image=4,
            boi_token_index=VISION_START,
            eoi_token_index=VISION_END,
            image_token_index=IMAGE,
        ),
        decoder=text,
        image_token_index=IMAGE,
    )


def _t5gemma2_inputs(draw: Draw, size: Size) -> Batch:
    """A question with pictures in, an answer out; the last answer is two tokens shorter."""
    batch = conversation(draw, size, [(IMAGE, 4)] * size.media, before=VISION_START, after=VISION_END)
    if size.media:
        batch["pixel_values"] = draw.normal(size.samples * size.media, 3, 56, 56)
    batch["labels"] = draw.tokens(size.samples, size.length // 2)
    batch["labels"][-1, -2:] = IGNORE
    return batch


def _granite4_vision_config() -> PretrainedConfig:
    return config(
        "granite4_vision",
        vision_config=clip_tower(),
        text_config=dict(TEXT, num_hidden_layers=6, attention_multiplier=0.25),
        qformer_config=config(
            "blip_2_qformer", **{**QFORMER, "cross_attention_frequency": 1, "use_qformer_text_input": False}
        ),
        image_token_index=IMAGE,
        image_grid_pinpoints=[[56, 112], [112, 56], [112, 112]],
        downsample_rate="1/2",
        deepstack_layer_map=[[2, 0], [3, 1]],
        spatial_target_layers=[2, 3, 4, 5],
        projector_dropout=0.0,
    )


def _granite4_vision_inputs(draw: Draw, size: Size) -> Batch:
    """112 x 112 pictures: a thumbnail (4 tokens), 2 x 2 tiles (16) and 4 newline tokens."""
    batch = conversation(draw, size, [(IMAGE, 24)] * size.media)
    if size.media:
        batch["pixel_values"] = draw.normal(size.samples * size.media, 5, 3, 56, 56)
        batch["image_sizes"] = repeat_rows([112, 112], size.samples * size.media)
    return batch


def _granite_docling_config() -> PretrainedConfig:
    return config(
        "granite_docling",
        vision_config=dict(
            VISION, image_size=64, patch_size=8, out_hidden_size=64, scale_factor=4, deepstack_visual_indexes=[1, 2]
        ),
        text_config=dict(TEXT, attention_multiplier=0.25),
        image_token_id=IMAGE,
        density_router_hidden_size=16,
        pad_token_id=0,
    )


def _granite_docling_inputs(draw: Draw, size: Size) -> Batch:
    """A page of `media` tiles, 4 tokens each, and whether the page is dense."""
    batch = conversation(draw, size, [(IMAGE, 4)] * size.media)
    if size.media:
        batch["pixel_values"] = draw.normal(size.samples, size.media, 3, 64, 64)
        batch["pixel_attention_mask"] = torch.ones(size.samples, size.media, dtype=torch.bool)
        batch["router_labels"] = torch.arange(size.samples) % 2
    return batch


def _family(
    name: str,
    class_name: str,
    make: Callable[[], PretrainedConfig],
    inputs: Callable[[Draw, Size], Batch],
    lengths: tuple[int, int],
    *,
    text_only: bool = True,
    aligned_media: bool = False,
) -> Family:
    return Family(
        name=name,
        model=Pretrained(class_name=class_name, config=make),
        inputs=inputs,
        first=Size(samples=2, length=lengths[0], media=1),
        second=Size(samples=3, length=lengths[1], media=2),
        text_only=text_only,
        aligned_media=aligned_media,
    )


FAMILIES = (
    _family(
        "pi0", "PI0ForConditionalGeneration", _pi0_config, _pi0_inputs, (32, 50), text_only=False, aligned_media=True
    ),
    _family("t5gemma2", "T5Gemma2ForConditionalGeneration", _t5gemma2_config, _t5gemma2_inputs, (32, 44)),
    _family(
        "granite4_vision",
        "Granite4VisionForConditionalGeneration",
        _granite4_vision_config,
        _granite4_vision_inputs,
        (44, 70),
    ),
    _family(
        "granite_docling",
        "GraniteDoclingForConditionalGeneration",
        _granite_docling_config,
        _granite_docling_inputs,
        (32, 44),
        aligned_media=True,
    ),
)
