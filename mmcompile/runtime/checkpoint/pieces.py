"""`Piece`: a tensor that a rank writes to a checkpoint, and where it is read back to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mmcompile.errors import CheckpointError
from mmcompile.ir.graph import torch_dtype
from mmcompile.runtime.checkpoint.holding import Box, Holding
from mmcompile.runtime.checkpoint.index import Index, StoredTensor, state_key, weight_key


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Piece:
    """A stored tensor, or the part of it that one rank has."""

    key: str
    """In the index."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of the whole."""
    boxes: tuple[Box, ...]
    tensor: Callable[[], Tensor]
    """The part; asked for when it is written, once for each box."""
    trains: bool = False
    """It changes as training goes on."""


def whole_piece(key: str, tensor: Tensor) -> Piece:
    """A tensor that is all there is of it."""
    return _piece(key, Holding(whole=key), tensor)


def weight_piece(holding: Holding, tensor: Tensor) -> Piece:
    """A parameter, or a part of it."""
    return _piece(weight_key(holding.whole), holding, tensor)


def state_piece(holding: Holding, key: str, tensor: Tensor, part: tuple[int, ...]) -> Piece | None:
    """A tensor of optimizer state; None where another rank writes it.

    Args:
        part: shape of the parameter here.

    Raises:
        CheckpointError: it belongs to a part of a parameter, and is neither divided alike nor one number.
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
    holdings: Mapping[str, Holding], index: Index, *, weights: Iterable[str], states: Iterable[str]
) -> dict[str, Piece]:
    """What a rank reads, as empty tensors by path: `value/<name>` and `state/<key>/<name>`.

    Args:
        holdings: by the name the rank has for a parameter.
        weights, states: such names of parameters whose weights, and whose optimizer state, it wants.

    Raises:
        CheckpointError: the index does not have such a weight.
    """
    stored_weights, stored_states = index.weights, index.states()
    found: dict[str, Piece] = {}
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


def empty_piece(key: str, holding: Holding, stored: StoredTensor, whole: tuple[int, ...]) -> Piece:
    """A tensor to read into: what a rank holds of a stored tensor, weight or state, of a parameter.

    Args:
        whole: shape of the whole parameter.
    """
    if stored.shape != whole:
        # A number, that all parts have.
        holding = Holding(whole=holding.whole)
    tensor = torch.empty(holding.shape_of_part(stored.shape), dtype=torch_dtype(stored.dtype))
    boxes = holding.boxes(stored.shape)
    return Piece(key=key, dtype=tensor.dtype, shape=stored.shape, boxes=boxes, tensor=lambda: tensor)


def _piece(key: str, holding: Holding, tensor: Tensor) -> Piece:
    whole = holding.shape_of_whole(tuple(tensor.shape))
    return Piece(
        key=key, dtype=tensor.dtype, shape=whole, boxes=holding.boxes(whole), tensor=lambda: tensor, trains=True
    )
