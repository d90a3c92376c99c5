"""A tiny LLaVA and data for it, for runs on nodes that die."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from mmcompile.batching.step_planner import Collate
from mmcompile.data.batches import Batches, IterableBatches, MapBatches
from mmcompile.data.collate import Sample, Value

BATCH = 16
"""Samples of a step."""
SAMPLES = 40
"""Of an epoch; a step can go from one into the next."""
BROKEN = 7
"""The sample that cannot be read where data is `broken`, joined with others where `unjoined`, computed where `poisoned`."""
VOCABULARY = 64

Data = Literal["map", "mixed", "stream", "broken", "unjoined", "poisoned"]


def llava(*, tied: bool) -> torch.nn.Module:
    """A tiny LLaVA. The projector and the language model train, with dropout in attention; vision is frozen."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    import mmcompile as mm

    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        image_size=16,
        patch_size=8,
        projection_dim=16,
    )
    text = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=None,
        attention_dropout=0.1,
        tie_word_embeddings=tied,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=1,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=tied,
    )
    model = LlavaForConditionalGeneration(config)
    mm.freeze(model, ["projector", "language_model", *([] if tied else ["lm_head"])])
    return model.train()


def sample(index: int, *, image: bool = True, poison: bool = False) -> dict[str, Tensor]:
    """A conversation: an image of four tokens, if any, and five tokens of text; with `poison`, one that no model knows."""
    generator = torch.Generator().manual_seed(index)
    words = torch.randint(3, VOCABULARY, (5,), generator=generator)
    if poison:
        words[2] = VOCABULARY
    ids = torch.cat([torch.tensor([2] + [1] * 4 if image else [2]), words])[None]
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.where(ids != 1, -100)}
    if image:
        found["pixel_values"] = torch.randn(1, 3, 16, 16, generator=generator)
    return found


class Broken(Sequence[dict[str, Tensor]]):
    """One of its samples cannot be read."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: Any) -> Any:
        if index == BROKEN:
            raise OSError(f"no such image: {index}.png")
        return sample(index)


class Stream:
    """Samples in their own order, another one in each epoch; it says nothing of where it is."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for place in range(SAMPLES):
            yield sample(self.index(self.epoch, place))

    @staticmethod
    def index(epoch: int, place: int) -> int:
        return (place * 7 + epoch) % SAMPLES


def batches(data: Data) -> Batches:
    """The data of a run."""
    match data:
        case "map" | "unjoined":
            return MapBatches([sample(index) for index in range(SAMPLES)], BATCH, 0)
        case "mixed":
            # Microbatches of text alone come in most steps.
            return MapBatches([sample(index, image=index % 3 == 0) for index in range(SAMPLES)], BATCH, 0)
        case "broken":
            return MapBatches(Broken(), BATCH, 0)
        case "poisoned":
            return MapBatches([sample(index, poison=index == BROKEN) for index in range(SAMPLES)], BATCH, 0)
        case "stream":
            return IterableBatches(Stream(), BATCH)


def join(collate: Collate, samples: Sequence[Sample], names: Sequence[int]) -> dict[str, Value]:
    """As a collate function of a user that does not know every sample."""
    broken = sample(BROKEN)["input_ids"].tolist()
    if any(isinstance(ids := one["input_ids"], Tensor) and ids.tolist() == broken for one in samples):
        raise KeyError("conversation")
    return collate(samples, names)
