"""`capture`: from a model and a batch to a `ModelGraph`, in the best mode that works, with reasons against better ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import sympy
import torch
from torch import nn

from mmcompile.errors import BatchError, CaptureError, ConfigError
from mmcompile.ir.capture_errors import explained
from mmcompile.ir.compat import fake_mode_of
from mmcompile.ir.components import find_structure
from mmcompile.ir.gradient_proof import GradientCheck, gradient_difference
from mmcompile.ir.graph import CaptureMode, Component, ModelGraph, ParameterSpec, dtype_name, torch_dtype
from mmcompile.ir.host_shapes import HostProgram, HostResult
from mmcompile.ir.inputs import FlatBatch, completed
from mmcompile.ir.losses import loss_of
from mmcompile.ir.sizes import Sizes, spec_of
from mmcompile.ir.trace import Trace, export_step
from mmcompile.ir.tracing_context import without_cache


class Holes(Protocol):
    """Source of the values of inputs that stand for what batches differ in (`mmcompile.ir.replay`)."""

    def fill(self, batch: FlatBatch) -> dict[str, torch.Tensor]:
        """Return their values for a batch, by name. Raises Mismatch if the model's Python calls something else for it."""
        ...

    def allow(self, batch: FlatBatch, small: Collection[str]) -> bool:
        """Return whether the graph holds for a batch in which the sizes named in `small` are 0 or 1."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Capture:
    """A graph together with the conditions under which it holds for other batches."""

    graph: ModelGraph
    host: HostProgram = field(repr=False)
    sizes: Sizes = field(repr=False)
    reads: tuple[object, ...]
    """Values that Python read while the batch was captured: the graph holds only for batches with equal values."""
    holes: Holes | None = field(default=None, repr=False)
    """Fills the inputs that stand for what batches differ in; None for a capture of one batch."""

    def filled(self, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the tensors of a flat batch by name, and those that the model's Python computes from it for the graph.

        Raises:
            Mismatch: the model's Python calls something else for this batch.
        """
        tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        return tensors if self.holes is None else {**tensors, **self.holes.fill(_flat(batch))}

    def bound(self, batch: Mapping[str, Any], filled: Mapping[str, torch.Tensor]) -> dict[sympy.Symbol, int] | None:
        """Return symbol -> size for a batch; None if the graph does not hold for its sizes.

        Args:
            batch: a flat batch.
            filled: its tensors, as `filled` returns them.
        """
        bound = self.sizes.bind(filled, small=self.holes is not None)
        small = self.sizes.small(bound) if bound is not None else []
        return None if small and self.holes is not None and not self.holes.allow(_flat(batch), small) else bound

    def given(self, batch: Mapping[str, Any]) -> dict[str, torch.Tensor | int]:
        """Return the tensors of a flat batch (`filled`) and the sizes in it, by name: what the host program takes."""
        tensors = self.filled(batch)
        return {**tensors, **self.sizes.size_inputs(self.bound(batch, tensors) or {})}

    def host_result(self, given: Mapping[str, torch.Tensor | int]) -> HostResult | None:
        """Return what the host program computes for a batch; None if the graph does not hold: other values are read from it."""
        try:
            result = self.host.run(given)
        except (IndexError, RuntimeError):  # a size read from the captured batch is too small for this one
            return None
        return result if result.reads == self.reads else None

    def values(self, batch: Mapping[str, Any]) -> dict[str, torch.Tensor | int]:
        """Return the values of the graph's inputs for a flat batch, by name: tensors, their sizes, and `HostResult.values`."""
        given = self.given(batch)
        return {**given, **self.host.run(given).values}


def capture(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    dynamic: Mapping[str, Any] | None = None,
    varying: Mapping[str, Iterable[int]] | None = None,
    reference: Sequence[Component] | None = None,
) -> Capture:
    """Capture the training step of `model` on `batch`, independently of the model's code.

    Args:
        model: any module whose forward takes the batch by name and returns a loss; real or fake parameters.
        batch: input name -> tensor or plain value. At best two or more samples with real padding: sizes of 1 and absent
            padding are baked in (and guarded).
        dynamic: a second batch of the same inputs. Dims in which it differs become symbolic if the model's code allows it. All
            other sizes are fixed; `ModelGraph.reasons` explains each dim that should vary but is fixed.
        varying: input name -> dims to keep symbolic in the same way, where no second batch shows them.
        reference: components of an earlier capture of this model, whose layer order is then kept.

    Raises:
        BatchError: the model refused the batch (wrong number of image tokens, a missing input, no loss).
        CaptureError: no mode worked; the message has one reason per mode.
    """
    batch = completed(model, batch)
    wanted = {name: frozenset(dims) for name, dims in (varying or {}).items()}
    if dynamic is not None:
        for name, dims in differing_dims(batch, completed(model, dynamic)).items():
            wanted[name] = wanted.get(name, frozenset()) | frozenset(dims)
    kept = {name: tuple(sorted(dims)) for name, dims in wanted.items() if dims}
    trace, reasons = _trace(model, batch, kept)
    return capture_of(model, batch, trace, kept, reasons, reference)


def capture_of(
    model: nn.Module,
    batch: FlatBatch,
    trace: Trace,
    kept: Mapping[str, tuple[int, ...]],
    reasons: tuple[str, ...],
    reference: Sequence[Component] | None,
    given: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Capture:
    """Return the capture of a trace.

    Args:
        model: the model.
        batch: batch on which it was traced.
        trace: the trace.
        kept: input name -> dims that were to be symbolic.
        reasons: one line for each mode of capture that failed.
        reference: components of an earlier capture, whose layer order is then kept.
        given: further inputs of the graph, by name.
    """
    components, edges = find_structure(trace.module, reference)
    parameters, buffers = _parameters(model), tuple(name for name, _ in model.named_buffers())
    tensors = {name: value for name, value in {**batch, **given}.items() if isinstance(value, torch.Tensor)}
    bound = trace.sizes.bind(tensors, small=bool(given)) or {}
    graph = ModelGraph(
        name=type(model).__name__,
        module=trace.module,
        components=components,
        edges=edges,
        inputs=tuple(spec_of(n) for n in trace.module.graph.nodes if n.op == "placeholder" and "size" not in n.meta),
        parameters=parameters,
        buffers=buffers,
        loss=trace.loss,
        mode=CaptureMode.SYMBOLIC if trace.sizes.dynamic() else CaptureMode.BUCKET,
        reasons=(*reasons, *_fixed(kept, trace.sizes.dynamic())),
        dynamic=trace.sizes.dynamic(),
        hints={str(symbol): value for symbol, value in bound.items()},
        num_samples=_num_samples(batch),
    )
    reads = trace.host.run({**tensors, **trace.sizes.size_inputs(bound)}).reads
    return Capture(graph=graph, host=trace.host, sizes=trace.sizes, reads=reads)


def verified(model: nn.Module, batch: Mapping[str, Any], found: Capture) -> GradientCheck:
    """Compare loss and all gradients of a capture with those of the model in eager mode, on the captured batch.

    Raises:
        ConfigError: the model has no weights.
        CaptureError: they differ by more than rounding.
    """
    if fake_mode_of(model) is not None:
        raise ConfigError(
            f"{type(model).__name__} was built from its config, without weights: its gradients cannot be compared; give a model "
            "with weights (on the command line, MODEL as package.module:function returning (model, batch))"
        )
    flat = completed(model, batch)
    values = found.values(flat)
    inputs = [values[str(node.target)] for node in found.graph.module.graph.nodes if node.op == "placeholder"]
    with without_cache(model) as options:
        difference = gradient_difference(
            model, lambda: loss_of(model(**options, **flat.arguments())), lambda: found.graph.module(*inputs)
        )
    difference.check(torch_dtype(found.graph.main_dtype))
    return difference


def _flat(batch: Mapping[str, Any]) -> FlatBatch:
    return batch if isinstance(batch, FlatBatch) else FlatBatch(batch)


def differing_dims(batch: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return input name -> dims in which two batches of the same inputs differ.

    Raises:
        BatchError: an input is in one batch only, or has another rank.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor):
            continue
        second = other.get(name)
        if not isinstance(second, torch.Tensor) or second.dim() != value.dim():
            got = f"shape {tuple(second.shape)}" if isinstance(second, torch.Tensor) else "nothing"
            raise BatchError(
                f"the second batch has {got} for {name!r}, the first {tuple(value.shape)}; give both the same inputs"
            )
        dims = tuple(dim for dim in range(value.dim()) if value.shape[dim] != second.shape[dim])
        if dims:
            found[name] = dims
    return found


def _fixed(wanted: Mapping[str, tuple[int, ...]], kept: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    lines = []
    for name, dims in wanted.items():
        fixed = [dim for dim in dims if dim not in kept.get(name, ())]
        if fixed:
            lines.append(
                f"{name} dim {', '.join(map(str, fixed))}: fixed by the model's Python (or its size is 1 in the batch)"
            )
    return tuple(lines)


def _num_samples(batch: Mapping[str, Any]) -> int:
    for name in ("input_ids", "labels", *batch):
        if isinstance(batch.get(name), torch.Tensor):
            return int(batch[name].shape[0])
    raise BatchError("the batch holds no tensor; pass input name -> tensor")


def _trace(model: nn.Module, batch: FlatBatch, varying: Mapping[str, tuple[int, ...]]) -> tuple[Trace, tuple[str, ...]]:
    """Return the trace in the first mode that works, most dynamic first, and a line of text for each mode that failed."""
    reasons: tuple[str, ...] = ()
    if varying:
        try:
            found = export_step(model, batch, varying)
            if (
                found.sizes.bind({name: value for name, value in batch.items() if isinstance(value, torch.Tensor)})
                is not None
            ):
                return found, ()
            guards = ", ".join(str(guard) for guard in found.sizes.guards if guard != True)  # noqa: E712 (sympy truth)
            reasons = (f"symbolic sizes: conditions that the captured batch does not fulfil: {guards}",)
        except Exception as error:  # export raises whatever the model's own Python raises; the fixed mode decides
            text = str(error).strip().partition("\n")[0][:200]
            reasons = (f"symbolic sizes: {type(error).__name__}: {text}",)
    try:
        return export_step(model, batch), reasons
    except (BatchError, CaptureError):
        raise
    except Exception as error:  # as above
        raise explained(model, batch, error) from error


def _parameters(model: nn.Module) -> tuple[ParameterSpec, ...]:
    names: dict[int, list[str]] = {}
    tensors: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        tensors[id(parameter)] = parameter
    return tuple(
        ParameterSpec(
            name=names[key][0],
            shape=tuple(parameter.shape),
            dtype=dtype_name(parameter.dtype),
            trainable=parameter.requires_grad,
            aliases=tuple(names[key][1:]),
        )
        for key, parameter in tensors.items()
    )
