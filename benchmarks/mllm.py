"""Models of the dissertation's evaluation: a Qwen2-VL vision encoder, a Phi-4 audio encoder and a Llama, of three sizes each.

`MLLM-SML` has a small vision encoder, a medium audio encoder and a large language model. Layers, widths and parameters are
those of Table 3.1; heads and inner widths, which it does not give, are those of the public model of that size (or its
proportions), stated beside each figure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights
from transformers.models.phi4_multimodal.configuration_phi4_multimodal import Phi4MultimodalAudioConfig
from transformers.models.phi4_multimodal.modeling_phi4_multimodal import Phi4MultimodalAudioModel
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from mmcompile.ir.compat import FakeTensorMode

IMAGE, AUDIO = 1, 2
"""Token ids that stand for a row of the image, or of the sound."""
VOCABULARY = 128256
MERGED = 4
"""Patches that make one row of the language model (Qwen2-VL)."""
PATCH, FRAMES_PER_ROW, MEL_BINS = 14, 8, 80
PIECE = 4000
"""Frames of a piece of sound: the encoder attends within 500 rows; given more, it would cut them so itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tower:
    """One row of Table 3.1."""

    layers: int
    width: int
    billions: float
    """Parameters, as published."""
    heads: int
    inner: int = 0
    """Width inside the feed-forward network; 0 where the model's class sets it."""


VISION = {
    "S": Tower(layers=32, width=1280, billions=0.6, heads=16),
    "M": Tower(layers=48, width=2560, billions=3.9, heads=32),  # 80 a head, as in S
    "L": Tower(layers=64, width=3840, billions=11.6, heads=48),
}
AUDIOS = {
    "S": Tower(layers=24, width=1024, billions=0.5, heads=16),
    "M": Tower(layers=32, width=3072, billions=3.4, heads=48),  # 64 a head, as in S
    "L": Tower(layers=48, width=5120, billions=12.4, heads=80),
}
LANGUAGE = {
    "S": Tower(layers=16, width=2048, billions=1, heads=32, inner=8192),  # Llama-3.2-1B
    "M": Tower(layers=32, width=4096, billions=8, heads=32, inner=14336),  # Llama-3.1-8B
    "L": Tower(layers=64, width=5120, billions=32, heads=40, inner=27648),  # as Qwen2.5-32B, of the same size
}


class Mllm(nn.Module):
    """Features of an image and a sound take the places of their tokens; encoders and language model are frozen."""

    def __init__(self, vision: Tower, audio: Tower, language: Tower) -> None:
        super().__init__()
        self.vision = Qwen2VisionTransformerPretrainedModel._from_config(
            Qwen2VLVisionConfig(
                depth=vision.layers, embed_dim=vision.width, hidden_size=vision.width, num_heads=vision.heads
            )
        )
        self.audio = Phi4MultimodalAudioModel._from_config(
            Phi4MultimodalAudioConfig(
                num_blocks=audio.layers,
                hidden_size=audio.width,
                num_attention_heads=audio.heads,
                # With the inner width as it is and these as the width, all three sizes have the published parameters.
                ext_pw_out_channel=audio.width,
                depthwise_separable_out_channel=audio.width,
                input_size=MEL_BINS,
            )
        )
        self.language = LlamaForCausalLM._from_config(
            LlamaConfig(
                num_hidden_layers=language.layers,
                hidden_size=language.width,
                intermediate_size=language.inner,
                num_attention_heads=language.heads,
                num_key_value_heads=8,
                vocab_size=VOCABULARY,
                use_cache=False,
                max_position_embeddings=131072,
            )
        )
        self.vision_projector = nn.Linear(vision.width, language.width)
        self.audio_projector = nn.Linear(audio.width, language.width)
        for part in (self.vision, self.audio, self.language):
            part.requires_grad_(False)

    def forward(
        self, input_ids: Tensor, pixel_values: Tensor, image_grid_thw: Tensor, audio_features: Tensor, labels: Tensor
    ) -> Any:
        hidden = self.language.get_input_embeddings()(input_ids)
        image = self.vision_projector(self.vision(pixel_values, grid_thw=image_grid_thw).pooler_output)
        sound = self.audio_projector(self.audio(audio_features, None)).flatten(0, 1)
        for token, rows in ((IMAGE, image), (AUDIO, sound)):
            hidden = hidden.masked_scatter((input_ids == token).unsqueeze(-1), rows.to(hidden.dtype))
        return self.language(inputs_embeds=hidden, labels=labels)


def without_weights(vision: Tower, audio: Tower, language: Tower) -> Mllm:
    """The model with fake parameters, bfloat16."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with FakeTensorMode(), no_init_weights():
            model = Mllm(vision, audio, language)
    finally:
        torch.set_default_dtype(torch.float32)
    return model.train()


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """What one sample of the evaluation holds."""

    text_tokens: int = 1024
    height: int = 720
    width: int = 1280
    seconds: int = 120

    @property
    def grid(self) -> tuple[int, int]:
        """Patches down and across: both even, as the processor of Qwen2-VL rounds them."""
        rows, columns = (2 * round(size / (2 * PATCH)) for size in (self.height, self.width))
        return rows, columns

    @property
    def image_tokens(self) -> int:
        return self.grid[0] * self.grid[1] // MERGED

    @property
    def audio_tokens(self) -> int:
        return self.pieces * PIECE // FRAMES_PER_ROW

    @property
    def pieces(self) -> int:
        """Of the sound, 100 frames a second."""
        return -(-100 * self.seconds // PIECE)

    @property
    def tokens(self) -> int:
        """Of the language model."""
        return self.text_tokens + self.image_tokens + self.audio_tokens


def batch_of(num_samples: int, sample: Sample) -> dict[str, Tensor]:
    """A microbatch without content, by input name."""
    rows, columns = sample.grid
    row = [IMAGE] * sample.image_tokens + [AUDIO] * sample.audio_tokens + [9] * sample.text_tokens
    ids = torch.tensor([row] * num_samples)
    return {
        "input_ids": ids,
        "pixel_values": torch.zeros(num_samples * rows * columns, 3 * 2 * PATCH * PATCH, dtype=torch.bfloat16),
        "image_grid_thw": torch.tensor([[1, rows, columns]] * num_samples),
        "audio_features": torch.zeros(num_samples * sample.pieces, PIECE, MEL_BINS, dtype=torch.bfloat16),
        "labels": torch.where(ids == 9, ids, -100),
    }
