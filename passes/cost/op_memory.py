"""Tensors that a node keeps for its backward, and whether it launches a kernel (approximation, by class of op).

Autograd decides what is saved inside C++ formulas that cannot be asked without running them. The classes below restate
`derivatives.yaml` of torch 2.13 for the ops that models consist of; an op in no class is taken to save its float inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod

import torch
from torch import fx

from mmcompile.ir.compat import storage_of
from mmcompile.passes.cost.op_flops import op_flops
from mmcompile.passes.values import aliased, aten_ops, num_bytes, op_name, shape, storage_bytes, tensors, written

_FLOAT32_BYTES = 4

# The gradient does not read any value: sums, copies, views, casts.
_SAVES_NOTHING = (
    aten_ops(
        "add sub rsub neg sum mean cat stack clone copy to _to_copy lift_fresh lift_fresh_copy type_as alias pad "
        "constant_pad_nd roll flip repeat tile cumsum view reshape _unsafe_view flatten unflatten transpose permute t "
        "expand expand_as unsqueeze squeeze slice select split split_with_sizes chunk unbind narrow contiguous movedim "
        "unfold diagonal select_scatter slice_scatter diagonal_scatter floor ceil round sign detach "
        "dropout upsample_bicubic2d upsample_bilinear2d upsample_nearest2d adaptive_avg_pool1d adaptive_avg_pool2d"
    )
    | {f"mmcompile.tp_{name}" for name in ("copy", "sum", "exit", "enter", "slice", "heads")}
    | {"mmcompile.gather_parameter"}
)
EXCHANGES = ("tp_sum", "tp_token_loss")
"""Names of our ops that wait for other ranks in the forward; selective recomputation keeps their results."""
# Only indices or masks.
_SAVES_INDICES = aten_ops(
    "index index_select index_put gather scatter scatter_add index_add index_copy masked_fill masked_scatter where "
    "embedding take_along_dim masked_select repeat_interleave tril triu"
) | {"merge_features", "mmcompile.tp_embedding"}
# The result, not the argument.
_SAVES_RESULT = aten_ops("relu sigmoid tanh softmax _softmax log_softmax exp rsqrt sqrt reciprocal")
# Each operand, where the other one carries gradient.
_SAVES_OTHER = aten_ops(
    "mul div matmul mm bmm linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d einsum addmm baddbmm"
)
_ATTENTION = aten_ops("scaled_dot_product_attention")
# All it reads and returns: result and log-sum-exp, words and positions; of a loss the logits, in their own dtype.
_SAVES_ALL = frozenset({"mmcompile.bitfield_attention", "mmcompile.tp_token_loss"})
LOSSES = frozenset({"aten.cross_entropy_loss", "aten.nll_loss_nd", "token_loss"})
# A norm keeps mean and reciprocal deviation of each row, in float32.
_ROW_STATISTICS = {"aten.layer_norm": 2, "aten.rms_norm": 1, "aten.group_norm": 2}
# Declared as views, yet they copy where strides demand it: then the storages differ.
_MAYBE_VIEW = aten_ops("reshape contiguous to flatten _to_copy expand_as type_as")


def is_view(node: fx.Node) -> bool:
    """Return whether a node only describes memory of an input, or is a size: it moves no bytes and launches no kernel."""
    values = tensors(node)
    if not values or op_name(node) == "getitem" or _passes_through(node):
        return True
    sources = aliased(node)
    if not sources or written(node):
        return False
    if op_name(node) in _MAYBE_VIEW:
        return storage_of(values[0]) in {storage_of(tensor) for source in sources for tensor in tensors(source)}
    return True


def _passes_through(node: fx.Node) -> bool:
    return op_name(node) == "aten.dropout" and not (node.args[1] and node.args[2])


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A storage (memory of one tensor and its views) that is kept from the forward to the backward."""

    num_bytes: int
    owner: fx.Node
    """Node whose value the storage holds; for an op's internal tensor, a node whose size is proportional to the tensor's."""


def saved_for_backward(node: fx.Node, carries: Callable[[fx.Node], bool]) -> dict[int, Saved]:
    """Return the memory that a node with gradient keeps until its backward, by id of the storage, parameters included.

    `carries` returns whether an input of the node needs a gradient.
    """
    kept = {
        storage_of(tensor): Saved(num_bytes=storage_bytes(tensor), owner=owner)
        for owner, tensor in _saved_tensors(node, carries)
    }
    for index, (owner, size) in enumerate(_extra_bytes(node)):
        kept[-2 * id(node) - index] = Saved(num_bytes=size, owner=owner)
    return kept


def _saved_tensors(node: fx.Node, carries: Callable[[fx.Node], bool]) -> Iterable[tuple[fx.Node, torch.Tensor]]:
    name = op_name(node).removesuffix("_")
    inputs = node.all_input_nodes
    if name in _SAVES_NOTHING or name == "getitem" or is_view(node):
        return ()
    if name in _SAVES_INDICES:
        return _of(inputs, floating=False)
    if name in _SAVES_RESULT:
        return _results(node)[:1]
    if name in _SAVES_OTHER:
        return _of([source for source in inputs if any(map(carries, _others(node, source)))], floating=True)
    if name in LOSSES:
        return _of(inputs, floating=False)
    floats = _of(inputs, floating=True)
    if name in _ATTENTION:  # and its result
        return (*floats, *_results(node)[:1])
    return (*floats, *_of(inputs, floating=False), *_results(node)) if name in _SAVES_ALL else floats


def _others(node: fx.Node, source: fx.Node) -> list[fx.Node]:
    """Return the operands of `node` whose gradient reads its operand `source`: all others, and `source` if read twice (x * x)."""
    operands = [operand for operand, _ in op_flops(node).operands]
    operands = operands or [operand for operand in node.args if isinstance(operand, fx.Node)]
    if source in operands:
        operands.remove(source)
        return operands
    return []  # a bias


def _results(node: fx.Node) -> list[tuple[fx.Node, torch.Tensor]]:
    return [(node, tensor) for tensor in tensors(node)]


def _of(nodes: Iterable[fx.Node], *, floating: bool) -> list[tuple[fx.Node, torch.Tensor]]:
    pairs = [pair for node in nodes for pair in _results(_memory_owner(node))]
    return [(owner, tensor) for owner, tensor in pairs if tensor.is_floating_point() == floating]


def _memory_owner(node: fx.Node) -> fx.Node:
    while _passes_through(node):
        (node,) = node.all_input_nodes
    return node


def _extra_bytes(node: fx.Node) -> Iterable[tuple[fx.Node, int]]:
    """Return (node whose size is proportional to the tensor's, bytes) for each tensor saved beside an op's inputs and result."""
    name = op_name(node)
    values = tensors(node)
    if name in _ROW_STATISTICS:
        return [(node, _ROW_STATISTICS[name] * _FLOAT32_BYTES * prod(shape(node.all_input_nodes[0])[:-1]))]
    if name in _ATTENTION:  # log-sum-exp of each row, and boolean masks made into a bias
        masks = [(owner, mask) for owner, mask in _of(node.all_input_nodes, floating=False) if mask.dtype == torch.bool]
        biases = [(owner, storage_bytes(mask) * values[0].element_size()) for owner, mask in masks]
        return [(node, _FLOAT32_BYTES * prod(shape(node)[:-1])), *biases]
    if name in LOSSES:  # log-probabilities, as large as the logits, and the sum of the weights
        source = node.all_input_nodes[0]
        (logits, *_) = tensors(source)
        return [(source, num_bytes(logits) + logits.element_size())]
    if name == "aten.dropout" and not _passes_through(node):  # the scaled mask, in the dtype of the input
        return [(node, num_bytes(values[0]))]
    return []
