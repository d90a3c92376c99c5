"""`layer_kinds`: groups of layers that do the same work, so that a calibration measures one layer of each kind."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import fx

from mmcompile.ir.graph import Component, Layer, ModelGraph, ParameterSpec, dtype_name, info
from mmcompile.passes.values import op_name, tensors

_NEAR = 4
_ATTENTION = ("scaled_dot_product_attention", "packed_attention", "bitfield_attention")


def layer_kinds(graph: ModelGraph) -> Mapping[str, tuple[str, ...]]:
    """Return component -> kind of each of its layers in order, for example `language_model.layers-3fa2b1c4`.

    Layers of one kind have the same operations on parameters of the same shapes, the same parameters training, the
    same values carrying gradient, and masks and sequence lengths computed the same way (windowed and full attention
    differ). Sizes of data (tokens, samples, images) are left out, so captures of one model on other batches give the
    same kinds.
    """
    specs, nodes = graph.specs, graph.layer_nodes()

    def kind(component: Component, layer: Layer) -> str:
        # Shapes of the component's parameters tell apart layers without nodes of other hidden sizes.
        widths = sorted({str(specs[name].shape) for own in component.layers for name in own.parameters})
        lines = _lines(nodes.get((component.name, layer.index), []), specs) or widths
        words = [part for part in layer.name.split(".") if not part.isdigit()]
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]
        return f"{component.kind}.{words[-1] if words else 'layer'}-{digest}"

    return {
        component.name: tuple(kind(component, layer) for layer in component.layers) for component in graph.components
    }


def _lines(nodes: list[fx.Node], specs: Mapping[str, ParameterSpec]) -> list[str]:
    """Return one line of text per operation of a layer.

    Operations without a parameter that give equal lines are listed once, since their number may grow with the images.
    """
    lines: dict[str, None] = {}
    num_readers = 0
    for node in nodes:
        own = [spec for source in node.all_input_nodes if (spec := specs.get(str(source.target)))]
        text = " ".join(
            [
                op_name(node),
                # A list of results may have one tensor for each image.
                ",".join(dict.fromkeys(dtype_name(tensor.dtype) for tensor in tensors(node))),
                "gradient" if info(node).carries_gradient else "",
                *(f"{list(spec.shape)}{'*' if spec.trainable else ''}" for spec in own),
                *_literals((node.args, node.kwargs)),
                *_attention(node),
            ]
        )
        num_readers += bool(own)
        lines[f"{num_readers} {text}" if own else text] = None
    return list(lines)


def _literals(value: object) -> Iterable[str]:
    """Yield the floats, flags, strings and dtypes in `value`; integers are skipped, as they may be sizes of data."""
    match value:
        case bool() | float() | str() | torch.dtype() | None:
            yield str(value)
        case dict():
            for key, item in value.items():
                yield from (f"{key}={text}" for text in _literals(item))
        case tuple() | list():
            for item in value:
                yield from _literals(item)


def _attention(node: fx.Node) -> Iterable[str]:
    if not any(name in op_name(node) for name in _ATTENTION):
        return
    shapes = [tensors(source)[0].shape for source in node.all_input_nodes[:2]]
    yield from (f"{shape[-3]}x{shape[-1]}" for shape in shapes if len(shape) >= 3)
    yield from (str(value) for value in node.args if isinstance(value, int))
    for source in node.all_input_nodes:
        if source.op == "call_function" and info(source).shared:
            yield "/".join(sorted(_near(source)))


def _near(source: fx.Node) -> set[str]:
    """Return the op names of a shared value and of the few steps that compute it.

    More steps would vary with the number of images.
    """
    names: set[str] = set()
    level = {source}
    for _ in range(_NEAR):
        names |= {op_name(node) for node in level}
        level = {far for node in level for far in node.all_input_nodes if far.op == "call_function"}
    return names
