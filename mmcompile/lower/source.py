"""Write a stage as Python that a person can read: original parameter names, a comment per module, our own loss and merge."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping

import torch
from torch import fx

from mmcompile.ir.graph import info
from mmcompile.ir.nodes import attention_words, merge_features, token_loss, token_positions
from mmcompile.lower.cut import StageCut

_OWN_NODES: dict[object, str] = {
    node: f"mm.{node.__name__}" for node in (token_loss, merge_features, attention_words, token_positions)
}
_OP_MODULES = {
    "packed_attention": "mmcompile.kernels.packed_attention",
    "bitfield_attention": "mmcompile.kernels.bitfield_attention.ops",
    "context_parallel_attention": "mmcompile.kernels.bitfield_attention.context_parallel",
    "shard_tokens": "mmcompile.kernels.bitfield_attention.shard",
}
"""Op of ours -> the module that registers it."""
_TAKEN = frozenset(("StageModule", "aten", "math", "mm", "mmcompile", "operator", "self", "torch"))
"""Names the source gives a meaning; `torch.mm` makes a node called "mm", and a model may call an input "aten"."""

_HEADER = '''"""{title}

{notes}
"""

import math
import operator

import torch

import mmcompile.ir.nodes as mm
{imports}from mmcompile.lower.stage_module import StageModule

aten = torch.ops.aten


class Stage(StageModule):
    def forward(self{arguments}):
'''


def stage_source(
    part: StageCut,
    names: Mapping[fx.Node, str],
    constants: Mapping[fx.Node, str],
    results: Iterable[fx.Node],
    title: str,
    notes: str,
) -> str:
    """Source text of one stage.

    Args:
        part: what the stage runs.
        names: tensor node -> original parameter or buffer name, read as `self.t[name]`.
        constants: tensor node -> constant name, read as `self.c[name]`.
        results: nodes returned, in order.
        title: first line of the docstring.
        notes: the rest of it.
    """
    inputs = [*part.roots, *part.received]
    arguments = "".join(f", {_variable(node)}" for node in inputs)
    results = list(results)
    printer = _Printer(names, constants)
    lines = [_HEADER.format(title=title, notes=notes, imports=_imports(part.nodes), arguments=arguments)]
    last_use, own = _last_uses(part.nodes), set(part.nodes)
    path: str | None = None
    dead: list[str] = []
    for node in part.nodes:
        where = "shared" if info(node).shared else info(node).module_path
        if where != path:
            if dead:
                lines.append(f"        del {', '.join(dead)}\n")
                dead = []
            lines.append(f"        # {_comment(node)}\n")
            path = where
        lines.append(f"        {_variable(node)} = {printer.call(node)}\n")
        ended = [
            source for source in dict.fromkeys([*node.all_input_nodes, node]) if last_use.get(source, node) is node
        ]
        dead += [_variable(source) for source in ended if source in own and source not in results]
    lines.append(f"        return ({''.join(_variable(node) + ', ' for node in results)})\n")
    return "".join(lines)


def _imports(nodes: Iterable[fx.Node]) -> str:
    """Import lines of the modules that register the ops of ours that are called."""
    called = {str(node.target).removeprefix("mmcompile.").removesuffix(".default") for node in nodes}
    return "".join(
        f"import {module}  # registers torch.ops.mmcompile.{name}\n"
        for name, module in _OP_MODULES.items()
        if name in called
    )


def _variable(node: fx.Node) -> str:
    return f"{node.name}_value" if node.name in _TAKEN else node.name


def _comment(node: fx.Node) -> str:
    if info(node).shared:
        return f"shared value, computed in every stage that reads it (from {info(node).module_path or 'forward'})"
    return info(node).module_path or "the model's own forward"


def _last_uses(nodes: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    last: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            last[source] = node
    return last


class _Printer:
    """Prints arguments as Python expressions."""

    def __init__(self, names: Mapping[fx.Node, str], constants: Mapping[fx.Node, str]) -> None:
        self.names = names
        self.constants = constants

    def call(self, node: fx.Node) -> str:
        if node.target is operator.getitem:
            return f"{self.value(node.args[0])}[{self.value(node.args[1])}]"
        arguments = [self.value(argument) for argument in node.args]
        arguments += [f"{name}={self.value(value)}" for name, value in node.kwargs.items()]
        return f"{_target(node.target)}({', '.join(arguments)})"

    def value(self, value: object) -> str:
        match value:
            case fx.Node():
                if value in self.names:
                    return f'self.t["{self.names[value]}"]'
                return f'self.c["{self.constants[value]}"]' if value in self.constants else _variable(value)
            case torch.device():
                return "self.device"
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


def _target(target: object) -> str:
    if isinstance(target, torch._ops.OpOverload):
        text = str(target)
        return text if text.startswith("aten.") else f"torch.ops.{text}"
    if target in _OWN_NODES:
        return _OWN_NODES[target]
    module, name = getattr(target, "__module__", ""), getattr(target, "__name__", "")
    if module in ("_operator", "operator", "math"):
        return f"{module.removeprefix('_')}.{name}"
    raise TypeError(f"cannot write a call of {target!r} into a stage source")
