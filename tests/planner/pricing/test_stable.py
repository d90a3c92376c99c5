"""`stable_allocation` on a captured model."""

from __future__ import annotations

import pytest
import zoo

from mmcompile.data.sample import SampleShape
from mmcompile.data.stats import DatasetStats
from mmcompile.data.synthetic import synthetic
from mmcompile.errors import PlanError
from mmcompile.ir.capture import capture
from mmcompile.passes.cost.cost import Cost
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.planner.pricing.stable import stable_allocation
from mmcompile.planner.pricing.workload import Workload


def test_a_projector_counts_with_its_encoder_and_more_images_mean_more_devices() -> None:
    family = zoo.ALL["llava"]
    batch = family.batch()
    graph = capture(family.build(), batch).graph
    GradientFlow().run(graph)
    table = Cost().run(graph)

    def devices_of(stats: DatasetStats) -> dict[str, int]:
        found = stable_allocation(graph, table, Workload.of(graph, table, batch, stats), 16)
        return dict(zip(found.components, found.allocations[0], strict=True))

    few = devices_of(
        DatasetStats.of((SampleShape(name=str(n), text_tokens=500, images=(16,)) for n in range(9)), name="few")
    )
    many = devices_of(
        DatasetStats.of((SampleShape(name=str(n), text_tokens=5, images=(160,)) for n in range(9)), name="many")
    )
    assert list(few) == ["vision_tower", "language_model"] and sum(few.values()) == 16
    assert many["vision_tower"] > few["vision_tower"] >= 1

    varied = stable_allocation(
        graph, table, Workload.of(graph, table, batch, DatasetStats.of(synthetic("orchmllm-mix", 500), name="mix")), 16
    )
    assert not varied.trials[0].stable and varied.stable_size is not None
    with pytest.raises(PlanError, match="no dataset to draw batches from"):
        stable_allocation(graph, table, Workload.of(graph, table, batch), 16)
