"""The graph of stages in three forms."""

from __future__ import annotations

import re
from collections.abc import Callable
from xml.etree import ElementTree

import pytest

from mmcompile.planner.plan.layout import Node, lay_out
from mmcompile.planner.plan.plan import Plan
from mmcompile.report.pictures.stage_graph import stage_graph_dot, stage_graph_svg, stage_graph_text

SVG = "{http://www.w3.org/2000/svg}"


def test_text(plan: Plan, golden: Callable[[str, str], None]) -> None:
    golden("stage_graph.txt", stage_graph_text(plan))


def test_dot_names_every_stage_and_link(plan: Plan) -> None:
    text = stage_graph_dot(plan)
    assert text.startswith("digraph plan {") and text.endswith("}")
    assert re.findall(r'^  "([^"]+)" \[', text, re.M) == [stage.name for stage in plan.stages]
    edges = re.findall(r'^  "([^"]+)" -> "([^"]+)" \[(.*)\];', text, re.M)
    assert [edge[:2] for edge in edges] == [(link.source, link.target) for link in plan.links]
    dashed = [edge[:2] for edge in edges if "dashed" in edge[2]]
    assert dashed == [(link.source, link.target) for link in plan.links if not link.gradient]


def test_svg_is_well_formed_and_inside_its_size(plan: Plan) -> None:
    root = ElementTree.fromstring(stage_graph_svg(plan))
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    assert [text for text in texts if "@ rank" in text] == [f"{s.name} @ rank {s.ranks[0]}" for s in plan.stages]
    lines = list(root.iter(f"{SVG}polyline"))
    assert len(lines) == len(plan.links)
    assert sum("stroke-dasharray" in line.attrib for line in lines) == sum(not link.gradient for link in plan.links)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    points = [tuple(map(float, point.split(","))) for line in lines for point in line.attrib["points"].split()]
    assert all(0 < x < width and 0 < y < height for x, y in points)


def test_no_line_runs_through_a_box(plan: Plan) -> None:
    """Also for edges that skip columns in both directions across rows."""
    nodes = [
        Node(name=f"{row}{column}", column=column, row=row, lines=("x" * (3 + column), "y"))
        for row in range(3)
        for column in range(4)
    ]
    names = [node.name for node in nodes]
    edges = [(a, b) for a in names for b in names if a[1] < b[1]]
    layout = lay_out(nodes, edges)
    cells = {
        (x, y)
        for box in layout.boxes
        for x in range(box.x, box.x + box.width)
        for y in range(box.y, box.y + box.height)
    }
    for path in layout.paths:
        for (x0, y0), (x1, y1) in zip(path.points, path.points[1:], strict=False):
            assert x0 == x1 or y0 == y1
            line = {(x, y) for x in range(min(x0, x1), max(x0, x1) + 1) for y in range(min(y0, y1), max(y0, y1) + 1)}
            assert not line & cells, f"{path.source} -> {path.target}"


def test_an_edge_must_go_right() -> None:
    nodes = [Node(name=name, column=0, row=row, lines=("",)) for row, name in enumerate("ab")]
    with pytest.raises(AssertionError, match="a -> b does not go right"):
        lay_out(nodes, [("a", "b")])
