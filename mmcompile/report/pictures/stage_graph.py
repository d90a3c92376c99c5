"""The plan's graph of stages as text, DOT and SVG, with no tool but Python."""

from __future__ import annotations

from xml.sax.saxutils import escape

from mmcompile.planner.plan.layout import DiagramLayout, Node, lay_out
from mmcompile.planner.plan.line_art import line_art
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.plan.plan_record import Link, Stage
from mmcompile.report.pictures.drawing import chain_of, colours
from mmcompile.report.pictures.svg import Svg, dot_text
from mmcompile.units import format_bytes, format_seconds


def stage_graph_text(plan: Plan) -> str:
    """Return Unicode boxes and lines, then one line for each link: tensors, bytes, and whether gradient returns."""
    links = (f"{link.source} -> {link.target}: {_describe(link)}" for link in plan.links)
    return "\n".join([line_art(_layout(plan)), "", *links])


def stage_graph_dot(plan: Plan) -> str:
    """Return Graphviz text; links on which no gradient returns are dashed."""
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
    """Return a self-contained SVG; links on which no gradient returns are dashed, hovering shows the tensors of a link."""
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


def _layout(plan: Plan) -> DiagramLayout:
    deepest = max(stage.depth for stage in plan.stages)
    nodes = [
        Node(name=stage.name, column=deepest - stage.depth, row=row, lines=_stage_lines(stage))
        for row, chain in enumerate(plan.chains)
        for stage in chain.stages
    ]
    return lay_out(nodes, list(dict.fromkeys((link.source, link.target) for link in plan.links)))


def _stage_lines(stage: Stage) -> tuple[str, ...]:
    predicted = stage.prediction
    backward = f", B {format_seconds(predicted.times.backward_s)}" if stage.has_backward else ", no backward"
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
