"""What a run of the command line gave."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from support.paths import CONFIGS as CONFIGS


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Outcome]
"""`run("plan", "config.json", ...)`"""
