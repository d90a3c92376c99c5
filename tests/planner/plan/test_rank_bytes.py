"""The memory that a plan prints for a stage is what one of its ranks holds: the parts of parameters in its program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from zoo import ALL

import mmcompile as mm
from mmcompile.ir.graph import ParameterSpec
from mmcompile.ir.inputs import completed
from mmcompile.planner.plan.plan_record import StagePrediction

STATES = 2
"""Of AdamW, in the parameters' dtype."""


@pytest.mark.parametrize(
    ("name", "degree"),
    [
        ("llava", 2),
        pytest.param("llava", 4, marks=pytest.mark.slow),
        pytest.param("qwen2_5_vl", 2, marks=pytest.mark.slow),
    ],
)
def test_ranks_that_share_tensors_hold_what_is_printed(name: str, degree: int) -> None:
    """To the byte, norms and biases that each holds whole included."""
    for held, trained, predicted in _stages(name, tensor_parallel=degree):
        assert predicted.parameter_bytes == sum(spec.num_bytes for spec in held)
        assert predicted.gradient_bytes == trained
        assert predicted.optimizer_bytes == STATES * trained


def test_replicas_that_share_parameters_hold_what_is_printed_and_little_more() -> None:
    """Vectors, and tables of an odd number of rows, which each replica holds whole, are priced as shared."""
    for held, trained, predicted in _stages("llava", replicas=2, fsdp=True):
        whole = [spec for spec in held if spec.shard is None]
        assert all(len(spec.shape) == 1 or spec.shape[0] % 2 for spec in whole)
        more, trains = (sum(spec.num_bytes for spec in part) for part in (whole, filter(_trains, whole)))
        assert predicted.parameter_bytes == sum(spec.num_bytes for spec in held) - more // 2
        assert predicted.gradient_bytes == trained - trains // 2
        assert predicted.optimizer_bytes == STATES * predicted.gradient_bytes


def _trains(spec: ParameterSpec) -> bool:
    return spec.trainable


def _stages(name: str, **axes: Any) -> Iterator[tuple[Sequence[ParameterSpec], int, StagePrediction]]:
    """What each rank of a stage holds, bytes of what trains, and what the plan says."""
    model = ALL[name].build(torch.float32)
    given = completed(model, ALL[name].batch(torch.float32))
    plan = mm.plan(model, given, cluster="2x8xH100", num_microbatches=2, **axes)
    programs = mm.stage_programs(model, given, plan)
    for stage in plan.stages:
        own = [program for key, program in programs.items() if key.partition("@")[0] == stage.name]
        assert own
        for program in own:
            trained = sum(spec.num_bytes for spec in program.parameters if spec.trainable)
            yield program.parameters, trained, stage.prediction
