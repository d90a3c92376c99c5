"""`summary`: one line on the sharded parts of a component and its whole parts, with reasons."""

from __future__ import annotations

import re
from collections import Counter

from mmcompile.ir.graph import info
from mmcompile.passes.tensor_parallel.graph_facts import GraphFacts
from mmcompile.passes.tensor_parallel.regions import ComponentSharding
from mmcompile.passes.values import op_name

_MOST_KEPT = 6
_PRODUCTS = ("mm", "matmul", "einsum", "conv", "index")


def summary(facts: GraphFacts, sharding: ComponentSharding) -> str:
    """Summarize: `language_model over 2 ranks: 21 column and 8 row projections, heads of 4 attention ops; whole: ...`."""
    columns = sum(len(region.columns) for region in sharding.regions)
    rows = sum(len(region.sums) for region in sharding.regions)
    parts = [f"{columns} column and {rows} row projections"]
    if sharding.attention():
        parts.append(f"heads of {len(sharding.attention())} attention ops")
    if sharding.embeddings:
        parts.append("embedding")
    if any(region.losses for region in sharding.regions):
        parts.append("head and loss")
    kept = kept_lines(facts, sharding)
    more = f", and {len(kept) - _MOST_KEPT} more" if len(kept) > _MOST_KEPT else ""
    whole = f"; whole: {'; '.join(kept[:_MOST_KEPT])}{more}" if kept else ""
    return f"{sharding.component} over {sharding.count} ranks: {', '.join(parts)}{whole}"


def kept_lines(facts: GraphFacts, sharding: ComponentSharding) -> list[str]:
    """Return one line for each kind of module that every rank holds whole, with number and reason.

    Modules that differ only in the index of their layer are one kind. Example:
    `model.layers.*.mlp.gate (4): aten.softmax works along the sharded dim`.
    """
    names: Counter[tuple[str, str]] = Counter()
    for kept in sharding.kept:
        names[_pattern(info(kept.node).module_path) or op_name(kept.node), kept.reason] += 1
    for weight, op in _stacked(facts, sharding).items():
        names[_pattern(weight), f"read by {op}, and only projections with a weight of two dims are sharded"] += 1
    return [f"{name}{f' ({number})' if number > 1 else ''}: {reason}" for (name, reason), number in names.items()]


def _stacked(facts: GraphFacts, sharding: ComponentSharding) -> dict[str, str]:
    specs = {spec.name: spec for spec in facts.graph.parameters}
    found: dict[str, str] = {}
    for name, readers in facts.uses.items():
        own = [node for node, _ in readers if node.op == "call_function" and info(node).component == sharding.component]
        if own and len(specs[name].shape) > 2 and any(word in op_name(own[0]) for word in _PRODUCTS):
            found[name] = op_name(own[0])
    return found


def _pattern(path: str) -> str:
    # `model.layers.3.mlp` -> `model.layers.*.mlp`
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
