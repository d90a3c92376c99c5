"""`ReportingAdamW`: tells how much optimizer state a process holds, wherever it runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

FOLDER = "REPORTING_ADAMW_FOLDER"
"""Environment variable: where each process writes a file."""


class ReportingAdamW(torch.optim.AdamW):
    """Writes the bytes of its moments to a file named after the process, after every step."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        values = (value for state in self.state.values() for value in state.values())
        held = sum(value.nbytes for value in values if isinstance(value, torch.Tensor) and value.ndim)
        (Path(os.environ[FOLDER]) / str(os.getpid())).write_text(str(held))
        return result


def reported(folder: Path) -> list[int]:
    """Bytes of every process that held any, ascending."""
    return sorted(int(path.read_text()) for path in folder.iterdir())
