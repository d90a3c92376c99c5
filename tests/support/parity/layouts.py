"""What the parity tests vary: how a model is split, and what of it trains."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from torch import nn


class Freeze(StrEnum):
    """What does not train."""

    NONE = "none"
    ENCODER = "encoder"
    ENCODER_AND_LANGUAGE_MODEL = "encoder+language_model"


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Stages of the language model and of each encoder, and where projectors go (in models that have them apart)."""

    language_model: int
    encoder: int
    projector: Literal["with_encoder", "alone"]

    def __str__(self) -> str:
        return f"llm{self.language_model}-encoder{self.encoder}-projector_{self.projector}"


LAYOUTS = (
    Layout(language_model=1, encoder=1, projector="with_encoder"),
    Layout(language_model=2, encoder=2, projector="alone"),
    Layout(language_model=3, encoder=2, projector="with_encoder"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Module names of a family's encoders and of what joins them to the language model."""

    encoders: tuple[str, ...]
    joints: tuple[str, ...]
    """Projectors, or mergers inside the encoders."""
    projectors: tuple[str, ...] = ()
    """The joints that are components of their own."""


_TOWER_AND_PROJECTOR = Parts(
    encoders=("vision_tower",), joints=("multi_modal_projector",), projectors=("multi_modal_projector",)
)
PARTS = {
    **dict.fromkeys(("llava", "gemma3", "pixtral", "mistral3", "llava_next", "lfm2_vl"), _TOWER_AND_PROJECTOR),
    "glm4v": Parts(encoders=("visual",), joints=("visual.merger", "visual.downsample")),
    "kimi_k25": Parts(encoders=("vision_tower",), joints=("mm_projector",), projectors=("mm_projector",)),
    "qwen2_5_vl": Parts(encoders=("visual",), joints=("visual.merger",)),
    "qwen3_vl": Parts(encoders=("visual",), joints=("visual.merger", "visual.deepstack_merger_list")),
    "mllama": Parts(
        encoders=("vision_model",), joints=("multi_modal_projector",), projectors=("multi_modal_projector",)
    ),
    "llama4": Parts(
        encoders=("vision_model",), joints=("multi_modal_projector",), projectors=("multi_modal_projector",)
    ),
    "qwen2_audio": Parts(
        encoders=("audio_tower",), joints=("multi_modal_projector",), projectors=("multi_modal_projector",)
    ),
    "qwen2_5_omni": Parts(encoders=("visual", "audio_tower"), joints=("visual.merger", "audio_tower.proj")),
    "two_encoder_net": Parts(
        encoders=("vision", "hearing"),
        joints=("vision_projector", "hearing_projector"),
        projectors=("vision_projector", "hearing_projector"),
    ),
}


def freeze(model: nn.Module, parts: Parts, what: Freeze) -> None:
    """Freeze encoders (but not their joints), and the language model where asked."""
    for name, parameter in model.named_parameters():
        joint = _within(name, parts.joints)
        encoder = _within(name, parts.encoders) and not joint
        frozen = {
            Freeze.NONE: False,
            Freeze.ENCODER: encoder,
            Freeze.ENCODER_AND_LANGUAGE_MODEL: not joint,
        }
        parameter.requires_grad_(not frozen[what])


def stages(layout: Layout, parts: Parts) -> dict[str, int]:
    """Chain name -> number of stages."""
    chains = {"language_model": layout.language_model, **dict.fromkeys(parts.encoders, layout.encoder)}
    if layout.projector == "alone":
        chains |= dict.fromkeys(parts.projectors, 1)
    return chains


def _within(name: str, modules: tuple[str, ...]) -> bool:
    return any(f".{module}." in f".{name}" for module in modules)
