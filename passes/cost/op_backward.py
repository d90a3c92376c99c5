"""Kernels that a node's backward launches, and the values they read and write (approximation, by class of op).

Counted as eager autograd runs: no fusion, a sum where an operand was broadcast, an addition for every further reader of
a value. Checked against the backward that torch traces for whole models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from mmcompile.passes.cost.op_flops import op_flops
from mmcompile.passes.cost.op_memory import LOSSES, is_view
from mmcompile.passes.values import aten_ops, num_bytes, op_name, tensors

Kernel = Sequence[fx.Node]
"""The nodes whose values one kernel of the backward reads or writes; a gradient is listed as its node, as both have one size."""

# The gradient is that of the result, or a view of it.
_PASSES_GRADIENT = aten_ops("add sub cat stack clone contiguous lift_fresh_copy sum reshape to _to_copy") | {
    "mmcompile.tp_sum"
}
_CASTS = aten_ops("to _to_copy")
# One product a gradient.
_SCALES = aten_ops("mul div")
# Views whose gradient is written into zeros, or gathered from parts.
_PARTS = aten_ops("slice select narrow unbind split split_with_sizes chunk")


def backward_kernels(node: fx.Node, carries: Callable[[fx.Node, fx.Node], bool]) -> list[Kernel]:
    """Return the kernels of the backward of a node that carries gradient, each as the nodes whose values it reads or writes.

    A gradient is listed as its node: for y = x @ w, each of the two kernels is `[y, x, w]`. `carries(reader, source)` returns
    whether the backward of `reader` makes a gradient for its input `source`.
    """
    wanted = [source for source in node.all_input_nodes if carries(node, source)]
    kernels = [kernel for source in wanted for kernel in _for_input(node, source)]
    if len(tensors(node)) != 1:
        return kernels
    # Gradients that several readers return are added up.
    readers = sum(carries(user, node) for user in node.users if user.op == "call_function")
    return kernels + [[node, node, node]] * (readers - 1)


def is_joint(node: fx.Node) -> bool:
    """Return whether one kernel computes all gradients of a node from the tensors it kept (norms, attention)."""
    name = op_name(node).removesuffix("_")
    known = (*_PASSES_GRADIENT, *_SCALES, *_PARTS, *LOSSES)
    return not (is_view(node) or op_flops(node).operands or name in known)


def _for_input(node: fx.Node, source: fx.Node) -> list[Kernel]:
    name = op_name(node).removesuffix("_")
    operands = [operand for operand, _ in op_flops(node).operands]
    if operands:
        return [[node, *operands] if source in operands else [node, source]]
    if name in LOSSES:  # gradient of the log-probabilities, then of the logits
        return [[source], [source, source, source]]
    if name in _SCALES:
        others = [other for other in node.all_input_nodes if other is not source] or [source]
        return [[node, *others, node], *_unbroadcast(node, source)]
    if name in _PARTS or name == "aten.expand" or name in _CASTS and not is_view(node):
        return [[node, source]]
    if is_view(node):
        return []
    return _unbroadcast(node, source) if name in _PASSES_GRADIENT else []


def _unbroadcast(node: fx.Node, source: fx.Node) -> list[Kernel]:
    is_smaller = sum(map(num_bytes, tensors(source))) < sum(map(num_bytes, tensors(node)))
    joins = op_name(node) in aten_ops("cat stack")
    return [[node, source]] if is_smaller and not joins else []
