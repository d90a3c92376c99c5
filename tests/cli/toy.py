"""A model and data for `package.module:function`: a caption model with an image encoder, and a few samples."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, VOCABULARY = 16, 32


class Captioner(nn.Module):
    """Two encoder blocks whose output is added to every token, two decoder blocks, a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.decoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self, pixel_values: Tensor, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        image = pixel_values
        for block in self.encoder:
            image = image + torch.tanh(block(image))
        hidden = self.embed(input_ids) + image.unsqueeze(1)
        for block in self.decoder:
            hidden = hidden + torch.tanh(block(hidden))
        return {"loss": functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}


def build() -> Captioner:
    return Captioner()


def build_with_batch() -> tuple[Captioner, dict[str, Tensor]]:
    samples = build_samples()
    return Captioner(), {key: torch.cat([sample[key] for sample in samples[:4]]) for key in samples[0]}


def build_samples() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "pixel_values": torch.randn(1, WIDTH, generator=generator),
            "input_ids": torch.randint(VOCABULARY, (1, 6), generator=generator),
            "labels": torch.randint(VOCABULARY, (1, 6), generator=generator),
        }
        for _ in range(12)
    ]


def build_free_samples() -> list[dict[str, Tensor]]:
    """Return samples whose texts all have lengths of their own."""
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "pixel_values": torch.randn(1, WIDTH, generator=generator),
            "input_ids": torch.randint(VOCABULARY, (1, 6 + number), generator=generator),
            "labels": torch.randint(VOCABULARY, (1, 6 + number), generator=generator),
        }
        for number in range(12)
    ]


def nothing() -> None:
    """Neither a model nor data."""
