"""`benchmarks/measured_prediction.py`: steps predicted from measured times."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
from support.paths import BENCHMARKS

from mmcompile.costmodel.calibration import RuntimeCosts
from mmcompile.costmodel.cluster import Interconnect
from mmcompile.costmodel.compute import LayerTimes
from mmcompile.planner.plan.placement import PlacedStage
from mmcompile.planner.schedule.measured import LinkMessages

sys.path.insert(0, str(BENCHMARKS))
prediction: Any = import_module("measured_prediction")
TrainedParameters, predict_measured = prediction.TrainedParameters, prediction.predict_measured

FREE = RuntimeCosts(
    forward_s=0.0,
    backward_s=0.0,
    message_s=0.0,
    message_s_per_byte=0.0,
    step_s=0.0,
    optimizer_s_per_byte=1e-9,
    optimizer_s_per_tensor=1e-3,
    optimizer="AdamW",
    link=Interconnect(bytes_per_s=1e30, latency_s=0.0, source="test"),
)
STAGES = tuple(PlacedStage(name=f"lm.{i}", ranks=(i,), depth=1 - i) for i in range(2))
LAYERS = LayerTimes(forward_s=1.0, input_grad_s=1.2, weight_grad_s=0.8)
LINK = LinkMessages(source="lm.0", target="lm.1", sizes=(1000, 24), gradient_sizes=(1000,))


def predict(runtime: RuntimeCosts = FREE, trained: dict[int, Any] | None = None, prepare_s: float = 0.0) -> Any:
    return predict_measured(
        STAGES,
        dict.fromkeys(("lm.0", "lm.1"), LAYERS),
        [LINK],
        trained or {},
        runtime=runtime,
        prepare_s=prepare_s,
        num_microbatches=6,
    )


def test_a_chain_of_equal_stages_takes_fill_and_work() -> None:
    assert predict().iteration_s == pytest.approx((6 + 2 - 1) * 3.0)


def test_actions_and_messages_cost_their_ranks() -> None:
    runtime = replace(FREE, forward_s=0.01, backward_s=0.02, step_s=0.5)
    assert predict(runtime).iteration_s == pytest.approx(7 * 3.03 + 0.5)
    # Two tensors forward, one back: each rank works on them, and what is left of the link's time delays the other rank.
    runtime = replace(
        FREE,
        message_s=0.01,
        message_s_per_byte=1e-6,
        link=Interconnect(bytes_per_s=1024 / 0.01, latency_s=0.1, source="test"),
    )
    work = 0.02 + 1024e-6 + 0.01 + 1000e-6
    assert predict(runtime).timeline.busy_s == pytest.approx((6 * (3 + work),) * 2)
    assert predict(runtime).iteration_s > 7 * (3 + work)


def test_preparing_counts_on_rank_0_and_optimizers_overlap_it() -> None:
    assert predict(prepare_s=0.1).iteration_s == pytest.approx(21.6)
    equal = {
        0: TrainedParameters(num_bytes=10**8, num_tensors=100),
        1: TrainedParameters(num_bytes=10**8, num_tensors=100),
    }
    assert predict(trained=equal).iteration_s == pytest.approx(21.2)
    # Rank 1 is busy 0.5 s longer, of which 0.3 s hide behind preparing and 0.2 s behind rank 0's first forward.
    late = {1: TrainedParameters(num_bytes=5 * 10**8)}
    assert predict(trained=late, prepare_s=0.05).iteration_s == pytest.approx(21.3)
    very_late = {1: TrainedParameters(num_bytes=3 * 10**9)}
    assert predict(trained=very_late).iteration_s == pytest.approx(21 + 2)
