"""Models that hear: audio encoders before a language model, two modalities at once, and Whisper."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PretrainedConfig

from zoo.family import IGNORE, Batch, Draw, Family, Size
from zoo.parts import (
    AUDIO,
    AUDIO_END,
    AUDIO_START,
    IMAGE,
    QFORMER,
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
    text_config,
)
from zoo.qwen_like import MROPE, WINDOWED_TOWER

MELS = 16
_FRAMES = 80


def _clips(tokens: int, *, mask: str | None) -> Callable[[Draw, Size], Batch]:
    """Inputs with clips of 80 frames x 16 mel bins, `tokens` placeholders each; `mask` names the frame mask."""

    def inputs(draw: Draw, size: Size) -> Batch:
        batch = conversation(draw, size, [(AUDIO, tokens)] * size.media)
        clips = size.samples * size.media
        if clips:
            batch["input_features"] = draw.normal(clips, MELS, _FRAMES)
            if mask is not None:
                batch[mask] = ones(clips, _FRAMES)
        return batch

    return inputs


def _family(
    name: str, class_name: str, make: Callable[[], PretrainedConfig], tokens: int, *, mask: str | None
) -> Family:
    return Family(
        name=name,
        model=Pretrained(class_name=class_name, config=make),
        inputs=_clips(tokens, mask=mask),
        first=Size(samples=2, length=tokens + 26, media=1),
        second=Size(samples=3, length=2 * tokens + 20, media=2),
        text_only=True,
    )


def _qwen2_audio_config() -> PretrainedConfig:
    return config(
        "qwen2_audio",
        audio_config=config(
            "qwen2_audio_encoder",
            d_model=64,
            encoder_layers=4,
            encoder_attention_heads=4,
            encoder_ffn_dim=128,
            num_mel_bins=MELS,
            max_source_positions=_FRAMES // 2,
        ),
        text_config=text_config("qwen2"),
        audio_token_index=AUDIO,
        audio_token_id=AUDIO,
        ignore_index=IGNORE,
    )


def _voxtral_config() -> PretrainedConfig:
    return config(
        "voxtral",
        audio_config=dict(TOWER, intermediate_size=256, num_mel_bins=MELS, max_source_positions=_FRAMES // 2),
        text_config=text_config(),
        audio_token_id=AUDIO,
        hidden_size=64,
    )


def _audioflamingo3_config() -> PretrainedConfig:
    return config(
        "audioflamingo3",
        audio_config=dict(TOWER, num_mel_bins=MELS, max_source_positions=_FRAMES // 2),
        text_config=text_config("qwen2"),
        audio_token_id=AUDIO,
    )


def _glmasr_config() -> PretrainedConfig:
    return config(
        "glmasr",
        audio_config=dict(
            TOWER,
            intermediate_size=256,
            num_key_value_heads=4,
            head_dim=16,
            num_mel_bins=MELS,
            max_position_embeddings=64,
        ),
        text_config=text_config(),
        audio_token_id=AUDIO,
    )


def _granite_speech_config() -> PretrainedConfig:
    return config(
        "granite_speech",
        encoder_config=dict(
            input_dim=32,
            num_layers=2,
            hidden_dim=64,
            feedforward_mult=2,
            num_heads=4,
            dim_head=16,
            output_dim=16,
            context_size=20,
            max_pos_emb=32,
            dropout=0.0,
            conv_kernel_size=5,
        ),
        projector_config=config("blip_2_qformer", **QFORMER),
        text_config=text_config("granite"),
        audio_token_index=AUDIO,
        audio_token_id=AUDIO,
        has_lora_adapter=False,
        downsample_rate=5,
        window_size=15,
    )


def _granite_speech_inputs(draw: Draw, size: Size) -> Batch:
    """40 frames make 3 windows of 15, each 3 queries: 9 placeholders."""
    batch = conversation(draw, size, [(AUDIO, 9)])
    batch["input_features"] = draw.normal(size.samples, 40, 32)
    batch["input_features_mask"] = torch.ones(size.samples, 9, dtype=torch.bool)
    return batch


def _phi4_multimodal_config() -> PretrainedConfig:
    return config(
        "phi4_multimodal",
        vision_config=dict(VISION, crop_size=56, image_token_id=IMAGE),
        audio_config=dict(
            hidden_size=64,
            intermediate_size=128,
            num_blocks=2,
            num_attention_heads=4,
            ext_pw_out_channel=64,
            depthwise_separable_out_channel=64,
            input_size=MELS,
            nemo_conv_channels=64,
            nemo_final_size=2,
            audio_token_id=AUDIO,
            time_reduction=8,
            dropout_rate=0.0,
        ),
        **TEXT,
        original_max_position_embeddings=4096,
    )


def _phi4_multimodal_inputs(draw: Draw, size: Size) -> Batch:
    """A picture (thumbnail and one crop, 2 x 3 tokens each and a separator) and a clip a row."""
    batch = conversation(draw, size, [(IMAGE, 13), (AUDIO, 10)])
    rows = size.samples
    batch["image_pixel_values"] = draw.normal(rows, 2, 3, 56, 56)
    batch["image_sizes"] = repeat_rows([56, 56], rows)
    batch["image_attention_mask"] = torch.ones(rows, 2, 4, 4)
    batch["audio_input_features"] = draw.normal(rows, _FRAMES, MELS)
    batch["audio_embed_sizes"] = torch.full((rows,), 10)
    batch["audio_attention_mask"] = torch.ones(rows, _FRAMES, dtype=torch.bool)
    return batch


def _qwen2_5_omni_config() -> PretrainedConfig:
    return config(
        "qwen2_5_omni_thinker",
        vision_config=dict(WINDOWED_TOWER),
        audio_config=dict(
            d_model=64,
            encoder_layers=2,
            encoder_attention_heads=4,
            encoder_ffn_dim=128,
            num_mel_bins=MELS,
            max_source_positions=64,
            n_window=20,
            output_dim=64,
        ),
        text_config=dict(TEXT, rope_parameters=MROPE),
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        audio_token_index=AUDIO,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        audio_token_id=AUDIO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        audio_start_token_id=AUDIO_START,
        audio_end_token_id=AUDIO_END,
    )


def picture_clip_pairs(patch: int, *, clip_tokens: int, frames: int) -> Callable[[Draw, Size], Batch]:
    """Inputs with `media` pairs of one picture (8 x 8 patches, 16 tokens) and one clip of `frames` frames a row."""

    def inputs(draw: Draw, size: Size) -> Batch:
        batch = conversation(draw, size, [(IMAGE, 16), (AUDIO, clip_tokens)] * size.media, start=4)
        for pair in range(size.media):
            picture = 4 + pair * (16 + 3 + clip_tokens + 3)
            marks = {
                picture - 1: VISION_START,
                picture + 16: VISION_END,
                picture + 18: AUDIO_START,
                picture + 19 + clip_tokens: AUDIO_END,
            }
            for position, token in marks.items():
                batch["input_ids"][:, position] = token
                batch["labels"][:, position] = IGNORE
        media = size.samples * size.media
        if media:
            batch["pixel_values"] = draw.normal(media * 64, 3 * 2 * patch * patch)
            batch["image_grid_thw"] = repeat_rows([1, 8, 8], media)
            batch["input_features"] = draw.normal(media, MELS, frames)
            batch["feature_attention_mask"] = ones(media, frames)
        return batch

    return inputs


def _whisper_config() -> PretrainedConfig:
    return config(
        "whisper",
        vocab_size=VOCABULARY,
        num_mel_bins=MELS,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        d_model=64,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=_FRAMES // 2,
        max_target_positions=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
    )


def _whisper_inputs(draw: Draw, size: Size) -> Batch:
    return {
        "input_features": draw.normal(size.samples, MELS, _FRAMES),
        "labels": draw.tokens(size.samples, size.length),
    }


FAMILIES = (
    _family(
        "qwen2_audio",
        "Qwen2AudioForConditionalGeneration",
        _qwen2_audio_config,
        20,
        mask="feature_attention_mask",
    ),
    # One placeholder a clip: the model's own forward makes the sequence longer, in a tensor made by `torch.zeros`.
    _family(
        "qwen2_audio_merged",
        "Qwen2AudioForConditionalGeneration",
        _qwen2_audio_config,
        1,
        mask="feature_attention_mask",
    ),
    _family("voxtral", "VoxtralForConditionalGeneration", _voxtral_config, 10, mask=None),
    _family(
        "audioflamingo3",
        "AudioFlamingo3ForConditionalGeneration",
        _audioflamingo3_config,
        20,
        mask="input_features_mask",
    ),
    _family("glmasr", "GlmAsrForConditionalGeneration", _glmasr_config, 10, mask="input_features_mask"),
    Family(
        name="granite_speech",
        model=Pretrained(class_name="GraniteSpeechForConditionalGeneration", config=_granite_speech_config),
        inputs=_granite_speech_inputs,
        first=Size(samples=2, length=32),
        second=Size(samples=3, length=40),
    ),
    Family(
        name="phi4_multimodal",
        model=Pretrained(class_name="Phi4MultimodalForCausalLM", config=_phi4_multimodal_config),
        inputs=_phi4_multimodal_inputs,
        first=Size(samples=2, length=48),
        second=Size(samples=3, length=60),
    ),
    Family(
        name="qwen2_5_omni",
        model=Pretrained(class_name="Qwen2_5OmniThinkerForConditionalGeneration", config=_qwen2_5_omni_config),
        inputs=picture_clip_pairs(14, clip_tokens=20, frames=_FRAMES),
        first=Size(samples=2, length=60, media=1),
        second=Size(samples=3, length=100, media=2),
        text_only=True,
    ),
    Family(
        name="whisper",
        model=Pretrained(class_name="WhisperForConditionalGeneration", config=_whisper_config),
        inputs=_whisper_inputs,
        first=Size(samples=2, length=24),
        second=Size(samples=3, length=30),
    ),
)
