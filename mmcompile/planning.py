"""From a captured model and what is wanted to a plan: costs, space of the search, the search itself, links between stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import torch

from mmcompile.costmodel.calibration import Calibration
from mmcompile.costmodel.cluster import Cluster
from mmcompile.costmodel.compute import Recompute
from mmcompile.data.stats import DatasetStats
from mmcompile.errors import ConfigError, PlanError
from mmcompile.ir.capture import Capture
from mmcompile.ir.graph import ModelGraph, component_of, info
from mmcompile.lower.attention import AttentionChoice, with_shared_tokens, with_words
from mmcompile.lower.cut import cut
from mmcompile.lower.stages import links
from mmcompile.passes.cost import Cost
from mmcompile.passes.layer_kinds import layer_kinds
from mmcompile.plan.chains import ProjectorPlacement
from mmcompile.plan.constraints import Constraint
from mmcompile.plan.infeasible import explain
from mmcompile.plan.outcome import plan_of
from mmcompile.plan.plan import Fingerprint, Plan, ScheduleKind
from mmcompile.plan.search import problem_of, searched
from mmcompile.plan.settings import SearchSpace
from mmcompile.plan.shared_tokens import SharedTokens
from mmcompile.plan.strategies import AUTO
from mmcompile.plan.workload import Workload

DEFAULT_MICROBATCHES = 4
SOLVER_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What a plan is asked to be; the arguments of `mmcompile.plan`, read and checked."""

    cluster: Cluster
    num_microbatches: int | None = None
    stages: Mapping[str, int] | None = None
    projector: ProjectorPlacement | None = None
    attention: AttentionChoice
    search_tokens: bool = False
    """Whether the ranks that share tokens are searched."""
    global_batch: int | None = None
    stats: DatasetStats | None = None
    strategy: str = AUTO
    schedule: ScheduleKind | None = None
    recompute: Recompute | None = None
    tensor_parallel: int | None = None
    replicas: int | None = None
    constraints: tuple[Constraint, ...] = ()
    calibration: Calibration | None = None
    solver_seconds: float | None = None

    def check(self) -> None:
        """Refuse what conflicts or has no effect. Raises ConfigError."""
        if self.global_batch is not None:
            return
        if self.replicas not in (None, 1):
            raise ConfigError(
                f"replicas={self.replicas} shares the samples of a step, but the step has no size: give global_batch"
            )
        if self.stats is not None:
            raise ConfigError(
                f"dataset {self.stats.name} has no effect without global_batch, the samples of a step: a step is then "
                "num_microbatches times the captured batch"
            )
        if self.strategy != AUTO:
            raise ConfigError(f"strategy {self.strategy!r} needs global_batch, the samples of a step")

    def space(self, can_share_tokens: bool) -> SearchSpace:
        """What the search may choose from: everything with a global batch, else what the engine runs."""
        cp = self.attention.context_parallel
        if self.global_batch is None:
            space = SearchSpace.runnable(self.num_microbatches or DEFAULT_MICROBATCHES)
        else:
            space = SearchSpace.everything(self.cluster, context_parallel=can_share_tokens)
            space = replace(space, cp=space.cp if cp == 1 else (cp,))
        return replace(
            space,
            tp=space.tp if self.tensor_parallel is None else (self.tensor_parallel,),
            dp=space.dp if self.replicas is None else (self.replicas,),
            schedules=space.schedules if self.schedule is None else (self.schedule,),
            recomputes=space.recomputes if self.recompute is None else (self.recompute,),
            microbatches=space.microbatches if self.num_microbatches is None else (self.num_microbatches,),
        )


def make_plan(captured: Capture, batch: Mapping[str, Any], wanted: Wanted, fingerprint: Fingerprint) -> Plan:
    """Find the plan.

    Args:
        captured: annotated by gradient-flow.
        batch: what it was captured on, completed.

    Raises:
        PlanError, ConfigError: as `mmcompile.plan`.
    """
    choice = wanted.attention
    captured = with_words(captured, choice, batch)
    graph = captured.graph
    dtype = _main_dtype(graph)
    kinds = _checked_kinds(graph, wanted, dtype)
    table = Cost().run(graph)
    engine_runs_it = wanted.global_batch is None
    costs = table
    if engine_runs_it and choice.context_parallel > 1:
        costs = _shared(graph, choice.context_parallel, wanted.cluster, dtype).costs(table.layers)
    problem = problem_of(
        graph,
        costs,
        wanted.cluster,
        dtype=dtype,
        fingerprint=fingerprint,
        stages=wanted.stages,
        projector=wanted.projector,
        entries=_entries(graph),
        shards=choice.context_parallel if engine_runs_it else 1,
        space=wanted.space(wanted.search_tokens and _can_share_tokens(captured, choice)),
        global_batch=wanted.global_batch,
        workload=None if engine_runs_it else Workload.of(graph, table, batch, wanted.stats),
        kinds=kinds,
        calibration=wanted.calibration,
    )
    search, best = searched(problem, wanted.strategy)
    if best is None:
        raise PlanError(explain(problem))
    notes: tuple[str, ...] = ()
    if wanted.constraints or wanted.solver_seconds is not None:
        # Z3 is a large library, and workers need none.
        from mmcompile.plan.constrained import constrained

        outcome = constrained(search, wanted.constraints, budget_s=wanted.solver_seconds or SOLVER_SECONDS)
        best, notes = outcome.best, outcome.notes
    found = plan_of(search, best, strategy=wanted.strategy)
    cp = found.context_parallel
    choice = replace(
        choice,
        context_parallel=cp,
        head_stride=_shared(graph, cp, wanted.cluster, dtype).head_stride if cp > 1 else 0,
    )
    found = replace(
        found, attention=choice.attention, head_stride=choice.head_stride, notes=(*found.notes, *notes)
    )
    return _linked(captured, found, choice)


def _linked(captured: Capture, plan: Plan, choice: AttentionChoice) -> Plan:
    """The plan with what crosses between its stages; one that runs layers in several stages has no such programs."""
    layers = [(s.component, i) for stage in plan.stages for s in stage.segments for i in range(s.first, s.last)]
    if len(set(layers)) < len(layers):
        return plan
    parts = cut(with_shared_tokens(captured, choice).graph, plan)
    return replace(plan, links=links(parts), shared_values=parts.shared_values)


def _shared(graph: ModelGraph, num_ranks: int, cluster: Cluster, dtype: str) -> SharedTokens:
    return SharedTokens(graph=graph, num_ranks=num_ranks, cluster=cluster, dtype=dtype)


def _can_share_tokens(captured: Capture, choice: AttentionChoice) -> bool:
    """Whether the model's layers keep to their own tokens, but for attention."""
    try:
        with_shared_tokens(captured, replace(choice, context_parallel=2, head_stride=1))
    except PlanError:
        return False
    return True


def _checked_kinds(graph: ModelGraph, wanted: Wanted, dtype: str) -> Mapping[str, tuple[str, ...]] | None:
    """Kinds of layers, where a calibration knows them. Raises ConfigError if it does not hold here."""
    if wanted.calibration is None:
        return None
    wanted.calibration.check(
        device=wanted.cluster.device.name,
        dtype=dtype,
        torch=torch.__version__.split("+")[0],
        mmcompile=version("mmcompile"),
    )
    return layer_kinds(graph)


def _entries(graph: ModelGraph) -> dict[tuple[str, str], int]:
    """(producer, consumer) -> first layer of the consumer that reads the producer."""
    first: dict[tuple[str, str], int] = {}
    for node in graph.module.graph.nodes:
        for source in node.all_input_nodes if node.op == "call_function" else ():
            if source.op == "call_function" and not info(source).shared and not info(node).shared:
                pair = (component_of(source), component_of(node))
                if pair[0] != pair[1]:
                    first[pair] = min(first.get(pair, info(node).layer), info(node).layer)
    return first


def _main_dtype(graph: ModelGraph) -> str:
    """The dtype of most parameter elements."""
    counts: Counter[str] = Counter()
    for spec in graph.parameters:
        counts[spec.dtype] += spec.num_elements
    return counts.most_common(1)[0][0] if counts else "float32"
