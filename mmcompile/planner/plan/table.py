"""A plan as plain text of at most forty lines, for plans of any size.

Header, chains as boxes, stages, prediction, bottlenecks and fault tolerance come first. Templates, cuts, rejected alternatives,
notes, links and shared values share the lines that remain; each of these sections counts what it leaves out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from mmcompile.planner.plan.bottlenecks import bottlenecks, bubble_text, causes
from mmcompile.planner.plan.layout import Node, lay_out
from mmcompile.planner.plan.line_art import line_art
from mmcompile.planner.plan.plan_record import Chain, Cut, Link, PlanRecord, SharedValue
from mmcompile.planner.plan.stage_rows import frozen_text, recompute_text, stage_table
from mmcompile.units import counted, format_bytes, format_seconds, labelled

_MAX_LINES = 40
_MAX_STAGE_ROWS = 10
_MAX_BOX_ROWS = 8
_MAX_BUBBLES = 3
_MAX_NAMES = 2
_LABEL = 13
"""Width in characters of the column of labels in a plan's table."""


def format_plan(plan: PlanRecord) -> str:
    """Return a plan as text, at most forty lines: layout, times, memory, bottlenecks and reasons."""
    head = [*_header(plan), "", *_boxes(plan), "", *stage_table(plan.chains, _MAX_STAGE_ROWS), ""]
    head += labelled("predicted", _prediction(plan), _LABEL)
    head += labelled("bottlenecks", [str(one) for one in bottlenecks(plan)], _LABEL)
    if plan.resilience is not None:
        head += labelled("resilience", [plan.resilience.promise], _LABEL)
    room = _MAX_LINES - len(head)
    return "\n".join(line.rstrip() for line in [*head, *_rest(plan, room)])


def _header(plan: PlanRecord) -> list[str]:
    used = len({rank for stage in plan.stages for rank in stage.ranks})
    available = plan.cluster.num_devices
    devices = f"{used} of {available} devices" if used <= available else f"{used} processes"
    first = (
        f"{plan.fingerprint.model} on {plan.cluster}: {counted(len(plan.stages), 'stage')} on {devices}, {plan.schedule}, "
        f"recompute {recompute_text(plan.stages)}, {_batch(plan)}"
    )
    second = [
        f"strategy {plan.strategy}",
        f"averages over {plan.data}" if plan.data else "sizes of the example batch",
        f"costs {plan.costs}",
    ]
    if plan.attention != "model":
        second.append(f"{plan.attention} attention")
    return [first, "; ".join(second)]


def _batch(plan: PlanRecord) -> str:
    replicas = plan.chains[-1].dp
    steps = counted(plan.num_microbatches, "microbatch")
    steps += f" x {replicas} replicas" if replicas > 1 else ""
    if not plan.global_batch:
        return steps
    return f"global batch {plan.global_batch} = {steps} x {counted(plan.microbatch_samples, 'sample')}"


def _boxes(plan: PlanRecord) -> list[str]:
    """Return lines of a diagram: chains as boxes, links as edges; without links, an edge from each chain to the last."""
    edges = plan.chain_edges or [(chain.name, plan.chains[-1].name) for chain in plan.chains[:-1]]
    columns_of = _columns(plan.chains, edges)
    # The first free row of the chain's column.
    taken: Counter[int] = Counter()
    parallel: dict[str, int] = {}
    for chain in plan.chains:
        parallel[chain.name] = taken[columns_of[chain.name]]
        taken[columns_of[chain.name]] += 1
    many = max(parallel.values())
    if many >= _MAX_BOX_ROWS:
        return [f"{len(plan.chains)} chains, too many to draw"]
    nodes = [
        Node(
            name=chain.name,
            column=columns_of[chain.name],
            row=parallel[chain.name],
            lines=_chain_lines(chain) if many < 2 else ("   ".join(_chain_lines(chain)),),
        )
        for chain in plan.chains
    ]
    return line_art(lay_out(nodes, edges, framed=many < 3, row_gap=0)).splitlines()


def _columns(chains: Sequence[Chain], edges: Iterable[tuple[str, str]]) -> dict[str, int]:
    """Return chain name -> column in the diagram. A chain is one column left of the leftmost chain that it sends to."""
    distance = {chain.name: 0 for chain in chains}
    position = {chain.name: index for index, chain in enumerate(chains)}
    for source, target in sorted(edges, key=lambda edge: -position[edge[0]]):
        distance[source] = max(distance[source], distance[target] + 1)
    farthest = max(distance.values())
    return {name: farthest - steps for name, steps in distance.items()}


def _chain_lines(chain: Chain) -> tuple[str, str]:
    degrees = f"tp {chain.tp}  cp {chain.cp}  pp {len(chain.stages)}  dp {chain.dp}{' fsdp' if chain.fsdp else ''}"
    frozen = frozen_text(chain.stages)
    share = {"0%": "all trains", "100%": "frozen", "-": "no parameters"}.get(frozen, f"{frozen} frozen")
    return " + ".join(chain.components), f"{degrees}  {share}"


def _prediction(plan: PlanRecord) -> list[str]:
    predicted = plan.predicted
    parts = [
        f"iteration {format_seconds(predicted.iteration_s)}",
        f"bubble {predicted.bubble:.1%}",
        f"lower bound {format_seconds(predicted.lower_bound_s)}",
        f"gap {predicted.gap:.1%}",
    ]
    if plan.global_batch and predicted.iteration_s:
        rate = plan.global_batch / predicted.iteration_s
        parts.insert(1, f"{rate:,.0f} samples/s" if rate >= 100 else f"{rate:.3g} samples/s")
    if predicted.reduce_s:
        parts.append(f"{format_seconds(predicted.reduce_s)} of it reduces gradients and steps")
    shares = sorted(predicted.bubbles, key=lambda share: -sum(causes(share).values()))
    rows = [bubble_text(share) for share in shares[:_MAX_BUBBLES]]
    left = [f"and {counted(len(shares) - len(rows), 'more chain')}"] if len(shares) > len(rows) else []
    return [", ".join(parts), *rows, *left]


def _rest(plan: PlanRecord, room: int) -> list[str]:
    """Return at most `room` lines: the plan's optional sections, such as notes and links, shortened to fit."""
    resilience = plan.resilience
    sections = {
        "templates": [] if resilience is None else resilience.rows(len(resilience.templates)),
        "cuts": _cuts(plan.cuts),
        "rejected": [f"{one.what}: {one.reason}" for one in plan.rejected],
        "notes": list(plan.notes),
        "links": _links(plan.links),
        "shared": [_shared(value) for value in plan.shared_values],
    }
    wanted = {name: len(lines) for name, lines in sections.items() if lines}
    given = _deal(wanted, room)
    lines: list[str] = []
    for name, count in given.items():
        shown = _first(sections[name], count)
        if name == "templates" and resilience is not None:
            shown = resilience.rows(count)
        lines += labelled(name, shown, _LABEL)
    return lines


def _deal(wanted: Mapping[str, int], room: int) -> dict[str, int]:
    """Return section -> number of its lines: one more in turn, until each has as many as in `wanted` or `room` is used up."""
    given = {name: 0 for name in wanted}
    while room > 0 and given != wanted:
        for name, count in wanted.items():
            if given[name] < count and room > 0:
                given[name] += 1
                room -= 1
    return {name: count for name, count in given.items() if count}


def _first(lines: Sequence[str], count: int) -> list[str]:
    shown = list(lines[:count])
    if len(lines) > count:
        shown[-1] += f" (and {len(lines) - count} more)"
    return shown


def _cuts(cuts: Sequence[Cut]) -> list[str]:
    """Return lines on why chains are cut into stages where they are; reasons that differ only in numbers share a line."""
    groups: dict[tuple[str, str], list[Cut]] = {}
    for cut in cuts:
        chain = cut.stage.rpartition(".")[0]
        groups.setdefault((chain, re.sub(r"[\d.]+", "#", cut.reason)), []).append(cut)
    return [_cut(group) for group in groups.values()]


def _cut(group: Sequence[Cut]) -> str:
    first, last = group[0], group[-1]
    if len(group) == 1:
        return f"after {first.stage}: {first.reason}"
    alike = "" if all(cut.reason == first.reason for cut in group) else " (the first; the others alike)"
    return f"after {first.stage}..{last.stage.rpartition('.')[2]} x{len(group)}: {first.reason}{alike}"


def _links(links: Sequence[Link]) -> list[str]:
    """Return lines on the links between stages, largest first; links along one chain with equal bytes share a line."""
    groups: dict[tuple[object, ...], list[Link]] = {}
    for link in sorted(links, key=lambda link: -link.num_bytes):
        ends = tuple(name.rpartition(".")[0] for name in (link.source, link.target))
        along = ends if ends[0] == ends[1] else (link.source, link.target)
        groups.setdefault((*along, bool(link.gradient), link.num_bytes), []).append(link)
    return [_link(group) for group in groups.values()]


def _link(group: Sequence[Link]) -> str:
    link = group[0]
    where = f"{link.source} -> {link.target}" + (f" and {len(group) - 1} alike" if len(group) > 1 else "")
    back = "gradient returns" if link.gradient else "no gradient"
    names = _names(tensor.name for tensor in link.tensors)
    return f"{where}: {names or 'tensors'}, {format_bytes(link.num_bytes)} a microbatch, {back}"


def _shared(value: SharedValue) -> str:
    did = "computed again in each" if value.choice == "recompute" else "sent"
    times = f"{format_seconds(value.recompute_s)} to compute, {format_seconds(value.send_s)} to send"
    return f"{value.name} {did} of {_names(value.stages)}: {times}"


def _names(names: Iterable[str]) -> str:
    listed = list(names)
    if len(listed) <= _MAX_NAMES + 1:
        return ", ".join(listed)
    return f"{', '.join(listed[:_MAX_NAMES])} and {len(listed) - _MAX_NAMES} more"
