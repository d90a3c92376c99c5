"""`StepRecord`: what is committed with a step, for whoever leads the next one and for whoever watches."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from mmcompile.runtime.monitoring.metrics import StepMetrics


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """The cursor of the commit protocol. JSON by `encode` and `decode`."""

    data: str
    """Cursor of the data after this step (`mmcompile.data.batches.Batches.cursor`)."""
    metrics: StepMetrics

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> StepRecord:
        return msgspec.json.decode(text, type=cls)
