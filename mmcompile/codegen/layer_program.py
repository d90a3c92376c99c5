"""One layer alone as a stage program, to measure it: the source a stage runs, with everything before it as inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from mmcompile.codegen.cut import StageCut
from mmcompile.codegen.program import Port, StageProgram
from mmcompile.codegen.source import LayerChoices, layer_names
from mmcompile.codegen.stage_programs import part_program
from mmcompile.ir.compat import FakeTensor
from mmcompile.ir.graph import ModelGraph, Place, dtype_name, info, reached, results_of
from mmcompile.ir.host_shapes import attribute
from mmcompile.ir.sizes import shape_of
from mmcompile.passes.values import needing_layers


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerProgram:
    """A single layer as a stage program, with its nodes and arguments, to measure it."""

    program: StageProgram
    arguments: tuple[fx.Node, ...] = field(repr=False)
    """Arguments of `forward`, in order: batch inputs, shared values, results of other layers."""


def layer_programs(graph: ModelGraph, places: Iterable[Place]) -> dict[Place, LayerProgram]:
    """Return the programs of the layers at `places`, for a graph annotated by gradient-flow. Layers without nodes are left out.

    A shared value that a single layer needs is computed in its program. One that several layers need is an argument, because a
    stage computes it once for all its layers.
    """
    needing = needing_layers(graph.module.graph)
    nodes: dict[Place, list[fx.Node]] = {place: [] for place in places}
    for node in graph.calls:
        for place in needing[node] & nodes.keys() if len(needing[node]) == 1 else ():
            nodes[place].append(node)
    return {place: _layer_program(graph, place, own) for place, own in nodes.items() if own}


def _layer_program(graph: ModelGraph, place: Place, own: list[fx.Node]) -> LayerProgram:
    inside = set(own)
    outside = sorted({source for node in own for source in node.all_input_nodes} - inside)
    kinds = ("placeholder", "call_function", "get_attr")
    roots, received, tensors = (tuple(node for node in outside if node.op == kind) for kind in kinds)
    loss = results_of(graph.module.graph)
    results = [node for node in own if node in loss or any(user not in inside for user in node.users)]
    name = f"{place[0]}.{place[1]}"
    program = part_program(
        graph,
        StageCut(stage=name, nodes=tuple(own), roots=roots, received=received, sent=(), tensors=tensors),
        {spec.name: spec for spec in graph.parameters},
        results,
        title=f"Layer {name} of {graph.name}.",
        notes=lambda parameters: "Measured alone.",
        choices=LayerChoices(names=layer_names(graph)),
    )
    program = replace(
        program,
        pattern="alone",
        inputs=tuple(_port(node, node.op == "placeholder") for node in (*roots, *received)),
        outputs=tuple(_port(node, False) for node in results),
        is_loss=any(node in loss for node in own),
    )
    return LayerProgram(program=program, arguments=(*roots, *received))


def _port(node: fx.Node, root: bool) -> Port:
    return Port(
        name=str(node.target) if root else node.name,
        kind="root" if root else "link",
        shape=shape_of(node),
        dtype=dtype_name(node.meta["val"].dtype),
        gradient=not root and info(node).carries_gradient,
    )


def shared_values(
    graph: ModelGraph, wanted: Iterable[fx.Node], inputs: Mapping[str, torch.Tensor]
) -> dict[fx.Node, torch.Tensor]:
    """Return values of shared nodes, computed on the CPU from `inputs`, the values of all placeholders by name."""
    known: dict[fx.Node, Any] = {}
    needed = reached(wanted)
    with torch.no_grad():
        for node in graph.module.graph.nodes:
            if node not in needed:
                continue
            if node.op == "placeholder":
                known[node] = inputs[str(node.target)]
            elif node.op == "get_attr":
                known[node] = real(attribute(graph.module, str(node.target)))
            else:
                args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), known.__getitem__)
                known[node] = node.target(*args, **kwargs)
    return {node: value for node in needed if isinstance(value := known[node], torch.Tensor)}


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor; for a meta tensor (of a model built without weights), a real tensor of the same shape."""
    if not isinstance(tensor, FakeTensor):
        return tensor.detach()
    made = torch.zeros(tensor.shape, dtype=tensor.dtype)
    return made.normal_() if made.is_floating_point() else made
