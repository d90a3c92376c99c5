"""Processors of families that cut pictures into tiles, or resize them to one size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import (
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    Idefics2ImageProcessorPil,
    Idefics2Processor,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    Llama4Processor,
    LlavaImageProcessorPil,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
    LlavaOnevisionImageProcessorPil,
    LlavaOnevisionProcessor,
    LlavaProcessor,
    MllamaImageProcessorPil,
    MllamaProcessor,
    ProcessorMixin,
    SmolVLMImageProcessorPil,
)

from zoo.parts import IMAGE, VIDEO, VISION_END, VISION_START
from zoo.streams.pictures import Llama4Pictures
from zoo.streams.processor import FamilyProcessor, SmolVLMPictures, without_videos
from zoo.streams.tokenizer import small_tokenizer

_SQUARE = {"height": 56, "width": 56}
_GRID_POINTS = [[56, 112], [112, 56], [112, 112]]
_IDEFICS = ("<fake_token_around_image>", "<end_of_utterance>", "<global-img>")
_TILE_NAMES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))


def _llava() -> ProcessorMixin:
    return LlavaProcessor(
        LlavaImageProcessorPil(size={"shortest_edge": 56}, crop_size=_SQUARE),
        small_tokenizer({"<image>": IMAGE}),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def _llava_next() -> ProcessorMixin:
    return LlavaNextProcessor(
        LlavaNextImageProcessorPil(size={"shortest_edge": 56}, crop_size=_SQUARE, image_grid_pinpoints=_GRID_POINTS),
        small_tokenizer({"<image>": IMAGE}),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def _llava_onevision() -> ProcessorMixin:
    return without_videos(LlavaOnevisionProcessor)(
        LlavaOnevisionImageProcessorPil(size=_SQUARE, image_grid_pinpoints=_GRID_POINTS),
        small_tokenizer({"<image>": IMAGE, "<video>": VIDEO}),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
    )


def _idefics2() -> ProcessorMixin:
    pictures = Idefics2ImageProcessorPil(size={"shortest_edge": 28, "longest_edge": 56})
    return Idefics2Processor(pictures, small_tokenizer({"<image>": IMAGE}, others=_IDEFICS), image_seq_len=8)


def _idefics3_pictures(kind: Any) -> Any:
    return kind(size={"longest_edge": 112}, max_image_size={"longest_edge": 56})


def _idefics3() -> ProcessorMixin:
    tokenizer = small_tokenizer({"<image>": IMAGE}, others=(*_IDEFICS, *_TILE_NAMES))
    return Idefics3Processor(_idefics3_pictures(Idefics3ImageProcessorPil), tokenizer, image_seq_len=4)


def _smolvlm() -> ProcessorMixin:
    tokenizer = small_tokenizer({"<image>": IMAGE, "<video>": VIDEO}, others=(*_IDEFICS, *_TILE_NAMES))
    pictures = _idefics3_pictures(SmolVLMImageProcessorPil)
    return without_videos(SmolVLMPictures)(pictures, tokenizer, image_seq_len=4)


def _mllama() -> ProcessorMixin:
    return MllamaProcessor(
        MllamaImageProcessorPil(size=_SQUARE, max_image_tiles=4), small_tokenizer({"<|image|>": IMAGE})
    )


def _llama4() -> ProcessorMixin:
    tokens = {"<|patch|>": IMAGE, "<|image_start|>": VISION_START, "<|image_end|>": VISION_END}
    others = ("<|image|>", "<|tile_x_separator|>", "<|tile_y_separator|>")
    return Llama4Processor(Llama4Pictures(), small_tokenizer(tokens, others=others))


def _gemma3() -> ProcessorMixin:
    tokens = {"<image_soft_token>": IMAGE, "<start_of_image>": VISION_START, "<end_of_image>": VISION_END}
    named = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    return Gemma3Processor(
        Gemma3ImageProcessorPil(size=_SQUARE), small_tokenizer(tokens, named=named), image_seq_length=4
    )


ROWS: Mapping[str, FamilyProcessor] = {
    "llava": FamilyProcessor(build=_llava, picture="<image>"),
    "llava_next": FamilyProcessor(build=_llava_next, picture="<image>"),
    "llava_onevision": FamilyProcessor(build=_llava_onevision, picture="<image>", by_row=True),
    "idefics2": FamilyProcessor(build=_idefics2, picture="<image>", by_row=True),
    "idefics3": FamilyProcessor(build=_idefics3, picture="<image>", by_row=True),
    "smolvlm": FamilyProcessor(build=_smolvlm, picture="<image>", by_row=True),
    "mllama": FamilyProcessor(build=_mllama, picture="<|image|>", by_row=True),
    "llama4": FamilyProcessor(
        build=_llama4, picture="<|image|>", by_hand="picture part (transformers' own requires torchvision)"
    ),
    "gemma3": FamilyProcessor(build=_gemma3, picture="<start_of_image>", by_row=True),
}
