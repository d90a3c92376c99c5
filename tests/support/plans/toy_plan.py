"""Model graphs and costs made by hand, for tests of planning that need no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from mmcompile.costmodel.compute import LayerCost
from mmcompile.ir.graph import CaptureMode, Component, ComponentKind, Layer, LossInfo, ModelGraph
from mmcompile.planner.plan.plan_record import Fingerprint

FINGERPRINT = Fingerprint(model="Toy", parameters="00ff", torch="2.13.0", transformers="5.24.0")


def cost(
    gflops: float,
    *,
    trains: bool = True,
    passes: bool = True,
    parameter_bytes: int = 10**6,
    activation_bytes: int = 10**6,
    output_bytes: int = 10**5,
) -> LayerCost:
    """A layer that costs `gflops` forward, and as much for each gradient it computes."""
    flops = round(gflops * 1e9)
    backward = trains or passes
    return LayerCost(
        forward_flops=flops,
        input_grad_flops=flops if passes else 0,
        weight_grad_flops=flops if trains else 0,
        forward_bytes=10**6,
        backward_bytes=2 * 10**6 if backward else 0,
        kernels=10,
        backward_kernels=20 if backward else 0,
        activation_bytes=activation_bytes if backward else 0,
        parameter_bytes=parameter_bytes,
        trainable_bytes=parameter_bytes if trains else 0,
        output_bytes=output_bytes,
    )


def frozen(gflops: float) -> LayerCost:
    """A layer before anything that trains: it only runs forward."""
    return cost(gflops, trains=False, passes=False)


def toy_graph(kinds: Mapping[str, tuple[ComponentKind, int]], edges: Sequence[tuple[str, str]]) -> ModelGraph:
    """A graph without nodes: component name -> (kind, number of layers), and the edges between components."""
    return ModelGraph(
        name="Toy",
        module=fx.GraphModule({}, fx.Graph()),
        components=tuple(
            Component(
                name=name,
                kind=kind,
                sources=(),
                modules=(),
                layers=tuple(Layer(index=i, name=f"{name}.layers.{i}", parameters=()) for i in range(count)),
            )
            for name, (kind, count) in kinds.items()
        ),
        edges=tuple((producer, consumer, (f"{producer}_out",)) for producer, consumer in edges),
        inputs=(),
        parameters=(),
        buffers=(),
        loss=LossInfo(per_token=True),
        mode=CaptureMode.BUCKET,
    )


def vision_language(encoder: int = 6, language: int = 8) -> tuple[ModelGraph, dict[str, tuple[LayerCost, ...]]]:
    """A frozen encoder, a trained projector, a trained language model."""
    graph = toy_graph(
        {
            "vision": (ComponentKind.ENCODER, encoder),
            "projector": (ComponentKind.PROJECTOR, 1),
            "language_model": (ComponentKind.LANGUAGE_MODEL, language),
        },
        [("vision", "projector"), ("projector", "language_model")],
    )
    costs = {
        "vision": (frozen(200),) * encoder,
        "projector": (cost(5, passes=False),),
        "language_model": (cost(100),) * language,
    }
    return graph, costs
