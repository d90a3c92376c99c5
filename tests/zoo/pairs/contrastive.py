"""Two towers and a contrastive loss over the batch: CLIP and its kin for pictures, videos and sounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PretrainedConfig

from zoo.family import Batch, Draw, Family, Size
from zoo.parts import BERT, TOWER, VISION, VOCABULARY, Pretrained, config, ones

_END = 2
_CAPTIONS: dict[str, Any] = {
    **TOWER,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 77,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": _END,
}


def _clip_config() -> PretrainedConfig:
    return config(
        "clip",
        vision_config=dict(VISION, projection_dim=32),
        text_config=dict(_CAPTIONS, projection_dim=32),
        projection_dim=32,
    )


def _siglip_config() -> PretrainedConfig:
    return config("siglip", vision_config=dict(VISION), text_config=dict(_CAPTIONS, projection_size=64))


def _captions(draw: Draw, size: Size) -> Batch:
    """Captions that end in the end token, from whose position CLIP reads its text embedding."""
    ids = draw.tokens(size.samples, size.length)
    ids[:, -1] = _END
    return {"input_ids": ids, "attention_mask": ones(size.samples, size.length), "return_loss": True}


def _picture_pairs(draw: Draw, size: Size) -> Batch:
    return {**_captions(draw, size), "pixel_values": draw.normal(size.samples, 3, 56, 56)}


def _clap_config() -> PretrainedConfig:
    return config(
        "clap",
        text_config=dict(BERT, num_hidden_layers=2, projection_dim=32),
        audio_config=dict(
            spec_size=64,
            num_mel_bins=16,
            patch_size=4,
            patch_stride=[4, 4],
            depths=[1, 1],
            num_attention_heads=[2, 4],
            patch_embeds_hidden_size=16,
            hidden_size=32,
            window_size=4,
            projection_dim=32,
            enable_fusion=False,
            drop_path_rate=0.0,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            projection_dropout_prob=0.0,
        ),
        projection_dim=32,
    )


def _clip_pairs(draw: Draw, size: Size) -> Batch:
    features = draw.normal(size.samples, 1, 250, 16)
    longer = torch.zeros(size.samples, 1, dtype=torch.bool)
    return {**_captions(draw, size), "input_features": features, "is_longer": longer}


def _typed_pairs(draw: Draw, size: Size) -> Batch:
    """Pairs whose captions a BERT tokenizer made: with token types."""
    batch = _picture_pairs(draw, size)
    batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
    return batch


def _chinese_clip_config() -> PretrainedConfig:
    return config("chinese_clip", vision_config=dict(VISION), text_config=dict(BERT), projection_dim=32)


def _altclip_config() -> PretrainedConfig:
    return config(
        "altclip",
        vision_config=dict(VISION),
        text_config=dict(BERT, pad_token_id=1, project_dim=32),
        projection_dim=32,
    )


def _clip_like_config(model_type: str) -> Callable[[], PretrainedConfig]:
    """A model configured as CLIP is."""

    def make() -> PretrainedConfig:
        return config(model_type, vision_config=dict(VISION), text_config=dict(_CAPTIONS), projection_dim=32)

    return make


def _siglip2_config() -> PretrainedConfig:
    return config(
        "siglip2",
        vision_config=dict(TOWER, patch_size=8, num_patches=16),
        text_config=dict(_CAPTIONS, projection_size=64),
    )


_GRIDS = ((4, 4), (2, 6), (3, 5), (5, 3))


def _siglip2_pairs(draw: Draw, size: Size) -> Batch:
    """Pictures of other aspect ratios as rows of 16 patches, the last of them padding."""
    patches = 16
    rows = [_GRIDS[row % len(_GRIDS)] for row in range(size.samples)]
    real = torch.tensor([[height * width] for height, width in rows])
    return {
        **_captions(draw, size),
        "pixel_values": draw.normal(size.samples, patches, 3 * 8 * 8),
        "pixel_attention_mask": (torch.arange(patches) < real).long(),
        "spatial_shapes": torch.tensor(rows),
    }


def _tipsv2_config() -> PretrainedConfig:
    return config(
        "tipsv2",
        vision_config=dict(
            hidden_size=64, mlp_ratio=2, num_hidden_layers=4, num_attention_heads=4, image_size=56, patch_size=14
        ),
        text_config=dict(TOWER, vocab_size=VOCABULARY),
    )


def _align_config() -> PretrainedConfig:
    return config(
        "align",
        vision_config=dict(
            image_size=56,
            hidden_dim=32,
            in_channels=[32, 16, 24],
            out_channels=[16, 24, 40],
            kernel_sizes=[3, 3, 5],
            strides=[1, 2, 2],
            num_block_repeats=[1, 2, 2],
            expand_ratios=[1, 6, 6],
            width_coefficient=1.0,
            depth_coefficient=1.0,
            drop_connect_rate=0.0,
        ),
        text_config=dict(BERT),
        projection_dim=40,
    )


def _groupvit_config() -> PretrainedConfig:
    return config(
        "groupvit",
        vision_config=dict(
            VISION, depths=[2, 1, 1], num_group_tokens=[8, 4, 0], num_output_groups=[8, 4, 4], assign_mlp_ratio=[0.5, 4]
        ),
        text_config=dict(_CAPTIONS),
        projection_dim=32,
        projection_intermediate_dim=64,
    )


def _xclip_config() -> PretrainedConfig:
    return config(
        "xclip",
        vision_config=dict(
            VISION,
            mit_hidden_size=32,
            mit_intermediate_size=64,
            mit_num_hidden_layers=2,
            mit_num_attention_heads=4,
            num_frames=_VIDEO_FRAMES,
        ),
        text_config=dict(_CAPTIONS),
        projection_dim=32,
        prompt_num_attention_heads=4,
    )


def _videoprism_config() -> PretrainedConfig:
    return config(
        "videoprism",
        vision_config=dict(
            image_size=56,
            num_frames=_VIDEO_FRAMES,
            tubelet_size=[1, 14, 14],
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=4,
            num_spatial_layers=4,
            num_temporal_layers=2,
        ),
        text_config=dict(TOWER, vocab_size=VOCABULARY, max_position_embeddings=80),
    )


_VIDEO_FRAMES = 4


def _video_pairs(name: str) -> Callable[[Draw, Size], Batch]:
    """Videos of 4 frames under `name`, with captions."""

    def inputs(draw: Draw, size: Size) -> Batch:
        return {**_captions(draw, size), name: draw.normal(size.samples, _VIDEO_FRAMES, 3, 56, 56)}

    return inputs


def _clvp_config() -> PretrainedConfig:
    encoder = dict(
        TOWER, num_attention_heads=2, vocab_size=VOCABULARY, projection_dim=64, dropout=0.0, attention_dropout=0.0
    )
    return config(
        "clvp",
        text_config=dict(encoder, bos_token_id=1, eos_token_id=0),
        speech_config=dict(encoder),
        decoder_config=dict(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_mel_attn_blocks=2,
            vocab_size=VOCABULARY,
            max_position_embeddings=80,
            max_text_tokens=80,
            feature_size=16,
            bos_token_id=1,
            eos_token_id=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attention_dropout=0.0,
            summary_first_dropout=0.0,
        ),
        projection_dim=64,
    )


def _clvp_pairs(draw: Draw, size: Size) -> Batch:
    """Captions and speech of 40 frames x 16 mel bins."""
    return {**_captions(draw, size), "input_features": draw.normal(size.samples, 16, 40)}


def _blip_config() -> PretrainedConfig:
    return config(
        "blip",
        vision_config=dict(VISION),
        text_config=dict(BERT, projection_dim=32, bos_token_id=1, sep_token_id=3),
        projection_dim=32,
        image_text_hidden_size=32,
    )


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
    _family("clip", "CLIPModel", _clip_config, _picture_pairs),
    _family("siglip", "SiglipModel", _siglip_config, _picture_pairs),
    _family("clap", "ClapModel", _clap_config, _clip_pairs),
    _family("chinese_clip", "ChineseCLIPModel", _chinese_clip_config, _typed_pairs),
    _family("altclip", "AltCLIPModel", _altclip_config, _picture_pairs),
    _family("metaclip_2", "MetaClip2Model", _clip_like_config("metaclip_2"), _picture_pairs),
    _family("owlvit", "OwlViTModel", _clip_like_config("owlvit"), _picture_pairs),
    _family("owlv2", "Owlv2Model", _clip_like_config("owlv2"), _picture_pairs),
    _family("siglip2", "Siglip2Model", _siglip2_config, _siglip2_pairs),
    _family("tipsv2", "Tipsv2Model", _tipsv2_config, _picture_pairs),
    _family("align", "AlignModel", _align_config, _typed_pairs),
    _family("groupvit", "GroupViTModel", _groupvit_config, _picture_pairs),
    _family("blip_contrastive", "BlipModel", _blip_config, _picture_pairs),
    _family("xclip", "XCLIPModel", _xclip_config, _video_pairs("pixel_values")),
    _family("videoprism", "VideoPrismClipModel", _videoprism_config, _video_pairs("pixel_values_videos")),
    _family("clvp", "ClvpModelForConditionalGeneration", _clvp_config, _clvp_pairs),
)
