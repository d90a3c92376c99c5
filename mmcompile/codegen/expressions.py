"""Calls and values of a graph as Python expressions, and its names as Python names."""

from __future__ import annotations

import keyword
import math
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import fx

from mmcompile.ir.compat import OpOverload
from mmcompile.ir.graph import info
from mmcompile.ir.nodes import attention_words, merge_features, token_loss, token_positions

_OWN_NODES: dict[object, str] = {
    node: f"mm.{node.__name__}" for node in (token_loss, merge_features, attention_words, token_positions)
}
_TENSOR_OPS = ("tp_copy", "tp_sum", "tp_exit", "tp_enter", "tp_first", "tp_slice", "tp_heads")
_VOCABULARY_OPS = ("tp_embedding", "tp_token_loss")
_OP_MODULES = {
    "packed_attention": "mmcompile.kernels.packed_attention",
    "bitfield_attention": "mmcompile.kernels.bitfield_attention.ops",
    "context_parallel_attention": "mmcompile.kernels.bitfield_attention.parallel.attention",
    "shard_tokens": "mmcompile.kernels.bitfield_attention.parallel.token_ops",
    **dict.fromkeys(_TENSOR_OPS, "mmcompile.kernels.tensor_parallel.boundary_ops"),
    **dict.fromkeys(_VOCABULARY_OPS, "mmcompile.kernels.tensor_parallel.vocabulary"),
    "ctc_losses": "mmcompile.kernels.ctc_loss",
    "gather_parameter": "mmcompile.kernels.sharded_parameters.gather_ops",
}
"""Name of an mmcompile op -> module that registers it."""
NAMES = frozenset(("aten", "math", "mm", "operator", "torch"))
"""Names that expressions use besides values and `device`."""
TAKEN = frozenset((*NAMES, "StageModule", "Stage", "device", "float", "mmcompile", "self", "slice", "tapped", "handed"))
"""Names that are reserved in generated source; `torch.mm` makes a node called "mm", and a model may call an input "aten"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expressions:
    """Writer of calls and arguments as Python expressions.

    Args:
        name: function that returns the Python name of a graph value.
        device: expression of the device on which tensors are made.
    """

    name: Callable[[fx.Node], str]
    device: str

    def call(self, node: fx.Node) -> str:
        """Return a call node as an expression. Raises TypeError for a target or argument that has no text."""
        if node.target is operator.getitem:
            return f"{self.value(node.args[0])}[{self.value(node.args[1])}]"
        arguments = [self.value(argument) for argument in node.args]
        arguments += [f"{name}={self.value(value)}" for name, value in node.kwargs.items()]
        return f"{_target(node.target)}({', '.join(arguments)})"

    def value(self, value: object) -> str:
        """Return an argument of a call. Raises TypeError for a value that has no text."""
        match value:
            case fx.Node():
                return self.name(value)
            case torch.device():
                return self.device
            case bool() | int() | str() | None:
                return repr(value)
            case float() if not math.isfinite(value):
                return f'float("{value}")'
            case float() | torch.dtype() | torch.layout() | torch.memory_format():
                return repr(value)
            case list():
                return f"[{', '.join(map(self.value, value))}]"
            case tuple():
                return f"({''.join(self.value(item) + ', ' for item in value)})"
            case slice():
                return f"slice({self.value(value.start)}, {self.value(value.stop)}, {self.value(value.step)})"
        raise TypeError(f"cannot write {value!r} of type {type(value).__name__} into a stage source")


def variable(node: fx.Node) -> str:
    """Return the Python name of a value."""
    return f"{node.name}_value" if node.name in TAKEN else node.name


def identifier(text: str) -> str:
    """Return a valid Python name that resembles a dotted name."""
    found = re.sub(r"\W", "_", text)
    return f"_{found}" if found[:1].isdigit() or keyword.iskeyword(found) else found


def comment(node: fx.Node, layer: str | None = None) -> str:
    """Return a node's origin as a comment: the path of its module; inside a layer function, relative to the path `layer`."""
    path = info(node).module_path
    if layer:
        path = "the layer itself" if path == layer else path.removeprefix(f"{layer}.")
    if info(node).shared:
        repeated = ", computed in every stage that reads it" if layer is None else ""
        return f"shared value{repeated} (from {path or 'forward'})"
    return path or "the model's own forward"


def registering_imports(nodes: Iterable[fx.Node]) -> str:
    """Return import lines for the modules that register the mmcompile ops among the called ones."""
    called = {str(node.target).removeprefix("mmcompile.").removesuffix(".default") for node in nodes}
    return "".join(
        f"import {module}  # registers torch.ops.mmcompile.{name}\n"
        for name, module in _OP_MODULES.items()
        if name in called
    )


def _target(target: object) -> str:
    if isinstance(target, OpOverload):
        text = str(target)
        return text if text.startswith("aten.") else f"torch.ops.{text}"
    if target in _OWN_NODES:
        return _OWN_NODES[target]
    module, name = getattr(target, "__module__", ""), getattr(target, "__name__", "")
    if module in ("_operator", "operator", "math"):
        return f"{module.removeprefix('_')}.{name}"
    raise TypeError(f"cannot write a call of {target!r} into a stage source")
