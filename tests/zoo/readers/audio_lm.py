"""Language models that transcribe, talk or listen: encoders of clips before a decoder, and a decoder of audio codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PretrainedConfig

from zoo.family import IGNORE, Batch, Draw, Family, Size
from zoo.parts import (
    AUDIO,
    AUDIO_END,
    AUDIO_START,
    QFORMER,
    TEXT,
    TOWER,
    Pretrained,
    config,
    conversation,
    ones,
    text_config,
)
from zoo.readers.hybrid import NEMOTRON_H

_MELS = 16
_FRAMES = 80
_CODEBOOKS, _CODES = 3, 34
_AUDIO_DELAY = 997


def _clips(tokens: int, *shape: int, mask: bool = True, before: int | None = None) -> Callable[[Draw, Size], Batch]:
    """Inputs with clips of `shape`, `tokens` placeholders each, and a mask of 80 frames unless told otherwise."""

    def inputs(draw: Draw, size: Size) -> Batch:
        batch = conversation(draw, size, [(AUDIO, tokens)] * size.media, before=before)
        clips = size.samples * size.media
        if clips:
            batch["input_features"] = draw.normal(clips, *shape)
            if mask:
                batch["input_features_mask"] = ones(clips, _FRAMES)
        return batch

    return inputs


def _fun_asr_nano_config() -> PretrainedConfig:
    quiet = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return config(
        "fun_asr_nano",
        audio_config=dict(
            TOWER,
            **quiet,
            num_mel_bins=_MELS,
            num_stacked_frames=4,
            num_timestamp_prediction_layers=2,
            max_position_embeddings=128,
        ),
        adaptor_config=dict(
            quiet, hidden_size=64, num_attention_heads=4, intermediate_size=16, projector_hidden_size=64
        ),
        text_config=text_config("qwen3", head_dim=16),
        audio_token_id=AUDIO,
    )


def _fun_asr_nano_inputs(draw: Draw, size: Size) -> Batch:
    """Clips of 20 stacks of 4 frames, a token each."""
    batch = conversation(draw, size, [(AUDIO, 20)] * size.media)
    clips = size.samples * size.media
    if clips:
        batch["input_features"] = draw.normal(clips, 20, 4 * _MELS)
        batch["input_features_mask"] = ones(clips, 20)
    return batch


def _granite_speech_plus_config() -> PretrainedConfig:
    return config(
        "granite_speech_plus",
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
            cat_hidden_layers=[1],
        ),
        projector_config=config("blip_2_qformer", **{**QFORMER, "encoder_hidden_size": 128}),
        text_config=text_config("granite"),
        audio_token_index=AUDIO,
        has_lora_adapter=False,
        downsample_rate=5,
        window_size=15,
    )


def _granite_speech_plus_inputs(draw: Draw, size: Size) -> Batch:
    """40 frames make 3 windows of 15, each 3 queries: 9 placeholders."""
    batch = conversation(draw, size, [(AUDIO, 9)])
    batch["input_features"] = draw.normal(size.samples, 40, 32)
    batch["input_features_mask"] = torch.ones(size.samples, 9, dtype=torch.bool)
    return batch


def _moss_transcribe_diarize_config() -> PretrainedConfig:
    return config(
        "moss_transcribe_diarize",
        audio_config=dict(TOWER, num_mel_bins=_MELS, max_source_positions=_FRAMES // 2),
        text_config=text_config("qwen3", head_dim=16),
        audio_token_id=AUDIO,
    )


def _nemo_speechlm_config() -> PretrainedConfig:
    tower = {**TOWER, "num_mel_bins": _MELS}
    return config(
        "nemo_speechlm",
        audio_config=dict(
            asr_config=tower,
            diarization_config=config(
                "nemotron3_diarization",
                audio_config=tower,
                head_config=dict(hidden_size=32, num_speakers=2, audio_hidden_size=64),
                streaming_config=dict(num_speakers=2),
            ),
        ),
        word_timestamp_config=dict(TOWER, num_hidden_layers=1, vocab_size=32, blank_token_id=31),
        text_config=config("nemotron_h", **NEMOTRON_H),
        audio_token_id=AUDIO,
    )


def _qwen3_asr_config() -> PretrainedConfig:
    return config(
        "qwen3_asr",
        audio_config=config(
            "qwen3_asr_encoder",
            d_model=64,
            encoder_layers=4,
            encoder_attention_heads=4,
            encoder_ffn_dim=128,
            num_mel_bins=_MELS,
            n_window_infer=100,
            output_dim=64,
            downsample_hidden_size=8,
        ),
        text_config=text_config("qwen3", head_dim=16),
        audio_token_id=AUDIO,
        pad_token_id=0,
    )


def _qwen3_asr_inputs(draw: Draw, size: Size) -> Batch:
    """Clips of 180 frames, padded to two chunks of 100: 13 and 10 placeholders."""
    batch = conversation(draw, size, [(AUDIO, 23)] * size.media)
    clips = size.samples * size.media
    if clips:
        batch["input_features"] = draw.normal(clips, _MELS, 200)
        batch["input_features_mask"] = (torch.arange(200) < 180).long().repeat(clips, 1)
    return batch


def _vibevoice_asr_config() -> PretrainedConfig:
    tokenizer: dict[str, Any] = {"num_filters": 8, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]}
    name = "vibevoice_acoustic_tokenizer_encoder"
    return config(
        "vibevoice_asr",
        acoustic_tokenizer_encoder_config=config(name, **tokenizer, hidden_size=16),
        semantic_tokenizer_encoder_config=config(name, **tokenizer, hidden_size=32),
        text_config=text_config("qwen2"),
        audio_token_id=AUDIO,
        audio_bos_token_id=AUDIO_START,
        audio_eos_token_id=AUDIO_END,
        acoustic_tokenizer_chunk_size=40,
    )


def _vibevoice_asr_inputs(draw: Draw, size: Size) -> Batch:
    """Waveforms of two chunks of 40 samples, 20 tokens each, without the noise that is otherwise added to them."""
    batch = conversation(draw, size, [(AUDIO, 20)] * size.media, before=AUDIO_START, after=AUDIO_END)
    clips = size.samples * size.media
    if clips:
        batch["input_values"] = draw.normal(clips, 1, 80)
        batch["padding_mask"] = torch.ones(clips, 80, dtype=torch.bool)
        batch["sample"] = False
    return batch


def _voxtral_realtime_config() -> PretrainedConfig:
    return config(
        "voxtral_realtime",
        audio_config=config(
            "voxtral_realtime_encoder",
            **TOWER,
            head_dim=16,
            num_mel_bins=_MELS,
            max_position_embeddings=256,
            sliding_window=16,
        ),
        text_config=dict(TEXT, head_dim=16, sliding_window=16),
    )


def _voxtral_realtime_inputs(draw: Draw, size: Size) -> Batch:
    """A transcript that goes on with the clip: a token for every eight frames, six tokens late."""
    batch = conversation(draw, size, [])
    batch["input_features"] = draw.normal(size.samples, _MELS, 8 * size.length)
    batch["num_delay_tokens"] = 6
    return batch


def _musicflamingo_config() -> PretrainedConfig:
    return config(
        "musicflamingo",
        audio_config=config("audioflamingo3_encoder", **TOWER, num_mel_bins=_MELS, max_source_positions=_FRAMES // 2),
        text_config=text_config("qwen2"),
        audio_token_id=AUDIO,
        audio_bos_token_id=AUDIO_START,
        audio_eos_token_id=AUDIO_END,
    )


def _higgs_audio_v2_config() -> PretrainedConfig:
    return config(
        "higgs_audio_v2",
        **TEXT,
        head_dim=16,
        num_codebooks=_CODEBOOKS,
        codebook_size=_CODES,
        audio_token_id=AUDIO,
        audio_bos_token_id=AUDIO_START,
        audio_delay_token_id=_AUDIO_DELAY,
        audio_stream_bos_id=_CODES - 2,
        audio_stream_eos_id=_CODES - 1,
    )


def _higgs_audio_v2_inputs(draw: Draw, size: Size) -> Batch:
    """A text and the 12 frames of codes of its speech; the first two frames of a clip carry no loss."""
    batch = conversation(draw, size, [(AUDIO, 12)], before=AUDIO_START)
    del batch["labels"]
    codes = draw.tokens(size.samples, 12 * _CODEBOOKS).view(size.samples, 12, _CODEBOOKS) % (_CODES - 2)
    batch["audio_input_ids"] = codes
    batch["audio_input_ids_mask"] = torch.ones(size.samples, 12, dtype=torch.bool)
    batch["audio_labels"] = codes.clone()
    batch["audio_labels"][:, :2] = IGNORE
    return batch


def _family(
    name: str,
    class_name: str,
    make: Callable[[], PretrainedConfig],
    inputs: Callable[[Draw, Size], Batch],
    lengths: tuple[int, int] = (44, 60),
    *,
    text_only: bool = True,
) -> Family:
    return Family(
        name=name,
        model=Pretrained(class_name=class_name, config=make),
        inputs=inputs,
        first=Size(samples=2, length=lengths[0], media=1),
        second=Size(samples=3, length=lengths[1], media=2),
        text_only=text_only,
    )


FAMILIES = (
    _family("fun_asr_nano", "FunAsrNanoForConditionalGeneration", _fun_asr_nano_config, _fun_asr_nano_inputs),
    _family(
        "granite_speech_plus",
        "GraniteSpeechPlusForConditionalGeneration",
        _granite_speech_plus_config,
        _granite_speech_plus_inputs,
        (32, 40),
        text_only=False,
    ),
    _family(
        "moss_transcribe_diarize",
        "MossTranscribeDiarizeForConditionalGeneration",
        _moss_transcribe_diarize_config,
        _clips(10, _MELS, _FRAMES),
    ),
    _family(
        "nemo_speechlm",
        "Nemotron3_5TranscribeForConditionalGeneration",
        _nemo_speechlm_config,
        _clips(10, _FRAMES, _MELS),
    ),
    _family("qwen3_asr", "Qwen3ASRForConditionalGeneration", _qwen3_asr_config, _qwen3_asr_inputs),
    _family("vibevoice_asr", "VibeVoiceAsrForConditionalGeneration", _vibevoice_asr_config, _vibevoice_asr_inputs),
    _family(
        "voxtral_realtime",
        "VoxtralRealtimeForConditionalGeneration",
        _voxtral_realtime_config,
        _voxtral_realtime_inputs,
        (16, 20),
        text_only=False,
    ),
    _family(
        "musicflamingo",
        "MusicFlamingoForConditionalGeneration",
        _musicflamingo_config,
        _clips(20, _MELS, _FRAMES, before=AUDIO_START),
    ),
    _family(
        "higgs_audio_v2",
        "HiggsAudioV2ForConditionalGeneration",
        _higgs_audio_v2_config,
        _higgs_audio_v2_inputs,
        (24, 32),
        text_only=False,
    ),
)
