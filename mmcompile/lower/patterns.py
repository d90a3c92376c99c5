"""`Patterns`: finds, for every batch, the stage programs that hold for it, and captures new ones when none does.

A pattern holds for a batch with the same inputs, shapes and plain values if the host program reads the same values from it
(image grids, whether the mask is all true). Everything else of the batch is free: token ids, pixels, where placeholders stand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mmcompile.ir.capture import Capture, capture
from mmcompile.ir.graph import dtype_name
from mmcompile.ir.host import HostResult
from mmcompile.lower.program import PatternPrograms, PreparedMicrobatch
from mmcompile.lower.stages import lower
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.passes.pipeline import Pipeline
from mmcompile.plan.plan import Plan

Key = tuple[object, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pattern:
    capture: Capture = field(repr=False)
    programs: PatternPrograms
    host_shapes: Mapping[str, tuple[int, ...]]


class Patterns:
    """Stage programs of one model under one plan, by pattern.

    Args:
        model: what to capture; its parameters' values are not read.
        plan: where layers run.
        first: the capture the plan was made from; its layer order holds for all later ones.
        on_capture: called with the number of patterns so far before a new capture, for progress output.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, first: Capture, on_capture: Callable[[int], None] | None = None
    ) -> None:
        self._model = model
        self._plan = plan
        self._components = first.graph.components
        self._known: dict[Key, list[_Pattern]] = {}
        self._on_capture = on_capture
        self.num_captures = 0

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Every parameter and buffer of the model under every name it has."""
        named = dict(self._model.named_parameters(remove_duplicate=False))
        return {**named, **dict(self._model.named_buffers(remove_duplicate=False))}

    def prepare(self, batch: Mapping[str, Any]) -> PreparedMicrobatch:
        """Match a batch with a pattern, capturing one if none holds.

        Raises:
            BatchError: the model refuses the batch.
            CaptureError: the model cannot be captured on it.
        """
        tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        candidates = self._known.setdefault(_key(batch), [])
        for pattern in candidates:
            host = pattern.capture.host.run(tensors)
            if host.reads == pattern.capture.reads and _shapes(host) == pattern.host_shapes:
                return _prepared(pattern, tensors, host)
        pattern = self._capture(batch)
        host = pattern.capture.host.run(tensors)
        pattern = _Pattern(capture=pattern.capture, programs=pattern.programs, host_shapes=_shapes(host))
        candidates.append(pattern)
        return _prepared(pattern, tensors, host)

    def _capture(self, batch: Mapping[str, Any]) -> _Pattern:
        if self._on_capture is not None:
            self._on_capture(self.num_captures)
        captured = capture(self._model, batch, reference=self._components)
        Pipeline(passes=(GradientFlow(),)).run(captured.graph)
        self.num_captures += 1
        return _Pattern(capture=captured, programs=lower(captured, self._plan), host_shapes={})


def _key(batch: Mapping[str, Any]) -> Key:
    """What must be equal before values are compared: inputs, shapes, dtypes, plain values."""
    return tuple(
        (name, tuple(value.shape), dtype_name(value.dtype)) if isinstance(value, torch.Tensor) else (name, repr(value))
        for name, value in sorted(batch.items())
    )


def _shapes(host: HostResult) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in host.values.items()}


def _prepared(pattern: _Pattern, tensors: Mapping[str, torch.Tensor], host: HostResult) -> PreparedMicrobatch:
    ports = [port for program in pattern.programs.programs.values() for port in (*program.inputs, *program.outputs)]
    values = {**tensors, **host.values}
    return PreparedMicrobatch(
        programs=pattern.programs,
        sizes={},
        values={port.name: values[port.name] for port in ports if port.kind in ("root", "host")},
        link_shapes={port.name: tuple(int(size) for size in port.shape) for port in ports if port.kind == "link" and port.peers},
        num_tokens=host.num_tokens,
    )
