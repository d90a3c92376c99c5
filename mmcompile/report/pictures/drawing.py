"""Colours of components, the same in every picture, and PNG files; matplotlib, optional, is imported only to draw one."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from mmcompile.errors import ConfigError
from mmcompile.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 120
_COLOURS = ("#4477aa", "#cc6677", "#228833", "#aa7700", "#7755aa", "#117788", "#bb3388", "#667722")
"""Colours distinguishable with common colour blindness, dark enough for white text (qualitative schemes of Paul Tol)."""


def chain_of(stage: str) -> str:
    """Return the chain of components of a stage: `"language_model.1"` -> `"language_model"`."""
    return stage.rpartition(".")[0] or stage


def colours(stages: Iterable[str]) -> dict[str, str]:
    """Return chain name -> `#rrggbb`, by order of first appearance; after eight chains colours repeat."""
    chains = dict.fromkeys(chain_of(stage) for stage in stages)
    return {chain: _COLOURS[index % len(_COLOURS)] for index, chain in enumerate(chains)}


def lighter(colour: str, share: float) -> str:
    """Mix `share` (0..1) of white into `#rrggbb`."""
    channels = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{round(value + (255 - value) * share):02x}" for value in channels)


def new_figure(what: str, width: float, height: float) -> Figure:
    """Return an empty figure, sizes in inches. Raises ConfigError, with `what` as its first words, if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError(f"{what} needs {error.name}: pip install 'mmcompile[demo]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def write_png(path: str | os.PathLike[str], figure: Figure) -> Path:
    """Write a figure, 120 dots per inch. Raises OutputError if it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_figure(picture, dpi=_DPI, format="png", metadata={"Software": None})
    return write_atomic(path, picture.getvalue())
