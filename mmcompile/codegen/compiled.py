"""Stage programs whose layer functions run as compiled code, shared by all layers that differ in names only.

A function is compiled once a process, for all layers, stages, patterns, ranks and generations that it serves. Processes
forked later have it too. What is left of a stage's `forward` only calls these functions, and runs as it is.
"""

from __future__ import annotations

import functools
import hashlib
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import mmcompile.ir.nodes
from mmcompile.codegen.canonical import CanonicalLayer, LayerArgument, canonical_layers
from mmcompile.codegen.load import execute, load_stage
from mmcompile.codegen.program import StageProgram
from mmcompile.codegen.selective import selective_contexts
from mmcompile.codegen.stage_module import Layer, StageModule
from mmcompile.codegen.weight_grad_split import handed, tapped
from mmcompile.config import Recompute

Backend = str | Callable[..., Any]
"""Backend of `torch.compile`: a name, or a function that compiles a graph."""


def load_compiled_stage(
    program: StageProgram,
    tensors: Mapping[str, Tensor],
    device: torch.device | str = "cpu",
    *,
    backend: Backend = "inductor",
) -> StageModule:
    """Return a stage whose layer functions are compiled. Nothing is compiled before the first call.

    Arguments are those of `load_stage`, and the backend of `torch.compile`.

    Raises:
        VerifyError: a tensor is missing, or the source has another form than `stage_source` writes.
    """
    layers = canonical_layers(program.source, program.stage)
    runner = CompiledLayers(
        stage=f"{program.stage} of pattern {program.pattern}",
        layers=layers,
        device=torch.device(device),
        backend=backend,
    )
    return load_stage(program, tensors, device, runner=runner)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledLayers:
    """Runs the layer functions of one stage as compiled code; functions that differ in names only share the compiled code."""

    stage: str
    layers: Mapping[str, CanonicalLayer]
    """Name of a layer function of the stage -> the function with its names replaced by numbers."""
    device: torch.device
    backend: Backend

    def __call__(self, layer: Layer, recompute: Recompute, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """Run the compiled code of `layer` on `arguments`; activations are recomputed only if gradients are enabled."""
        found = self.layers[layer.__name__]
        given = [self._settled(value, argument) for value, argument in zip(arguments, found.arguments, strict=True)]
        try:
            return self.compiled(layer.__name__, recompute if torch.is_grad_enabled() else "none")(*given)
        except RuntimeError as error:
            error.add_note(f"in compiled function {layer.__name__} of stage {self.stage}")
            raise

    def compiled(self, name: str, recompute: Recompute = "none") -> Layer:
        """Return the compiled function for the stage's layer function `name`; equal layers share it."""
        return compiled_layer(self.layers[name].text, recompute, self.backend)

    def _settled(self, value: Any, argument: LayerArgument) -> Any:
        if argument.is_size:
            value = torch.empty((value, 0), device=self.device)
        elif isinstance(value, Tensor) and not argument.is_tap and not _is_plain(value):
            value = value.clone(memory_format=torch.contiguous_format)
        if dims := argument.varying:
            torch._dynamo.maybe_mark_dynamic(value, dims)  # pyright: ignore[reportPrivateUsage]
        return value


def _is_plain(value: Tensor) -> bool:
    return value.is_contiguous() and value.storage_offset() == 0


_AROUND: Mapping[Recompute, str] = {
    "none": "",
    "full": "return checkpoint(layer, *arguments, use_reentrant=False)",
    "selective": "return checkpoint(layer, *arguments, use_reentrant=False, context_fn=selective_contexts)",
}


@functools.cache
def compiled_layer(text: str, recompute: Recompute, backend: Backend | None) -> Layer:
    """Return the compiled function of a source of `layer(a0, a1, ...)`, uncompiled if `backend` is None; results are cached."""
    # Each function has code of its own: torch counts recompilations by it.
    around = _AROUND[recompute]
    text += f"\n\ndef recomputing(*arguments):\n    {around}\n" if around else ""
    namespace = execute(
        text,
        f"<layer {hashlib.sha256(text.encode()).hexdigest()[:12]}>",
        **{"aten": torch.ops.aten, "math": math, "mm": mmcompile.ir.nodes, "operator": operator},
        **{"tapped": tapped, "handed": handed, "checkpoint": checkpoint, "selective_contexts": selective_contexts},
    )
    layer: Any = namespace["recomputing" if around else "layer"]
    # Not dynamic: of sizes those vary that are marked, so nothing is compiled twice to find out which do.
    return layer if backend is None else torch.compile(layer, backend=backend, fullgraph=True, dynamic=False)
