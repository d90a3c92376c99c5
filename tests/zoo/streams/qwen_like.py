"""Processors of families whose pictures keep their own resolution: patches of all pictures, and a grid or a size each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import (
    Glm4vImageProcessorPil,
    Glm4vProcessor,
    Kimi_K25Processor,
    Lfm2VlProcessor,
    PixtralImageProcessorPil,
    ProcessorMixin,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessorPil,
    Qwen2VLProcessor,
    Qwen3VLProcessor,
    VideoLlama3ImageProcessorPil,
    VideoLlama3Processor,
)

from zoo.parts import IMAGE, VIDEO, VISION_END, VISION_START
from zoo.streams.pictures import KimiPictures, Lfm2VlPictures
from zoo.streams.processor import FamilyProcessor, PixtralRows, without_videos
from zoo.streams.tokenizer import small_tokenizer

PIXELS: Mapping[str, int] = {"shortest_edge": 56**2, "longest_edge": 168**2}
"""Fewest and most pixels of a picture."""
_MARKS = {
    "<|image_pad|>": IMAGE,
    "<|video_pad|>": VIDEO,
    "<|vision_start|>": VISION_START,
    "<|vision_end|>": VISION_END,
}
_QWEN_PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
_NO_PIL = "picture part (transformers' own requires torchvision)"


def _qwen(kind: type[ProcessorMixin], patch: int) -> FamilyProcessor:
    def build() -> ProcessorMixin:
        pictures = Qwen2VLImageProcessorPil(patch_size=patch, size=dict(PIXELS))
        return without_videos(kind)(pictures, small_tokenizer(_MARKS))

    return FamilyProcessor(build=build, picture=_QWEN_PICTURE)


def _glm4v() -> ProcessorMixin:
    tokens = {
        "<|image|>": IMAGE,
        "<|video|>": VIDEO,
        "<|begin_of_image|>": VISION_START,
        "<|end_of_image|>": VISION_END,
        "<|begin_of_video|>": 995,
        "<|end_of_video|>": 996,
    }
    return without_videos(Glm4vProcessor)(Glm4vImageProcessorPil(size=dict(PIXELS)), small_tokenizer(tokens))


def _video_llama_3() -> ProcessorMixin:
    return without_videos(VideoLlama3Processor)(
        VideoLlama3ImageProcessorPil(size=dict(PIXELS)), small_tokenizer(_MARKS)
    )


def _kimi() -> ProcessorMixin:
    tokens = {"<|media_pad|>": IMAGE, "<|kimi_k25_video_placeholder|>": VIDEO}
    others = ("<|media_begin|>", "<|media_content|>", "<|media_end|>")
    return without_videos(Kimi_K25Processor)(KimiPictures(), small_tokenizer(tokens, others=others))


def _pixtral(merge: int) -> Callable[[], ProcessorMixin]:
    def build() -> ProcessorMixin:
        pictures: Any = PixtralImageProcessorPil(size={"longest_edge": 112}, patch_size=14)
        tokenizer = small_tokenizer({"[IMG]": IMAGE}, others=("[IMG_BREAK]", "[IMG_END]"))
        return PixtralRows(pictures, tokenizer, patch_size=14, spatial_merge_size=merge)

    return build


def _lfm2_vl() -> ProcessorMixin:
    rows = (f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5))
    others = ("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", *rows)
    return Lfm2VlProcessor(Lfm2VlPictures(), small_tokenizer({"<image>": IMAGE}, others=others))


ROWS: Mapping[str, FamilyProcessor] = {
    "qwen2_vl": _qwen(Qwen2VLProcessor, 14),
    "qwen2_5_vl": _qwen(Qwen2_5_VLProcessor, 14),
    "qwen3_vl": _qwen(Qwen3VLProcessor, 16),
    "qwen3_5": _qwen(Qwen3VLProcessor, 16),
    "glm4v": FamilyProcessor(build=_glm4v, picture="<|begin_of_image|><|image|><|end_of_image|>"),
    "kimi_k25": FamilyProcessor(
        build=_kimi, picture="<|media_begin|>image<|media_content|><|media_pad|><|media_end|>", by_hand=_NO_PIL
    ),
    "pixtral": FamilyProcessor(
        build=_pixtral(1), picture="[IMG]", by_hand="text part (transformers' own requires torchvision)"
    ),
    "mistral3": FamilyProcessor(
        build=_pixtral(2), picture="[IMG]", by_hand="text part (transformers' own requires torchvision)"
    ),
    "lfm2_vl": FamilyProcessor(build=_lfm2_vl, picture="<image>", by_row=True, by_hand=_NO_PIL),
    "video_llama_3": FamilyProcessor(build=_video_llama_3, picture="<|image_pad|>"),
}
