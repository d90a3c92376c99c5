"""The picture of a step."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmcompile.errors import ConfigError
from mmcompile.planner.schedule.schedule import ActionKind
from mmcompile.planner.schedule.simulate import Event
from mmcompile.report.pictures.drawing import chain_of, colours, lighter
from mmcompile.report.pictures.timeline import computing, draw_timeline, idle_share, length_s


def _pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB"))


def _count(pixels: np.ndarray, colour: str) -> int:
    wanted = [int(colour[start : start + 2], 16) for start in (1, 3, 5)]
    return int((pixels == wanted).all(-1).sum())


def test_bars_have_their_components_colours(events: tuple[Event, ...], tmp_path: Path) -> None:
    pixels = _pixels(draw_timeline(tmp_path / "timeline.png", events))
    palette = colours(event.stage for event in events)
    for chain, colour in palette.items():
        trained = any(event.kind is ActionKind.B and chain_of(event.stage) == chain for event in events)
        assert _count(pixels, colour) > 1000, f"{chain} forward is not drawn"
        assert (_count(pixels, lighter(colour, 0.45)) > 1000) == trained


def test_measured_stands_above_predicted(events: tuple[Event, ...], tmp_path: Path) -> None:
    """The measured one alone has an audio encoder."""
    others = [event for event in events if not event.stage.startswith("audio")]
    rows = {}
    for name, measured, predicted in (("above", events, others), ("below", others, events)):
        pixels = _pixels(draw_timeline(tmp_path / f"{name}.png", measured, predicted))
        colour = colours(event.stage for event in (*measured, *predicted))["audio"]
        wanted = [int(colour[start : start + 2], 16) for start in (1, 3, 5)]
        found = (pixels == wanted).all(-1).sum(1)
        # Bars are wide; the legend's patch, always at the top, is not.
        rows[name] = np.flatnonzero(found > 60).mean() / len(pixels)
    assert rows["above"] < 0.5 < rows["below"]


def test_lengths_and_idle_share(events: tuple[Event, ...]) -> None:
    shifted = [replace(event, start_s=event.start_s + 7, end_s=event.end_s + 7) for event in events]
    assert length_s(computing(shifted)) == pytest.approx(length_s(computing(events)))
    busy = sum(event.end_s - event.start_s for event in computing(events))
    assert idle_share(computing(events)) == pytest.approx(1 - busy / (5 * length_s(computing(events))))


def test_nothing_to_draw(events: tuple[Event, ...], tmp_path: Path) -> None:
    sends = [event for event in events if event.kind.is_send]
    with pytest.raises(ConfigError, match="no timeline to draw"):
        draw_timeline(tmp_path / "timeline.png", sends)
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_error_says_what_to_install() -> None:
    code = """
import sys
sys.modules["matplotlib"] = None
from mmcompile.planner.schedule.schedule import ActionKind
from mmcompile.planner.schedule.simulate import Event
from mmcompile.report.pictures.timeline import draw_timeline
event = Event(rank=0, stage="a.0", kind=ActionKind.F, microbatch=0, start_s=0.0, end_s=1.0)
draw_timeline("never.png", [event])
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert "a timeline picture needs matplotlib" in done.stderr and "pip install 'mmcompile[demo]'" in done.stderr
