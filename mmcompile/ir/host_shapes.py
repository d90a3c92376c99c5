"""The host shape program: values that a capture needs of a batch's integers, computed on CPU before the batch runs.

Three kinds of result: *reads*, values that Python looked at during capture (the graph holds for a batch with equal reads);
*host values*, tensors whose shape depends on values (positions of a mask), handed to the stages as inputs; and the number
of tokens that carry loss.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from mmcompile.errors import VerifyError
from mmcompile.ir.compat import FakeTensor, OpOverload, is_mutating_op, is_random_op
from mmcompile.ir.graph import reached
from mmcompile.ir.known_values import FACTORIES_LIKE, MAX_KNOWN_FLOATS, MAX_KNOWN_INTEGERS, NEW, is_boolean, is_copy
from mmcompile.ir.nodes import VALUE_READ, token_loss

aten = torch.ops.aten
HOST_PREFIX = "host_"


@dataclass(frozen=True, kw_only=True, slots=True)
class HostResult:
    """Values that a captured graph needs of one batch, computed on the CPU before the graph runs."""

    reads: tuple[object, ...]
    """Lists and numbers that Python read in capture, then shapes of `values`; the graph fits only batches with equal ones."""
    values: Mapping[str, torch.Tensor]
    """Host input name -> value."""
    num_tokens: int | None
    """Number of tokens that carry loss; None if the loss is not a token loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostProgram:
    """A small graph, run eagerly on the CPU, that computes from a batch the values that a captured graph needs (`HostResult`)."""

    module: fx.GraphModule = field(repr=False)
    inputs: tuple[str, ...]
    num_reads: int
    values: tuple[str, ...]
    counts_tokens: bool
    fixed_shapes: tuple[str, ...] = ()
    """Names of host values whose shape Python read as numbers: the graph holds only for batches that give an equal shape."""

    def run(self, batch: Mapping[str, torch.Tensor | int]) -> HostResult:
        """Compute the values from a batch (input name -> tensor, or int for a size), whose shapes the capture must allow."""
        with torch.no_grad():
            results = self.module(*(batch[name] for name in self.inputs))
        reads = (read.tolist() if isinstance(read, torch.Tensor) else read for read in results[: self.num_reads])
        values = dict(zip(self.values, results[self.num_reads : self.num_reads + len(self.values)], strict=True))
        return HostResult(
            reads=(*reads, *(tuple(values[name].shape) for name in self.fixed_shapes)),
            values=values,
            num_tokens=int(results[-1]) if self.counts_tokens else None,
        )


def split_host_program(module: fx.GraphModule, batch: Mapping[str, torch.Tensor | int]) -> HostProgram:
    """Take value reads and dynamic-shape ops out of a captured graph; in `module` they become `host_*` inputs.

    Args:
        module: captured graph, functional, placeholders named as in `batch`; changed in place.
        batch: the captured batch, real values, and the sizes in it.
    """
    graph = module.graph
    known = _evaluate(module, batch)
    _concrete_mask_indices(graph, known)
    reads = [node for node in graph.nodes if node.target is VALUE_READ or (reads_value(node) and node in known)]
    dynamic = [node for node in graph.nodes if isinstance(known.get(node), torch.Tensor) and has_dynamic_shape(node)]
    labels = [node.args[1] for node in graph.nodes if node.target is token_loss and node.args[1] in known]
    host, inputs = _extract(module, reads, dynamic, labels)
    names: dict[fx.Node, str] = {}
    roots = _roots(graph)
    last_placeholder = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for index, node in enumerate(dynamic):
        names[node] = f"{HOST_PREFIX}{index}"
        with graph.inserting_after(last_placeholder):
            last_placeholder = graph.placeholder(names[node])
        last_placeholder.meta = {"val": known[node], "roots": roots[node]}
        last_placeholder.meta["from_integers"] = not any(_is_float(batch[name]) for name in roots[node])
        node.replace_all_uses_with(last_placeholder)
    for node in graph.nodes:
        if node.target is VALUE_READ:
            graph.erase_node(node)
    return HostProgram(
        module=host,
        inputs=inputs,
        num_reads=len(reads),
        values=tuple(names.values()),
        counts_tokens=bool(labels),
        fixed_shapes=tuple(names.values()),
    )


def hoist(module: fx.GraphModule, host: HostProgram, values: Mapping[str, fx.Node]) -> HostProgram:
    """Move the computation of shared values from a graph to the host program.

    Each value becomes an input of the graph under its new name.

    Args:
        module: graph, changed in place.
        host: host program of the graph, not changed.
        values: name of the new input -> node, computed from integer inputs and constants alone.

    Returns:
        The host program that also computes `values`, last.

    Raises:
        VerifyError: a node is computed from a parameter, a float input or random numbers.
    """
    graph = module.graph
    roots, extended = _roots(graph), _extended(module, host, values)
    for name, node in values.items():
        last = [other for other in graph.nodes if other.op == "placeholder"][-1]
        with graph.inserting_after(last):
            made = graph.placeholder(name)
        made.meta = {key: node.meta[key] for key in ("val", "symbolic_shape") if key in node.meta}
        made.meta |= {"roots": roots[node], "from_integers": True}
        node.replace_all_uses_with(made)
        drop_unread(graph, [node])
    module.recompile()
    return extended


def drop_unread(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Erase those of `nodes` that no node reads, and all nodes that are unread thereafter, inputs included."""
    waiting, erased = list(nodes), set()
    while waiting:
        node = waiting.pop()
        if not node.users and node not in erased and not is_mutating_op(node.target):
            waiting += node.all_input_nodes
            graph.erase_node(node)
            erased.add(node)


def _extended(module: fx.GraphModule, host: HostProgram, values: Mapping[str, fx.Node]) -> HostProgram:
    graph, copies = fx.Graph(), {}
    results: Any = graph.graph_copy(host.module.graph, copies)
    inputs = {str(node.target): node for node in graph.nodes if node.op == "placeholder"}
    computed = dict(zip(host.values, results[host.num_reads :], strict=False))
    last: fx.Node | None = list(inputs.values())[-1] if inputs else None
    needed = _closure(module, values.values())
    tensors = {str(n.target): attribute(host.module, str(n.target)) for n in graph.nodes if n.op == "get_attr"}
    for node in module.graph.nodes:
        if node not in needed:
            continue
        if node.op == "placeholder":
            name = str(node.target)
            if name not in inputs and name not in computed:
                with graph.inserting_after(last) if last is not None else graph.inserting_before():
                    last = inputs[name] = graph.placeholder(name)
            copies[node] = computed.get(name, inputs.get(name))
        else:
            copies[node] = _copied(graph, node, copies)
            if node.op == "get_attr":
                tensors[str(node.target)] = attribute(module, str(node.target))
    count = len(results) - int(host.counts_tokens)
    graph.output((*results[:count], *(copies[node] for node in values.values()), *results[count:]))
    return HostProgram(
        module=fx.GraphModule(tensors, graph),
        inputs=tuple(inputs),
        num_reads=host.num_reads,
        values=(*host.values, *values),
        counts_tokens=host.counts_tokens,
        fixed_shapes=host.fixed_shapes,
    )


def _closure(module: fx.GraphModule, nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return `nodes` and all nodes that they depend on.

    Raises VerifyError if they depend on more than integer inputs and constants.
    """
    needed = reached(nodes, _sources)
    for node in needed:
        float_input = node.op == "placeholder" and not node.meta.get("from_integers", not _is_float(node.meta["val"]))
        parameter = node.op == "get_attr" and isinstance(attribute(module, str(node.target)), torch.nn.Parameter)
        if float_input or parameter or (node.op == "call_function" and not _deterministic(node)):
            raise VerifyError(
                f"the host cannot compute {node.format_node()}: it needs integer inputs and constants alone"
            )
    return set(needed)


def _is_float(value: torch.Tensor | int) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _roots(graph: fx.Graph) -> dict[fx.Node, frozenset[str]]:
    roots: dict[fx.Node, frozenset[str]] = {}
    for node in graph.nodes:
        own = frozenset((str(node.target),)) if node.op == "placeholder" else frozenset()
        roots[node] = own.union(*(roots[source] for source in node.all_input_nodes))
    return roots


def reads_value(node: fx.Node) -> bool:
    """Return True for a node with which Python read a value: our mark of a read, or an op whose result is a number."""
    dependent = torch.Tag.data_dependent_output in getattr(node.target, "tags", ())
    return node.target is VALUE_READ or node.op == "call_function" and dependent


def has_dynamic_shape(node: fx.Node) -> bool:
    """Return True for an op whose result's shape depends on values, and for one of several results of such an op."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return has_dynamic_shape(node.args[0])
    if node.target is aten.index.Tensor:
        indices: Any = node.args[1]
        return any(isinstance(index, fx.Node) and is_boolean(index.meta["val"]) for index in indices)
    if node.target in (aten.repeat_interleave.self_Tensor, aten.where.default):
        return True
    return torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ())


def _evaluate(module: fx.GraphModule, batch: Mapping[str, torch.Tensor | int]) -> dict[fx.Node, Any]:
    """Return node -> real value in `batch`, for nodes computed only from inputs, buffers and constants, except large tensors."""
    known: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            known[node] = batch[str(node.target)]
        elif node.op == "get_attr":
            value = attribute(module, str(node.target))
            if not isinstance(value, (torch.nn.Parameter, FakeTensor)) and _small(value):
                known[node] = value
        elif _computable(node, known):
            target, args, kwargs = _free_factory(node) or (node.target, node.args, dict(node.kwargs))
            args, kwargs = fx.map_arg((args, kwargs), known.__getitem__)
            with torch.no_grad():
                value = target(*args, **kwargs)
            leaves = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
            if is_copy(node.target) or all(map(_small, leaves)):
                known[node] = value
    return known


def _free_factory(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """Return (op, args, kwargs) of a call that makes the same tensor as the factory `node` without reading another tensor.

    `x.new_ones(3)` reads dtype and device from `x`; its replacement is `ones(3, dtype=..., device=...)`. None if `node` is no
    factory like another tensor, or its shape is symbolic.
    """
    if node.target not in FACTORIES_LIKE:
        return None
    value, (source, *rest) = node.meta["val"], node.args
    shape = rest.pop(0) if node.target in NEW else tuple(value.shape)
    if node.target not in NEW and "symbolic_shape" in node.meta or source.meta.get("val") is None:  # type: ignore[union-attr]
        return None
    device = "cpu" if value.is_meta else value.device  # values of symbolic shapes are annotated by meta tensors
    return FACTORIES_LIKE[node.target], (shape, *rest), {"dtype": value.dtype, "device": device}


def _computable(node: fx.Node, known: Mapping[fx.Node, Any]) -> bool:
    if node.op != "call_function" or node.target is VALUE_READ or not _deterministic(node):
        return False
    sources = _sources(node)
    return all(source in known for source in sources) if sources else _is_factory(node)


def _sources(node: fx.Node) -> list[fx.Node]:
    free = _free_factory(node)
    if free is None:
        return node.all_input_nodes
    found: list[fx.Node] = []
    fx.map_arg(free[1:], found.append)
    return found


def _copied(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Append a copy of `node` to `graph`, with inputs replaced by their `copies`, and return it.

    A factory such as `x.new_ones(3)` becomes `ones(3)`, since `x` may be an activation, which is not in `graph`.
    """
    free = _free_factory(node)
    if free is None:
        return graph.node_copy(node, copies.__getitem__)
    copy = graph.call_function(free[0], *fx.map_arg(free[1:], copies.__getitem__))
    copy.meta = dict(node.meta)
    return copy


def _is_factory(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and "empty" not in node.target.name()


def _deterministic(node: fx.Node) -> bool:
    random = is_random_op(node.target) or "dropout" in str(node.target)
    return not random and not is_mutating_op(node.target)


def _small(value: torch.Tensor) -> bool:
    return value.numel() <= (MAX_KNOWN_FLOATS if value.is_floating_point() else MAX_KNOWN_INTEGERS)


def attribute(module: torch.nn.Module, path: str) -> torch.Tensor:
    """Return the tensor at a dotted path."""
    owner, _, name = path.rpartition(".")
    return getattr(module.get_submodule(owner), name)


def _concrete_mask_indices(graph: fx.Graph, known: dict[fx.Node, Any]) -> None:
    """Replace each mask with a known value in `x[mask]`, for an unknown x, by integer indices, which the host computes."""
    for node in list(graph.nodes):
        if node.target in (aten.index.Tensor, aten.index_put.default) and node not in known:
            masks = [i for i in node.args[1] if isinstance(i, fx.Node) and i in known and is_boolean(known[i])]
            if masks:
                with graph.inserting_before(node):
                    indices = [
                        position
                        for index in node.args[1]
                        for position in (_positions(graph, index, known) if index in masks else [index])
                    ]
                node.args = (node.args[0], indices, *node.args[2:])
        elif node.target is aten.masked_select.default and node not in known and node.args[1] in known:
            mask = node.args[1]
            if tuple(known[mask].shape) == tuple(node.args[0].meta["val"].shape):
                with graph.inserting_before(node):
                    indices = _positions(graph, mask, known)
                node.target, node.args = aten.index.Tensor, (node.args[0], indices)


def _positions(graph: fx.Graph, mask: fx.Node, known: dict[fx.Node, Any]) -> list[fx.Node]:
    def call(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta = {key: value for key, value in mask.meta.items() if key != "val"}
        real_args = fx.map_arg(args, known.__getitem__)
        known[node] = target(*real_args)
        node.meta["val"] = known[node]
        return node

    nonzero = call(aten.nonzero.default, mask)
    return [call(aten.select.int, nonzero, 1, dim) for dim in range(known[mask].dim())]


def _extract(
    module: fx.GraphModule, reads: list[fx.Node], dynamic: list[fx.Node], labels: list[fx.Node]
) -> tuple[fx.GraphModule, tuple[str, ...]]:
    """Return (module: batch -> values of the given nodes, for `labels` the number of valid ones; names of module inputs)."""
    read: list[Any] = [node.args[0] if node.target is VALUE_READ else node for node in reads]
    wanted: list[fx.Node] = [*read, *dynamic, *labels]
    needed = reached(wanted, _sources)
    graph, copies = fx.Graph(), {}
    for node in module.graph.nodes:
        if node in needed:
            copies[node] = _copied(graph, node, copies)
    results = [copies[node] for node in wanted]
    if labels:
        ignore_index = next(node.args[2] for node in module.graph.nodes if node.target is token_loss)
        valid = graph.call_function(aten.ne.Scalar, (results[-1], ignore_index))
        results[-1] = graph.call_function(aten.sum.default, (valid,))
    graph.output(tuple(results))
    tensors = {str(node.target): attribute(module, str(node.target)) for node in needed if node.op == "get_attr"}
    names = tuple(str(node.target) for node in module.graph.nodes if node in needed and node.op == "placeholder")
    return fx.GraphModule(tensors, graph), names
