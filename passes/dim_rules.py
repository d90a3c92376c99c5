"""Effects of ops on one dim of their first argument, for ops that treat every dim (tokens, heads, hidden units) alike.

The passes context-parallel (dims of tokens) and tensor-parallel (sharded dims) follow dims by these rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import fx

from mmcompile.passes.values import argument, aten_ops, given, has_tag, op_name, shape

_UNTAGGED_POINTWISE = aten_ops(
    "to _to_copy type_as contiguous alias detach dropout bernoulli zeros_like ones_like full_like rand_like randn_like "
    "empty_like masked_fill fill lift_fresh_copy log_sigmoid logsigmoid softsign"
)


def is_pointwise(node: fx.Node) -> bool:
    """Return whether an op computes each element of its result from the elements of the same place, with broadcasting."""
    return has_tag(node, torch.Tag.pointwise) or op_name(node) in _UNTAGGED_POINTWISE


def dims(node: fx.Node) -> tuple[int, ...]:
    """Return the dims that an op's argument `dim` or `dims` gives, from 0 up; all dims of its first input if it gives none."""
    rank, values = len(shape(node.all_input_nodes[0])), given(node)
    found = values.get("dim", values.get("dims"))
    if found is None or found == []:
        return tuple(range(rank))
    return tuple(dim % rank for dim in ([found] if isinstance(found, int) else found))


def passed_dim(node: fx.Node, dim: int) -> int | str:
    """Return the dim of an op's result that is dim `dim` of its first argument; else what the op does to it, such as "pads".

    The op is one of `PASSING`.
    """
    return _RULES[op_name(node)](node, dim)


def _along(node: fx.Node, dim: int) -> int | str:
    return "works along" if dim in dims(node) else dim


def _reduced(node: fx.Node, dim: int) -> int | str:
    over = dims(node)
    if dim in over:
        return "reduces over"
    return dim if argument(node, "keepdim") else dim - sum(other < dim for other in over)


def _normalized(node: fx.Node, dim: int) -> int | str:
    return "normalizes over" if dim >= len(dims(node)) - len(argument(node, "normalized_shape")) else dim


def _padded(node: fx.Node, dim: int) -> int | str:
    from_last = len(dims(node)) - 1 - dim
    return "pads" if any(amount != 0 for amount in argument(node, "pad")[2 * from_last :][:2]) else dim


def _transposed(node: fx.Node, dim: int) -> int:
    rank, values = len(dims(node)), given(node)
    one, other = values.get("dim0", -2) % rank, values.get("dim1", -1) % rank
    return {one: other, other: one}.get(dim, dim)


def _permuted(node: fx.Node, dim: int) -> int:
    return dims(node).index(dim)


_TABLE: tuple[tuple[str, Callable[[fx.Node, int], int | str]], ...] = (
    ("softmax _softmax log_softmax _log_softmax topk sort argsort cumsum cumprod flip roll", _along),
    (
        "sum mean amax amin max min argmax argmin prod var std norm linalg_vector_norm logsumexp any all median",
        _reduced,
    ),
    ("layer_norm rms_norm native_layer_norm", _normalized),
    ("pad constant_pad_nd", _padded),
    ("transpose t mT", _transposed),
    ("permute", _permuted),
)
_RULES: Mapping[str, Callable[[fx.Node, int], int | str]] = {
    name: rule for names, rule in _TABLE for name in aten_ops(names)
}
PASSING = frozenset(_RULES)
"""Names of the ops for which `passed_dim` has a rule."""
