"""Models that read a page: words with boxes, the page's picture, or both."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PretrainedConfig

from zoo.family import IGNORE, Batch, Draw, Family, Size
from zoo.pairs.fused import classes, text
from zoo.parts import BERT, IMAGE, TOWER, VOCABULARY, Pretrained, config, conversation

_LABELS = 5


def _words(draw: Draw, size: Size) -> Batch:
    """Words and their boxes: left, top, right and bottom in thousandths of the page."""
    corners = draw.tokens(size.samples, size.length * 4).view(size.samples, size.length, 2, 2)
    top_left = corners[:, :, 0] // 2
    return {**text(draw, size), "bbox": torch.cat([top_left, top_left + corners[:, :, 1] // 2], dim=-1)}


def _word_labels(draw: Draw, size: Size) -> Batch:
    """A class for every token that begins a word: three of four."""
    labels = classes(draw, size.samples, size.length, _LABELS)
    labels[:, 3::4] = IGNORE
    return {"labels": labels}


def _answer(draw: Draw, size: Size) -> Batch:
    """First and last token of the answer to a question."""
    start = classes(draw, size.samples, 1, size.length // 2)[:, 0]
    return {"start_positions": start, "end_positions": start + 3}


def _layoutlm_config() -> PretrainedConfig:
    return config("layoutlm", **BERT, num_labels=_LABELS)


def _layoutlm_inputs(draw: Draw, size: Size) -> Batch:
    token_types = torch.zeros(size.samples, size.length, dtype=torch.long)
    return {**_words(draw, size), **_word_labels(draw, size), "token_type_ids": token_types}


def _layoutlmv3_config(labels: int) -> Callable[[], PretrainedConfig]:
    def make() -> PretrainedConfig:
        return config(
            "layoutlmv3",
            **BERT,
            input_size=56,
            patch_size=14,
            coordinate_size=11,
            shape_size=10,
            rel_pos_bins=8,
            max_rel_pos=32,
            rel_2d_pos_bins=8,
            max_rel_2d_pos=32,
            num_labels=labels,
        )

    return make


def _layoutlmv3_inputs(targets: Callable[[Draw, Size], Batch]) -> Callable[[Draw, Size], Batch]:
    def inputs(draw: Draw, size: Size) -> Batch:
        return {**_words(draw, size), **targets(draw, size), "pixel_values": draw.normal(size.samples, 3, 56, 56)}

    return inputs


def _udop_config() -> PretrainedConfig:
    return config(
        "udop",
        vocab_size=VOCABULARY,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=4,
        num_decoder_layers=4,
        num_heads=4,
        dropout_rate=0.0,
        image_size=56,
        patch_size=14,
        max_2d_position_embeddings=64,
        decoder_start_token_id=0,
    )


def _udop_inputs(draw: Draw, size: Size) -> Batch:
    """Words whose boxes are shares of the page, the page and the answer in words."""
    corners = draw.normal(size.samples, size.length, 2).sigmoid() * 0.6
    labels = draw.tokens(size.samples, size.length // 2)
    labels[-1, -2:] = IGNORE
    return {
        **text(draw, size),
        "bbox": torch.cat([corners, corners + 0.3], dim=-1),
        "pixel_values": draw.normal(size.samples, 3, 56, 56),
        "labels": labels,
    }


def _kosmos2_5_config() -> PretrainedConfig:
    return config(
        "kosmos-2.5",
        vision_config=dict(TOWER, head_dim=16, patch_embed_hidden_size=_PATCH, max_num_patches=64),
        text_config=dict(
            vocab_size=VOCABULARY,
            embed_dim=64,
            layers=4,
            ffn_dim=128,
            attention_heads=4,
            dropout=0.0,
            max_position_embeddings=512,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        ),
        latent_query_num=8,
    )


_PATCH = 24
_REAL_PATCHES = (16, 12)


def _flattened_patches(draw: Draw, samples: int) -> tuple[Tensor, Tensor]:
    """Rows of 16 patches, each its row and column in the picture and its pixels, and their mask.

    Every second picture has 12 patches and four that are padding.
    """
    patches = draw.normal(samples, 16, 2 + _PATCH)
    position = torch.arange(16)
    patches[:, :, 0], patches[:, :, 1] = position // 4 + 1, position % 4 + 1
    mask = torch.ones(samples, 16)
    for row in range(samples):
        mask[row, _REAL_PATCHES[row % len(_REAL_PATCHES)] :] = 0
    return patches * mask[:, :, None], mask


def _kosmos2_5_inputs(draw: Draw, size: Size) -> Batch:
    batch = conversation(draw, size, [(IMAGE, 8)], start=2)
    batch["image_embeds_position_mask"] = (batch["input_ids"] == IMAGE).long()
    batch["flattened_patches"], mask = _flattened_patches(draw, size.samples)
    batch["height"] = (mask.sum(-1) // 4).long()
    batch["width"] = torch.full((size.samples,), 4)
    return batch


def _pix2struct_config() -> PretrainedConfig:
    return config(
        "pix2struct",
        vision_config=dict(
            hidden_size=64,
            patch_embed_hidden_size=_PATCH,
            d_ff=128,
            d_kv=16,
            num_hidden_layers=4,
            num_attention_heads=4,
            seq_len=64,
        ),
        text_config=dict(
            vocab_size=VOCABULARY, hidden_size=64, d_kv=16, d_ff=128, num_layers=4, num_heads=4, dropout_rate=0.0
        ),
    )


def _pix2struct_inputs(draw: Draw, size: Size) -> Batch:
    patches, mask = _flattened_patches(draw, size.samples)
    labels = draw.tokens(size.samples, size.length)
    labels[-1, -3:] = IGNORE
    return {"flattened_patches": patches, "attention_mask": mask, "labels": labels}


def _family(
    name: str, class_name: str, make: Callable[[], PretrainedConfig], inputs: Callable[[Draw, Size], Batch]
) -> Family:
    return Family(
        name=name,
        model=Pretrained(class_name=class_name, config=make),
        inputs=inputs,
        first=Size(samples=2, length=16),
        second=Size(samples=3, length=20),
    )


FAMILIES = (
    _family("layoutlm", "LayoutLMForTokenClassification", _layoutlm_config, _layoutlm_inputs),
    _family(
        "layoutlmv3", "LayoutLMv3ForTokenClassification", _layoutlmv3_config(_LABELS), _layoutlmv3_inputs(_word_labels)
    ),
    _family("layoutlmv3_answers", "LayoutLMv3ForQuestionAnswering", _layoutlmv3_config(2), _layoutlmv3_inputs(_answer)),
    _family("udop", "UdopForConditionalGeneration", _udop_config, _udop_inputs),
    _family("pix2struct", "Pix2StructForConditionalGeneration", _pix2struct_config, _pix2struct_inputs),
    _family("kosmos2_5", "Kosmos2_5ForConditionalGeneration", _kosmos2_5_config, _kosmos2_5_inputs),
)
