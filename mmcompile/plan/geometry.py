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
from mmcompile.passes.values import aten_ops, concrete_shape, op_name, tensors

Modality = Literal["image", "audio", "text", "sample"]
"""What a component's rows are made of. `sample`: none of the others, so as many for every sample."""

_WORDS: Mapping[Modality, tuple[str, ...]] = {
    "image": ("pixel", "image", "video", "vision", "visual", "frame"),
    "audio": ("input_features", "input_values", "audio", "sound", "speech", "mel"),
}
_CONVOLUTIONS = aten_ops("conv2d conv3d convolution")
_WHOLE = 0.99
"""Share of the pairs of an image, below which its rows attend within windows. (Rows are not quite proportional to patches.)"""
_TOKENS = ("input_ids", "decoder_input_ids", "labels")
"""Inputs that have the sequences of a text component, best first."""


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
    window: float = 0.0
    """Rows that attend to each other, where that is not the whole image, sound or sequence; 0 where it is. Read from the
    captured batch: one whose images all fit into a window does not show it."""
    tokens_per_patch: float = 0.0
    """Positions in the sequence that one patch takes; 0 where images are attended to from outside it."""
    tokens_per_frame: float = 0.0
    pads: bool = False
    """All sequences of a microbatch are as long as its longest."""

    def squares(self, length: float) -> float:
        """Pairs of rows that attend to each other in one image, sound or sequence of that length."""
        rows = self.rows_per_unit * length
        return rows * min(rows, self.window) if self.window else self.pairs_per_unit * length * length


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
    modalities: dict[str, Modality] = {component.name: modality_of(component) for component in graph.components}
    lengths: dict[Modality, tuple[float, ...]] = {
        modality: _lengths(graph, loads, batch, modalities, modality) for modality in _WORDS
    }
    sequences = _sequences(batch)
    if sequences is not None:
        lengths["text"] = (float(sequences.shape[1]),) * sequences.shape[0]
    found = {}
    for name, modality in modalities.items():
        units = lengths.get(modality, ())
        taken: dict[Modality, float] = dict.fromkeys(_WORDS, 0.0)
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
    found = (batch[name] for name in _TOKENS if isinstance(batch.get(name), Tensor))
    ids = next((ids for ids in found if isinstance(ids, Tensor) and not ids.is_floating_point()), None)
    if ids is None:
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
    readers = [component for component in graph.components if modalities[component.name] == modality]
    readers.sort(key=lambda component: component.kind != ComponentKind.ENCODER)
    words = _WORDS[modality]
    inputs = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    sizes: list[float] = []
    for name, value in inputs.items():
        if name.endswith(("grid_thw", "grid_hws")) and any(word in name for word in words):
            sizes += [float(prod(row)) for row in value.tolist()]
    if sizes:
        return tuple(sizes)
    for name, value in inputs.items():
        reader = next((component for component in readers if name in component.sources), None)
        if reader is not None and value.is_floating_point() and any(word in name for word in words):
            sizes += _equal_lengths(graph, reader, value, loads[reader.name])
    return tuple(sizes)


def _equal_lengths(graph: ModelGraph, encoder: Component, value: Tensor, load: Load) -> list[float]:
    """One entry an image or sound of a float input: its patches, or else its part of the encoder's rows."""
    if value.dim() < 4:
        return [load.tokens / value.shape[0]] * value.shape[0]
    count, (height, width) = prod(value.shape[:-3]), value.shape[-2:]
    patch = _patch_size(graph, encoder.name)
    size = load.tokens / count if patch is None else float((height // patch[0]) * (width // patch[1]))
    return [size] * count


def _patch_size(graph: ModelGraph, component: str) -> tuple[int, int] | None:
    """Height and width of the steps of a component's first convolution."""
    for node in graph.module.graph.nodes:
        if node.op == "call_function" and info(node).component == component and op_name(node) in _CONVOLUTIONS:
            stride = node.args[3] if len(node.args) > 3 else node.kwargs.get("stride", (1, 1))
            assert isinstance(stride, Sequence), f"{node.name} has stride {stride}"
            height, width = stride[-2:]
            return int(height), int(width)
    return None


def _rows_into(graph: ModelGraph, component: str, modality: Modality, modalities: Mapping[str, Modality]) -> set[int]:
    """Row counts of the tensors that components of a modality send to one."""
    nodes: dict[str, fx.Node] = {node.name: node for node in graph.module.graph.nodes}
    rows: set[int] = set()
    for producer, consumer, names in graph.edges:
        if consumer == component and modality in (modalities[producer], *_above(graph, producer, modalities)):
            for name in names:
                rows |= {prod(concrete_shape(tensor)[:-1]) for tensor in tensors(nodes[name])}
    return rows


def _above(graph: ModelGraph, component: str, modalities: Mapping[str, Modality]) -> set[Modality]:
    return {modalities[name] for name in nx.ancestors(graph.dag(), component)}


def _placeholders(sequences: Tensor, rows: set[int]) -> int:
    """Positions held by ids that stand for as many rows as an encoder sends; 0 if it sends none into the sequence.

    Where several ids are as frequent, placeholders are those that follow each other most.
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
