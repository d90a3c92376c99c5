"""Text to sound: spectrograms (SpeechT5, FastSpeech 2) and codes of a sound codec (Dia, CSM, MusicGen)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from zoo.family import IGNORE, Batch, Draw, Family, Size
from zoo.parts import AUDIO, AUDIO_END, TEXT, TOWER, VOCABULARY, Pretrained, config, ones
from zoo.speech.to_text import SPEECHT5

_BINS = 16
_CODES = 32
_DELAYS = (0, 1, 2)
_BEGIN, _END, _PAD = _CODES, _CODES + 1, _CODES + 2


def _texts(draw: Draw, size: Size) -> Batch:
    """Text of `length` tokens; the last row is two tokens shorter."""
    mask = ones(size.samples, size.length)
    mask[-1, -2:] = 0
    return {"input_ids": draw.tokens(size.samples, size.length) * mask, "attention_mask": mask}


def _speecht5_config() -> PretrainedConfig:
    """The prenet, whose dropout cannot be turned off, is one layer."""
    return config(
        "speecht5",
        **SPEECHT5,
        num_mel_bins=_BINS,
        speaker_embedding_dim=8,
        speech_decoder_prenet_layers=0,
        speech_decoder_prenet_units=_BINS,
        speech_decoder_postnet_layers=3,
        speech_decoder_postnet_units=32,
        speech_decoder_postnet_dropout=0.0,
    )


def _speecht5_inputs(draw: Draw, size: Size) -> Batch:
    """Two frames a token; the last spectrogram ends six frames before the others."""
    frames = draw.normal(size.samples, 2 * size.length, _BINS)
    frames[-1, -6:] = IGNORE
    mask = ones(size.samples, 2 * size.length)
    mask[-1, -6:] = 0
    return {
        **_texts(draw, size),
        "speaker_embeddings": draw.normal(size.samples, 8),
        "decoder_attention_mask": mask,
        "labels": frames,
    }


def _fastspeech2_config() -> PretrainedConfig:
    return config(
        "fastspeech2_conformer",
        hidden_size=64,
        vocab_size=VOCABULARY,
        num_mel_bins=_BINS,
        encoder_layers=4,
        encoder_linear_units=128,
        decoder_layers=4,
        decoder_linear_units=128,
        decoder_kernel_size=7,
        speech_decoder_postnet_layers=3,
        speech_decoder_postnet_units=32,
        duration_predictor_channels=32,
        energy_predictor_channels=32,
        pitch_predictor_layers=2,
        pitch_predictor_channels=32,
        encoder_dropout_rate=0.0,
        encoder_positional_dropout_rate=0.0,
        encoder_attention_dropout_rate=0.0,
        decoder_dropout_rate=0.0,
        decoder_positional_dropout_rate=0.0,
        decoder_attention_dropout_rate=0.0,
        duration_predictor_dropout_rate=0.0,
        energy_predictor_dropout=0.0,
        pitch_predictor_dropout=0.0,
        speech_decoder_postnet_dropout=0.0,
    )


def _fastspeech2_inputs(draw: Draw, size: Size) -> Batch:
    """One to three frames a token, and a spectrogram as long as they add up to."""
    batch = _texts(draw, size)
    durations = (draw.tokens(size.samples, size.length) % 3 + 1) * batch["attention_mask"]
    lengths = durations.sum(1)
    frames = draw.normal(size.samples, int(lengths.max()), _BINS)
    frames[torch.arange(frames.shape[1]) >= lengths[:, None]] = IGNORE
    return {
        **batch,
        "spectrogram_labels": frames,
        "duration_labels": durations,
        "pitch_labels": draw.normal(size.samples, size.length, 1),
        "energy_labels": draw.normal(size.samples, size.length, 1),
    }


def _codes(draw: Draw, size: Size, books: int) -> Tensor:
    """Codes [samples, length, books] below 32."""
    return torch.stack([draw.tokens(size.samples, size.length) % _CODES for _ in range(books)], dim=-1)


def _dia_config() -> PretrainedConfig:
    attention = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    decoder = dict(
        TOWER,
        **{**attention, "num_key_value_heads": 2},
        cross_num_attention_heads=4,
        cross_num_key_value_heads=4,
        cross_head_dim=16,
        cross_hidden_size=64,
        vocab_size=_CODES + 3,
        num_channels=len(_DELAYS),
        bos_token_id=_BEGIN,
        eos_token_id=_END,
        pad_token_id=_PAD,
    )
    encoder = {**TOWER, **attention, "vocab_size": VOCABULARY}
    return config("dia", encoder_config=encoder, decoder_config=decoder, delay_pattern=list(_DELAYS))


def _dia_inputs(draw: Draw, size: Size) -> Batch:
    """Channels of codes, each one step later than the one before, between a begin and an end code."""
    codes = _codes(draw, size, len(_DELAYS))
    delayed = torch.full((size.samples, size.length + 2 + _DELAYS[-1], len(_DELAYS)), _PAD)
    for channel, delay in enumerate(_DELAYS):
        delayed[:, : delay + 1, channel] = _BEGIN
        delayed[:, delay + 1 : delay + 1 + size.length, channel] = codes[:, :, channel]
        delayed[:, delay + 1 + size.length, channel] = _END
    targets = delayed[:, 1:]
    labels = targets.masked_fill((targets == _PAD) | (targets == _BEGIN), IGNORE)
    return {
        **_texts(draw, size),
        "decoder_input_ids": delayed[:, :-1],
        "decoder_attention_mask": ones(size.samples, targets.shape[1]),
        "labels": labels.transpose(1, 2).reshape(-1, targets.shape[1]),
    }


def _csm_config() -> PretrainedConfig:
    codec = config(
        "mimi",
        **dict(TOWER, num_hidden_layers=2),
        num_key_value_heads=4,
        num_filters=8,
        upsampling_ratios=[4, 4],
        codebook_size=_CODES,
        codebook_dim=16,
        num_quantizers=4,
        vector_quantization_hidden_dimension=16,
        upsample_groups=4,
    )
    depth = dict(TOWER, num_key_value_heads=2, num_codebooks=4, backbone_hidden_size=64, vocab_size=_CODES + 3)
    return config(
        "csm",
        **{**TEXT, "vocab_size": _CODES + 3},
        text_vocab_size=VOCABULARY,
        num_codebooks=4,
        codebook_pad_token_id=_PAD,
        codebook_eos_token_id=_END,
        audio_token_id=AUDIO,
        audio_eos_token_id=AUDIO_END,
        depth_decoder_config=depth,
        codec_config=codec,
    )


def _csm_model() -> nn.Module:
    """CSM with random codebooks, which transformers leaves at zero."""
    model = Pretrained(class_name="CsmForConditionalGeneration", config=_csm_config)()
    for name, buffer in model.named_buffers():
        if name.endswith("codebook.embed_sum"):
            buffer.normal_()
    return model


def _csm_inputs(draw: Draw, size: Size) -> Batch:
    """`media` clips of eight frames a row, the last frame for the first codebook only."""
    frames, samples = 8, 256
    ids = draw.tokens(size.samples, size.length)
    labels = torch.full_like(ids, IGNORE)
    for clip in range(size.media):
        start = 3 + clip * (frames + 3)
        ids[:, start : start + frames] = AUDIO
        ids[:, start + frames] = AUDIO_END
        labels[:, start : start + frames + 1] = ids[:, start : start + frames + 1]
        labels[:, start + frames - 1] = -101
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "input_values": draw.normal(size.samples, 1, samples * size.media),
        "input_values_cutoffs": samples * torch.arange(1, size.media + 1).repeat(size.samples, 1),
        "labels": labels,
    }


def _musicgen_config(model_type: str) -> Callable[[], PretrainedConfig]:
    def make() -> PretrainedConfig:
        decoder = config(
            f"{model_type}_decoder",
            vocab_size=_CODES,
            hidden_size=64,
            ffn_dim=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_codebooks=len(_DELAYS),
            max_position_embeddings=128,
            dropout=0.0,
            pad_token_id=_CODES,
            bos_token_id=_CODES,
            decoder_start_token_id=_CODES,
        )
        text = config(
            "t5", vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=4, num_heads=4, dropout_rate=0.0
        )
        codec = config(
            "encodec", hidden_size=16, num_filters=4, upsampling_ratios=[4, 4], codebook_size=_CODES, codebook_dim=16
        )
        fields = {"chroma_length": 12} if model_type == "musicgen_melody" else {}
        return config(model_type, text_encoder=text, audio_encoder=codec, decoder=decoder, **fields)

    return make


def _musicgen_inputs(draw: Draw, size: Size) -> Batch:
    """A description and the codes of the music, each codebook one step later than the one before."""
    labels = _codes(draw, size, len(_DELAYS))
    for book, delay in enumerate(_DELAYS):
        labels[:, :delay, book] = IGNORE
    return {**_texts(draw, size), "labels": labels}


def _musicgen_melody_inputs(draw: Draw, size: Size) -> Batch:
    """The melody is a one-hot pitch class a step."""
    melody = nn.functional.one_hot(draw.tokens(size.samples, 12) % 12, 12).float()
    return {**_musicgen_inputs(draw, size), "input_features": melody}


def _family(name: str, model: Callable[[], nn.Module], inputs: Callable[[Draw, Size], Batch]) -> Family:
    return Family(
        name=name,
        model=model,
        inputs=inputs,
        first=Size(samples=2, length=12),
        second=Size(samples=3, length=16),
    )


FAMILIES = (
    _family(
        "speecht5_tts", Pretrained(class_name="SpeechT5ForTextToSpeech", config=_speecht5_config), _speecht5_inputs
    ),
    _family(
        "fastspeech2_conformer",
        Pretrained(class_name="FastSpeech2ConformerModel", config=_fastspeech2_config),
        _fastspeech2_inputs,
    ),
    _family("dia", Pretrained(class_name="DiaForConditionalGeneration", config=_dia_config), _dia_inputs),
    Family(
        name="csm",
        model=_csm_model,
        inputs=_csm_inputs,
        first=Size(samples=2, length=20, media=1),
        second=Size(samples=3, length=32, media=2),
    ),
    _family(
        "musicgen",
        Pretrained(class_name="MusicgenForConditionalGeneration", config=_musicgen_config("musicgen")),
        _musicgen_inputs,
    ),
    _family(
        "musicgen_melody",
        Pretrained(class_name="MusicgenMelodyForConditionalGeneration", config=_musicgen_config("musicgen_melody")),
        _musicgen_melody_inputs,
    ),
)
