"""Work of the models of the Entrain evaluation, in closed form from their public configurations.

Forward FLOPs of every matrix product and of attention, two a multiply-add; everything trains, so the backward costs twice the
forward in both components and cancels in their ratio. Held against captured graphs by `entrain_allocation.py --captured`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from transformers import Qwen2_5_VLConfig

from mmcompile import capture, example_batch, skeleton
from mmcompile.costmodel.load import Polynomial
from mmcompile.data.sample import SampleShape
from mmcompile.passes.cost.cost import Cost
from mmcompile.passes.pipeline import analyse
from mmcompile.planner.pricing.workload import Workload

PATCH_FEATURES = 3 * 2 * 14 * 14  # channels, frames, height and width of a patch
MERGED = 4
"""Patches that become one token of the language model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Vision:
    """The vision encoder of Qwen2.5-VL: windows of 8 x 8 patches in most layers, the whole image in some."""

    layers: int = 32
    full_layers: int = 4
    width: int = 1280
    inner: int = 3420
    window: int = 64

    def flops(self, patches: np.ndarray, out_width: int) -> np.ndarray:
        """Of one image, merger included.

        Args:
            patches: [samples].
            out_width: of the language model.
        """
        attention = 4 * self.width * ((self.layers - self.full_layers) * self.window + self.full_layers * patches)
        return patches * (self._embedding + self.layers * self._block + attention + self._merger(out_width))

    def by_layer(self, patches: np.ndarray, out_width: int) -> np.ndarray:
        """Of all images together, float64 [layers]: the embedding with the first layer, the merger with the last."""
        whole = np.arange(1, self.layers + 1) % (self.layers // self.full_layers) == 0
        total, squares = float(patches.sum()), float((patches**2).sum())
        found = self._block * total + 4 * self.width * np.where(whole, squares, self.window * total)
        found[0] += self._embedding * total
        found[-1] += self._merger(out_width) * total
        return found

    @property
    def _block(self) -> int:
        return 2 * (4 * self.width**2 + 3 * self.width * self.inner)

    @property
    def _embedding(self) -> int:
        return 2 * PATCH_FEATURES * self.width

    def _merger(self, out_width: int) -> float:
        merged = MERGED * self.width
        return 2 * merged * (merged + out_width) / MERGED


@dataclass(frozen=True, kw_only=True, slots=True)
class Language:
    """A Llama 3.2."""

    name: str
    layers: int
    width: int
    heads: int
    key_value_heads: int = 8
    inner: int = 8192
    vocabulary: int = 128256

    def flops(self, tokens: np.ndarray) -> np.ndarray:
        """Of one sequence, head included. Attention counts whole squares, as kernels with a mask compute them.

        Args:
            tokens: [samples].
        """
        attention = 4 * self.width * tokens
        return tokens * (self.layers * (self._block + attention) + self._head)

    def by_layer(self, tokens: np.ndarray) -> np.ndarray:
        """Of all sequences together, float64 [layers]: the head with the last."""
        total = float(tokens.sum())
        found = np.full(self.layers, self._block * total + 4 * self.width * float((tokens**2).sum()))
        found[-1] += self._head * total
        return found

    @property
    def _block(self) -> int:
        key_value = self.width // self.heads * self.key_value_heads
        return 2 * (2 * self.width**2 + 2 * self.width * key_value + 3 * self.width * self.inner)

    @property
    def _head(self) -> int:
        return 2 * self.width * self.vocabulary


VISION = Vision()
LLAMA_1B = Language(name="Llama3-1b", layers=16, width=2048, heads=32)
LLAMA_3B = Language(name="Llama3-3b", layers=28, width=3072, heads=24)


def captured_work(samples: Sequence[SampleShape], language: Language) -> np.ndarray:
    """FLOPs [samples, 2], backward included, by the polynomials of a graph captured from the config."""
    workload, flops = _captured(language)
    loads = (workload.loads([sample]) for sample in samples)
    return np.array([[polynomial.at(load[name]) for name, polynomial in flops.items()] for load in loads])


@cache
def _captured(language: Language) -> tuple[Workload, dict[str, Polynomial]]:
    """Llama's sizes in the text model of Qwen2.5-VL, which differs from it by biases and by how positions rotate."""
    model = skeleton(_config(language), dtype="bfloat16")
    batch = example_batch(model, batch_size=1, text_tokens=256, image_size=560)
    graph = capture(model, batch)
    table = analyse(Cost(), graph)
    flops = {
        name: sum(
            (table.polynomial(name, index, field) for index in range(len(table[name])) for field in _FLOPS),
            Polynomial(),
        )
        for name in ("visual", graph.loss_component)
    }
    return Workload.of(graph, table, batch), flops


_FLOPS = ("forward_flops", "input_grad_flops", "weight_grad_flops")


def _config(language: Language) -> Qwen2_5_VLConfig:
    vision = {
        "depth": VISION.layers,
        "hidden_size": VISION.width,
        "intermediate_size": VISION.inner,
        "num_heads": 16,
        "out_hidden_size": language.width,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    }
    pairs = language.width // language.heads // 2
    text = {
        "hidden_size": language.width,
        "num_hidden_layers": language.layers,
        "num_attention_heads": language.heads,
        "num_key_value_heads": language.key_value_heads,
        "intermediate_size": language.inner,
        "vocab_size": language.vocabulary,
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_scaling": {"type": "mrope", "mrope_section": [pairs // 4, pairs * 3 // 8, pairs * 3 // 8]},
    }
    return Qwen2_5_VLConfig(
        vision_config=vision,
        text_config=text,
        tie_word_embeddings=True,
        image_token_id=128001,
        video_token_id=128002,
        vision_start_token_id=128003,
        vision_end_token_id=128004,
    )
