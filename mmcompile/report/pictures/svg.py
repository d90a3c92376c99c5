"""SVG text of graphs: boxes and edges of a `DiagramLayout`, which has their positions in character cells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

from mmcompile.planner.plan.layout import DiagramBox, DiagramLayout, Path

_CELL_WIDTH, _CELL_HEIGHT, _MARGIN = 7.5, 17.0, 12.0
"""Width and height of a character cell, and margin around the picture, in pixels."""
_MARKER = (
    '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    '<path d="M0 0L8 4L0 8z" fill="#555"/></marker></defs>'
)


@dataclass(frozen=True, slots=True)
class Svg:
    """SVG writer of one layout, whose character cells are scaled to pixels."""

    layout: DiagramLayout

    def document(self, body: Iterable[str]) -> str:
        """Return the whole SVG file, with the parts in `body` drawn in order."""
        width, height = _x(self.layout.width) + _MARGIN, _y(self.layout.height) + _MARGIN
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            'font-family="monospace" font-size="12">'
        )
        return "\n".join([head, _MARKER, '<rect width="100%" height="100%" fill="white"/>', *body, "</svg>"]) + "\n"

    def path(self, path: Path, title: str, *, dashed: bool) -> str:
        """Return the SVG element of a routed edge; `title`, XML-escaped, shows on hovering."""
        points = " ".join(f"{_x(x + 0.5):.1f},{_y(y + 0.5):.1f}" for x, y in path.points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        return (
            f'<polyline points="{points}" fill="none" stroke="#555" stroke-width="1.5" marker-end="url(#arrow)"{dash}>'
            f"<title>{title}</title></polyline>"
        )

    def box(self, box: DiagramBox, colour: str) -> Iterator[str]:
        """Yield a filled box with its lines, the first in bold."""
        x, y = _x(box.x), _y(box.y)
        size = f'width="{box.width * _CELL_WIDTH:.1f}" height="{box.height * _CELL_HEIGHT:.1f}"'
        yield f'<rect x="{x:.1f}" y="{y:.1f}" {size} rx="4" fill="{colour}"/>'
        for index, line in enumerate(box.node.lines):
            weight = ' font-weight="bold"' if index == 0 else ""
            left, base = x + 1.5 * _CELL_WIDTH, y + (index + 1.7) * _CELL_HEIGHT
            yield f'<text x="{left:.1f}" y="{base:.1f}" fill="white"{weight}>{escape(line)}</text>'


def dot_text(text: str) -> str:
    r"""Quote a string for Graphviz; line breaks become `\\n`."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _x(cells: float) -> float:
    return _MARGIN + cells * _CELL_WIDTH


def _y(cells: float) -> float:
    return _MARGIN + cells * _CELL_HEIGHT
