"""`CheckpointPiece`: a tensor that a rank writes to or reads from a checkpoint. `Holding`: boxes of a parameter on a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mmcompile.errors import CheckpointError
from mmcompile.ir.graph import ParameterSpec, torch_dtype
from mmcompile.ir.tensor_shard import TensorShard
from mmcompile.runtime.checkpoint.index import CheckpointIndex, StoredTensor, state_key, weight_key


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorBox:
    """A box (a range of indices in each dim) of a whole tensor, and its position in the part of the tensor that a rank holds."""

    offsets: tuple[int, ...]
    """Index of the box's first element in the whole tensor, by dim."""
    inside: tuple[int, ...]
    """Index of the box's first element in the part, by dim."""
    sizes: tuple[int, ...]

    def of(self, part: Tensor) -> Tensor:
        """Return this box of a rank's part of a tensor, as a view."""
        return part[tuple(slice(at, at + size) for at, size in zip(self.inside, self.sizes, strict=True))]


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """The whole or the part of a parameter that a rank holds under a name of its own."""

    whole: str
    """Original name of the parameter."""
    shard: TensorShard | None = None
    """Division of the parameter into parts; None: the rank holds the whole."""
    index: int = 0
    """Number of the part that the rank holds."""

    @classmethod
    def of(cls, spec: ParameterSpec) -> Holding:
        """Return which model parameter, and which part of it (or the whole), the parameter `spec` of a stage program is."""
        return cls(whole=spec.whole_name, shard=spec.shard, index=spec.index)

    def shape_of_whole(self, part: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the whole parameter, from the shape of a part."""
        return part if self.shard is None else _with(part, self.shard.dim, self.shard.size)

    def shape_of_part(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this part, from the shape of the whole parameter."""
        return whole if self.shard is None else self.shard.local_shape(whole)

    def boxes(self, whole: tuple[int, ...]) -> tuple[TensorBox, ...]:
        """Return the boxes, of a parameter of shape `whole`, that make up this part: one for each of `TensorShard.blocks`."""
        zeros = (0,) * len(whole)
        if self.shard is None:
            return (TensorBox(offsets=zeros, inside=zeros, sizes=whole),)
        dim, begin, inside = self.shard.dim, 0, 0
        boxes: list[TensorBox] = []
        for block in self.shard.blocks:
            width = block // self.shard.count
            offsets, within = _with(zeros, dim, begin + self.index * width), _with(zeros, dim, inside)
            boxes.append(TensorBox(offsets=offsets, inside=within, sizes=_with(whole, dim, width)))
            begin, inside = begin + block, inside + width
        return tuple(boxes)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CheckpointPiece:
    """A tensor of a checkpoint, or a rank's part of it, for the rank to write or to read into."""

    key: str
    """Key of the tensor in the index."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    boxes: tuple[TensorBox, ...]
    tensor: Callable[[], Tensor]
    """Function that returns this rank's part of the tensor. Called during the write, again for each of `boxes`."""
    trains: bool = False
    """True if training changes the tensor."""


def whole_piece(key: str, tensor: Tensor) -> CheckpointPiece:
    """Return the piece of a tensor that one rank holds whole."""
    return _piece(key, Holding(whole=key), tensor)


def weight_piece(holding: Holding, tensor: Tensor) -> CheckpointPiece:
    """Return the checkpoint piece of a weight: of the whole parameter, or of the part that a rank holds (`tensor`)."""
    return _piece(weight_key(holding.whole), holding, tensor)


def state_piece(holding: Holding, key: str, tensor: Tensor, part: tuple[int, ...]) -> CheckpointPiece | None:
    """Return the piece of a tensor of optimizer state; None for a single number (a step count) that the rank of part 0 writes.

    Args:
        part: shape of the parameter on this rank.

    Raises:
        CheckpointError: the state of a parameter's part is neither divided like the parameter nor a single number.
    """
    name = state_key(holding.whole, key)
    if holding.shard is None or tuple(tensor.shape) == part:
        return _piece(name, holding, tensor)
    if tensor.numel() > 1:
        raise CheckpointError(
            f"the optimizer keeps {key} of {holding.whole} with shape {tuple(tensor.shape)}, and the parameter is divided over "
            f"ranks in parts of {part}: only state of the parameter's shape, or one number, can be saved; plan with "
            "tensor_parallel=1, or take another optimizer"
        )
    return whole_piece(name, tensor) if holding.index == 0 else None


def wanted_by(
    holdings: Mapping[str, Holding], index: CheckpointIndex, *, weights: Iterable[str], states: Iterable[str]
) -> dict[str, CheckpointPiece]:
    """Return the pieces that a rank reads, with tensors to be filled, by path: `value/<name>` and `state/<key>/<name>`.

    Args:
        holdings: name of a parameter on the rank -> the model parameter that it is, or is a part of.
        weights, states: names of parameters whose weights, and whose optimizer state, are read.

    Raises:
        CheckpointError: the index lacks one of the weights.
    """
    stored_weights, stored_states = index.weights, index.states()
    found: dict[str, CheckpointPiece] = {}
    for name in weights:
        holding, saved = holdings[name], index.name_of(holdings[name].whole)
        if (stored := stored_weights.get(saved)) is None:
            raise CheckpointError(f"the checkpoint has no {holding.whole}: it belongs to another model")
        found[f"value/{name}"] = empty_piece(weight_key(saved), holding, stored, stored.shape)
    for name in states:
        holding, saved = holdings[name], index.name_of(holdings[name].whole)
        for key, stored in stored_states.get(saved, {}).items():
            whole = stored_weights[saved].shape
            found[f"state/{key}/{name}"] = empty_piece(state_key(saved, key), holding, stored, whole)
    return found


def empty_piece(key: str, holding: Holding, stored: StoredTensor, whole: tuple[int, ...]) -> CheckpointPiece:
    """Return a piece with an uninitialised tensor, into which a rank reads its part of a stored weight or optimizer state.

    Args:
        whole: shape of the whole parameter.
    """
    if stored.shape != whole:
        # A number, that all parts have.
        holding = Holding(whole=holding.whole)
    tensor = torch.empty(holding.shape_of_part(stored.shape), dtype=torch_dtype(stored.dtype))
    boxes = holding.boxes(stored.shape)
    return CheckpointPiece(key=key, dtype=tensor.dtype, shape=stored.shape, boxes=boxes, tensor=lambda: tensor)


def _piece(key: str, holding: Holding, tensor: Tensor) -> CheckpointPiece:
    whole = holding.shape_of_whole(tuple(tensor.shape))
    return CheckpointPiece(
        key=key, dtype=tensor.dtype, shape=whole, boxes=holding.boxes(whole), tensor=lambda: tensor, trains=True
    )


def _with(sizes: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*sizes[:dim], value, *sizes[dim + 1 :])
