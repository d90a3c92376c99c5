"""The plan's graph of stages as text, DOT and SVG, with no tool but Python."""

from __future__ import annotations

from xml.sax.saxutils import escape

from mmcompile.plan.plan import Link, Plan, Stage
from mmcompile.report.layout import Box, Layout, Node, lay_out
from mmcompile.report.palette import chain_of, colours
from mmcompile.report.svg import Svg, dot_text
from mmcompile.units import format_bytes, format_seconds

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


def stage_graph_text(plan: Plan) -> str:
    """Boxes and lines in Unicode, then one line for each link: tensors, bytes, and whether gradient returns."""
    layout = _layout(plan)
    canvas = [[" "] * layout.width for _ in range(layout.height)]
    _draw_paths(canvas, layout)
    for box in layout.boxes:
        _draw_box(canvas, box)
    art = "\n".join("".join(row).rstrip() for row in canvas)
    return "\n".join([art, "", *(f"{link.source} -> {link.target}: {_describe(link)}" for link in plan.links)])


def stage_graph_dot(plan: Plan) -> str:
    """Graphviz text; links on which no gradient returns are dashed."""
    palette = colours(stage.name for stage in plan.stages)
    lines = [
        "digraph plan {",
        "  rankdir=LR;",
        '  node [shape=box, style=filled, fontcolor=white, fontname="monospace"];',
    ]
    for stage in plan.stages:
        label = dot_text("\n".join(_stage_lines(stage)))
        lines.append(f'  {dot_text(stage.name)} [label={label}, fillcolor="{palette[chain_of(stage.name)]}"];')
    for link in plan.links:
        style = "" if link.gradient else ", style=dashed"
        label, hint = dot_text(format_bytes(link.num_bytes)), dot_text(_describe(link))
        lines.append(f"  {dot_text(link.source)} -> {dot_text(link.target)} [label={label}, tooltip={hint}{style}];")
    return "\n".join([*lines, "}"])


def stage_graph_svg(plan: Plan) -> str:
    """A self-contained SVG; links on which no gradient returns are dashed, hovering tells what a link carries."""
    svg = Svg(_layout(plan))
    palette = colours(stage.name for stage in plan.stages)
    links = {(link.source, link.target): link for link in plan.links}
    parts = []
    for path in svg.layout.paths:
        link = links[path.source, path.target]
        title = escape(f"{link.source} -> {link.target}: {_describe(link)}")
        parts.append(svg.path(path, title, dashed=not link.gradient))
    for box in svg.layout.boxes:
        parts += svg.box(box, palette[chain_of(box.node.name)])
    return svg.document(parts)


def _layout(plan: Plan) -> Layout:
    deepest = max(stage.depth for stage in plan.stages)
    nodes = [
        Node(name=stage.name, column=deepest - stage.depth, row=row, lines=_stage_lines(stage))
        for row, chain in enumerate(plan.chains)
        for stage in chain.stages
    ]
    return lay_out(nodes, list(dict.fromkeys((link.source, link.target) for link in plan.links)))


def _stage_lines(stage: Stage) -> tuple[str, ...]:
    predicted = stage.prediction
    backward = f", B {format_seconds(predicted.backward_s)}" if stage.has_backward else ", no backward"
    segments = (f"{part.component}[{part.first}:{part.last}]" for part in stage.segments)
    return (
        f"{stage.name} @ rank {','.join(map(str, stage.ranks))}",
        *segments,
        f"F {format_seconds(predicted.forward_s)}{backward}",
        format_bytes(predicted.total_bytes),
    )


def _describe(link: Link) -> str:
    names = ", ".join(tensor.name for tensor in link.tensors)
    gradient = "gradient returns" if link.gradient else "no gradient"
    return f"{names} ({format_bytes(link.num_bytes)} a microbatch, {gradient})"


def _draw_paths(canvas: list[list[str]], layout: Layout) -> None:
    directions: dict[tuple[int, int], int] = {}
    for path in layout.paths:
        for (x0, y0), (x1, y1) in zip(path.points, path.points[1:], strict=False):
            step_x, step_y = (x1 > x0) - (x1 < x0), (y1 > y0) - (y1 < y0)
            leave, enter = _bits(step_x, step_y)
            x, y = x0, y0
            while (x, y) != (x1, y1):
                directions[x, y] = directions.get((x, y), 0) | leave
                x, y = x + step_x, y + step_y
                directions[x, y] = directions.get((x, y), 0) | enter
    for (x, y), bits in directions.items():
        canvas[y][x] = _LINES[bits]
    for path in layout.paths:
        x, y = path.points[-1]
        canvas[y][x] = "▶"


def _bits(step_x: int, step_y: int) -> tuple[int, int]:
    """Directions a line takes out of a cell and, one step on, out of the next one backwards."""
    if step_x:
        return (_RIGHT, _LEFT) if step_x > 0 else (_LEFT, _RIGHT)
    return (_DOWN, _UP) if step_y > 0 else (_UP, _DOWN)


def _draw_box(canvas: list[list[str]], box: Box) -> None:
    inner = box.width - 2
    texts = [f" {line}".ljust(inner) for line in box.node.lines]
    texts += [" " * inner] * (box.height - 2 - len(texts))
    rows = [f"┌{'─' * inner}┐", *(f"│{text}│" for text in texts), f"└{'─' * inner}┘"]
    for offset, row in enumerate(rows):
        canvas[box.y + offset][box.x : box.x + box.width] = row
