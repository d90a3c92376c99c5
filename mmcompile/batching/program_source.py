"""`ProgramSource`: where the engine gets stage programs from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from mmcompile.codegen.program import PreparedMicrobatch
from mmcompile.data.collate import Value


class ProgramSource(Protocol):
    """Source of the programs of a model's pipeline stages, one set for each captured graph (pattern); only rank 0 has one."""

    def prepare(self, batch: Mapping[str, Value]) -> PreparedMicrobatch:
        """Match a collated microbatch with the programs that run it, capturing a new pattern where none fits.

        Equal pattern names must have equal programs. The result must have `num_tokens` if its programs have a loss per token.

        Raises:
            BatchError: the batch does not fit the model. No message was sent yet, so the engine stays usable.
        """
        ...

    def parameters(self) -> Mapping[str, Tensor]:
        """Return all parameters and buffers of the model by original name, tied aliases included; they are not copies."""
        ...
