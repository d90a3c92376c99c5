"""Cut of a captured graph into stages: nodes of each stage, values sent, and values computed twice instead of sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from mmcompile.costmodel.comm import p2p_seconds
from mmcompile.errors import PlanError
from mmcompile.ir.graph import ModelGraph, component_of, info, reached
from mmcompile.passes.values import num_bytes, tensors
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.plan.plan_record import SharedValue


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCut:
    """Nodes of a graph that one stage runs, and the values and tensors that it reads and sends."""

    stage: str
    nodes: tuple[fx.Node, ...] = field(repr=False)
    """Call nodes in graph order: those of the stage's layers, and shared ones that it also computes."""
    roots: tuple[fx.Node, ...]
    """Placeholders that the stage reads."""
    received: tuple[fx.Node, ...]
    """Values that the stage receives from other stages."""
    sent: tuple[tuple[fx.Node, tuple[str, ...]], ...]
    """(value, reading stages in plan order) for each value that other stages read."""
    tensors: tuple[fx.Node, ...]
    """Parameters, buffers and constants that the stage reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphCut:
    """Cut of one captured graph into stages."""

    stages: Mapping[str, StageCut]
    """Stage name -> its part of the graph; stages without work are absent."""
    owner: Mapping[fx.Node, str] = field(repr=False)
    """Value -> stage that computes it; for a shared value that is sent, the stage that sends it."""
    needs_gradient: frozenset[fx.Node] = field(repr=False)
    """Values whose gradient is needed: the loss reaches a trainable parameter through them."""
    shared_values: tuple[SharedValue, ...]


def cut(graph: ModelGraph, plan: Plan) -> GraphCut:
    """Cut `graph` along the layers of `plan`. Nodes must be annotated by gradient-flow."""
    order = [stage.name for stage in plan.stages]
    place = {layer: stage.name for stage in plan.stages for layer in stage.layers}
    calls = graph.calls
    owner: dict[fx.Node, str] = {}
    for node in calls:
        if not info(node).shared:
            key = (component_of(node), info(node).layer)
            if key not in place:
                raise PlanError(
                    f"layer {key[1]} of component {key[0]!r} is in no stage of the plan; plan this model again"
                )
            owner[node] = place[key]
    readers = _shared_readers(calls, owner, order)
    decisions, sent_shared = _decide(readers, plan)
    owner.update(sent_shared)
    needs = frozenset(node for node in calls if info(node).carries_gradient)
    stages: dict[str, StageCut] = {}
    reads = {stage: _reads(stage, owner) for stage in order if stage in owner.values()}
    for stage, (own, received, leaves) in reads.items():
        sent = {
            node: tuple(other for other in order if other != stage and other in reads and node in reads[other][1])
            for node in own
            if owner.get(node) == stage
        }
        stages[stage] = StageCut(
            stage=stage,
            nodes=tuple(sorted(own)),
            roots=tuple(sorted(node for node in leaves if node.op == "placeholder")),
            received=tuple(sorted(received)),
            sent=tuple((node, sent[node]) for node in sorted(sent) if sent[node]),
            tensors=tuple(sorted(node for node in leaves if node.op == "get_attr")),
        )
    return GraphCut(stages=stages, owner=owner, needs_gradient=needs, shared_values=decisions)


def _reads(stage: str, owner: Mapping[fx.Node, str]) -> tuple[set[fx.Node], set[fx.Node], set[fx.Node]]:
    """Return three sets for a stage: nodes it computes, values other stages send it, and inputs or parameters it reads.

    `owner` maps a node to its stage; shared nodes have none, and are computed in each stage that reads them.
    """
    own = {node for node, name in owner.items() if name == stage}
    received: set[fx.Node] = set()
    leaves: set[fx.Node] = set()
    stack = [source for node in own for source in node.all_input_nodes]
    while stack:
        node = stack.pop()
        if node in own or node in received or node in leaves:
            continue
        if node.op != "call_function":
            leaves.add(node)
        elif node in owner:
            received.add(node)
        else:  # shared: computed here too
            own.add(node)
            stack.extend(node.all_input_nodes)
    return own, received, leaves


def _shared_readers(
    calls: Sequence[fx.Node], owner: Mapping[fx.Node, str], order: list[str]
) -> dict[fx.Node, tuple[str, ...]]:
    """Return shared value -> stages that need it, in plan order. A shared value (mask, rotary table) belongs to no layer.

    Only values after which the stages differ are returned: if all stages need `cos = angles.cos()` and each reshapes `cos` for
    itself, `cos` is returned; `angles` is not, as all stages compute the same value from it.
    """
    needing: dict[fx.Node, frozenset[str]] = {}
    for node in reversed(calls):
        users = [needing[user] for user in node.users if user in needing]
        needing[node] = frozenset((owner[node],)) if node in owner else frozenset().union(*users)
    parting: dict[fx.Node, tuple[str, ...]] = {}
    for node in calls:
        if node not in owner:
            # What all its stages read after it is decided there.
            ways = (needing[user] for user in node.users if user in needing and needing[user] != needing[node])
            if len(frozenset().union(*ways)) > 1:
                parting[node] = tuple(stage for stage in order if stage in needing[node])
    return parting


def _decide(
    readers: Mapping[fx.Node, tuple[str, ...]], plan: Plan
) -> tuple[tuple[SharedValue, ...], dict[fx.Node, str]]:
    """Decide for each shared value that several stages read: compute it in each stage, or compute it once and send it.

    The faster way is chosen. Computing costs the bytes that its whole computation moves, over memory bandwidth; sending costs
    its bytes over the link. A value read in several chains is always computed in each stage, because microbatches of
    different chains may hold different samples.
    """
    decisions, sent = [], {}
    device, link = plan.cluster.device, plan.cluster.intra
    chain_of = {stage.name: chain.name for chain in plan.chains for stage in chain.stages}
    for node, stages in readers.items():
        if len(stages) < 2 or not isinstance(node.meta["val"], torch.Tensor):
            continue
        computing = reached([node], lambda n: [source for source in n.all_input_nodes if source.op == "call_function"])
        moved = sum(num_bytes(tensor) for own in computing for tensor in tensors(own))
        recompute_s = moved / device.memory_bytes_per_s
        send_s = p2p_seconds(num_bytes(node.meta["val"]), link)
        apart = len({chain_of[stage] for stage in stages}) > 1
        choice = "recompute" if apart or recompute_s <= send_s else "send"
        if choice == "send":
            sent[node] = stages[0]
        decisions.append(
            SharedValue(name=node.name, stages=stages, choice=choice, recompute_s=recompute_s, send_s=send_s)
        )
    return tuple(decisions), sent
