"""The best pipeline for each node count: exact for a chain, within a stated gap where chains branch and are large.

Memory is first looked at stage by stage; where the best pipeline then keeps too many microbatches in flight, it is
searched again with the stages counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from mmcompile.planner.resilience.template import Template
from mmcompile.planner.templates.branches import best_of_branches
from mmcompile.planner.templates.intervals import Found, Search
from mmcompile.planner.templates.layer_table import LayerTable
from mmcompile.planner.templates.line import Line
from mmcompile.planner.templates.sweep import Costs


def fastest_templates(table: LayerTable, node_counts: Sequence[int]) -> dict[int, Template]:
    """The fastest pipeline for each node count.

    Args:
        node_counts: of the pipelines; no other than these are looked at.

    Returns:
        Node count -> template, for those that have one: every device is in use, every stage has its devices in one node
        and fits their memory under 1F1B. A chain's are optima. Of branching chains, `gap` bounds the distance to the
        optimum; where memory binds and they are large, a pipeline may be missed.
    """
    line = Line.of(table)
    wanted = sorted({count for count in node_counts if count > 0})
    if not wanted:
        return {}
    find = _best_of_chain if line.is_chain else best_of_branches
    return {count: line.template(count, found.pieces, found.gap) for count, found in find(line, wanted).items()}


def _best_of_chain(line: Line, node_counts: Sequence[int]) -> dict[int, Found]:
    last = len(line.names) - 1
    families = [Costs(line=line, path=0, first=0, last=last, weights=(1, *(0,) * last))]
    simple = Search.of(line, families, node_counts)
    simple.run()
    results = {count: simple.result(count) for count, pieces in simple.found.items() if line.fits(pieces)}
    tight = [count for count in simple.found if count not in results]
    if tight:
        counted = Search.of(line, families, tight, num_stages=line.most_stages(max(tight)))
        counted.run()
        results |= {count: counted.result(count) for count in counted.found}
    return dict(sorted(results.items()))
