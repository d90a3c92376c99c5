"""One layer alone as a stage program, to measure it: the source a stage runs, with everything before it as inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from mmcompile.codegen.cut import StageCut
from mmcompile.codegen.program import Port, StageProgram
from mmcompile.codegen.source import LayerChoices, layer_names, stage_source
from mmcompile.ir.compat import FakeTensor
from mmcompile.ir.graph import ModelGraph, dtype_name, info, results_of
from mmcompile.ir.host_shapes import attribute
from mmcompile.ir.sizes import shape_of

Place = tuple[str, int]
"""(component, layer)."""


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
    needing = _needing(graph.module.graph)
    nodes: dict[Place, list[fx.Node]] = {place: [] for place in places}
    for node in graph.module.graph.nodes:
        if node.op == "call_function" and len(needing[node]) == 1:
            (place,) = needing[node]
            if place in nodes:
                nodes[place].append(node)
    return {place: _layer_program(graph, place, own) for place, own in nodes.items() if own}


def _needing(graph: fx.Graph) -> dict[fx.Node, frozenset[Place]]:
    """Return call node -> layers that need it: its layer.

    For a shared value, the layers that read it directly or through others.
    """
    needing: dict[fx.Node, frozenset[Place]] = {}
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function":
            continue
        if info(node).shared:
            needing[node] = frozenset[Place]().union(*(needing[user] for user in node.users if user in needing))
        else:
            needing[node] = frozenset([(str(info(node).component), info(node).layer)])
    return needing


def _layer_program(graph: ModelGraph, place: Place, own: list[fx.Node]) -> LayerProgram:
    inside, order = set(own), {node: index for index, node in enumerate(graph.module.graph.nodes)}
    outside = sorted({s for node in own for s in node.all_input_nodes if s not in inside}, key=order.__getitem__)
    roots = [node for node in outside if node.op == "placeholder"]
    received = [node for node in outside if node.op == "call_function"]
    tensors = [node for node in outside if node.op == "get_attr"]
    loss = results_of(graph.module.graph)
    results = [node for node in own if node in loss or any(user not in inside for user in node.users)]
    specs = {spec.name: spec for spec in graph.parameters}
    names = {n: str(n.target) for n in tensors if str(n.target) in specs or str(n.target) in graph.buffers}
    constants = {node: str(node.target) for node in tensors if node not in names}
    name = f"{place[0]}.{place[1]}"
    part = StageCut(
        stage=name, nodes=tuple(own), roots=tuple(roots), received=tuple(received), sent=(), tensors=tuple(tensors)
    )
    program = StageProgram(
        stage=name,
        pattern="alone",
        source=stage_source(
            part,
            names,
            constants,
            results,
            f"Layer {name} of {graph.name}.",
            "Measured alone.",
            trained=frozenset(spec.name for spec in specs.values() if spec.trainable),
            choices=LayerChoices(names=layer_names(graph)),
        ),
        inputs=tuple(_port(node, node.op == "placeholder") for node in (*roots, *received)),
        outputs=tuple(_port(node, False) for node in results),
        parameters=tuple(specs[n] for n in dict.fromkeys(names.values()) if n in specs),
        buffers=tuple(n for n in dict.fromkeys(names.values()) if n not in specs),
        constants={text: _constant(graph, node) for node, text in constants.items()},
        is_loss=any(node in loss for node in own),
        has_backward=any(info(node).carries_gradient for node in own),
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


def _constant(graph: ModelGraph, node: fx.Node) -> torch.Tensor:
    value = attribute(graph.module, str(node.target))
    assert not isinstance(value, FakeTensor)
    return value


def shared_values(
    graph: ModelGraph, wanted: Iterable[fx.Node], inputs: Mapping[str, torch.Tensor]
) -> dict[fx.Node, torch.Tensor]:
    """Return values of shared nodes, computed from batch inputs and host values on the CPU.

    Args:
        graph: graph annotated by gradient-flow.
        wanted: shared nodes.
        inputs: value of every placeholder of the graph, by name.
    """
    known: dict[fx.Node, Any] = {}
    needed = _closure(wanted)
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


def _closure(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    needed, waiting = set[fx.Node](), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    return needed


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor; for a meta tensor (of a model built without weights), a real tensor of the same shape."""
    if not isinstance(tensor, FakeTensor):
        return tensor.detach()
    made = torch.zeros(tensor.shape, dtype=tensor.dtype)
    return made.normal_() if made.is_floating_point() else made
