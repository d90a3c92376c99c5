"""`Geometry`: how the shape of a sample becomes rows of a component, read from one captured batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import networkx as nx
import torch
from torch import Tensor, fx

from mmcompile.costmodel.load import Load
from mmcompile.ir.graph import Component, ComponentKind, ModelGraph, info
from mmcompile.passes.values import op_name, tensors

Modality = Literal["image", "audio", "text", "sample"]
"""What a component's rows are made of. `sample`: none of the others, so as many for every sample."""

_WORDS: Mapping[Modality, tuple[str, ...]] = {
    "image": ("pixel", "image", "video", "vision", "visual", "frame"),
    "audio": ("input_features", "input_values", "audio", "sound", "speech", "mel"),
}
_CONVOLUTIONS = ("aten.conv2d", "aten.conv3d", "aten.convolution")


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """Rows that one component makes of a sample.

    For images and sounds: `rows_per_unit` times the patches or frames. For text: `rows_per_unit` times the length of the
    sample's sequence, `text_tokens + tokens_per_patch * patches + tokens_per_frame * frames`.
    """

    component: str
    modality: Modality
    rows_per_unit: float
    """Rows per patch, frame, token of the sequence, or sample: one class token beside 576 patches makes 577 / 576."""
    pairs_per_unit: float
    """Squared length of the component's rows per squared length in those units."""
    tokens_per_patch: float = 0.0
    """Positions in the sequence that one patch takes; 0 where images are attended to from outside it."""
    tokens_per_frame: float = 0.0
    pads: bool = False
    """All sequences of a microbatch are as long as its longest."""


def geometries(
    graph: ModelGraph, loads: Mapping[str, Load], batch: Mapping[str, object], *, packed: bool = False
) -> dict[str, Geometry]:
    """Read the geometry of every component from the batch it was captured with.

    Args:
        graph: captured from `batch`.
        loads: component -> its load in that batch.
        batch: inputs by name, as given to the model.
        packed: the language model gets sequences without padding, one after the other.
    """
    modalities = {component.name: modality_of(component) for component in graph.components}
    lengths = {modality: _lengths(graph, loads, batch, modalities, modality) for modality in _WORDS}
    sequences = _sequences(batch)
    found = {}
    for component in graph.components:
        modality = modalities[component.name]
        if modality == "text" and sequences is not None:
            units: Sequence[float] = [sequences.shape[1]] * sequences.shape[0]
        else:
            units = lengths.get(modality, ())
            modality = modality if units else "sample"
            units = units or [1.0] * graph.num_samples
        taken = {m: 0.0 for m in _WORDS}
        if modality == "text" and sequences is not None:
            for name, sizes in lengths.items():
                rows = _rows_into(graph, component.name, name, modalities)
                taken[name] = _placeholders(sequences, rows) / sum(sizes) if sizes else 0.0
        load = loads[component.name]
        found[component.name] = Geometry(
            component=component.name,
            modality=modality,
            rows_per_unit=load.tokens / sum(units),
            pairs_per_unit=load.squares / sum(size * size for size in units),
            tokens_per_patch=taken["image"],
            tokens_per_frame=taken["audio"],
            pads=modality == "text" and not packed,
        )
    return found


def modality_of(component: Component) -> Modality:
    """What a component's rows are made of, by the names of the inputs that reach it."""
    if component.kind == ComponentKind.LANGUAGE_MODEL or any(_is_text(name) for name in component.sources):
        return "text"
    hits: list[Modality] = [
        modality
        for modality, words in _WORDS.items()
        if any(word in source for source in component.sources for word in words)
    ]
    return hits[0] if len(hits) == 1 else "sample"


def _is_text(name: str) -> bool:
    return name.endswith(("input_ids", "inputs_embeds"))


def _sequences(batch: Mapping[str, object]) -> Tensor | None:
    """Token ids [samples, length] of the batch; padding is -1."""
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor):
        return None
    ids = ids if ids.dim() == 2 else ids[None]
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        return torch.where(mask.bool(), ids, torch.full_like(ids, -1))
    return ids


def _lengths(
    graph: ModelGraph,
    loads: Mapping[str, Load],
    batch: Mapping[str, object],
    modalities: Mapping[str, Modality],
    modality: Modality,
) -> tuple[float, ...]:
    """Patches of every image, or frames of every sound, of the batch; () without any."""
    first = next((c for c in graph.components if modalities[c.name] == modality), None)
    if first is None:
        return ()
    words = _WORDS[modality]
    inputs = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    sizes: list[float] = []
    for name, value in inputs.items():
        if name.endswith(("grid_thw", "grid_hws")) and any(word in name for word in words):
            sizes += [float(prod(row)) for row in value.tolist()]
    if sizes:
        return tuple(sizes)
    for name, value in inputs.items():
        if name in first.sources and value.is_floating_point() and any(word in name for word in words):
            sizes += _equal_lengths(graph, first, value)
    if sizes and all(sizes):
        return tuple(sizes)
    rows = loads[first.name].tokens
    return (rows / len(sizes),) * len(sizes) if sizes else ()


def _equal_lengths(graph: ModelGraph, encoder: Component, value: Tensor) -> list[float]:
    """One entry an image or sound of a float input; 0 where its patches cannot be told from the input alone."""
    if value.dim() < 4:
        return [0.0] * value.shape[0]
    count, (height, width) = prod(value.shape[:-3]), value.shape[-2:]
    patch = _patch_size(graph, encoder.name)
    return [0.0 if patch is None else float((height // patch[0]) * (width // patch[1]))] * count


def _patch_size(graph: ModelGraph, component: str) -> tuple[int, int] | None:
    """Height and width of the kernel of a component's first convolution."""
    for node in graph.module.graph.nodes:
        if node.op == "call_function" and info(node).component == component and op_name(node) in _CONVOLUTIONS:
            (weight,) = tensors(node.args[1])
            return int(weight.shape[-2]), int(weight.shape[-1])
    return None


def _rows_into(graph: ModelGraph, component: str, modality: Modality, modalities: Mapping[str, Modality]) -> set[int]:
    """Row counts of the tensors that components of a modality send to one."""
    nodes: dict[str, fx.Node] = {node.name: node for node in graph.module.graph.nodes}
    rows: set[int] = set()
    for producer, consumer, names in graph.edges:
        if consumer == component and modality in (modalities[producer], *_above(graph, producer, modalities)):
            for name in names:
                rows |= {prod(int(size) for size in tensor.shape[:-1]) for tensor in tensors(nodes[name])}
    return rows


def _above(graph: ModelGraph, component: str, modalities: Mapping[str, Modality]) -> set[Modality]:
    return {modalities[name] for name in nx.ancestors(graph.dag(), component)}


def _placeholders(sequences: Tensor, rows: set[int]) -> int:
    """Positions held by ids that stand for as many rows as an encoder sends; 0 if it sends none into the sequence."""
    ids, counts = torch.unique(sequences[sequences >= 0], return_counts=True)
    return sum(count for count in counts.tolist() if count in rows)
