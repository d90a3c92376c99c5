"""Diagrams of boxes in a grid with edges between them, in character cells. One layout serves text and SVG.

An edge leaves its box at the right, turns up or down in the gap behind the box's column, and enters its target at the left.
Vertical parts of edges are on *tracks*, columns of cells in a gap. Every source has its own, but sources whose only edge leads
to the same box in the next column share one. An edge that skips columns passes them in a *lane*, a row of cells below its
source. Edges of one source share tracks and lanes (they fork), edges into one target share its entry (they join).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

_ROW_GAP = 1
"""Number of free character cells between rows of boxes, if no edge runs there."""
_COLUMN_GAP = 4
"""Number of character cells between columns of boxes, if no edge turns there; the arrow head takes the last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """Box to draw: its name, column and row in the grid, and lines of text."""

    name: str
    column: int
    row: int
    lines: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DiagramBox:
    """Node with its position: x, y of the top left cell, and the size with the frame, in cells."""

    node: Node
    x: int
    y: int
    width: int
    height: int

    @property
    def middle(self) -> int:
        """Cell row of the middle of the box."""
        return self.y + self.height // 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Path:
    """Route of an edge as corner cells (x, y), from the cell right of its source to the cell left of its target."""

    source: str
    target: str
    points: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DiagramLayout:
    """Placed boxes and routed edges of a diagram, and the diagram's size in cells."""

    boxes: tuple[DiagramBox, ...]
    paths: tuple[Path, ...]
    width: int
    height: int
    framed: bool
    """True if boxes have a frame of one cell around them."""


def lay_out(
    nodes: Sequence[Node], edges: Sequence[tuple[str, str]], *, framed: bool = True, row_gap: int = _ROW_GAP
) -> DiagramLayout:
    """Place nodes in the grid and route edges (source name, target name), each from a lower to a higher column.

    Args:
        framed: True to leave room for a frame around each box.
        row_gap: number of free cells between rows; lanes for edges are added to it.
    """
    tracks, lanes = _tracks(nodes, edges)
    boxes = _place(nodes, tracks, lanes, framed, row_gap)
    paths = tuple(_route(boxes[source], boxes[target], boxes, tracks, lanes) for source, target in edges)
    placed = tuple(boxes.values())
    corners = [point for path in paths for point in path.points]
    width = max([box.x + box.width for box in placed] + [x + 1 for x, _ in corners])
    height = max([box.y + box.height for box in placed] + [y + 1 for _, y in corners])
    return DiagramLayout(boxes=placed, paths=paths, width=width, height=height, framed=framed)


_Numbers = dict[int, dict[str, int]]
"""Grid column -> box name -> index of the vertical track in the gap behind it for edges from that box; or row -> box -> lane."""


def _tracks(nodes: Sequence[Node], edges: Sequence[tuple[str, str]]) -> tuple[_Numbers, _Numbers]:
    by_name = {node.name: node for node in nodes}
    outgoing = Counter(source for source, _ in edges)
    tracks: _Numbers = defaultdict(dict)
    lanes: _Numbers = defaultdict(dict)
    numbers: defaultdict[int, dict[tuple[str, bool], int]] = defaultdict(dict)
    for source, target in edges:
        first, last = by_name[source], by_name[target].column - 1
        assert first.column <= last, f"edge {source} -> {target} does not go right"
        # Sources that feed one target and nothing else share its track: no reader can mistake where they go.
        alone = outgoing[source] == 1 and first.column == last
        key = (target, True) if alone else (source, False)
        for column in {first.column, last}:
            tracks[column].setdefault(source, numbers[column].setdefault(key, len(numbers[column])))
        if last > first.column:
            lanes[first.row].setdefault(source, len(lanes[first.row]))
    return tracks, lanes


def _place(
    nodes: Sequence[Node], tracks: _Numbers, lanes: _Numbers, framed: bool, row_gap: int
) -> dict[str, DiagramBox]:
    columns = sorted({node.column for node in nodes})
    rows = sorted({node.row for node in nodes})
    frame, length = 2 * framed, {node.name: max(map(len, node.lines)) for node in nodes}
    widths = {
        column: frame + 2 + max(length[node.name] for node in nodes if node.column == column) for column in columns
    }
    heights = {row: frame + max(len(node.lines) for node in nodes if node.row == row) for row in rows}
    x_of, y_of, x, y = {}, {}, 0, 0
    for column in columns:
        x_of[column] = x
        x += widths[column] + _COLUMN_GAP + len(set(tracks[column].values()))
    for row in rows:
        y_of[row] = y
        y += heights[row] + row_gap + len(lanes[row])
    return {
        node.name: DiagramBox(
            node=node, x=x_of[node.column], y=y_of[node.row], width=widths[node.column], height=heights[node.row]
        )
        for node in nodes
    }


def _route(
    source: DiagramBox, target: DiagramBox, boxes: dict[str, DiagramBox], tracks: _Numbers, lanes: _Numbers
) -> Path:
    name, row = source.node.name, source.node.row
    start = (source.x + source.width, source.middle)
    end = (target.x - 1, target.middle)
    first = start[0] + 1 + tracks[source.node.column][name]
    corners = [(first, source.middle)]
    if target.node.column > source.node.column + 1:
        before = max(box.x + box.width for box in boxes.values() if box.node.column == target.node.column - 1)
        last = before + 1 + tracks[target.node.column - 1][name]
        lane = source.y + source.height + lanes[row][name]
        corners += [(first, lane), (last, lane), (last, target.middle)]
    else:
        corners.append((first, target.middle))
    return Path(source=name, target=target.node.name, points=(start, *corners, end))
