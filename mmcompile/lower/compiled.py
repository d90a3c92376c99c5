"""`CompiledStage`: a stage program run by compiled code that it shares with every program like it.

The code is compiled once a process, whatever stages, ranks or generations it serves. Processes forked later have it too.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmcompile.lower.canonical import canonical
from mmcompile.lower.load import execute, held_tensors
from mmcompile.lower.program import StageProgram

Layer = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledStage:
    """Called like `StageModule`, with the program's inputs in order."""

    name: str
    layer: Layer
    """`layer(tensors, *inputs)`, shared."""
    tensors: tuple[Tensor, ...]
    varying: tuple[tuple[int, ...], ...]
    device: torch.device

    @classmethod
    def load(
        cls,
        program: StageProgram,
        tensors: Mapping[str, Tensor],
        device: torch.device | str = "cpu",
        *,
        backend: str = "inductor",
    ) -> CompiledStage:
        """Bind a program's tensors to its function. Nothing is compiled before the first call.

        Args:
            tensors: every parameter and buffer, as for `load_stage`.
            backend: of `torch.compile`.

        Raises:
            VerifyError: a tensor is missing, or the source is not a stage's.
        """
        device = torch.device(device)
        parameters, buffers = held_tensors(program, tensors)
        found = canonical(program, {**parameters, **buffers})
        held: dict[tuple[str, str], Tensor] = {
            **{("t", name): tensor for name, tensor in {**parameters, **buffers}.items()},
            **{("c", name): tensor for name, tensor in program.constants.items()},
        }
        return cls(
            name=f"{program.stage} of pattern {program.pattern}",
            layer=_compiled(found.text, device, backend),
            tensors=tuple(held[name] for name in found.tensors),
            varying=found.varying,
            device=device,
        )

    def __call__(self, *inputs: Tensor | int) -> tuple[Tensor, ...]:
        given = [self._settled(value, dims) for value, dims in zip(inputs, self.varying, strict=True)]
        try:
            return self.layer(self.tensors, *given)
        except RuntimeError as error:
            error.add_note(f"in compiled stage {self.name}")
            raise

    def _settled(self, value: Tensor | int, dims: tuple[int, ...]) -> Tensor:
        """An input as compiled code wants it wherever it comes from: it is made for one layout, and for sizes that vary."""
        if isinstance(value, int):
            tensor = torch.empty((value, 0), device=self.device)
        elif value.is_contiguous() and value.storage_offset() == 0:
            tensor = value
        else:
            tensor = value.clone(memory_format=torch.contiguous_format)
        if dims:
            torch._dynamo.maybe_mark_dynamic(tensor, dims)
        return tensor


@functools.cache
def _compiled(text: str, device: torch.device, backend: str) -> Layer:
    filename = f"<layer {hashlib.sha256(text.encode()).hexdigest()[:12]}>"
    layer: Any = execute(text, filename, device=device)["layer"]
    # Not dynamic: of sizes those vary that are marked, so nothing is compiled twice to find out which do.
    return torch.compile(layer, backend=backend, fullgraph=True, dynamic=False)
