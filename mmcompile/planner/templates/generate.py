"""`generate`: all templates of a cluster; `fastest_templates`: the best pipeline for each of some node counts.

For a single chain it is the optimum; where chains branch, `Template.gap` bounds by how much another could be faster. The first
search for a chain checks that each stage's memory holds one microbatch. If early stages of the pipeline found cannot hold their
microbatches in flight, a second search counts the stages behind each stage, and with them these microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence

from mmcompile.errors import PlanError
from mmcompile.planner.resilience.nodes import node_counts
from mmcompile.planner.resilience.template import Template
from mmcompile.planner.templates.branches import best_of_branches
from mmcompile.planner.templates.intervals import FoundPipeline, Search
from mmcompile.planner.templates.layer_table import LayerTable
from mmcompile.planner.templates.line import Line
from mmcompile.planner.templates.sweep import Costs
from mmcompile.units import format_bytes


def generate(table: LayerTable, num_nodes: int, fault_tolerance: int) -> dict[int, Template]:
    """Return the templates with which a cluster can lose nodes and continue with all that are left.

    Args:
        num_nodes: N, number of nodes of the cluster.
        fault_tolerance: f, number of nodes that may fail at once.

    Returns:
        Node count -> the fastest pipeline of so many nodes, from n0 (the fewest nodes that hold a replica) to N - f n0. Node
        counts without a pipeline (with more nodes than layers, for example) are missing.

    Raises:
        PlanError: no pipeline fits the memory (with the reason), or f + 1 replicas do not fit the cluster.
        ConfigError: `fault_tolerance` is negative.
    """
    for least in range(1, num_nodes + 1):
        if fastest_templates(table, [least]):
            return fastest_templates(table, node_counts(num_nodes, least, fault_tolerance))
    raise PlanError(f"no template: a replica fits in no number of nodes up to {num_nodes}: {_why(table, num_nodes)}")


def fastest_templates(table: LayerTable, node_counts: Sequence[int]) -> dict[int, Template]:
    """Return node count -> template of the fastest pipeline, for node counts that have one.

    Every device is in use, and every stage is within one node and fits its memory under 1F1B. For a single chain, templates are
    optima. For branching chains, `Template.gap` bounds by how much another pipeline could be faster; if these chains have many
    layers and memory is tight, a node count may be missing although it has a pipeline.
    """
    line = Line.of(table)
    wanted = sorted({count for count in node_counts if count > 0})
    if not wanted:
        return {}
    find = _best_of_chain if line.is_chain else best_of_branches
    return {count: line.template(count, found.pieces, found.gap) for count, found in find(line, wanted).items()}


def _best_of_chain(line: Line, node_counts: Sequence[int]) -> dict[int, FoundPipeline]:
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


def _why(table: LayerTable, most: int) -> str:
    """Return the reason, as text, why no pipeline of up to `most` nodes fits the memory."""
    for chain in table.chains:
        for layer in range(chain.num_layers):
            # A stage that has only this layer and is the loss stage.
            needed, devices = min(
                (each.parameter_bytes[layer] + each.activation_bytes[layer] + each.working_bytes, each.devices)
                for each in chain.shared
            )
            if table.memory_bytes is not None and needed > table.memory_bytes:
                where = "a device that has" if devices == 1 else f"each of {devices} devices that have"
                return (
                    f"layer {layer} of {chain.name} needs {format_bytes(needed)} on {where} "
                    f"{format_bytes(table.memory_bytes)}; use recomputation, smaller microbatches or larger devices"
                )
    devices, chains = most * table.devices_per_node, len(table.chains)
    if devices < chains:
        return f"{chains} chains need a device each, and there are {devices}; use more nodes, or colocate components"
    stages = -(-table.devices_per_node // table.devices[-1])
    if stages > table.num_layers:
        return (
            f"a node holds {stages} stage{'s' * (stages > 1)} or more, and {table.num_layers} layers make no more than "
            f"{table.num_layers}; use fewer nodes in a pipeline, or let a stage have more devices"
        )
    if table.memory_bytes is None:
        return (
            f"stages of {', '.join(map(str, table.devices))} devices do not add up to nodes of {table.devices_per_node}"
        )
    held = sum(sum(chain.shared[0].parameter_bytes) for chain in table.chains)
    return (
        f"parameters, gradients and optimizer state are {format_bytes(held)}, and stages far from the loss keep a "
        f"microbatch of activations for each stage behind them, in {format_bytes(table.memory_bytes)} a device; use "
        "recomputation, smaller microbatches or more nodes"
    )
