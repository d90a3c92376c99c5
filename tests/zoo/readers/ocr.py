"""Readers of documents: one sequence of patches or tiles of a page in, its text out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PretrainedConfig

from zoo.family import IGNORE, Batch, Draw, Family, Size
from zoo.llava_like import one_block
from zoo.parts import (
    IMAGE,
    TEXT,
    TOWER,
    VIDEO,
    VISION,
    VISION_END,
    VISION_START,
    Pretrained,
    config,
    conversation,
    repeat_rows,
    text_config,
)
from zoo.qwen_like import MROPE, WINDOWED_TOWER
from zoo.readers.sparse import EXPERTS, grid_inputs

_SLICE_START, _SLICE_END, _NEWLINE = 995, 996, 997


def _hunyuan_vl_config() -> PretrainedConfig:
    return config(
        "hunyuan_vl",
        vision_config=dict(TOWER, out_hidden_size=64, max_image_size=128),
        text_config=dict(TEXT, head_dim=16, rope_parameters=MROPE),
        image_token_id=IMAGE,
        im_start_id=VISION_START,
        im_end_id=VISION_END,
    )


def _hyperclovax_vision_v2_config() -> PretrainedConfig:
    return config(
        "hyperclovax_vision_v2",
        vision_config=config("qwen2_5_vl_vision", **WINDOWED_TOWER),
        text_config=text_config("hyperclovax"),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )


def _minicpm_config(model_type: str, **fields: Any) -> Callable[[], PretrainedConfig]:
    def make() -> PretrainedConfig:
        text = text_config(
            "qwen3_5_text",
            head_dim=32,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            linear_num_key_heads=4,
            linear_num_value_heads=4,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 3, 3],
                "mrope_interleaved": True,
            },
        )
        return config(
            model_type,
            vision_config=dict(VISION, image_size=112),
            text_config=text,
            insert_layer_id=1,
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            **fields,
        )

    return make


def _strip(tokens: int, *, token_types: bool = False) -> Callable[[Draw, Size], Batch]:
    """Inputs with the patches of all pictures side by side, [1, 3, 14, 14 x patches], 8 x 8 a picture."""

    def inputs(draw: Draw, size: Size) -> Batch:
        batch = conversation(draw, size, [(IMAGE, tokens)] * size.media, before=VISION_START, after=VISION_END)
        pictures = size.samples * size.media
        if pictures:
            batch["pixel_values"] = draw.normal(1, 3, 14, 14 * 64 * pictures)
            batch["target_sizes"] = repeat_rows([8, 8], pictures)
        if token_types:
            batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).int()
        return batch

    return inputs


def _molmo2_config() -> PretrainedConfig:
    heads = {"num_key_value_heads": 4, "head_dim": 16}
    return config(
        "molmo2",
        vision_config=dict(TOWER, **heads, image_size=[56, 56]),
        adapter_config=dict(
            vision_feature_layer=[3, 1],
            hidden_size=64,
            num_attention_heads=4,
            **heads,
            intermediate_size=128,
            text_hidden_size=64,
        ),
        text_config=dict(TEXT, head_dim=16, additional_vocab_size=8),
        image_patch_id=IMAGE,
        image_start_token_id=VISION_START,
        image_end_token_id=VISION_END,
    )


def _molmo2_inputs(draw: Draw, size: Size) -> Batch:
    """Pictures of an overview and a crop, 4 x 4 patches each, 2 x 2 of them in a token; the crop's last token has two."""
    batch = conversation(draw, size, [(IMAGE, 8)] * size.media, before=VISION_START, after=VISION_END)
    batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).long()
    pictures = size.samples * size.media
    if pictures:
        patches = torch.arange(pictures * 32).view(-1, 2, 2, 2, 2).transpose(2, 3).reshape(pictures, 8, 4)
        patches[:, -1, 2:] = -1
        batch["pixel_values"] = draw.normal(pictures * 2, 16, 3 * 14 * 14)
        batch["image_token_pooling"] = patches.flatten(0, 1)
        batch["image_grids"] = repeat_rows([2, 2, 2, 2], pictures)
        batch["image_num_crops"] = torch.full((pictures,), 2)
    return batch


def _pp_formulanet_config() -> PretrainedConfig:
    return config(
        "pp_formulanet",
        vision_config=dict(
            hidden_size=64,
            output_channels=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=64,
            patch_size=8,
            window_size=4,
            global_attn_indexes=[1],
            mlp_dim=128,
            post_conv_in_channels=64,
            post_conv_mid_channels=32,
            post_conv_out_channels=64,
            decoder_hidden_size=64,
        ),
        text_config=dict(
            d_model=64,
            vocab_size=TEXT["vocab_size"],
            encoder_layers=2,
            encoder_attention_heads=4,
            decoder_layers=2,
            decoder_attention_heads=4,
            decoder_ffn_dim=128,
            max_position_embeddings=256,
            dropout=0.0,
        ),
    )


def _pp_formulanet_inputs(draw: Draw, size: Size) -> Batch:
    """A picture of a formula in, its characters out; the last formula is two characters shorter."""
    characters = draw.tokens(size.samples, size.length + 1)
    labels = characters[:, 1:].clone()
    labels[-1, -2:] = IGNORE
    return {
        "pixel_values": draw.normal(size.samples, 3, 64, 64),
        "decoder_input_ids": characters[:, :-1].contiguous(),
        "labels": labels,
    }


def _qianfan_ocr_config() -> PretrainedConfig:
    return config(
        "qianfan_ocr",
        vision_config=dict(TOWER, image_size=56, patch_size=14, drop_path_rate=0.0),
        text_config=text_config("qwen3", head_dim=16),
        image_token_id=IMAGE,
        image_seq_length=4,
    )


def _unlimited_ocr_config() -> PretrainedConfig:
    return config(
        "unlimited_ocr",
        vision_config=dict(
            sam_config=dict(
                hidden_size=64,
                output_channels=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                image_size=64,
                patch_size=8,
                window_size=4,
                global_attn_indexes=[1],
                mlp_dim=128,
                downsample_channels=[32, 64],
            ),
            encoder_config=dict(TOWER, image_size=28, patch_size=14),
        ),
        text_config=dict({**TEXT, "num_key_value_heads": 4}, **EXPERTS, n_shared_experts=1, sliding_window=16),
        image_token_id=IMAGE,
    )


def _family(
    name: str,
    class_name: str,
    make: Callable[[], PretrainedConfig],
    inputs: Callable[[Draw, Size], Batch],
    lengths: tuple[int, int] = (40, 60),
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
    _family(
        "hunyuan_vl",
        "HunYuanVLForConditionalGeneration",
        _hunyuan_vl_config,
        grid_inputs(22, 3 * 16 * 16, token_types=True, before=VISION_START),
    ),
    _family(
        "hyperclovax_vision_v2",
        "HyperCLOVAXVisionV2ForConditionalGeneration",
        _hyperclovax_vision_v2_config,
        grid_inputs(16, 3 * 2 * 14 * 14),
    ),
    _family("minicpm_ocr", "MiniCPMOcrForConditionalGeneration", _minicpm_config("minicpm_ocr"), _strip(16)),
    _family("minicpmv4_6", "MiniCPMV4_6ForConditionalGeneration", _minicpm_config("minicpmv4_6"), _strip(4)),
    _family(
        "minicpmv4_7",
        "MiniCPMV4_7ForConditionalGeneration",
        _minicpm_config(
            "minicpmv4_7",
            image_start_id=VISION_START,
            image_end_id=VISION_END,
            slice_start_id=_SLICE_START,
            slice_end_id=_SLICE_END,
            newline_id=_NEWLINE,
        ),
        _strip(4, token_types=True),
        (44, 60),
    ),
    _family("molmo2", "Molmo2ForConditionalGeneration", _molmo2_config, _molmo2_inputs),
    _family(
        "pp_formulanet",
        "PPFormulaNetForConditionalGeneration",
        _pp_formulanet_config,
        _pp_formulanet_inputs,
        (16, 20),
        text_only=False,
    ),
    _family("qianfan_ocr", "QianfanOCRForConditionalGeneration", _qianfan_ocr_config, one_block(4)),
    _family("unlimited_ocr", "UnlimitedOcrForConditionalGeneration", _unlimited_ocr_config, one_block(7, pixels=64)),
)
