"""Geometries of a model's components: how many rows a sample's shape makes in each, read from one captured batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import networkx as nx
import torch
from torch import Tensor, fx

from mmcompile.costmodel.load import Load
from mmcompile.ir.graph import Component, ComponentKind, ModelGraph, info
from mmcompile.passes.values import aten_ops, concrete_shape, op_name, tensors
from mmcompile.planner.plan.geometry import MEDIA_WORDS, Geometry, Media, MediaInput, Modality
from mmcompile.planner.pricing.sample_sizes import grid_of, media_lengths, token_ids, token_mask

_CONVOLUTIONS = aten_ops("conv2d conv3d convolution")
_TEXT = ("input_ids", "inputs_embeds")
# Least share of an image's pairs of rows that attend to each other for attention to count as global, not windowed. It is below 1,
# as rows are not quite proportional to patches.
_WHOLE = 0.99


def geometries(
    graph: ModelGraph, loads: Mapping[str, Load], batch: Mapping[str, object], *, packed: bool = False
) -> dict[str, Geometry]:
    """Return the geometry of every component: the rows that it makes of a sample, read from the captured batch.

    Args:
        loads: component -> its load in that batch.
        batch: inputs by name, as given to the model.
        packed: True if the language model gets sequences one after the other, without padding.
    """
    modalities: dict[str, Modality] = {component.name: _modality_of(component) for component in graph.components}
    inputs: dict[Modality, tuple[MediaInput, ...]] = {
        modality: _inputs(graph, loads, batch, modalities, modality) for modality in MEDIA_WORDS
    }
    lengths: dict[Modality, tuple[float, ...]] = {
        modality: tuple(media_lengths(batch, modality, inputs[modality])) for modality in MEDIA_WORDS
    }
    sequences = _sequences(batch)
    if sequences is not None:
        lengths["text"] = (float(sequences.shape[1]),) * sequences.shape[0]
    found = {}
    for name, modality in modalities.items():
        units = lengths.get(modality, ())
        taken: dict[Modality, float] = dict.fromkeys(MEDIA_WORDS, 0.0)
        if modality == "text" and sequences is not None:
            for source in taken:
                rows = _rows_into(graph, name, source, modalities)
                taken[source] = _placeholders(sequences, rows) / (sum(lengths[source]) or 1.0)
        if not units:
            modality, units = "sample", (1.0,) * graph.num_samples
        load, squares = loads[name], sum(size * size for size in units)
        rows_per_unit, pairs_per_unit = load.tokens / sum(units), load.squares / squares
        found[name] = Geometry(
            component=name,
            modality=modality,
            rows_per_unit=rows_per_unit,
            pairs_per_unit=pairs_per_unit,
            window=load.squares / load.tokens if pairs_per_unit < _WHOLE * rows_per_unit**2 else 0.0,
            tokens_per_patch=taken["image"],
            tokens_per_frame=taken["audio"],
            pads=modality == "text" and not packed,
            media=inputs.get(modality, ()),
            sources=() if name == graph.loss_component else _sources(graph.component(name), modality, inputs),
        )
    return found


def _sources(
    component: Component, modality: Modality, inputs: Mapping[Modality, tuple[MediaInput, ...]]
) -> tuple[str, ...]:
    """Return the names of inputs that show whether a sample has work for a component; () if the modality alone shows it."""
    if modality == "sample":
        return component.sources
    everyone = [own.name for own in inputs.get(modality, ())]
    own = tuple(name for name in everyone if name in component.sources)
    return own if len(own) < len(everyone) else ()


def _modality_of(component: Component) -> Modality:
    """Return the modality that a component processes, from the names of the model inputs that reach it; "sample" if unclear."""
    if component.kind == ComponentKind.LANGUAGE_MODEL or any(name.endswith(_TEXT) for name in component.sources):
        return "text"
    hits: list[Modality] = [
        modality
        for modality, words in MEDIA_WORDS.items()
        if any(word in source for source in component.sources for word in words)
    ]
    return hits[0] if len(hits) == 1 else "sample"


def _sequences(batch: Mapping[str, object]) -> Tensor | None:
    """Return the batch's token ids [samples, length], with -1 for padding; None if the batch has no token ids."""
    ids = token_ids(batch)
    mask = None if ids is None else token_mask(batch, ids)
    return ids if ids is None or mask is None else torch.where(mask.bool(), ids, torch.full_like(ids, -1))


def _inputs(
    graph: ModelGraph,
    loads: Mapping[str, Load],
    batch: Mapping[str, object],
    modalities: Mapping[str, Modality],
    modality: Media,
) -> tuple[MediaInput, ...]:
    """Return the float inputs that hold images or audio clips; () where a grid input gives their sizes."""
    readers = [component for component in graph.components if modalities[component.name] == modality]
    readers.sort(key=lambda component: component.kind != ComponentKind.ENCODER)
    inputs = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    if any(modality in grid_of(name) and len(value) for name, value in inputs.items()):
        return ()
    found: list[MediaInput] = []
    for name, value in inputs.items():
        reader = next((component for component in readers if name in component.sources), None)
        named = any(word in name for word in MEDIA_WORDS[modality])
        if reader is not None and value.is_floating_point() and named and value.dim() and value.numel():
            found.append(_input(graph, reader, name, value, inputs, loads[reader.name]))
    return tuple(found)


def _input(
    graph: ModelGraph, encoder: Component, name: str, value: Tensor, inputs: Mapping[str, Tensor], load: Load
) -> MediaInput:
    """Return the rule that gives the lengths of images or audio clips from the shape of the batch's input `name`.

    A length is a number of patches if the encoder has a convolution, else of encoder rows, equal for all items of the batch. If
    the graph lacks the input, the model has packed it: then only the positions that a mask input marks count, as audio frames.
    """
    masks = (other for other in encoder.sources if other != name and other in inputs and _marks(inputs[other], value))
    mask = next(masks, "") if all(spec.name != name for spec in graph.inputs) else ""
    if mask:
        elements = int(inputs[mask].count_nonzero())
        return MediaInput(name=name, item_dims=value.dim() - 1, length=load.tokens, elements=elements, mask=mask)
    dims = 3 if value.dim() > 3 else value.dim() - 1
    patch = _patch_size(graph, encoder.name) if dims == 3 else None
    if patch is not None:
        return MediaInput(name=name, item_dims=dims, patch=patch)
    count, elements = prod(value.shape[: value.dim() - dims]), prod(value.shape[value.dim() - dims :])
    return MediaInput(name=name, item_dims=dims, length=load.tokens / count, elements=elements)


def _marks(mask: Tensor, value: Tensor) -> bool:
    return (
        not mask.is_floating_point()
        and mask.dim() == 2
        and len(mask) == len(value)
        and mask.shape[1] in value.shape[1:]
    )


def _patch_size(graph: ModelGraph, component: str) -> tuple[int, int] | None:
    for node in graph.module.graph.nodes:
        if node.op == "call_function" and info(node).component == component and op_name(node) in _CONVOLUTIONS:
            stride = node.args[3] if len(node.args) > 3 else node.kwargs.get("stride", (1, 1))
            assert isinstance(stride, Sequence), f"{node.name} has stride {stride}"
            height, width = stride[-2:]
            return int(height), int(width)
    return None


def _rows_into(graph: ModelGraph, component: str, modality: Modality, modalities: Mapping[str, Modality]) -> set[int]:
    """Return the numbers of rows of all tensors that a component receives, directly or not, from components of a modality."""
    nodes: dict[str, fx.Node] = {node.name: node for node in graph.module.graph.nodes}
    dag, rows = graph.dag(), set[int]()
    for producer, consumer, names in graph.edges:
        above = {modalities[name] for name in (producer, *nx.ancestors(dag, producer))}
        if consumer == component and modality in above:
            for name in names:
                rows |= {prod(concrete_shape(tensor)[:-1]) for tensor in tensors(nodes[name])}
    return rows


def _placeholders(sequences: Tensor, rows: set[int]) -> int:
    """Return the number of sequence positions held by placeholder ids; 0 if an encoder's rows do not enter the sequence.

    An id is a placeholder if its count equals a number of rows that an encoder sends (`rows`). If several ids have that count,
    one of them must occur twice in a row.
    """
    ids, counts = torch.unique(sequences[sequences >= 0], return_counts=True)
    frequent: dict[int, list[int]] = {}
    for token, count in zip(ids.tolist(), counts.tolist(), strict=True):
        if count in rows:
            frequent.setdefault(count, []).append(token)
    following = {
        count: max(int(((sequences[:, 1:] == token) & (sequences[:, :-1] == token)).sum()) for token in tokens)
        for count, tokens in frequent.items()
    }
    return sum(count for count, tokens in frequent.items() if len(tokens) == 1 or following[count])
