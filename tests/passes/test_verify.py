"""`Verify`: a good graph passes; each rule, broken, says so."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.graphs.hand_graph import SmallModel, build_graph, small_batch, small_graph
from torch import fx, nn

from mmcompile.errors import VerifyError
from mmcompile.ir.graph import META_KEY, CaptureMode, LossInfo, ModelGraph, annotate, info
from mmcompile.passes.verify import Verify

aten = torch.ops.aten


def node(graph: ModelGraph, name: str) -> fx.Node:
    return next(found for found in graph.module.graph.nodes if found.name == name)


def insert(
    graph: ModelGraph, after: str, target: Callable[..., object], args: tuple[Any, ...], *, shared: bool
) -> None:
    """A new call after node `after`, annotated like it."""
    before = node(graph, after)
    with graph.module.graph.inserting_after(before):
        made = graph.module.graph.call_function(target, args)
    made.meta["val"] = before.meta["val"]
    made.meta[META_KEY] = replace(info(before), component=None if shared else info(before).component)


def test_a_good_graph_passes() -> None:
    assert str(Verify().run(small_graph())) == "11 rules hold over 162 nodes"


def drop_annotation(graph: ModelGraph) -> ModelGraph:
    del node(graph, "linear_8").meta[META_KEY]
    return graph


def drop_value(graph: ModelGraph) -> ModelGraph:
    del node(graph, "linear_8").meta["val"]
    return graph


def add_module_call(graph: ModelGraph) -> ModelGraph:
    with graph.module.graph.inserting_after(node(graph, "linear_8")):
        graph.module.graph.call_module("projector", (node(graph, "linear_8"),))
    return graph


def unknown_component(graph: ModelGraph) -> ModelGraph:
    annotate(node(graph, "linear_8"), component="video")
    return graph


def layer_out_of_range(graph: ModelGraph) -> ModelGraph:
    annotate(node(graph, "linear_8"), layer=1)
    return graph


def misnumbered_layers(graph: ModelGraph) -> ModelGraph:
    first = graph.components[0]
    layers = (replace(first.layers[0], index=7), *first.layers[1:])
    return replace(graph, components=(replace(first, layers=layers), *graph.components[1:]))


def layer_reads_later(graph: ModelGraph) -> ModelGraph:
    annotate(node(graph, "conv2d"), layer=2)
    return graph


def cyclic(graph: ModelGraph) -> ModelGraph:
    return replace(graph, edges=(*graph.edges, ("language_model", "vision", ("x",))))


def two_sinks(graph: ModelGraph) -> ModelGraph:
    return replace(graph, edges=tuple(edge for edge in graph.edges if edge[0] != "audio"))


def missing_tensor(graph: ModelGraph) -> ModelGraph:
    edges = [(a, b, ("other",) if a == "vision" else names) for a, b, names in graph.edges]
    return replace(graph, edges=tuple(edges))


def shared_reads_component(graph: ModelGraph) -> ModelGraph:
    insert(graph, "linear_8", aten.neg.default, (node(graph, "linear_8"),), shared=True)
    return graph


def shared_reads_trainable(graph: ModelGraph) -> ModelGraph:
    insert(graph, "linear_8", aten.neg.default, (node(graph, "projector_weight"),), shared=True)
    return graph


def shared_reads_float_input(graph: ModelGraph) -> ModelGraph:
    insert(graph, "linear_8", aten.neg.default, (node(graph, "pixels"),), shared=True)
    return graph


def unstated_parameter(graph: ModelGraph) -> ModelGraph:
    return replace(graph, parameters=graph.parameters[1:])


def extra_parameter(graph: ModelGraph) -> ModelGraph:
    return replace(graph, parameters=(*graph.parameters, replace(graph.parameters[0], name="ghost")))


def wrong_shape(graph: ModelGraph) -> ModelGraph:
    return replace(graph, parameters=(replace(graph.parameters[0], shape=(1,)), *graph.parameters[1:]))


def layer_with_ghost(graph: ModelGraph) -> ModelGraph:
    (layer,) = graph.component("audio").layers
    audio = replace(graph.component("audio"), layers=(replace(layer, parameters=("ghost",)),))
    return replace(graph, components=tuple(audio if c.name == "audio" else c for c in graph.components))


def stated_twice(graph: ModelGraph) -> ModelGraph:
    return replace(graph, parameters=(*graph.parameters, graph.parameters[0]))


def false_alias(graph: ModelGraph) -> ModelGraph:
    first, *rest = graph.parameters
    alias = next(spec for spec in rest if spec.name == "layers.0.norm.bias")
    merged = replace(next(spec for spec in rest if spec.name == "layers.0.norm.weight"), aliases=(alias.name,))
    kept = [spec for spec in rest if spec.name not in (alias.name, merged.name)]
    return replace(graph, parameters=(first, *kept, merged))


def wrong_number_of_results(graph: ModelGraph) -> ModelGraph:
    return replace(graph, loss=LossInfo(per_token=True))


def loss_is_no_scalar(graph: ModelGraph) -> ModelGraph:
    graph.module.graph.output_node().args = ((node(graph, "linear_8"),),)
    return graph


def symbolic_nonzero(graph: ModelGraph) -> ModelGraph:
    insert(graph, "linear_8", aten.nonzero.default, (node(graph, "linear_8"),), shared=False)
    return replace(graph, mode=CaptureMode.SYMBOLIC)


def in_place(graph: ModelGraph) -> ModelGraph:
    insert(graph, "linear_8", aten.add_.Tensor, (node(graph, "linear_8"), 1.0), shared=False)
    return graph


BROKEN: list[tuple[Callable[[ModelGraph], ModelGraph], str]] = [
    (drop_annotation, "rule annotated: linear_8 has no NodeInfo"),
    (drop_value, "rule annotated: linear_8 has no recorded value (node.meta['val'])"),
    (
        add_module_call,
        "rule annotated: projector is a call_module; nodes are placeholder, get_attr, call_function, output",
    ),
    (
        unknown_component,
        "rule place: linear_8 is in component 'video'; components are vision, audio, projector, language_model",
    ),
    (layer_out_of_range, "rule place: linear_8 is in layer 1 of projector, which has 1 layers"),
    (misnumbered_layers, "rule place: layers of vision are numbered [7, 1, 2], not 0 to 2"),
    (layer_reads_later, "rule layer-order: flatten (layer 0 of vision) reads conv2d of later layer 2"),
    (cyclic, "rule component-dag: components form a cycle: vision -> projector -> language_model"),
    (two_sinks, "rule component-dag: components audio, language_model have no consumer; exactly one ends in the loss"),
    (missing_tensor, "rule component-dag: edge vision -> projector is stated with other but the nodes read add_3"),
    (shared_reads_component, "rule shared: shared node neg_default reads linear_8, a node of projector"),
    (shared_reads_trainable, "rule shared: shared node neg_default reads projector_weight, a parameter that trains"),
    (shared_reads_float_input, "rule shared: shared node neg_default reads pixels, a float input"),
    (unstated_parameter, "rule parameters: the module has parameter vision.patches.weight but it is not stated"),
    (extra_parameter, "rule parameters: parameter ghost is stated but the module has none of that name"),
    (
        wrong_shape,
        "rule parameters: parameter vision.patches.weight is stated as float32[1] but is float32[16, 3, 4, 4]",
    ),
    (layer_with_ghost, "rule parameters: layer audio of audio lists parameter ghost, which is not stated"),
    (stated_twice, "rule tied: parameter vision.patches.weight is stated 2 times; a tied parameter is one spec"),
    (false_alias, "rule tied: layers.0.norm.bias is stated as tied to layers.0.norm.weight but is another tensor"),
    (wrong_number_of_results, "rule output: the graph returns 1 values, wanted (loss sum, valid tokens)"),
    (loss_is_no_scalar, "rule output: loss must be one float scalar, got linear_8"),
    (
        symbolic_nonzero,
        "rule static-shapes: the shape of nonzero_default depends on values (aten.nonzero); fold or pad it at capture",
    ),
    (in_place, "rule functional: add__tensor changes linear_8 in place (aten.add_)"),
]


@pytest.mark.parametrize(("break_it", "message"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_rule_says_what_broke(break_it: Callable[[ModelGraph], ModelGraph], message: str) -> None:
    with pytest.raises(VerifyError, match=re.escape(f"SmallModel breaks {message}")):
        Verify().run(break_it(small_graph()))


def test_the_error_shows_the_node_with_five_lines_around_it() -> None:
    with pytest.raises(VerifyError) as caught:
        Verify().run(layer_out_of_range(small_graph()))
    message, *lines = str(caught.value).splitlines()
    assert message.endswith("linear_8 is in layer 1 of projector, which has 1 layers")
    assert [line[:2] for line in lines] == ["  "] * 5 + ["> "] + ["  "] * 5
    assert lines[5] == (
        "> linear_8: float32[2, 4, 16] = aten.linear(add_3, projector_weight, projector_bias)  # projector.1 projector"
    )


def test_a_boolean_index_is_fine_where_values_are_known_and_an_integer_index_everywhere() -> None:
    class Picks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 2)[:, torch.tensor([1, 0])].sum()

    graph = build_graph(Picks(), {"x": torch.randn(3, 4)}, {"layer": ("language_model", 0)})
    Verify().run(replace(graph, mode=CaptureMode.SYMBOLIC))


def test_an_unknown_region_is_reported() -> None:
    class Region(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return (x @ x).float().sum()

    graph = build_graph(Region(), {"x": torch.randn(4, 4)}, {"layer": ("language_model", 0)})
    with pytest.raises(VerifyError, match="rule regions: .* is a wrap_with_autocast"):
        Verify().run(graph)


def test_tied_parameters_pass() -> None:
    model = SmallModel()
    model.head.logits.weight = model.embed.weight
    graph = build_graph(model, small_batch())
    (tied,) = [spec for spec in graph.parameters if spec.aliases]
    assert (tied.name, tied.aliases) == ("embed.weight", ("head.logits.weight",))
    Verify().run(graph)
