"""Diagrams as text: boxes and edges of a layout drawn with Unicode lines."""

from __future__ import annotations

from mmcompile.planner.plan.layout import DiagramBox, DiagramLayout

_LEFT, _RIGHT, _UP, _DOWN = 1, 2, 4, 8
_LINES = {
    _LEFT: "─",
    _RIGHT: "─",
    _LEFT | _RIGHT: "─",
    _UP: "│",
    _DOWN: "│",
    _UP | _DOWN: "│",
    _DOWN | _RIGHT: "┌",
    _DOWN | _LEFT: "┐",
    _UP | _RIGHT: "└",
    _UP | _LEFT: "┘",
    _UP | _DOWN | _RIGHT: "├",
    _UP | _DOWN | _LEFT: "┤",
    _DOWN | _LEFT | _RIGHT: "┬",
    _UP | _LEFT | _RIGHT: "┴",
    _UP | _DOWN | _LEFT | _RIGHT: "┼",
}


_STEPS = {(1, 0): (_RIGHT, _LEFT), (-1, 0): (_LEFT, _RIGHT), (0, 1): (_DOWN, _UP), (0, -1): (_UP, _DOWN)}
"""(dx, dy) from one cell of a line to the next -> (direction bit to set in the first cell, bit to set in the second)."""


def line_art(layout: DiagramLayout) -> str:
    """Return a layout as lines of text, without trailing spaces."""
    canvas = [[" "] * layout.width for _ in range(layout.height)]
    _draw_paths(canvas, layout)
    for box in layout.boxes:
        _draw_box(canvas, box, framed=layout.framed)
    return "\n".join("".join(row).rstrip() for row in canvas)


def _draw_paths(canvas: list[list[str]], layout: DiagramLayout) -> None:
    directions: dict[tuple[int, int], int] = {}
    for path in layout.paths:
        for (x0, y0), (x1, y1) in zip(path.points, path.points[1:], strict=False):
            step_x, step_y = (x1 > x0) - (x1 < x0), (y1 > y0) - (y1 < y0)
            x, y = x0, y0
            while (x, y) != (x1, y1):
                leave, enter = _STEPS[step_x, step_y]
                directions[x, y] = directions.get((x, y), 0) | leave
                x, y = x + step_x, y + step_y
                directions[x, y] = directions.get((x, y), 0) | enter
    for (x, y), bits in directions.items():
        canvas[y][x] = _LINES[bits]
    for path in layout.paths:
        x, y = path.points[-1]
        canvas[y][x] = "▶"


def _draw_box(canvas: list[list[str]], box: DiagramBox, *, framed: bool) -> None:
    inner = box.width - 2 * framed
    texts = [f" {line}".ljust(inner) for line in box.node.lines]
    texts += [" " * inner] * (box.height - 2 * framed - len(texts))
    rows = [f"┌{'─' * inner}┐", *(f"│{text}│" for text in texts), f"└{'─' * inner}┘"] if framed else texts
    for offset, row in enumerate(rows):
        canvas[box.y + offset][box.x : box.x + box.width] = row
