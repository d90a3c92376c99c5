"""A plan made by hand: two encoders, a language model of three stages, one link into its middle."""

from __future__ import annotations

import pytest

from mmcompile.costmodel.cluster import Cluster
from mmcompile.costmodel.compute import LayerTimes
from mmcompile.ir.tensor_spec import TensorSpec
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.plan.plan_record import Chain, Fingerprint, Link, Prediction, Segment, Stage, StagePrediction
from mmcompile.planner.schedule.schedule import Flow, FlowEdge, build_schedule
from mmcompile.planner.schedule.simulate import Event, simulate

EDGES = (
    ("vision.0", "language_model.0", False),
    ("vision.0", "language_model.2", False),
    ("audio.0", "language_model.0", True),
    ("language_model.0", "language_model.1", True),
    ("language_model.1", "language_model.2", True),
)


def _stage(chain: str, index: int, rank: int, depth: int, *, trains: bool = True) -> Stage:
    prediction = StagePrediction(
        forward_s=0.002,
        input_grad_s=0.002 * trains,
        weight_grad_s=0.001 * trains,
        parameter_bytes=3 << 20,
        gradient_bytes=(1 << 20) * trains,
        optimizer_bytes=(2 << 20) * trains,
        activation_bytes=512 << 10,
        in_flight=depth + 1,
    )
    return Stage(
        name=f"{chain}.{index}",
        segments=(Segment(component=chain, first=index, last=index + 1),),
        layer_names=(f"model.{chain}.layers.{index}",),
        ranks=(rank,),
        has_backward=trains,
        depth=depth,
        prediction=prediction,
    )


@pytest.fixture
def plan() -> Plan:
    chains = (
        Chain(name="vision", components=("vision",), stages=(_stage("vision", 0, 0, 3, trains=False),)),
        Chain(name="audio", components=("audio",), stages=(_stage("audio", 0, 1, 3),)),
        Chain(
            name="language_model",
            components=("language_model",),
            stages=tuple(_stage("language_model", index, 2 + index, 2 - index) for index in range(3)),
        ),
    )
    links = tuple(
        Link(
            source=source,
            target=target,
            tensors=(TensorSpec(name="hidden", shape=(2, 16, 64), dtype="float32"),),
            gradient=("hidden",) if gradient else (),
            num_bytes=8192,
        )
        for source, target, gradient in EDGES
    )
    return Plan(
        fingerprint=Fingerprint(model="TwoTowers", parameters="0" * 64, torch="2.13.0", transformers="5.24.0"),
        cluster=Cluster.local(5),
        chains=chains,
        links=links,
        num_microbatches=4,
        shared_values=(),
        predicted=Prediction(iteration_s=0.03, bubble=0.2, lower_bound_s=0.02, gap=0.5),
    )


@pytest.fixture
def events(plan: Plan) -> tuple[Event, ...]:
    """The plan's step, simulated."""
    flow = Flow(
        stages=tuple(stage.name for stage in plan.stages),
        edges=tuple(FlowEdge(source=source, target=target, gradient=gradient) for source, target, gradient in EDGES),
        backward=tuple(stage.name for stage in plan.stages if stage.has_backward),
    )
    durations = {
        stage.name: LayerTimes(
            forward_s=stage.prediction.forward_s,
            input_grad_s=stage.prediction.input_grad_s,
            weight_grad_s=stage.prediction.weight_grad_s,
        )
        for stage in plan.stages
    }
    schedule = build_schedule(plan.stages, [flow] * plan.num_microbatches)
    return simulate(schedule, durations, {(source, target): 0.0005 for source, target, _ in EDGES}).events
