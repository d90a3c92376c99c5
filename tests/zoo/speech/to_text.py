"""Speech to text: encoder-decoders that write a transcript of one clip, and language models that read sound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, SpeechEncoderDecoderConfig

from zoo.family import IGNORE, Batch, Draw, Family, Size
from zoo.parts import AUDIO, TOWER, VOCABULARY, Pretrained, config, conversation, ones, text_config
from zoo.speech.frames import PARAKEET_ENCODER, WAVE_CONVOLUTIONS, WAVE_ENCODER, shortened

_BINS = 16
_TOKENS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
}


def _transcripts(draw: Draw, size: Size) -> Tensor:
    """Labels [samples, length]; the last transcript is three tokens shorter."""
    labels = draw.tokens(size.samples, size.length)
    labels[-1, -3:] = IGNORE
    return labels


def _waves(samples: int) -> Callable[[Draw, Size], Batch]:
    """Inputs of raw sound, `samples` numbers a token of the transcript."""

    def inputs(draw: Draw, size: Size) -> Batch:
        sounds, mask = shortened(draw.normal(size.samples, samples * size.length), dim=1)
        return {"input_values": sounds, "attention_mask": mask, "labels": _transcripts(draw, size)}

    return inputs


def _spectrograms(frames: int, bins: int = _BINS) -> Callable[[Draw, Size], Batch]:
    """Inputs of spectrograms, `frames` frames a token of the transcript."""

    def inputs(draw: Draw, size: Size) -> Batch:
        features, mask = shortened(draw.normal(size.samples, frames * size.length, bins), dim=1)
        return {"input_features": features, "attention_mask": mask, "labels": _transcripts(draw, size)}

    return inputs


def _speech_to_text_config() -> PretrainedConfig:
    return config(
        "speech_to_text",
        **_TOKENS,
        d_model=64,
        encoder_layers=4,
        encoder_ffn_dim=128,
        encoder_attention_heads=4,
        decoder_layers=4,
        decoder_ffn_dim=128,
        decoder_attention_heads=4,
        conv_channels=64,
        input_feat_per_channel=_BINS,
        max_source_positions=256,
        max_target_positions=128,
        dropout=0.0,
    )


def _moonshine_config() -> PretrainedConfig:
    return config(
        "moonshine",
        **_TOKENS,
        hidden_size=64,
        intermediate_size=128,
        encoder_num_hidden_layers=4,
        decoder_num_hidden_layers=4,
        encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
    )


def _moonshine_streaming_config() -> PretrainedConfig:
    encoder = dict(TOWER, num_key_value_heads=4, sliding_windows=[[8, 4], [8, 0], [8, 0], [8, 4]])
    return config("moonshine_streaming", encoder_config=encoder, num_key_value_heads=4, **TOWER, **_TOKENS)


def _seamless_config(model_type: str, **fields: Any) -> Callable[[], PretrainedConfig]:
    def make() -> PretrainedConfig:
        return config(
            model_type,
            **_TOKENS,
            hidden_size=64,
            decoder_layers=4,
            decoder_ffn_dim=128,
            decoder_attention_heads=4,
            speech_encoder_layers=4,
            speech_encoder_attention_heads=4,
            speech_encoder_intermediate_size=128,
            feature_projection_input_dim=2 * _BINS,
            conv_depthwise_kernel_size=7,
            adaptor_kernel_size=4,
            adaptor_stride=4,
            adaptor_dropout=0.0,
            dropout=0.0,
            attention_dropout=0.0,
            encoder_layerdrop=0.0,
            decoder_layerdrop=0.0,
            speech_encoder_layerdrop=0.0,
            **fields,
        )

    return make


def _speech_encoder_decoder_config() -> PretrainedConfig:
    made = SpeechEncoderDecoderConfig.from_encoder_decoder_configs(
        config("wav2vec2", **WAVE_ENCODER, feat_extract_norm="layer", do_stable_layer_norm=True, conv_bias=True),
        config("bert", **TOWER, vocab_size=VOCABULARY, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    )
    made.pad_token_id = 0
    made.decoder_start_token_id = 1
    return made


SPEECHT5: dict[str, Any] = {
    **_TOKENS,
    **WAVE_CONVOLUTIONS,
    "hidden_size": 64,
    "encoder_layers": 4,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_layers": 4,
    "decoder_ffn_dim": 128,
    "decoder_attention_heads": 4,
    "encoder_max_relative_position": 16,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "positional_dropout": 0.0,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "apply_spec_augment": False,
}
"""Fields of a four-layer SpeechT5."""


def _speecht5_config() -> PretrainedConfig:
    return config("speecht5", **SPEECHT5)


def _pop2piano_config() -> PretrainedConfig:
    return config(
        "pop2piano",
        vocab_size=VOCABULARY,
        composer_vocab_size=4,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=4,
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )


def _canary_config() -> PretrainedConfig:
    decoder = dict(TOWER, num_key_value_heads=4, head_dim=16, vocab_size=VOCABULARY, pad_token_id=0)
    return config("canary", encoder_config=dict(PARAKEET_ENCODER, scale_input=False), decoder_config=decoder, **_TOKENS)


def _cohere_asr_config() -> PretrainedConfig:
    encoder = dict(PARAKEET_ENCODER, scale_input=False)
    return config("cohere_asr", encoder_config=encoder, num_key_value_heads=4, **TOWER, **_TOKENS)


def _kyutai_speech_to_text_config() -> PretrainedConfig:
    return config(
        "kyutai_speech_to_text",
        hidden_size=64,
        ffn_dim=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        num_codebooks=4,
        codebook_vocab_size=33,
        audio_bos_token_id=32,
        audio_pad_token_id=VOCABULARY + 4 * 33,
        pad_token_id=3,
        bos_token_id=1,
        sliding_window=16,
        max_position_embeddings=64,
        codec_config=config(
            "mimi",
            **dict(TOWER, num_hidden_layers=2),
            num_key_value_heads=4,
            num_filters=8,
            codebook_size=32,
            codebook_dim=16,
            num_quantizers=4,
            vector_quantization_hidden_dimension=16,
            upsample_groups=4,
        ),
    )


def _kyutai_speech_to_text_inputs(draw: Draw, size: Size) -> Batch:
    """A text token and four codes of sound a step."""
    text = draw.tokens(size.samples, size.length)
    codes = [draw.tokens(size.samples, size.length) % 32 for _ in range(4)]
    codes[0][:, 0] = 32
    labels = text.clone()
    labels[:, :2] = IGNORE
    return {
        "input_ids": torch.stack([text, *codes], dim=-1),
        "attention_mask": ones(size.samples, size.length),
        "labels": labels,
    }


def _omniasr_config() -> PretrainedConfig:
    return config(
        "omniasr",
        audio_config=dict(WAVE_ENCODER),
        text_config=text_config(),
        audio_token_id=AUDIO,
        bos_token_id=1,
        pad_token_id=0,
        eos_token_id=2,
    )


def _omniasr_inputs(draw: Draw, size: Size) -> Batch:
    """One clip of 1,100 samples a row: 16 placeholders."""
    batch = conversation(draw, size, [(AUDIO, 16)])
    batch["input_values"] = draw.normal(size.samples, 1, 1100)
    batch["padding_mask"] = ones(size.samples, 1100)
    return batch


def _family(
    name: str,
    class_name: str,
    make: Callable[[], PretrainedConfig],
    inputs: Callable[[Draw, Size], Batch],
    lengths: tuple[int, int] = (12, 16),
) -> Family:
    return Family(
        name=name,
        model=Pretrained(class_name=class_name, config=make),
        inputs=inputs,
        first=Size(samples=2, length=lengths[0]),
        second=Size(samples=3, length=lengths[1]),
    )


FAMILIES = (
    _family("speech_to_text", "Speech2TextForConditionalGeneration", _speech_to_text_config, _spectrograms(4)),
    _family("moonshine", "MoonshineForConditionalGeneration", _moonshine_config, _waves(400)),
    _family(
        "moonshine_streaming",
        "MoonshineStreamingForConditionalGeneration",
        _moonshine_streaming_config,
        _waves(240),
    ),
    _family(
        "seamless_m4t",
        "SeamlessM4TForSpeechToText",
        _seamless_config("seamless_m4t", num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4),
        _spectrograms(4, 2 * _BINS),
    ),
    _family(
        "seamless_m4t_v2",
        "SeamlessM4Tv2ForSpeechToText",
        _seamless_config("seamless_m4t_v2"),
        _spectrograms(4, 2 * _BINS),
    ),
    _family("speech_encoder_decoder", "SpeechEncoderDecoderModel", _speech_encoder_decoder_config, _waves(160)),
    _family("speecht5", "SpeechT5ForSpeechToText", _speecht5_config, _waves(160)),
    _family("pop2piano", "Pop2PianoForConditionalGeneration", _pop2piano_config, _spectrograms(2, 64)),
    _family("canary", "CanaryForConditionalGeneration", _canary_config, _spectrograms(8)),
    _family("cohere_asr", "CohereAsrForConditionalGeneration", _cohere_asr_config, _spectrograms(8)),
    _family(
        "kyutai_speech_to_text",
        "KyutaiSpeechToTextForConditionalGeneration",
        _kyutai_speech_to_text_config,
        _kyutai_speech_to_text_inputs,
    ),
    _family("omniasr", "OmniASRForConditionalGeneration", _omniasr_config, _omniasr_inputs, (32, 40)),
)
