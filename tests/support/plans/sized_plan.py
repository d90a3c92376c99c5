"""Costs of real sizes made by formula, for tests of planning that need no model: a vision tower and a language model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mmcompile.costmodel.compute import LayerCost
from mmcompile.costmodel.load import Load
from mmcompile.data.sample import SampleShape
from mmcompile.data.stats import DatasetStats
from mmcompile.ir.graph import ComponentKind, ModelGraph
from mmcompile.passes.cost.cost_table import NOTHING, CostTable, GrowingCost
from mmcompile.planner.plan.geometry import Geometry
from mmcompile.planner.pricing.workload import Workload
from support.plans.toy_plan import toy_graph

BYTES = 2


def block(load: Load, width: int, inner: int, kv: int, *, trains: bool, passes: bool) -> GrowingCost:
    """A transformer block in two-byte elements: attention with `kv` wide keys and values, a gated MLP of `inner`."""
    tokens, squares = round(load.tokens), round(load.squares)
    parameters = 2 * width * width + 2 * width * kv + 3 * width * inner
    backward = trains or passes
    saved = (tokens * (8 * width + 2 * kv + 4 * inner)) * BYTES if backward else 0
    products, attention = 2 * tokens * parameters, 2 * squares * width
    return GrowingCost(
        fixed=_cost(parameter_bytes=parameters * BYTES, trainable_bytes=parameters * BYTES * trains, kernels=20)
        if not backward
        else _cost(
            parameter_bytes=parameters * BYTES,
            trainable_bytes=parameters * BYTES * trains,
            forward_bytes=parameters * BYTES,
            backward_bytes=2 * parameters * BYTES,
            kernels=20,
            backward_kernels=40,
        ),
        by_tokens=_cost(
            forward_flops=products,
            input_grad_flops=products * backward,
            weight_grad_flops=products * trains,
            forward_bytes=tokens * 20 * width * BYTES,
            backward_bytes=tokens * 40 * width * BYTES * backward,
            activation_bytes=saved,
            selective_bytes=saved // 2,
            full_bytes=tokens * width * BYTES * backward,
            output_bytes=tokens * width * BYTES,
            kv_bytes=2 * tokens * kv * BYTES,
        ),
        by_squares=_cost(
            forward_flops=attention,
            input_grad_flops=2 * attention * backward,
            attention_flops=attention,
            attention_backward_flops=2 * attention * backward,
        ),
    )


def product(load: Load, rows: int, columns: int, *, trains: bool, passes: bool, saved: int = 0) -> GrowingCost:
    """One matrix [rows, columns] applied to every token; `saved` more elements a token for its backward."""
    tokens, parameters = round(load.tokens), rows * columns
    backward = trains or passes
    return GrowingCost(
        fixed=_cost(parameter_bytes=parameters * BYTES, trainable_bytes=parameters * BYTES * trains, kernels=2),
        by_tokens=_cost(
            forward_flops=2 * tokens * parameters,
            input_grad_flops=2 * tokens * parameters * passes,
            weight_grad_flops=2 * tokens * parameters * trains,
            activation_bytes=tokens * (rows + saved) * BYTES * backward,
            selective_bytes=tokens * (rows + saved) * BYTES * backward,
            full_bytes=tokens * rows * BYTES * backward,
            output_bytes=tokens * columns * BYTES,
        ),
    )


def _cost(**amounts: int) -> LayerCost:
    return replace(NOTHING, **amounts)


def vision_language_72b(*, train: str = "all") -> tuple[ModelGraph, CostTable]:
    """27 blocks of 1152, a projector, 80 blocks of 8192 with embedding and head; captured on one sample."""
    all_trains = train == "all"
    seen, read = Load(tokens=3645.0, squares=5 * 729.0**2), Load(tokens=4096.0, squares=4096.0**2)
    vision = (block(seen, 1152, 2868, 1152, trains=all_trains, passes=all_trains),) * 27
    projector = (product(seen, 1152, 8192, trains=True, passes=all_trains),)
    embedding = product(read, 8192, 18, trains=all_trains, passes=True)
    blocks = (block(read, 8192, 29568, 1024, trains=all_trains, passes=True),) * 80
    head = product(read, 8192, 152_064, trains=all_trains, passes=True, saved=152_064)
    growing = {"vision": vision, "projector": projector, "language_model": (embedding, *blocks, head)}
    loads = {"vision": seen, "projector": seen, "language_model": read}
    graph = toy_graph(
        {
            "vision": (ComponentKind.ENCODER, 27),
            "projector": (ComponentKind.PROJECTOR, 1),
            "language_model": (ComponentKind.LANGUAGE_MODEL, 82),
        },
        [("vision", "projector"), ("projector", "language_model")],
    )
    return graph, table_of(growing, loads)


def table_of(growing: dict[str, tuple[GrowingCost, ...]], loads: dict[str, Load]) -> CostTable:
    layers = {name: tuple(own.total for own in costs) for name, costs in growing.items()}
    return CostTable(layers=layers, loads=loads, growing=growing, captured_loads=loads)


def workload(table: CostTable, samples: Sequence[SampleShape]) -> Workload:
    """Images into vision and projector; text and a position every patch into the language model, without padding."""
    geometries = {
        name: Geometry(component=name, modality="image", rows_per_unit=1.0, pairs_per_unit=1.0)
        for name in ("vision", "projector")
    }
    geometries["language_model"] = Geometry(
        component="language_model", modality="text", rows_per_unit=1.0, pairs_per_unit=1.0, tokens_per_patch=1.0
    )
    stats = DatasetStats.of(samples, name="mix")
    return Workload.from_geometries(geometries, table.loads, 1, stats)


def mixed_samples(count: int = 2000, seed: int = 0) -> list[SampleShape]:
    """One to eight images of 729 patches, 100 to 2,000 tokens of text."""
    rng = np.random.default_rng(seed)
    return [
        SampleShape(
            name=f"sample {index}",
            text_tokens=int(rng.integers(100, 2000)),
            images=(729,) * int(rng.choice([1, 1, 2, 5, 8])),
        )
        for index in range(count)
    ]
