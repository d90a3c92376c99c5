"""`ProgramSource`: where the engine gets stage programs from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from mmcompile.codegen.program import PreparedMicrobatch
from mmcompile.data.collate import Value


class ProgramSource(Protocol):
    """Programs of the model by pattern; rank 0 alone has it."""

    def prepare(self, batch: Mapping[str, Value]) -> PreparedMicrobatch:
        """Match a collated microbatch with the programs that run it, capturing a new pattern where none fits.

        `programs` with a `pattern` seen before must be the programs seen before. With `per_token` programs,
        `num_tokens` must be set.

        Raises:
            BatchError: the batch does not fit the model. Nothing was sent yet, so the engine stays usable.
        """
        ...

    def parameters(self) -> Mapping[str, Tensor]:
        """All parameters and buffers of the model by original name, tied aliases too; not copies."""
        ...
