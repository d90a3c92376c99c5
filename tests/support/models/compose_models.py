"""Tiny random encoders and language models of transformers, and random compositions of them; test data alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from zoo.parts import TEXT, TOWER, VISION, VOCABULARY, opt_config

import mmcompile as mm

_CONVOLUTIONS: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "conv_dim": [16] * 7,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
}
_STEPS: dict[str, Any] = {"depths": [1, 2], "num_heads": [2, 4], "embed_dim": 16, "drop_path_rate": 0.0}
_NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_QWEN_VISION: dict[str, Any] = {"depth": 2, "num_heads": 4, "patch_size": 14, "spatial_merge_size": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One pretrained model, tiny."""

    model_type: str
    class_name: str
    fields: Mapping[str, Any]
    options: Mapping[str, Any]
    """Of `mm.Encoder`."""
    packed: bool = False
    """It returns tokens of all images end to end."""

    def build(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        made = CONFIG_MAPPING[self.model_type](**self.fields)
        return _class(self.class_name)(made).to(dtype).train()


def _class(name: str) -> Any:
    """A class of transformers, also one that is not exported at its top."""
    if hasattr(transformers, name):
        return getattr(transformers, name)
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
    from transformers.models.qwen2_vl import modeling_qwen2_vl
    from transformers.models.whisper import modeling_whisper

    return next(
        getattr(m, name) for m in (modeling_qwen2_vl, modeling_qwen2_5_vl, modeling_whisper) if hasattr(m, name)
    )


def _part(model_type: str, class_name: str, fields: Mapping[str, Any], *, packed: bool = False, **options: Any) -> Part:
    return Part(model_type=model_type, class_name=class_name, fields=fields, options=options, packed=packed)


VISION_ENCODERS: dict[str, Part] = {
    "clip": _part("clip_vision_model", "CLIPVisionModel", VISION, drop_tokens=1, layer=-2),
    "siglip": _part("siglip_vision_model", "SiglipVisionModel", VISION),
    "siglip2": _part("siglip2_vision_model", "Siglip2VisionModel", {**TOWER, "patch_size": 14, "num_patches": 16}),
    "dinov2": _part("dinov2", "Dinov2Model", {**VISION, "intermediate_size": 0, **_NO_DROPOUT}, drop_tokens=1),
    "dinov3": _part(
        "dinov3_vit", "DINOv3ViTModel", {**VISION, "num_register_tokens": 4, "pos_embed_rescale": None}, drop_tokens=5
    ),
    "vit": _part("vit", "ViTModel", {**VISION, **_NO_DROPOUT}),
    "deit": _part("deit", "DeiTModel", {**VISION, **_NO_DROPOUT}, drop_tokens=2),
    "pixtral": _part("pixtral", "PixtralVisionModel", VISION, packed=True),
    "qwen2_vl": _part(
        "qwen2_vl_vision",
        "Qwen2VisionTransformerPretrainedModel",
        {**_QWEN_VISION, "embed_dim": 64, "hidden_size": 48, "mlp_ratio": 2},
        packed=True,
        output="pooler_output",
    ),
    "qwen2_5_vl": _part(
        "qwen2_5_vl_vision",
        "Qwen2_5_VisionTransformerPretrainedModel",
        {
            **_QWEN_VISION,
            "hidden_size": 64,
            "out_hidden_size": 48,
            "intermediate_size": 128,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        packed=True,
        output="pooler_output",
    ),
    "swin": _part("swin", "SwinModel", {**_STEPS, "image_size": 56, "patch_size": 7, "window_size": 4, **_NO_DROPOUT}),
    "hiera": _part(
        "hiera",
        "HieraModel",
        {
            "embed_dim": 16,
            "image_size": [64, 64],
            "patch_size": [8, 8],
            "patch_stride": [8, 8],
            "patch_padding": [0, 0],
            "masked_unit_size": [4, 4],
            "depths": [1, 2],
            "num_heads": [1, 2],
            "num_query_pool": 1,
            "drop_path_rate": 0.0,
        },
    ),
    "convnext": _part(
        "convnext", "ConvNextModel", {"depths": [1, 2], "hidden_sizes": [16, 32], "num_stages": 2, "image_size": 56}
    ),
}
AUDIO_ENCODERS: dict[str, Part] = {
    "whisper": _part(
        "whisper",
        "WhisperEncoder",
        {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "num_mel_bins": 16}
        | {"max_source_positions": 20, "vocab_size": VOCABULARY, "dropout": 0.0, "pad_token_id": 0},
    ),
    "wav2vec2": _part("wav2vec2", "Wav2Vec2Model", _CONVOLUTIONS),
    "hubert": _part("hubert", "HubertModel", _CONVOLUTIONS),
    "ast": _part(
        "audio-spectrogram-transformer",
        "ASTModel",
        {**TOWER, "num_mel_bins": 32, "max_length": 48, "patch_size": 16, **_NO_DROPOUT},
        drop_tokens=2,
    ),
}

_MOE: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
LANGUAGE_MODELS: dict[str, Part] = {
    "llama": _part("llama", "LlamaForCausalLM", TEXT),
    "qwen2": _part("qwen2", "Qwen2ForCausalLM", TEXT),
    "qwen3": _part("qwen3", "Qwen3ForCausalLM", {**TEXT, "head_dim": 16}),
    "mistral": _part("mistral", "MistralForCausalLM", {**TEXT, "sliding_window": 16}),
    "gemma2": _part("gemma2", "Gemma2ForCausalLM", {**TEXT, "head_dim": 16, "sliding_window": 16}),
    "gemma3": _part("gemma3_text", "Gemma3ForCausalLM", {**TEXT, "head_dim": 16, "sliding_window": 16}),
    "phi3": _part("phi3", "Phi3ForCausalLM", {**TEXT, "resid_pdrop": 0.0}),
    "gpt_neox": _part("gpt_neox", "GPTNeoXForCausalLM", TEXT),
    "opt": _part("opt", "OPTForCausalLM", opt_config().to_dict()),
    "falcon": _part("falcon", "FalconForCausalLM", TEXT),
    "olmo2": _part("olmo2", "Olmo2ForCausalLM", TEXT),
    "mixtral": _part("mixtral", "MixtralForCausalLM", {**TEXT, **_MOE}),
    "qwen2_moe": _part(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        {**TEXT, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"shared_expert_intermediate_size": 64, "experts_implementation": "eager"},
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Composition:
    """One random composed model."""

    encoders: Mapping[str, str]
    """Component name -> key of the tables."""
    language_model: str
    projectors: Mapping[str, str]
    merge: str
    frozen: tuple[str, ...]

    def __str__(self) -> str:
        parts = "+".join(f"{key}_{self.projectors[name]}" for name, key in self.encoders.items())
        return f"{parts}-{self.language_model}-{self.merge}-freeze_{'+'.join(self.frozen) or 'none'}"

    def build(self) -> mm.ComposedModel:
        """In float64, weights from seed 0, biases and norms away from 0 and 1."""
        torch.manual_seed(0)
        tables = VISION_ENCODERS | AUDIO_ENCODERS
        model = mm.compose(
            {name: mm.Encoder(tables[key].build(), **tables[key].options) for name, key in self.encoders.items()},
            LANGUAGE_MODELS[self.language_model].build(),
            projectors=dict(self.projectors),
            merge=_halves if self.merge == "function" else self.merge,  # type: ignore[arg-type]
            num_queries=4 if "qformer" in self.projectors.values() else None,
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
        model.freeze(*self.frozen)
        return model

    def batch(self, model: mm.ComposedModel) -> dict[str, Tensor]:
        """Two samples; the second is shorter."""
        batch = mm.example_batch(model, text_tokens=20, image_size=56)
        for name, filler in (("input_ids", 0), ("attention_mask", 0), ("labels", -100)):
            batch[name][1, -3:] = filler
        return batch


def _halves(embeddings: Tensor, features: Mapping[str, Tensor], input_ids: Tensor) -> Tensor:
    """Add the mean of each sample's features to every token."""
    for values in features.values():
        embeddings = embeddings + values.reshape(len(input_ids), -1, values.shape[-1]).mean(1, keepdim=True)
    return embeddings


def compositions(count: int, seed: int) -> list[Composition]:
    """Different random pairs (one encoder) and triples (two), all parts of the tables before one comes a second time."""
    draw = random.Random(seed)
    deal = {key: _dealer(draw, list(table)) for key, table in _TABLES.items()}
    found: list[Composition] = []
    while len(found) < count:
        encoders = draw.choice(
            [
                {"vision": "vision"},
                {"audio": "audio"},
                {"vision": "vision", "audio": "audio"},
                {"left": "vision", "right": "vision"},
            ]
        )
        chosen = {name: deal[kind]() for name, kind in encoders.items()}
        packed = {name for name, key in chosen.items() if key in VISION_ENCODERS and VISION_ENCODERS[key].packed}
        merge = "placeholder" if packed else draw.choice(["placeholder", "placeholder", "prepend", "function"])
        kinds = {
            name: draw.choice(["linear", "mlp"] if name in packed else ["linear", "mlp", "qformer"]) for name in chosen
        }
        parts = [*chosen, *(f"{name}_projector" for name in chosen), "language_model"]
        frozen = tuple(part for part in parts if draw.random() < (0.2 if part.endswith("_projector") else 0.5))
        if len(frozen) == len(parts):
            continue
        made = Composition(encoders=chosen, language_model=deal["text"](), projectors=kinds, merge=merge, frozen=frozen)
        if made not in found:
            found.append(made)
    return found


_TABLES = {"vision": VISION_ENCODERS, "audio": AUDIO_ENCODERS, "text": LANGUAGE_MODELS}


def _dealer(draw: random.Random, keys: list[str]) -> Callable[[], str]:
    """Deals shuffled keys round after round."""
    pile: list[str] = []

    def deal() -> str:
        if not pile:
            pile.extend(draw.sample(keys, len(keys)))
        return pile.pop()

    return deal
