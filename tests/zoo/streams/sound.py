"""Processors of families that hear."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import (
    Phi4MultimodalFeatureExtractor,
    Phi4MultimodalProcessor,
    ProcessorMixin,
    Qwen2_5OmniProcessor,
    Qwen2AudioProcessor,
    Qwen2VLImageProcessorPil,
    WhisperFeatureExtractor,
)

from zoo.audio import MELS
from zoo.parts import AUDIO, AUDIO_END, AUDIO_START, IMAGE, VIDEO, VISION_END, VISION_START
from zoo.streams.pictures import Phi4Pictures
from zoo.streams.processor import FamilyProcessor, VoxtralRows, without_videos
from zoo.streams.qwen_like import PIXELS
from zoo.streams.tokenizer import small_tokenizer

_FRAMES = 80


def _qwen2_audio() -> ProcessorMixin:
    features = WhisperFeatureExtractor(feature_size=MELS, chunk_length=1, hop_length=200)  # 80 frames
    marks = {"<|AUDIO|>": AUDIO, "<|audio_bos|>": AUDIO_START, "<|audio_eos|>": AUDIO_END}
    return Qwen2AudioProcessor(features, small_tokenizer(marks))


def _voxtral() -> ProcessorMixin:
    tokenizer = small_tokenizer({"[AUDIO]": AUDIO}, others=("[BEGIN_AUDIO]",))
    features = WhisperFeatureExtractor(feature_size=MELS, chunk_length=1)
    return VoxtralRows(features, tokenizer, chunk_frames=_FRAMES, chunk_tokens=10)


def _phi4_multimodal() -> ProcessorMixin:
    tokens = {"<|endoftext10|>": IMAGE, "<|endoftext11|>": AUDIO}
    named = {"image_token": "<|endoftext10|>", "audio_token": "<|endoftext11|>"}
    features = Phi4MultimodalFeatureExtractor(feature_size=MELS)
    return Phi4MultimodalProcessor(Phi4Pictures(), features, small_tokenizer(tokens, named=named))


def _qwen2_5_omni() -> ProcessorMixin:
    tokens = {
        "<|IMAGE|>": IMAGE,
        "<|VIDEO|>": VIDEO,
        "<|AUDIO|>": AUDIO,
        "<|vision_bos|>": VISION_START,
        "<|vision_eos|>": VISION_END,
        "<|audio_bos|>": AUDIO_START,
        "<|audio_eos|>": AUDIO_END,
    }
    named = {
        "image_token": "<|IMAGE|>",
        "video_token": "<|VIDEO|>",
        "audio_token": "<|AUDIO|>",
        "vision_bos_token": "<|vision_bos|>",
        "vision_eos_token": "<|vision_eos|>",
        "audio_bos_token": "<|audio_bos|>",
        "audio_eos_token": "<|audio_eos|>",
    }
    return without_videos(Qwen2_5OmniProcessor)(
        Qwen2VLImageProcessorPil(size=dict(PIXELS)),
        None,
        WhisperFeatureExtractor(feature_size=MELS, chunk_length=1, return_attention_mask=True),
        small_tokenizer(tokens, named=named),
    )


ROWS: Mapping[str, FamilyProcessor] = {
    "qwen2_audio": FamilyProcessor(build=_qwen2_audio, sound="<|audio_bos|><|AUDIO|><|audio_eos|>"),
    "voxtral": FamilyProcessor(
        build=_voxtral, sound="[BEGIN_AUDIO][AUDIO]", by_hand="text part (transformers' own requires mistral_common)"
    ),
    "phi4_multimodal": FamilyProcessor(
        build=_phi4_multimodal,
        picture="<|endoftext10|>",
        sound="<|endoftext11|>",
        by_hand="picture part (transformers' own requires torchvision)",
    ),
    "qwen2_5_omni": FamilyProcessor(
        build=_qwen2_5_omni,
        picture="<|vision_bos|><|IMAGE|><|vision_eos|>",
        sound="<|audio_bos|><|AUDIO|><|audio_eos|>",
    ),
}
