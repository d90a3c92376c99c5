"""The job of the benchmarks of fault tolerance: a small LLaVA on made-up conversations, one image each."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import transformers
from torch import nn

from mmcompile.data.collate import Sample

IMAGE, VOCABULARY, IMAGE_TOKENS, TEXT_TOKENS = 1000, 1024, 16, 48
OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-4)

TEXT: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOWER: dict[str, Any] = {"num_attention_heads": 4, "image_size": 56, "patch_size": 14, "projection_dim": 64}


def llava(*, tower: tuple[int, int], text: tuple[int, int]) -> nn.Module:
    """A model of which everything trains.

    Args:
        tower, text: width and number of layers.
    """
    torch.manual_seed(0)
    sizes = [{"hidden_size": width, "num_hidden_layers": layers} for width, layers in (tower, text)]
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(intermediate_size=4 * tower[0], **sizes[0], **TOWER),
        text_config=transformers.LlamaConfig(intermediate_size=3 * text[0], **sizes[1], **TEXT),
        image_seq_length=IMAGE_TOKENS,
        image_token_index=IMAGE,
    )
    return transformers.LlavaForConditionalGeneration(config).train()


def conversations(count: int) -> list[Sample]:
    """Samples of one length, so that there is one pattern."""
    generator = torch.Generator().manual_seed(1)
    return [_conversation(generator) for _ in range(count)]


def load() -> str:
    """How busy this machine is."""
    return f"load of this machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def _conversation(generator: torch.Generator) -> Sample:
    ids = torch.randint(3, IMAGE, (1, IMAGE_TOKENS + TEXT_TOKENS), generator=generator)
    ids[:, :IMAGE_TOKENS] = IMAGE
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids.masked_fill(ids == IMAGE, -100),
        "pixel_values": torch.randn(1, 3, 56, 56, generator=generator),
    }
