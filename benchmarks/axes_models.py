"""Models that `axes.py` lays out: the nine frozen mixes of Table 3.2 of the dissertation, and those of DFLOP's Table 3.

DFLOP names encoders and language models, not their sizes: here they are those of the public models of these names. All are
captured without weights, blocks three deep at full width; the middle one then stands for all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import frozen_aware
import mllm
from frozen_aware import DEPTH, deepened, repeated
from mllm import Tower
from torch import nn
from transformers import (
    InternVLConfig,
    LlamaConfig,
    LlavaOnevisionConfig,
    PretrainedConfig,
    Qwen2Config,
    SiglipVisionConfig,
)
from transformers.models.internvl.configuration_internvl import InternVLVisionConfig

from mmcompile.costmodel.cluster import Cluster
from mmcompile.errors import MMCompileError
from mmcompile.ir.capture import Capture, capture
from mmcompile.ir.graph import ModelGraph
from mmcompile.ir.meta_model import skeleton
from mmcompile.ir.sample_inputs import example_batch
from mmcompile.passes.capture_pipeline import run_on_capture
from mmcompile.passes.cost.cost import Cost
from mmcompile.passes.cost.cost_table import CostTable
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.passes.masks.bitfield_attention import BitfieldAttention
from mmcompile.passes.pipeline import Pipeline
from mmcompile.passes.tensor_parallel.tensor_axes import TensorAxes, tensor_axes
from mmcompile.planner.planning_passes import with_context_parallel

Built = tuple[nn.Module, Mapping[str, Any]]
"""A model without weights, and a batch for it."""

TEXT_TOKENS = 215
"""Of a sample of DFLOP's: the mean of its mixed data as `step_dflop.py` draws it."""
TILES = 13
"""Of an image of InternVL-2.5: twelve of 448 pixels and the whole."""
SAMPLES = 2
"""Captured; a step has more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What is laid out, and where."""

    name: str
    cluster: str
    global_batch: int
    towers: Mapping[str, Tower]
    """Component -> its size at full depth."""
    build: Callable[[], Built]
    """At `DEPTH` blocks."""


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A model at full depth, priced, and what the passes say of its axes."""

    graph: ModelGraph
    table: CostTable
    tensor: Mapping[str, TensorAxes]
    no_cp: str
    """Why the tokens of the language model cannot be shared; empty if they can."""

    @classmethod
    def of(cls, model: Model) -> Captured:
        """Capture and price a model. Raises BatchError, CaptureError."""
        module, batch = model.build()
        found = capture(module, batch)
        cost = Cost()
        table = Pipeline(passes=(GradientFlow(), cost)).run(found.graph).of(cost)
        shallow = tensor_axes(found.graph, Cluster.parse(model.cluster).devices_per_node, table)
        tensor = {name: _deepened(own, model.towers.get(name)) for name, own in shallow.items()}
        graph, table = deepened(found.graph, table, model.towers)
        return cls(graph=graph, table=table, tensor=tensor, no_cp=_no_cp(found))


def _deepened(axes: TensorAxes, tower: Tower | None) -> TensorAxes:
    if tower is None:
        return axes
    return replace(axes, layers={degree: repeated(own, tower) for degree, own in axes.layers.items()})


def _no_cp(found: Capture) -> str:
    """Tries it. Masks become words first, as the engine does it."""
    try:
        with_context_parallel(run_on_capture(found, (BitfieldAttention(),)).capture, num_ranks=2, head_stride=1)
    except MMCompileError as error:
        return str(error).split("\n")[0]
    return ""


def mix(name: str) -> Model:
    """`SML`: small vision encoder, medium audio encoder, large language model; only projectors train."""
    towers = {
        "vision": mllm.VISION[name[0]],
        "audio": mllm.AUDIOS[name[1]],
        "language_model": mllm.LANGUAGE[name[2]],
    }
    return Model(
        name=f"MLLM-{name}",
        cluster=frozen_aware.CLUSTER,
        global_batch=frozen_aware.BATCH,
        towers=towers,
        build=partial(_mix, towers),
    )


def _mix(towers: Mapping[str, Tower]) -> Built:
    shallow = (replace(tower, layers=DEPTH) for tower in towers.values())
    return mllm.without_weights(*shallow), mllm.batch_of(frozen_aware.BATCH // frozen_aware.MICROBATCHES, mllm.Sample())


SIGLIP = Tower(layers=26, width=1152, billions=0.4, heads=16, inner=4304)  # so400m, its last block left out
INTERN_VIT = Tower(layers=45, width=3200, billions=5.5, heads=25, inner=12800)  # 6B, V2.5
QWEN = {
    "7B": Tower(layers=28, width=3584, billions=7.6, heads=28, inner=18944),
    "32B": Tower(layers=64, width=5120, billions=32.8, heads=40, inner=27648),
    "72B": Tower(layers=80, width=8192, billions=72.7, heads=64, inner=29568),
}
LLAMA = {
    "8B": Tower(layers=32, width=4096, billions=8, heads=32, inner=14336),
    "70B": Tower(layers=80, width=8192, billions=70.6, heads=64, inner=28672),
}


def _qwen(tower: Tower) -> PretrainedConfig:
    return Qwen2Config(
        **_sizes(tower), num_key_value_heads=4 if tower.heads == 28 else 8, vocab_size=152064, use_cache=False
    )


def _llama(tower: Tower) -> PretrainedConfig:
    return LlamaConfig(**_sizes(tower), num_key_value_heads=8, vocab_size=128258, use_cache=False)


def _sizes(tower: Tower) -> dict[str, Any]:
    return {
        "num_hidden_layers": DEPTH,
        "hidden_size": tower.width,
        "intermediate_size": tower.inner,
        "num_attention_heads": tower.heads,
    }


def _onevision(text: Callable[[Tower], PretrainedConfig], tower: Tower) -> Built:
    """LLaVA-OneVision: an image of 768 x 768, four crops and the whole."""
    config = LlavaOnevisionConfig(
        text_config=text(tower),
        vision_config=SiglipVisionConfig(**_sizes(SIGLIP), image_size=384, patch_size=14, vision_use_head=False),
        image_grid_pinpoints=[[384, 384], [384, 768], [768, 384], [768, 768]],
        image_token_index=128256 if text is _llama else 151646,
        video_token_index=128257 if text is _llama else 151647,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return _built(config, images=1, image_size=768)


def _internvl(tower: Tower) -> Built:
    """InternVL-2.5 as transformers has it."""
    config = InternVLConfig(
        text_config=_qwen(tower),
        vision_config=InternVLVisionConfig(
            **_sizes(INTERN_VIT), use_qk_norm=True, norm_type="rms_norm", image_size=448, patch_size=14
        ),
        tie_word_embeddings=False,
    )
    return _built(config, images=TILES, image_size=448)


def _built(config: PretrainedConfig, *, images: int, image_size: int) -> Built:
    model = skeleton(config, dtype="bfloat16").train()
    batch = example_batch(
        model, batch_size=SAMPLES, text_tokens=TEXT_TOKENS, images=images, image_size=image_size, audios=0
    )
    return model, batch


def _dflop(name: str, nodes: int, vision: Tower, language: Tower, build: Callable[[], Built]) -> Model:
    return Model(
        name=name,
        cluster=f"{nodes}x8xA100-80G@12.5GB/s",
        global_batch=512,
        towers={"vision_tower": vision, "language_model": language},
        build=build,
    )


MODELS = (
    *(mix(name) for name in frozen_aware.PUBLISHED),
    *(
        _dflop(f"LLaVA-OV Qwen2.5-{size}", 4 if size == "7B" else 8, SIGLIP, tower, partial(_onevision, _qwen, tower))
        for size, tower in QWEN.items()
    ),
    *(
        _dflop(f"LLaVA-OV Llama-3-{size}", 4 if size == "8B" else 8, SIGLIP, tower, partial(_onevision, _llama, tower))
        for size, tower in LLAMA.items()
    ),
    _dflop("InternVL-2.5 Qwen2.5-72B", 8, INTERN_VIT, QWEN["72B"], partial(_internvl, QWEN["72B"])),
)
"""Nine mixes, then the six of DFLOP's Table 3."""
