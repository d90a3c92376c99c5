"""A `Capture` as bytes and back: graph and host program, without the model's weights and without what fills its holes.

Parameters, buffers and operators are names; tensors recorded in a graph are shapes, which share memory as they did.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from mmcompile.ir.compat import (
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    OpOverload,
    fake_mode_of,
    fake_on,
    storage_of,
)
from mmcompile.ir.functional import NO_GRAD
from mmcompile.ir.graph import META_KEY

_KEPT = frozenset(
    (META_KEY, NO_GRAD, "module_path", "val", "symbolic_shape", "size", "roots", "from_integers", "words", "shard")
    + ("stack_trace",)
)
"""Keys of a node's metadata that this package reads; those of torch are left out."""
_PACKAGES = frozenset(("torch", "sympy", "mmcompile", "collections", "operator", "_operator", "math", "transformers"))
"""Packages whose classes and functions may be in the bytes, beside those of the model's own classes."""
_BUILTINS = frozenset(
    ("set", "frozenset", "slice", "complex", "range", "list", "dict", "tuple", "int", "float", "bool", "str")
)


class StoreError(Exception):
    """Bytes are no capture of this model, or a capture contains what bytes cannot."""


def encoded(value: Any, model: nn.Module) -> bytes:
    """Return a capture, or values with captures inside, as bytes. Raises StoreError if something in it has no form in bytes."""
    stream = io.BytesIO()
    try:
        _CapturePickler(stream, model).dump(value)
    except Exception as error:  # whatever a foreign object raises when it is pickled
        raise StoreError(f"{type(error).__name__}: {error}") from error
    return stream.getvalue()


def decoded(data: bytes, model: nn.Module) -> Any:
    """Return what `encoded` was given, with the parameters and buffers of `model` in it. Raises StoreError."""
    try:
        return _CaptureUnpickler(io.BytesIO(data), model).load()
    except Exception as error:  # damaged bytes raise anything
        raise StoreError(f"{type(error).__name__}: {error}") from error


@dataclass(slots=True, eq=False)
class _SharedStorage:
    """Memory that recorded tensors share."""

    num_bytes: int
    made: torch.UntypedStorage | None = field(default=None, repr=False)

    def __reduce__(self) -> Any:
        return _SharedStorage, (self.num_bytes,)

    @property
    def storage(self) -> torch.UntypedStorage:
        """Memory without data, made once."""
        if self.made is None:
            self.made = torch.empty(self.num_bytes, dtype=torch.uint8, device="meta").untyped_storage()
        return self.made


@dataclass(frozen=True, slots=True)
class _NodeName:
    name: str


class _CapturePickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, model: nn.Module) -> None:
        super().__init__(stream, protocol=5)
        named = {**dict(model.named_buffers(remove_duplicate=False)), **dict(model.named_parameters())}
        self._names = {id(tensor): name for name, tensor in named.items()}
        self._memory: dict[int, tuple[torch.Tensor, _SharedStorage]] = {}

    def persistent_id(self, obj: Any) -> tuple[str, str] | None:
        match obj:
            case torch.Tensor() if id(obj) in self._names:
                return "tensor", self._names[id(obj)]
            case FakeTensorMode():
                return "mode", ""
            case OpOverload():
                return "op", str(obj)
            case HigherOrderOperator():
                return "higher", obj.name()
            case _:
                return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, fx.GraphModule):
            return _module, (type(obj).__name__, _attributes(obj), _records(obj.graph))
        if isinstance(obj, FakeTensor) or isinstance(obj, torch.Tensor) and obj.is_meta:
            return _tensor, self._described(obj)
        if isinstance(obj, torch.SymInt):
            raise pickle.PicklingError("a symbolic size outside of `Sizes`")
        return NotImplemented

    def _described(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        identity = storage_of(tensor)
        if identity not in self._memory:
            self._memory[identity] = tensor, _SharedStorage(tensor.untyped_storage().nbytes())
        mode = tensor.fake_mode if isinstance(tensor, FakeTensor) else None
        place = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        return self._memory[identity][1], tensor.dtype, *place, tensor.requires_grad, mode, str(tensor.device)


class _CaptureUnpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, model: nn.Module) -> None:
        super().__init__(stream)
        self._named = {**dict(model.named_buffers(remove_duplicate=False)), **dict(model.named_parameters())}
        self._mode = fake_mode_of(model) or FakeTensorMode(allow_non_fake_inputs=True)
        self._packages = _PACKAGES | {type(module).__module__.partition(".")[0] for module in model.modules()}

    def persistent_load(self, pid: tuple[str, str]) -> Any:
        kind, name = pid
        match kind:
            case "tensor":
                return self._named[name]
            case "mode":
                return self._mode
            case "op":
                namespace, packet, overload = name.split(".")
                return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
            case _:
                return getattr(torch.ops.higher_order, name)

    def find_class(self, module_name: str, global_name: str) -> Any:
        package = module_name.partition(".")[0]
        if package in self._packages or module_name == "builtins" and global_name in _BUILTINS:
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"{module_name}.{global_name} has no place in a capture")


def _tensor(
    memory: _SharedStorage,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    requires_grad: bool,
    mode: FakeTensorMode | None,
    device: str,
) -> torch.Tensor:
    made = torch.empty(0, dtype=dtype, device="meta").set_(memory.storage, offset, shape, stride)  # type: ignore[call-overload]
    made.requires_grad_(requires_grad)
    return made if mode is None else fake_on(mode, made, torch.device(device))


def _attributes(module: fx.GraphModule) -> dict[str, Any]:
    """Return what a module's graph reads from it, and its other parameters, by name."""
    found: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
    for node in module.graph.find_nodes(op="get_attr"):
        value: Any = module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        found[str(node.target)] = value
    return found


def _records(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """Return (op, name, target, args, kwargs, metadata) of each node of a graph, with other nodes by name."""

    def name(part: Any) -> Any:
        return _NodeName(part.name) if isinstance(part, fx.Node) else part

    def named(value: Any) -> Any:
        return map_aggregate(value, name)

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(part) for key, part in value.items()}
        if isinstance(value, slice):
            return slice(plain(value.start), plain(value.stop), plain(value.step))
        if isinstance(value, (list, tuple)) and type(value) is not torch.Size and not hasattr(value, "_fields"):
            return (list if isinstance(value, list) else tuple)(map(plain, value))
        return value

    return [
        (
            node.op,
            node.name,
            node.target,
            plain(named(node.args)),
            plain(named(node.kwargs)),
            {key: value for key, value in node.meta.items() if key in _KEPT},
        )
        for node in graph.nodes
    ]


def _module(name: str, attributes: Mapping[str, Any], records: list[tuple[Any, ...]]) -> fx.GraphModule:
    graph = fx.Graph()
    made: dict[str, fx.Node] = {}

    def node_of(part: Any) -> Any:
        return made[part.name] if isinstance(part, _NodeName) else part

    def nodes(value: Any) -> Any:
        return map_aggregate(value, node_of)

    for op, node_name, target, args, kwargs, meta in records:
        made[node_name] = node = graph.create_node(op, target, nodes(args), nodes(kwargs), node_name)
        if node.name != node_name:
            raise ValueError(f"node {node_name} became {node.name}")
        node.meta = dict(meta)
    module = fx.GraphModule(dict(attributes), graph, name)
    for path, value in attributes.items():  # GraphModule takes only what its graph reads
        _assign(module, path, value)
    return module


def _assign(module: nn.Module, path: str, value: Any) -> None:
    *owners, name = path.split(".")
    for owner in owners:
        if not hasattr(module, owner):
            module.add_module(owner, nn.Module())
        module = getattr(module, owner)
    if not hasattr(module, name):
        setattr(module, name, value)
