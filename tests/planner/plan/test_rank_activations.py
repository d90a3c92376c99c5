"""What ranks that share tensors or parameters are predicted to keep for the backward is what their programs keep."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from support.graphs.split import root_values
from support.oracles.kept_bytes import kept_bytes
from support.oracles.stage_memory import stage_activation_bytes
from support.oracles.stage_oracle import in_order
from support.plans.captured_once import CapturedOnce
from torch import Tensor
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from zoo import ALL
from zoo.family import Size

from mmcompile.codegen.load import load_stage
from mmcompile.config import Recompute
from mmcompile.costmodel.cluster import Cluster
from mmcompile.ir.graph import ParameterSpec
from mmcompile.ir.inputs import completed
from mmcompile.kernels.process_groups import REPLICA_GROUP, TENSOR_GROUP, register_group
from mmcompile.passes.cost.cost import Cost
from mmcompile.passes.tensor_parallel.tensor_axes import tensor_axes
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.pricing.pricing import LayerSharding, Pricing
from mmcompile.planner.search.settings import RECOMPUTES

LONG = Size(samples=4, length=200, media=2)
"""Activations that are larger than the parameters of the test models."""


@contextmanager
def only_rank(name: str, count: int) -> Iterator[None]:
    """A group of ranks of which only the first exists: collectives leave values as they are, of the right sizes."""
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    group = dist.group.WORLD
    assert group is not None
    register_group(name, group)
    try:
        yield
    finally:
        dist.destroy_process_group()


def kept_by_first_ranks(subject: CapturedOnce, plan: Plan) -> dict[str, int]:
    """Bytes that the first rank of each stage keeps for the backward of one microbatch, measured."""
    model = subject.model
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    programs = {
        name: program for name, program in subject.programs(plan).items() if name.partition("@")[2] in ("", "0")
    }
    roots, made, kept = root_values(subject.found, subject.batch), dict[str, Tensor](), dict[str, int]()
    for name in in_order(programs):
        program = programs[name]
        own = {spec.name: _held(spec, tensors[spec.whole_name]) for spec in program.parameters}
        own |= {buffer: tensors[buffer].clone() for buffer in program.buffers}
        stage = load_stage(program, own)
        inputs = [
            made[port.name].detach().requires_grad_(port.gradient) if port.kind == "link" else roots[port.name]
            for port in program.inputs
        ]
        made |= {port.name: value for port, value in zip(program.outputs, stage(*inputs), strict=True)}
        kept[name.partition("@")[0]] = kept_bytes(stage, inputs, own.values())
    return kept


@functools.cache
def _captured(name: str) -> CapturedOnce:
    model = ALL[name].build()
    return CapturedOnce.on(model, completed(model, ALL[name].draw(LONG, seed=0)))


def _held(spec: ParameterSpec, whole: Tensor) -> Tensor:
    return (whole if spec.shard is None else spec.shard.part(whole, spec.index)).detach().clone()


@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")
@pytest.mark.parametrize("degree", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", ["llava", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2_5_vl", "gemma3", "qwen2_audio"))]
)
def test_ranks_that_share_tensors_keep_what_is_predicted(name: str, degree: int) -> None:
    subject = _captured(name)
    graph = subject.capture().graph
    table = Cost().run(graph)
    axes = tensor_axes(graph, degree, table)
    shared = {part: degree for part, own in axes.items() if degree in own.degrees}
    assert "language_model" in shared
    pricing = Pricing(
        table=table,
        cluster=Cluster.parse("1x8xH100"),
        dtype="float32",
        tensor_shares={part: own.layers for part, own in axes.items()},
    )
    options: dict[str, Any] = {"stages": {"language_model": 2}, "tensor_parallel": shared, "num_microbatches": 1}
    for recompute in RECOMPUTES:
        plan = subject.plan("2x8xH100", recompute=recompute, **options)
        with only_rank(TENSOR_GROUP, degree):
            found_bytes = kept_by_first_ranks(subject, plan)
        for stage in plan.stages:
            costs = [
                pricing.costs(
                    part.component, None, LayerSharding(tp=shared.get(part.component, 1), recompute=recompute)
                )[at]
                for part in stage.segments
                for at in range(part.first, part.last)
            ]
            predicted = stage_activation_bytes(costs)
            assert found_bytes[stage.name] == pytest.approx(predicted, rel=0.1), (recompute, stage.name)


@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")
@pytest.mark.parametrize(
    "recompute", ["none", *(pytest.param(mode, marks=pytest.mark.slow) for mode in RECOMPUTES[1:])]
)
def test_replicas_that_share_parameters_keep_none_of_them_whole(recompute: Recompute) -> None:
    """They keep for the backward what replicas with parameters of their own do, to the byte."""
    subject = _captured("llava")
    plain = subject.plan("2x8xH100", recompute=recompute, replicas=2, num_microbatches=1)
    shared = replace(plain, chains=tuple(replace(chain, fsdp=True) for chain in plain.chains))
    wanted = kept_by_first_ranks(subject, plain)
    with only_rank(REPLICA_GROUP, 2):
        assert kept_by_first_ranks(subject, shared) == wanted
    assert max(wanted.values()) > 0
