"""A step can be followed: rank 0 goes through few files from `Engine.step` to the loss, beside those that plan it."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType

from support.graphs.hand_stages import HandModel, HandSource, hand_plan, hand_samples
from support.paths import ROOT
from support.product import LINKS, PACKAGE

from mmcompile.batching.step_planner import StepPlanner
from mmcompile.runtime.engine import Engine

MOST_FILES = 20
FOLDERS = (PACKAGE, *(ROOT / link for link in LINKS))


class StepPath:
    """Product files in which Python functions run while `on`, in order, without those of planning only."""

    def __init__(self) -> None:
        self.on = False
        self.files: list[str] = []
        self._planning = False

    def note(self, frame: FrameType, event: str, _: object) -> None:
        if not self.on or event not in ("call", "return"):
            return
        code = frame.f_code
        if code in (StepPlanner.plan.__code__, StepPlanner.observe.__code__):
            self._planning = event == "call"
        elif event == "call" and not self._planning and code.co_filename not in self.files:
            self.files.append(code.co_filename)

    @property
    def product(self) -> list[str]:
        found = (Path(file).resolve() for file in self.files if not file.startswith("<"))
        return [str(file.relative_to(ROOT)) for file in found if any(file.is_relative_to(folder) for folder in FOLDERS)]


def test_a_step_goes_through_few_files() -> None:
    path = StepPath()
    before = sys.getprofile()
    # The thread of the session inherits it, so it is set before the engine is made.
    threading.setprofile(path.note)
    sys.setprofile(path.note)
    try:
        with Engine(hand_plan(2, lm0=1, lm1=0, lm2=0), HandSource(HandModel())) as engine:
            engine.step(hand_samples(4))
            path.on = True
            engine.step(hand_samples(4))
            path.on = False
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # type: ignore[arg-type]
    print("\n".join(path.product))
    assert path.product[0] == "mmcompile/runtime/engine.py"
    assert len(path.product) <= MOST_FILES, path.product
