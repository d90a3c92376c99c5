"""Models with query tokens between tower and text (BLIP-2, Kosmos-2, IDEFICS), and encoder-decoders that read pictures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PretrainedConfig, VisionEncoderDecoderConfig

from zoo.family import IGNORE, Batch, Draw, Family, Size
from zoo.parts import (
    IMAGE,
    PLACEHOLDERS,
    QFORMER,
    TEXT,
    TOWER,
    VISION,
    VOCABULARY,
    Pretrained,
    config,
    conversation,
    ones,
    opt_config,
)


def _qformer_config(model_type: str) -> Callable[[], PretrainedConfig]:
    def make() -> PretrainedConfig:
        return config(
            model_type,
            vision_config=dict(VISION),
            qformer_config=dict(QFORMER),
            text_config=opt_config(),
            num_query_tokens=8,
            **PLACEHOLDERS,
        )

    return make


def _one_picture(start: int, tokens: int, pixels: int = 56) -> Callable[[Draw, Size], Batch]:
    """Inputs with exactly one picture a row."""

    def inputs(draw: Draw, size: Size) -> Batch:
        batch = conversation(draw, size, [(IMAGE, tokens)], start=start)
        batch["pixel_values"] = draw.normal(size.samples, 3, pixels, pixels)
        return batch

    return inputs


def _instructblip_inputs(draw: Draw, size: Size) -> Batch:
    batch = _one_picture(1, 8)(draw, size)
    batch["qformer_input_ids"] = draw.tokens(size.samples, size.length // 4)
    batch["qformer_attention_mask"] = ones(size.samples, size.length // 4)
    return batch


def _kosmos2_config() -> PretrainedConfig:
    return config(
        "kosmos-2",
        vision_config=dict(VISION),
        text_config=dict(
            vocab_size=VOCABULARY,
            embed_dim=64,
            layers=4,
            ffn_dim=128,
            attention_heads=4,
            dropout=0.0,
            attention_dropout=0.0,
            max_position_embeddings=512,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        ),
        latent_query_num=8,
    )


def _kosmos2_inputs(draw: Draw, size: Size) -> Batch:
    batch = _one_picture(2, 8)(draw, size)
    batch["image_embeds_position_mask"] = (batch["input_ids"] == IMAGE).long()
    return batch


def _florence2_config() -> PretrainedConfig:
    return config(
        "florence2",
        vision_config=dict(
            depths=[1, 1, 1, 1],
            embed_dim=[16, 32, 32, 64],
            num_heads=[2, 2, 2, 4],
            num_groups=[2, 2, 2, 4],
            window_size=4,
            projection_dim=64,
            drop_path_rate=0.0,
        ),
        text_config=config(
            "bart",
            d_model=64,
            vocab_size=VOCABULARY,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=128,
            decoder_ffn_dim=128,
            max_position_embeddings=256,
            dropout=0.0,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=2,
            forced_eos_token_id=2,
        ),
        image_token_id=IMAGE,
    )


def _vision_encoder_decoder_config() -> PretrainedConfig:
    made = VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        config("vit", **VISION, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
        config(
            "gpt2",
            n_embd=64,
            n_layer=2,
            n_head=4,
            vocab_size=VOCABULARY,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=2,
        ),
    )
    made.pad_token_id = 0
    made.decoder_start_token_id = 1
    return made


def _caption_inputs(draw: Draw, size: Size) -> Batch:
    """A picture in, a caption out."""
    return {
        "pixel_values": draw.normal(size.samples, 3, 56, 56),
        "labels": draw.tokens(size.samples, size.length),
    }


def _blip_config() -> PretrainedConfig:
    return config(
        "blip",
        vision_config=dict(VISION),
        text_config=dict(
            TOWER,
            vocab_size=VOCABULARY,
            max_position_embeddings=80,
            projection_dim=32,
            bos_token_id=1,
            eos_token_id=2,
            sep_token_id=3,
        ),
        projection_dim=32,
        image_text_hidden_size=32,
    )


def _blip_caption_inputs(draw: Draw, size: Size) -> Batch:
    """A picture and its caption, whose first three tokens are a prompt."""
    batch = conversation(draw, size, [])
    batch["labels"][:, :3] = IGNORE
    batch["pixel_values"] = draw.normal(size.samples, 3, 56, 56)
    return batch


def _blip_question_inputs(draw: Draw, size: Size) -> Batch:
    """A picture, a question and its answer, of which the last is shorter."""
    answers = draw.tokens(size.samples, size.length // 2)
    known = ones(*answers.shape)
    known[-1, -2:] = 0
    return {
        "input_ids": draw.tokens(size.samples, size.length),
        "attention_mask": ones(size.samples, size.length),
        "pixel_values": draw.normal(size.samples, 3, 56, 56),
        "decoder_input_ids": answers * known,
        "decoder_attention_mask": known,
        "labels": answers.masked_fill(known == 0, IGNORE),
    }


def _idefics_config() -> PretrainedConfig:
    text: dict[str, Any] = {name: value for name, value in TEXT.items() if name != "num_key_value_heads"}
    return config(
        "idefics",
        **text,
        vision_config=dict(
            embed_dim=64,
            image_size=56,
            intermediate_size=128,
            patch_size=14,
            num_hidden_layers=4,
            num_attention_heads=4,
        ),
        perceiver_config=dict(
            use_resampler=True, resampler_n_latents=4, resampler_depth=2, resampler_n_heads=4, resampler_head_dim=16
        ),
        use_resampler=True,
        cross_layer_interval=2,
        freeze_text_layers=False,
        freeze_vision_layers=False,
    )


def _idefics_inputs(draw: Draw, size: Size) -> Batch:
    """Pictures with their rows; a token sees the last picture before it, and the first tokens see none."""
    batch = conversation(draw, size, [(IMAGE, 1)] * size.media)
    before = (batch["input_ids"] == IMAGE).cumsum(-1)
    batch["image_attention_mask"] = (before[:, :, None] == torch.arange(1, size.media + 1)).long()
    batch["pixel_values"] = draw.normal(size.samples, size.media, 3, 56, 56)
    return batch


def _family(
    name: str,
    class_name: str,
    make: Callable[[], PretrainedConfig],
    inputs: Callable[[Draw, Size], Batch],
    lengths: tuple[int, int] = (32, 40),
) -> Family:
    return Family(
        name=name,
        model=Pretrained(class_name=class_name, config=make),
        inputs=inputs,
        first=Size(samples=2, length=lengths[0]),
        second=Size(samples=3, length=lengths[1]),
    )


FAMILIES = (
    _family("blip2", "Blip2ForConditionalGeneration", _qformer_config("blip-2"), _one_picture(1, 8)),
    _family(
        "instructblip", "InstructBlipForConditionalGeneration", _qformer_config("instructblip"), _instructblip_inputs
    ),
    _family("kosmos2", "Kosmos2ForConditionalGeneration", _kosmos2_config, _kosmos2_inputs),
    _family("florence2", "Florence2ForConditionalGeneration", _florence2_config, _one_picture(3, 5, pixels=64)),
    _family(
        "vision_encoder_decoder",
        "VisionEncoderDecoderModel",
        _vision_encoder_decoder_config,
        _caption_inputs,
        (16, 20),
    ),
    _family("blip", "BlipForConditionalGeneration", _blip_config, _blip_caption_inputs, (16, 20)),
    _family("blip_questions", "BlipForQuestionAnswering", _blip_config, _blip_question_inputs, (16, 20)),
    Family(
        name="idefics",
        model=Pretrained(class_name="IdeficsForVisionText2Text", config=_idefics_config),
        inputs=_idefics_inputs,
        first=Size(samples=2, length=24, media=1),
        second=Size(samples=3, length=32, media=2),
    ),
)
