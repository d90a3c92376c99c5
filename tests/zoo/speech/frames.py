"""Speech encoders that emit a token a frame: connectionist temporal classification, a transducer, sound classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from zoo.family import IGNORE, Batch, Draw, Family, Size
from zoo.parts import TOWER, Pretrained, config, ones

_LETTERS = 32
_BINS = 16

UNDROPPED: dict[str, Any] = {
    "hidden_dropout": 0.0,
    "activation_dropout": 0.0,
    "attention_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
    "layerdrop": 0.0,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
}
"""Fields that take all randomness from a wav2vec 2.0 encoder."""

WAVE_CONVOLUTIONS: dict[str, Any] = {
    "conv_dim": (16, 16, 16),
    "conv_kernel": (8, 8, 4),
    "conv_stride": (4, 4, 4),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
"""Fields of the convolutions in front of a wav2vec 2.0 encoder: a frame every 64 samples."""

WAVE_ENCODER: dict[str, Any] = {**TOWER, **UNDROPPED, **WAVE_CONVOLUTIONS}
"""Fields of a four-layer encoder of raw sound."""

PARAKEET_ENCODER: dict[str, Any] = {
    **TOWER,
    "num_mel_bins": _BINS,
    "subsampling_conv_channels": 16,
    "conv_kernel_size": 5,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "activation_dropout": 0.0,
    "attention_dropout": 0.0,
    "layerdrop": 0.0,
}
"""Fields of a four-layer Parakeet encoder: a token every eight frames."""

_SAMPLES_A_LETTER = 160


def shortened(sounds: Tensor, *, dim: int) -> tuple[Tensor, Tensor]:
    """Sounds whose last one ends after three quarters of `dim`, and the mask [samples, steps] of the others' steps."""
    steps = sounds.shape[dim]
    kept = 3 * steps // 4
    mask = ones(sounds.shape[0], steps)
    mask[-1, kept:] = 0
    silent = sounds.clone()
    silent[-1:].narrow(dim, kept, steps - kept).zero_()
    return silent, mask


def _letters(draw: Draw, size: Size, filler: int = IGNORE) -> Tensor:
    """Transcripts [samples, length] of letters 5 to 31; the last one is two letters shorter."""
    letters = draw.tokens(size.samples, size.length) % (_LETTERS - 5) + 5
    letters[-1, -2:] = filler
    return letters


def _waves(*, masked: bool) -> Callable[[Draw, Size], Batch]:
    """Inputs of raw sound, 160 samples a letter, with a mask of samples or all of one length."""

    def inputs(draw: Draw, size: Size) -> Batch:
        sounds = draw.normal(size.samples, _SAMPLES_A_LETTER * size.length)
        batch = {"labels": _letters(draw, size)}
        if not masked:
            return {"input_values": sounds, **batch}
        sounds, mask = shortened(sounds, dim=1)
        return {"input_values": sounds, "attention_mask": mask, **batch}

    return inputs


def _spectrograms(frames: int, bins: int = _BINS) -> Callable[[Draw, Size], Batch]:
    """Inputs of spectrograms with `frames` frames a letter."""

    def inputs(draw: Draw, size: Size) -> Batch:
        features, mask = shortened(draw.normal(size.samples, frames * size.length, bins), dim=1)
        return {"input_features": features, "attention_mask": mask, "labels": _letters(draw, size)}

    return inputs


def _wave_config(model_type: str, **fields: Any) -> Callable[[], PretrainedConfig]:
    def make() -> PretrainedConfig:
        made = {**WAVE_ENCODER, "vocab_size": _LETTERS, "ctc_loss_reduction": "mean", **fields}
        return config(model_type, **made)

    return make


def _layer_normalized(model_type: str, **fields: Any) -> Callable[[], PretrainedConfig]:
    """The large variant of an encoder: norms before the blocks, and in every convolution."""
    return _wave_config(model_type, feat_extract_norm="layer", do_stable_layer_norm=True, conv_bias=True, **fields)


def _wav2vec2_bert_config() -> PretrainedConfig:
    return config(
        "wav2vec2-bert",
        **TOWER,
        **UNDROPPED,
        vocab_size=_LETTERS,
        feature_projection_input_dim=2 * _BINS,
        conv_depthwise_kernel_size=7,
        conformer_conv_dropout=0.0,
        ctc_loss_reduction="mean",
        add_adapter=True,
    )


def _omniasr_ctc_config() -> PretrainedConfig:
    return config("omniasr_ctc", audio_config=dict(WAVE_ENCODER), vocab_size=_LETTERS)


def _omniasr_ctc_inputs(draw: Draw, size: Size) -> Batch:
    sounds, mask = shortened(draw.normal(size.samples, 1, _SAMPLES_A_LETTER * size.length), dim=2)
    return {"input_values": sounds, "padding_mask": mask, "labels": _letters(draw, size)}


def _parakeet_ctc_config() -> PretrainedConfig:
    return config("parakeet_ctc", encoder_config=dict(PARAKEET_ENCODER), vocab_size=_LETTERS + 1, pad_token_id=_LETTERS)


def _parakeet_tdt_config() -> PretrainedConfig:
    return config(
        "parakeet_tdt",
        encoder_config=dict(PARAKEET_ENCODER),
        vocab_size=_LETTERS + 1,
        decoder_hidden_size=64,
        durations=[0, 1, 2],
        blank_token_id=_LETTERS,
        pad_token_id=2,
    )


def _parakeet_tdt_inputs(draw: Draw, size: Size) -> Batch:
    """The decoder reads a blank and the letters; padding carries no loss."""
    features, mask = shortened(draw.normal(size.samples, 16 * size.length, _BINS), dim=1)
    labels = _letters(draw, size, filler=2)
    return {
        "input_features": features,
        "attention_mask": mask,
        "decoder_input_ids": torch.cat([torch.full_like(labels[:, :1], _LETTERS), labels], dim=1),
        "labels": labels,
    }


def _granite_speech5_config() -> PretrainedConfig:
    encoder = dict(
        TOWER, vocab_size=_LETTERS, num_mel_bins=_BINS, max_position_embeddings=32, context_size=8, conv_kernel_size=5
    )
    return config("granite_speech5_ctc", encoder_config=encoder, vocab_size=_LETTERS)


def _lasr_ctc_config() -> PretrainedConfig:
    encoder = dict(PARAKEET_ENCODER, conv_kernel_size=4)
    return config("lasr_ctc", encoder_config=encoder, vocab_size=_LETTERS)


def _audio_spectrogram_transformer_config() -> PretrainedConfig:
    return config(
        "audio-spectrogram-transformer",
        **TOWER,
        patch_size=8,
        frequency_stride=6,
        time_stride=6,
        max_length=64,
        num_mel_bins=_BINS,
        num_labels=5,
    )


def _sound_classes(draw: Draw, size: Size) -> Batch:
    """Clips of 64 frames, one class each."""
    return {
        "input_values": draw.normal(size.samples, 64, _BINS),
        "labels": draw.tokens(size.samples, 1)[:, 0] % 5,
    }


def _family(
    name: str,
    class_name: str,
    make: Callable[[], PretrainedConfig],
    inputs: Callable[[Draw, Size], Batch],
    lengths: tuple[int, int] = (10, 14),
) -> Family:
    return Family(
        name=name,
        model=Pretrained(class_name=class_name, config=make),
        inputs=inputs,
        first=Size(samples=2, length=lengths[0]),
        second=Size(samples=3, length=lengths[1]),
    )


FAMILIES = (
    _family("wav2vec2", "Wav2Vec2ForCTC", _layer_normalized("wav2vec2"), _waves(masked=True)),
    _family("wav2vec2_bert", "Wav2Vec2BertForCTC", _wav2vec2_bert_config, _spectrograms(6, 2 * _BINS)),
    _family(
        "wav2vec2_conformer",
        "Wav2Vec2ConformerForCTC",
        _wave_config(
            "wav2vec2-conformer",
            feat_extract_norm="layer",
            conv_bias=True,
            conv_depthwise_kernel_size=7,
            conformer_conv_dropout=0.0,
        ),
        _waves(masked=True),
    ),
    _family("hubert", "HubertForCTC", _wave_config("hubert"), _waves(masked=False)),
    _family("sew", "SEWForCTC", _wave_config("sew"), _waves(masked=False)),
    _family(
        "sew_d",
        "SEWDForCTC",
        _wave_config("sew-d", feat_extract_norm="layer", position_buckets=16, max_position_embeddings=64),
        _waves(masked=True),
    ),
    _family("unispeech", "UniSpeechForCTC", _layer_normalized("unispeech"), _waves(masked=True)),
    _family("unispeech_sat", "UniSpeechSatForCTC", _wave_config("unispeech-sat"), _waves(masked=False)),
    _family("wavlm", "WavLMForCTC", _layer_normalized("wavlm", num_buckets=32), _waves(masked=True)),
    _family("data2vec_audio", "Data2VecAudioForCTC", _wave_config("data2vec-audio"), _waves(masked=True)),
    _family("omniasr_ctc", "OmniASRForCTC", _omniasr_ctc_config, _omniasr_ctc_inputs),
    _family("parakeet_ctc", "ParakeetForCTC", _parakeet_ctc_config, _spectrograms(16), (6, 9)),
    _family("parakeet_tdt", "ParakeetForTDT", _parakeet_tdt_config, _parakeet_tdt_inputs, (4, 5)),
    _family("granite_speech5", "GraniteSpeech5ForCTC", _granite_speech5_config, _spectrograms(8, 4 * _BINS)),
    _family("lasr_ctc", "LasrForCTC", _lasr_ctc_config, _spectrograms(12)),
    _family(
        "audio_spectrogram_transformer",
        "ASTForAudioClassification",
        _audio_spectrogram_transformer_config,
        _sound_classes,
    ),
)
