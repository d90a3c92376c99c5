"""PNG files drawn by matplotlib, an optional dependency that is imported only when a picture is drawn."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

from mmcompile.errors import ConfigError
from mmcompile.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 120


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
