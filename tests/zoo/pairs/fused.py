"""One encoder over text and picture together, or two that read each other: ViLT, FLAVA, LXMERT, BridgeTower, GIT."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PretrainedConfig

from zoo.family import IGNORE, Batch, Draw, Family, Size
from zoo.parts import BERT, IMAGE, TOWER, VISION, VOCABULARY, Pretrained, config, conversation, ones, siglip_tower

_MASK = 4
_MASKED = slice(2, 6)


def text(draw: Draw, size: Size) -> Batch:
    """Token ids and their mask."""
    return {
        "input_ids": draw.tokens(size.samples, size.length),
        "attention_mask": ones(size.samples, size.length),
    }


def masked_text(draw: Draw, size: Size) -> Batch:
    """Text with four masked tokens a row, which alone carry loss."""
    batch = text(draw, size)
    batch["labels"] = torch.full_like(batch["input_ids"], IGNORE)
    batch["labels"][:, _MASKED] = batch["input_ids"][:, _MASKED]
    batch["input_ids"][:, _MASKED] = _MASK
    return batch


def classes(draw: Draw, samples: int, count: int, number: int) -> Tensor:
    """Class labels [samples, count] among `number` classes."""
    return draw.tokens(samples, count) % number


def _bridgetower_config() -> PretrainedConfig:
    return config(
        "bridgetower",
        vision_config=dict(hidden_size=64, num_hidden_layers=4, image_size=56, patch_size=14),
        text_config=dict(BERT),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        contrastive_hidden_size=32,
        logit_scale_init_value=2.6592,
    )


def _bridgetower_pixels(draw: Draw, size: Size) -> Batch:
    return {"pixel_values": draw.normal(size.samples, 3, 56, 56), "pixel_mask": ones(size.samples, 56, 56)}


def _bridgetower_pairs(draw: Draw, size: Size) -> Batch:
    return {**text(draw, size), **_bridgetower_pixels(draw, size), "return_loss": True}


def _bridgetower_masked(draw: Draw, size: Size) -> Batch:
    return {**masked_text(draw, size), **_bridgetower_pixels(draw, size)}


_ANSWERS = 7


def _vilt_config() -> PretrainedConfig:
    return config("vilt", **{**BERT, **VISION, "max_position_embeddings": 40}, num_labels=_ANSWERS)


def _vilt_pixels(draw: Draw, size: Size) -> Batch:
    """Pictures of 4 x 4 patches; every second is one column narrower and padded."""
    pixels, mask = draw.normal(size.samples, 3, 56, 56), ones(size.samples, 56, 56)
    mask[1::2, :, 42:] = 0
    return {
        "pixel_values": pixels * mask[:, None],
        "pixel_mask": mask,
        "token_type_ids": torch.zeros(size.samples, size.length, dtype=torch.long),
    }


def _vilt_question(draw: Draw, size: Size) -> Batch:
    scores = draw.normal(size.samples, _ANSWERS).sigmoid()
    return {**text(draw, size), **_vilt_pixels(draw, size), "labels": scores}


def _vilt_masked(draw: Draw, size: Size) -> Batch:
    return {**masked_text(draw, size), **_vilt_pixels(draw, size)}


def _flava_config() -> PretrainedConfig:
    return config(
        "flava",
        text_config=dict(BERT),
        image_config=dict(VISION, vocab_size=64),
        multimodal_config=dict(TOWER),
        image_codebook_config=dict(vocab_size=64, hidden_size=8, num_blocks_per_group=1),
        hidden_size=64,
        projection_dim=32,
    )


def _flava_inputs(draw: Draw, size: Size) -> Batch:
    """Text and picture as they are and with 4 tokens and 4 patches masked; one pair in three does not match."""
    whole = text(draw, size)
    masked = whole["input_ids"].clone()
    masked[:, _MASKED] = _MASK
    labels = torch.full_like(masked, IGNORE)
    labels[:, _MASKED] = whole["input_ids"][:, _MASKED]
    patches = torch.zeros(size.samples, 4, 4, dtype=torch.bool)
    patches[:, 1:3, 1:3] = True
    return {
        **whole,
        "input_ids_masked": masked,
        "mlm_labels": labels,
        "pixel_values": draw.normal(size.samples, 3, 56, 56),
        "codebook_pixel_values": draw.normal(size.samples, 3, 32, 32).sigmoid(),
        "bool_masked_pos": patches,
        "itm_labels": (torch.arange(size.samples) % 3 != 1).long(),
        "return_loss": True,
    }


_REGIONS = 6
_REGION_FEATURES = 32


def _lxmert_config() -> PretrainedConfig:
    return config(
        "lxmert",
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=80,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        l_layers=3,
        x_layers=2,
        r_layers=2,
        visual_feat_dim=_REGION_FEATURES,
        num_qa_labels=12,
        num_object_labels=10,
        num_attr_labels=8,
    )


def _lxmert_inputs(draw: Draw, size: Size) -> Batch:
    """Six regions of a picture with features, boxes, objects and attributes; masked text; a question's answer."""
    rows = size.samples
    corners = draw.normal(rows, _REGIONS, 2).sigmoid() * 0.5
    features = draw.normal(rows, _REGIONS, _REGION_FEATURES)
    sure = draw.normal(rows, _REGIONS).sigmoid()
    return {
        **masked_text(draw, size),
        "visual_feats": features,
        "visual_pos": torch.cat([corners, corners + 0.4], dim=-1),
        "visual_attention_mask": torch.ones(rows, _REGIONS),
        "obj_labels": {
            "obj": (classes(draw, rows, _REGIONS, 10), sure),
            "attr": (classes(draw, rows, _REGIONS, 8), sure),
            "feat": (features.clone(), sure),
        },
        "matched_label": torch.arange(rows) % 2,
        "ans": classes(draw, rows, 1, 12)[:, 0],
    }


def _visual_bert_config() -> PretrainedConfig:
    return config("visual_bert", **BERT, visual_embedding_dim=_REGION_FEATURES)


def _visual_bert_inputs(draw: Draw, size: Size) -> Batch:
    """Masked text, then six regions of a picture, which carry no loss."""
    batch = masked_text(draw, size)
    regions = ones(size.samples, _REGIONS)
    batch["labels"] = torch.cat([batch["labels"], torch.full_like(regions, IGNORE)], dim=1)
    batch["visual_embeds"] = draw.normal(size.samples, _REGIONS, _REGION_FEATURES)
    batch["visual_attention_mask"] = regions
    batch["visual_token_type_ids"] = regions
    batch["sentence_image_labels"] = torch.arange(size.samples) % 2
    return batch


_GIT_FRAMES = 3


def _git_config(frames: int | None) -> Callable[[], PretrainedConfig]:
    def make() -> PretrainedConfig:
        return config("git", **BERT, vision_config=dict(VISION), num_image_with_embedding=frames)

    return make


def _git_inputs(frames: int | None) -> Callable[[Draw, Size], Batch]:
    """A caption whose first two tokens are a prompt, and a picture or a clip."""

    def inputs(draw: Draw, size: Size) -> Batch:
        batch = text(draw, size)
        batch["labels"] = batch["input_ids"].clone()
        batch["labels"][:, :2] = IGNORE
        shape = (3, 56, 56) if frames is None else (frames, 3, 56, 56)
        batch["pixel_values"] = draw.normal(size.samples, *shape)
        return batch

    return inputs


def _modernvbert_config() -> PretrainedConfig:
    return config(
        "modernvbert",
        vision_config=siglip_tower(),
        text_config=config(
            "modernbert",
            **TOWER,
            vocab_size=VOCABULARY,
            max_position_embeddings=256,
            local_attention=16,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            cls_token_id=1,
            sep_token_id=2,
        ),
        pixel_shuffle_factor=2,
        image_token_id=IMAGE,
    )


def _modernvbert_inputs(draw: Draw, size: Size) -> Batch:
    """Pictures of four placeholders each and four masked tokens, the last but one of a row."""
    batch = conversation(draw, size, [(IMAGE, 4)] * size.media)
    last = slice(-6, -2)
    batch["labels"] = torch.full_like(batch["input_ids"], IGNORE)
    batch["labels"][:, last] = batch["input_ids"][:, last]
    batch["input_ids"][:, last] = _MASK
    if size.media:
        batch["pixel_values"] = draw.normal(size.samples, size.media, 3, 56, 56)
        batch["pixel_attention_mask"] = torch.ones(size.samples, size.media, 56, 56, dtype=torch.bool)
    return batch


def _family(
    name: str, class_name: str, make: Callable[[], PretrainedConfig], inputs: Callable[[Draw, Size], Batch]
) -> Family:
    return Family(
        name=name,
        model=Pretrained(class_name=class_name, config=make),
        inputs=inputs,
        first=Size(samples=3, length=16),
        second=Size(samples=4, length=20),
    )


FAMILIES = (
    _family("bridgetower", "BridgeTowerForContrastiveLearning", _bridgetower_config, _bridgetower_pairs),
    _family("bridgetower_masked", "BridgeTowerForMaskedLM", _bridgetower_config, _bridgetower_masked),
    _family("vilt", "ViltForQuestionAnswering", _vilt_config, _vilt_question),
    _family("vilt_masked", "ViltForMaskedLM", _vilt_config, _vilt_masked),
    _family("flava", "FlavaForPreTraining", _flava_config, _flava_inputs),
    _family("lxmert", "LxmertForPreTraining", _lxmert_config, _lxmert_inputs),
    _family("visual_bert", "VisualBertForPreTraining", _visual_bert_config, _visual_bert_inputs),
    _family("git", "GitForCausalLM", _git_config(None), _git_inputs(None)),
    _family("git_video", "GitForCausalLM", _git_config(_GIT_FRAMES), _git_inputs(_GIT_FRAMES)),
    Family(
        name="modernvbert",
        model=Pretrained(class_name="ModernVBertForMaskedLM", config=_modernvbert_config),
        inputs=_modernvbert_inputs,
        first=Size(samples=2, length=32, media=1),
        second=Size(samples=3, length=44, media=2),
        text_only=True,
        aligned_media=True,
    ),
)
