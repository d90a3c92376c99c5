"""What ranks that share tensors are predicted to keep for the backward is what their programs keep: some of it whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kept_bytes import kept_bytes
from lower.split import root_values
from stage_oracle import in_order
from torch import Tensor
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from zoo import ALL
from zoo.family import Size

import mmcompile as mm
from mmcompile.costmodel.cluster import Cluster
from mmcompile.costmodel.memory import stage_activation_bytes
from mmcompile.ir.capture import capture
from mmcompile.ir.inputs import completed
from mmcompile.kernels.process_groups import TENSOR_GROUP, register_group
from mmcompile.lower.load import load_stage
from mmcompile.passes.cost import Cost
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.passes.tensor_axes import tensor_axes
from mmcompile.plan.search.pricing import Pricing, Sharding
from mmcompile.plan.search.settings import RECOMPUTES

LONG = Size(samples=4, length=200, media=2)
"""Activations that are larger than the parameters of the test models."""


@pytest.fixture(params=[2, pytest.param(4, marks=pytest.mark.slow)])
def degree(request: pytest.FixtureRequest) -> Iterator[int]:
    """As many ranks of which only the first exists: collectives leave values as they are, of the right sizes."""
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    group = dist.group.WORLD
    assert group is not None
    register_group(TENSOR_GROUP, group)
    yield request.param
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")
@pytest.mark.parametrize(
    "name", ["llava", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2_5_vl", "gemma3", "qwen2_audio"))]
)
def test_ranks_keep_what_is_predicted(name: str, degree: int) -> None:
    model = ALL[name].build()
    given = ALL[name].draw(LONG, seed=0)
    found, batch = capture(model, given), completed(model, given)
    GradientFlow().run(found.graph)
    table = Cost().run(found.graph)
    axes = tensor_axes(found.graph, degree, table)
    shared = {part: degree for part, own in axes.items() if degree in own.degrees}
    assert "language_model" in shared
    pricing = Pricing(
        table=table,
        cluster=Cluster.parse("1x8xH100"),
        dtype="float32",
        tensor_shares={part: own.layers for part, own in axes.items()},
    )
    for recompute in RECOMPUTES:
        plan = mm.plan(
            model,
            batch,
            cluster="2x8xH100",
            stages={"language_model": 2},
            tensor_parallel=shared,
            recompute=recompute,
            num_microbatches=1,
        )
        programs = {
            key: program
            for key, program in mm.stage_programs(model, batch, plan).items()
            if key.partition("@")[2] in ("", "0")
        }
        tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
        roots, made = root_values(found, batch), dict[str, Tensor]()
        for key in in_order(programs):
            program, stage = programs[key], plan.stage(key.partition("@")[0])
            parts = {
                spec.name: tensors[spec.whole_name]
                if spec.shard is None
                else spec.shard.part(tensors[spec.whole_name], 0)
                for spec in program.parameters
            }
            own = {**parts, **{buffer: tensors[buffer] for buffer in program.buffers}}
            own = {key: value.detach().clone() for key, value in own.items()}
            module = load_stage(program, own)
            inputs = [
                made[port.name].detach().requires_grad_(port.gradient) if port.kind == "link" else roots[port.name]
                for port in program.inputs
            ]
            made |= {port.name: value for port, value in zip(program.outputs, module(*inputs), strict=True)}
            kept = kept_bytes(module, inputs, own.values())
            costs = [
                pricing.layers(
                    segment.component, None, Sharding(tp=shared.get(segment.component, 1), recompute=recompute)
                )[layer][0]
                for segment in stage.segments
                for layer in range(segment.first, segment.last)
            ]
            assert kept == pytest.approx(stage_activation_bytes(costs), rel=0.1), (recompute, key)
