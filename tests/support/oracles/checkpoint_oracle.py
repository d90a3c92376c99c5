"""Bytes that torch keeps for the backward of each stage when every layer is run under `torch.utils.checkpoint`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from mmcompile.codegen.cut import StageCut, cut
from mmcompile.config import Recompute
from mmcompile.ir.graph import ModelGraph, info, results_of
from mmcompile.planner.plan.plan import Plan
from support.oracles.flop_oracle import saved_storages

KEPT = frozenset(
    {
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "convolution",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "packed_attention",
        "bitfield_attention",
    }
)
"""Products, convolutions and attention, as dispatch names them."""


def checkpointed_bytes(
    graph: ModelGraph, plan: Plan, roots: Mapping[str, Any], permanent: Iterable[Tensor], recompute: Recompute
) -> dict[str, int]:
    """Stage name -> bytes of distinct storages kept for backward; parameters, buffers and constants excluded.

    Each stage runs what its layers share first, then layer by layer; a layer with products in its backward is a
    checkpoint of its own unless `recompute` is "none".

    Args:
        graph: annotated by gradient-flow; its module holds the parameters.
        plan: the stages.
        roots: value of every input, by name.
        permanent: what is there anyway.
        recompute: what torch computes again.
    """
    parts = cut(graph, plan)
    excluded = {tensor.untyped_storage()._cdata for tensor in permanent}
    made: dict[fx.Node, Any] = {}
    kept_bytes: dict[str, int] = {}
    for stage in _in_order(parts.stages):
        env: dict[fx.Node, Any] = {node: roots[str(node.target)] for node in stage.roots}
        env |= {node: attrgetter(str(node.target))(graph.module) for node in stage.tensors}
        env |= {node: made[node].detach().requires_grad_(made[node].requires_grad) for node in stage.received}
        here = excluded | {env[node].untyped_storage()._cdata for node in stage.tensors}
        kept: dict[int, Tensor] = {}
        with saved_storages(kept):
            _run_stage(graph, stage, env, kept, recompute)
        made |= {node: env[node] for node, _ in stage.sent}
        kept_bytes[stage.stage] = sum(
            tensor.untyped_storage().nbytes() for storage, tensor in kept.items() if storage not in here
        )
    return kept_bytes


def _in_order(stages: Mapping[str, StageCut]) -> list[StageCut]:
    waiting, made, order = dict(stages), set(), []
    while waiting:
        ready = [name for name, stage in waiting.items() if made.issuperset(stage.received)]
        assert ready, f"stages wait for each other: {sorted(waiting)}"
        for name in ready:
            order.append(waiting.pop(name))
            made |= set(order[-1].nodes)
    return order


def _run_stage(
    graph: ModelGraph, stage: StageCut, env: dict[fx.Node, Any], kept: dict[int, Tensor], recompute: Recompute
) -> None:
    shared = [node for node in stage.nodes if info(node).shared]
    own = sorted((node for node in stage.nodes if not info(node).shared), key=_layer)
    env |= _computed(shared, env)
    wanted = {node for node, _ in stage.sent} | set(results_of(graph.module.graph))
    for _, group in itertools.groupby(own, key=_layer):
        _run_layer(list(group), wanted, env, kept, recompute)


def _run_layer(
    nodes: list[fx.Node],
    wanted: set[fx.Node],
    env: dict[fx.Node, Any],
    kept: dict[int, Tensor],
    recompute: Recompute,
) -> None:
    inside = set(nodes)
    outside = list(dict.fromkeys(s for node in nodes for s in node.all_input_nodes if s not in inside))
    leaving = [node for node in nodes if node in wanted or any(user not in inside for user in node.users)]
    passed = [source for source in outside if isinstance(env[source], Tensor) and source.op != "get_attr"]

    def run(*values: Tensor) -> tuple[Any, ...]:
        found = _computed(nodes, {**env, **dict(zip(passed, values, strict=True))})
        return tuple(found[node] for node in leaving)

    arguments = [env[source] for source in passed]
    if recompute == "none" or not any(info(node).carries_gradient and _is_product(node) for node in nodes):
        results = run(*arguments)
    else:
        results = checkpoint(run, *arguments, use_reentrant=False, context_fn=_contexts(recompute, kept))
    env |= dict(zip(leaving, results, strict=True))


def _layer(node: fx.Node) -> tuple[str | None, int]:
    return info(node).component, info(node).layer


def _is_product(node: fx.Node) -> bool:
    return any(word in str(node.target) for word in ("linear", "matmul", "bmm", "conv", "attention"))


def _computed(nodes: Iterable[fx.Node], env: Mapping[fx.Node, Any]) -> dict[fx.Node, Any]:
    found: dict[fx.Node, Any] = {}
    for node in nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: found[n] if n in found else env[n])
        assert callable(node.target)
        found[node] = node.target(*args, **kwargs)
    return found


def _contexts(recompute: Recompute, kept: dict[int, Tensor]) -> Callable[[], Any]:
    if recompute == "full":
        return noop_context_fn

    def policy(context: Any, op: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
        if op.overloadpacket.__name__ not in KEPT:
            return CheckpointPolicy.PREFER_RECOMPUTE
        for tensor in context.op_output if isinstance(context.op_output, tuple) else (context.op_output,):
            if isinstance(tensor, Tensor):
                kept.setdefault(tensor.untyped_storage()._cdata, tensor.detach())
        return CheckpointPolicy.MUST_SAVE

    return partial(create_selective_checkpoint_contexts, policy)
