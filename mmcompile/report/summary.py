"""A plan as one plain JSON object for `--json`, flat enough for scripts and dashboards."""

from __future__ import annotations

from typing import Any

import msgspec

from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.plan.plan_record import Stage
from mmcompile.planner.plan.stage_rows import recompute_text
from mmcompile.planner.resilience.resilience import Resilience


def plan_summary(plan: Plan) -> dict[str, Any]:
    """Return `components`, `stages`, `links`, `predicted`, `rejected`, and the plan's request.

    Times [s], sizes [bytes].

    `recompute` is text, a mode or modes with numbers of layers: `"full 3 of 8 layers"`. That of a stage is the list of its
    layers' modes, null where recomputation saves nothing; it is empty if all its layers keep everything.

    `templates` has one object for each number of nodes that a pipeline is planned for, fewest nodes first: `nodes`;
    `stages`, each with `chain`, `first` and `last` (layers of the chain, the last excluded), `devices` (numbered node
    by node from 0) and `seconds` of a microbatch, forward and backward; `slowest_s` of these; `fill_s`, so that b
    microbatches take `fill_s + b * slowest_s`; `gap`, the largest share by which another may be faster, 0 for an optimum.
    It is empty for a plan made without fault tolerance; then `fault_tolerance` (nodes that may fail at once) and
    `cover` (numbers of nodes that can be used in full, in words) are null.
    """
    return {
        "model": plan.fingerprint.model,
        "cluster": str(plan.cluster),
        "processes": plan.num_ranks,
        "strategy": plan.strategy,
        "schedule": plan.schedule,
        "recompute": recompute_text(plan.stages),
        "attention": plan.attention,
        "autocast": list(plan.autocast),
        "num_microbatches": plan.num_microbatches,
        "microbatch_samples": plan.microbatch_samples,
        "global_batch": plan.global_batch,
        "data": plan.data,
        "costs": plan.costs,
        "components": [name for chain in plan.chains for name in chain.components],
        "stages": [
            _stage(stage) | {"tp": chain.tp, "cp": chain.cp, "dp": chain.dp, "fsdp": chain.fsdp}
            for chain in plan.chains
            for stage in chain.stages
        ],
        "links": [
            {
                "source": link.source,
                "target": link.target,
                "tensors": [tensor.name for tensor in link.tensors],
                "gradient": list(link.gradient),
                "bytes": link.num_bytes,
            }
            for link in plan.links
        ],
        "predicted": msgspec.to_builtins(plan.predicted),
        **_resilience(plan.resilience),
        "rejected": msgspec.to_builtins(plan.rejected),
        "notes": list(plan.notes),
        "cuts": msgspec.to_builtins(plan.cuts),
    }


def _resilience(resilience: Resilience | None) -> dict[str, Any]:
    if resilience is None:
        return {"fault_tolerance": None, "cover": None, "templates": []}
    return {
        "fault_tolerance": resilience.fault_tolerance,
        "cover": str(resilience.cover),
        "templates": [
            {
                "nodes": template.num_nodes,
                "stages": msgspec.to_builtins(template.stages),
                "slowest_s": template.slowest_s,
                "fill_s": template.fill_s,
                "gap": template.gap,
            }
            for template in resilience.templates
        ],
    }


def _stage(stage: Stage) -> dict[str, Any]:
    predicted = stage.prediction
    return {
        "name": stage.name,
        "component": "+".join(segment.component for segment in stage.segments),
        "layers": msgspec.to_builtins(stage.segments),
        "devices": list(stage.ranks),
        "recompute": list(stage.recompute),
        **msgspec.to_builtins(predicted.times),
        "memory_bytes": predicted.memory_bytes,
    }
