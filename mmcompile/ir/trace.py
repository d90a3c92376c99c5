"""Export of a model's training step as one FX graph, from inputs by name to the loss; integer inputs keep real values."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram
from torch.fx.graph import CodeGen

from mmcompile.errors import CaptureError
from mmcompile.ir.compat import (
    FakeTensor,
    OpOverload,
    fake_mode_of,
    is_mutating_op,
    mkldnn_flags,
    plain_checkpointing,
    transformers_eager_paths,
)
from mmcompile.ir.functional import NO_GRAD, changed_buffers, functionalize
from mmcompile.ir.gradient_proof import GradientPaths, check_gradients, gradient_paths
from mmcompile.ir.graph import LossInfo
from mmcompile.ir.host_shapes import HostProgram, attribute, has_dynamic_shape, reads_value, split_host_program
from mmcompile.ir.implementations import packed_towers, traceable_experts
from mmcompile.ir.inputs import FlatBatch
from mmcompile.ir.known_values import KnownValues, known_values
from mmcompile.ir.losses import loss_of, own_loss
from mmcompile.ir.nodes import merge_features
from mmcompile.ir.sizes import Sizes, take_sizes
from mmcompile.ir.tracing_context import no_python_randomness, python_state_kept, quiet_export, without_cache

aten = torch.ops.aten

_ASSERTIONS = (
    "_assert_tensor_metadata",
    "_assert_scalar",
    "_assert_async",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """A captured training step: no op works in place, and Python reads no value in it."""

    module: fx.GraphModule = field(repr=False)
    """Batch tensors, sizes of their dims, tensors of `host` -> (loss_sum, num_tokens) or (loss,). Parameters are the model's."""
    host: HostProgram
    sizes: Sizes = field(repr=False)
    loss: LossInfo


class _LossOnly(nn.Module):
    """Wrapper module whose forward takes tensor inputs by name, calls the model's forward and returns only the loss.

    Args:
        batch: real value of each tensor input, and plain values, which are fixed.
        options: further arguments of the model's forward.
        known_buffers: whether Python may read the values of integer buffers.
        on_trace: called after a traced forward with the paths of its gradient. A callback, because export removes attributes
            that a forward sets.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: FlatBatch,
        options: Mapping[str, Any],
        on_trace: Callable[[GradientPaths], None],
        *,
        known_buffers: bool,
    ) -> None:
        super().__init__()
        self.model = model
        self.constants = _constants(model) if known_buffers else {}
        self._batch = batch
        self._options = options
        self._on_trace = on_trace
        names = [name for name, value in batch.items() if isinstance(value, torch.Tensor)]
        self.forward = named_forward(self._run, names)

    def _run(self, **inputs: torch.Tensor) -> torch.Tensor:
        if not any(isinstance(value, FakeTensor) for value in inputs.values()):
            return self._loss(inputs)
        known = KnownValues()
        for name, value in inputs.items():
            if isinstance(value, FakeTensor):
                known.learn(value, self._batch[name])
        for name, buffer in self.model.named_buffers():
            if name in self.constants and isinstance(buffer, FakeTensor):
                known.learn(buffer, self.constants[name])
        with transformers_eager_paths(), plain_checkpointing(), mkldnn_flags(allow_tf32=None):  # noqa: SIM117
            with no_python_randomness(self.model), known_values(known):
                loss = self._loss(inputs)
        self._on_trace(gradient_paths(loss, dict(self.model.named_parameters())))
        return loss

    def _loss(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return loss_of(self.model(**self._options, **self._batch.arguments(inputs)))


def named_forward(run: Any, names: list[str]) -> Any:
    """Return a function whose parameters are called `names`, which passes their values to `run` by name.

    `torch.export` requires a signature without `**kwargs`.
    """

    def forward(*args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        return run(**dict(zip(names, args, strict=False)), **kwargs)

    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return forward


def export_step(
    model: nn.Module,
    batch: FlatBatch,
    dynamic: Mapping[str, tuple[int, ...]] | None = None,
    *,
    known_buffers: bool = True,
) -> Trace:
    """Capture `loss = model(**batch)` as one functional graph.

    Args:
        model: any module, with real or fake parameters; `requires_grad` flags and train/eval mode are taken as they
            are.
        batch: tensors (real values), and plain Python values, which are fixed.
        dynamic: input name -> dims to keep symbolic; the model's code may still fix some of them.
        known_buffers: let Python read the values of integer buffers, if the forward changes none of them.

    Raises:
        BatchError: the model itself refused the batch.
        CaptureError: a value was needed that depends on activations.
    """
    with without_cache(model) as options, python_state_kept(model):
        recorded: list[GradientPaths] = []
        wrapper = _LossOnly(model, batch, options, recorded.append, known_buffers=known_buffers)
        # Copies, as export leaves marks on the tensors it is given, with which a later capture of them would fail.
        tensors = {name: value.detach() for name, value in batch.items() if isinstance(value, torch.Tensor)}
        module = exported_graph(wrapper, tensors, dynamic)
    functionalize(module.graph)
    if changed_buffers(module.graph.nodes).keys() & wrapper.constants.keys():
        return export_step(model, batch, dynamic, known_buffers=False)
    return finished_trace(module, tensors, recorded[-1])


def exported_graph(
    wrapper: nn.Module, tensors: Mapping[str, torch.Tensor], dynamic: Mapping[str, tuple[int, ...]] | None
) -> fx.GraphModule:
    """Export a module whose forward takes tensors by name and calls its attribute `model`; parameters are the model's.

    Args:
        wrapper: the module.
        tensors: its inputs, real tensors.
        dynamic: input name -> dims to keep symbolic.
    """
    model: Any = wrapper.model
    mode = fake_mode_of(model)
    inputs = {name: mode.from_tensor(value, static_shapes=True) for name, value in tensors.items()} if mode else tensors
    dims = {name: {dim: Dim.AUTO for dim in (dynamic or {}).get(name, ())} or None for name in tensors}
    with packed_towers(model), traceable_experts(model), quiet_export(), mode or contextlib.nullcontext():
        exported = torch.export.export(
            wrapper, (), dict(inputs), strict=False, dynamic_shapes=dims if dynamic else None
        )
    return _rooted_at_model(exported, model)


def finished_trace(module: fx.GraphModule, tensors: Mapping[str, torch.Tensor], paths: GradientPaths) -> Trace:
    """Return the trace of a graph without in-place ops: sizes and host work taken out, the loss our own, its gradients proven.

    Args:
        module: the graph; changed in place.
        tensors: its inputs, real tensors.
        paths: paths of the gradient that autograd recorded while it was traced.

    Raises:
        CaptureError: gradients take other paths in the graph.
    """
    sizes = take_sizes(module.graph)
    _name_merges(module.graph)
    loss = own_loss(module.graph)
    _drop_dead(module.graph, keep_reads=True)
    hints = {str(n.target): n.meta["val"] for n in module.graph.nodes if n.op == "placeholder" and "size" in n.meta}
    host = split_host_program(module, {**tensors, **hints})
    _drop_dead(module.graph, keep_reads=False)
    for node in list(module.graph.nodes):
        if node.op == "placeholder" and not node.users:
            module.graph.erase_node(node)
    module.graph.lint()
    module.recompile()
    check_gradients(module, paths)
    return Trace(module=module, host=host, sizes=sizes, loss=loss)


def _constants(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the integer buffers of a model by name, except those of norms, which count their batches."""
    found: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        if not isinstance(module, torch.nn.modules.batchnorm._NormBase):  # pyright: ignore[reportPrivateUsage]
            for name, buffer in module.named_buffers(path, recurse=False):
                if type(buffer) is torch.Tensor and not buffer.is_floating_point() and not buffer.is_meta:
                    found[name] = buffer.detach().clone()
    return found


def _rooted_at_model(exported: ExportedProgram, model: nn.Module) -> fx.GraphModule:
    """Return the exported graph in a module with the model's parameters and buffers under their names in the model.

    All other tensors are named `constant_<n>`. (`exported.module()` would generate code of copies of the graph three times.)
    """
    # Export leaves nodes out of `users` where regions share a value; in a copy they are whole.
    graph, values = copy.deepcopy(exported.graph), {**exported.state_dict, **exported.constants}
    for spec, node in zip(exported.graph_signature.input_specs, graph.find_nodes(op="placeholder"), strict=True):
        if spec.target is not None:
            with graph.inserting_after(node):
                read = graph.create_node("get_attr", spec.target)
            read.meta = node.meta
            node.replace_all_uses_with(read)
            graph.erase_node(node)
    inline_regions(graph, exported.graph_module)
    own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    first_name = {id(tensor): name for name, tensor in reversed(own.items())}
    tensors: dict[str, Any] = {}
    for node in graph.find_nodes(op="get_attr"):
        name = str(node.target).removeprefix("model.")
        if name in own:
            node.target = first_name[id(own[name])]
            tensors[node.target] = own[name]
        else:
            value = values[node.target] if node.target in values else attribute(exported.graph_module, str(node.target))
            node.target = f"constant_{len(tensors)}"
            tensors[node.target] = value.detach() if isinstance(value, torch.Tensor) else value
    graph.set_codegen(CodeGen())
    _clean_module_paths(graph)
    return fx.GraphModule(tensors, graph, type(model).__name__)


def inline_regions(graph: fx.Graph, exported: fx.GraphModule) -> None:
    """Inline the bodies of regions with `torch.no_grad` or with autocast off. Values that leave a no_grad region are detached."""
    for node in list(graph.nodes):
        if node.op != "call_function" or not str(node.target).startswith("wrap_with_"):
            continue
        if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            enabled, body, *inputs = node.args
        elif node.args[3] is False or node.args[1] is False:
            enabled, body, *inputs = True, *(arg for arg in node.args[4:])
        else:
            raise CaptureError("the model switches autocast on inside forward; enable it outside, or cast explicitly")
        region = attribute(exported, str(body.target))
        assert isinstance(region, fx.GraphModule)
        with graph.inserting_before(node):
            outputs = _copy_body(graph, region, inputs, detach=not enabled)
        for user in list(node.users):
            user.replace_all_uses_with(outputs[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
        inline_regions(graph, exported)
        return


def _copy_body(graph: fx.Graph, region: fx.GraphModule, inputs: list[fx.Node], *, detach: bool) -> list[fx.Node]:
    copies: dict[fx.Node, fx.Node] = {}
    outputs: list[fx.Node] = []
    arguments = iter(inputs)
    for node in region.graph.nodes:
        if node.op == "placeholder":
            copies[node] = next(arguments)
        elif node.op == "output":
            outputs = list(node.args[0])
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta[NO_GRAD] = detach or node.meta.get(NO_GRAD, False)
    return [_detached(graph, copies[node]) if detach and not _is_input(node) else copies[node] for node in outputs]


def _is_input(node: fx.Node) -> bool:
    # In-place ops on an input return the input itself, and so do `to` and `contiguous` where there is nothing to do.
    while is_mutating_op(node.target) or _returns_its_input(node):
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


def _returns_its_input(node: fx.Node) -> bool:
    if node.op != "call_function" or not node.all_input_nodes or not isinstance(node.target, OpOverload):
        return False
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    return bool(args) and isinstance(args[0], torch.Tensor) and node.target(*args, **kwargs) is args[0]


def _detached(graph: fx.Graph, node: fx.Node) -> fx.Node:
    barrier = graph.call_function(aten.detach.default, (node,))
    barrier.meta = dict(node.meta)
    return barrier


def _clean_module_paths(graph: fx.Graph) -> None:
    """Replace `node.meta["nn_module_stack"]` by `node.meta["module_path"]`: the dotted path of the innermost module, a string."""
    for node in graph.nodes:
        stack = node.meta.pop("nn_module_stack", None)
        path = next(reversed(stack.values()))[0] if stack else ""
        path = path.removeprefix("L['self'].")
        path = ".".join(part.split("@")[0] for part in path.split("."))
        node.meta["module_path"] = "" if path == "model" else path.removeprefix("model.")


def _name_merges(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.target is aten.masked_scatter.default and node.meta["val"].is_floating_point():
            node.target = merge_features


def _drop_dead(graph: fx.Graph, *, keep_reads: bool) -> None:
    """Erase assertions and calls without users, except updates of model buffers, and reads of values if `keep_reads`."""
    for node in reversed(list(graph.nodes)):
        if node.op in ("placeholder", "output") or node.users:
            continue
        if (
            node.op == "call_module"
            or node.op == "get_attr"
            or any(name in str(node.target) for name in _ASSERTIONS)
            or not _updates_buffer(node)
            and not (keep_reads and (reads_value(node) or has_dynamic_shape(node)))
        ):
            graph.erase_node(node)


def _updates_buffer(node: fx.Node) -> bool:
    return is_mutating_op(node.target) and isinstance(node.args[0], fx.Node) or bool(changed_buffers([node]))
