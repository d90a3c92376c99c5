"""From a captured model and what is wanted to a plan: costs, space of the search, the search itself, links between stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from mmcompile.passes.cost_table import CostTable
from mmcompile.passes.layer_kinds import layer_kinds
from mmcompile.plan.chains import ProjectorPlacement
from mmcompile.plan.constraints import Constraint, decided_stages
from mmcompile.plan.geometry import geometries
from mmcompile.plan.plan import Attention, Fingerprint, Packing, Plan, ScheduleKind
from mmcompile.plan.search.infeasible import explain
from mmcompile.plan.search.outcome import plan_of
from mmcompile.plan.search.projector_only import fresh
from mmcompile.plan.search.rates import sample_rates
from mmcompile.plan.search.search import problem_of, searched
from mmcompile.plan.search.settings import Placing, SearchSpace
from mmcompile.plan.search.strategies import AUTO
from mmcompile.plan.shared_tokens import SharedTokens
from mmcompile.plan.templates.plan_resilience import notes_of, plan_resilience
from mmcompile.plan.workload import Workload
from mmcompile.runtime.timer import processor_name
from mmcompile.step.collate import Sample

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
    placement: Placing | None = None
    tensor_parallel: int | None = None
    replicas: int | Mapping[str, int] | None = None
    """Of the language model, or of each chain or component named."""
    packing: Packing | None = None
    """What keeps samples of one row apart; None for padded samples in rows of their own."""
    constraints: tuple[Constraint, ...] = ()
    calibration: Calibration | None = None
    solver_seconds: float | None = None
    fault_tolerance: int | None = None
    """Nodes that may fail at once; None for a plan without templates."""

    def check(self) -> None:
        """Refuse what conflicts or has no effect. Raises ConfigError."""
        for name, number in self.replicas.items() if isinstance(self.replicas, Mapping) else (("", self.replicas),):
            if number is not None and number < 1:
                raise ConfigError(f"replicas of {name or 'the language model'} are {number}; give 1 or more")
        if self.fault_tolerance is not None and self.fault_tolerance < 0:
            raise ConfigError(
                f"fault_tolerance is {self.fault_tolerance}; give the number of nodes that may fail at once, 0 or more"
            )
        if self.global_batch is not None:
            return
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
            schedules=space.schedules if self.schedule is None else (self.schedule,),
            placements=space.placements if self.placement is None else (self.placement,),
            recomputes=space.recomputes if self.recompute is None else (self.recompute,),
            microbatches=space.microbatches if self.num_microbatches is None else (self.num_microbatches,),
        )


def check_agrees(
    plan: Plan,
    attention: Attention | None,
    context_parallel: int | None,
    replicas: int | Mapping[str, int] | None,
    packing: Sequence[Sample] | None,
) -> None:
    """Refuse options that a plan has decided otherwise. Raises ConfigError."""
    if attention not in (None, plan.attention) or context_parallel not in (None, plan.context_parallel):
        raise ConfigError(
            f"the plan has attention {plan.attention!r} and context_parallel {plan.context_parallel}, asked were "
            f"{attention!r} and {context_parallel}: a plan decides these; leave them out, or make another plan"
        )
    if replicas is not None:
        raise ConfigError(
            f"replicas={replicas} has no effect together with a plan: the plan decides it; drop one of the two"
        )
    if (plan.packing is None) != (packing is None):
        said = "does not pack samples" if plan.packing is None else "packs samples"
        raise ConfigError(
            f"the plan {said}, and packing was {'not ' if packing is None else ''}given: give packing (two samples or more) both "
            "to plan and to parallelize, or to none"
        )


OnPhase = Callable[[str, float], None]
"""Told the name of a phase and its seconds."""


def make_plan(
    captured: Capture,
    batch: Mapping[str, Any],
    wanted: Wanted,
    fingerprint: Fingerprint,
    on_phase: OnPhase = lambda name, seconds: None,
) -> Plan:
    """Find the plan.

    Args:
        captured: annotated by gradient-flow.
        batch: what it was captured on, completed.
        on_phase: told the seconds of `"cost"`, `"search"`, `"proof"` and `"templates"` where there are any, and `"links"`.

    Raises:
        PlanError, ConfigError: as `mmcompile.plan`.
    """
    choice, clock = wanted.attention, _Clock(on_phase)
    captured = with_words(captured, choice, batch)
    graph = captured.graph
    dtype = graph.main_dtype
    kinds = _checked_kinds(graph, wanted, dtype)
    table = Cost().run(graph)
    engine_runs_it = wanted.global_batch is None
    costs: CostTable = table
    if engine_runs_it and choice.context_parallel > 1:
        costs = _with_shared_tokens(graph, table, choice.context_parallel, wanted, dtype)
    can_share = wanted.search_tokens and _can_share_tokens(captured, choice)
    packed = wanted.packing is not None
    workload = None if engine_runs_it else Workload.of(graph, table, batch, wanted.stats, packed=packed)
    clock.done("cost")
    problem = problem_of(
        graph,
        costs,
        wanted.cluster,
        dtype=dtype,
        fingerprint=fingerprint,
        stages={**decided_stages(wanted.constraints), **(wanted.stages or {})},
        replicas=_replicas(graph, wanted),
        projector=wanted.projector,
        entries=_entries(graph),
        shards=choice.context_parallel if engine_runs_it else 1,
        space=wanted.space(can_share),
        global_batch=wanted.global_batch,
        workload=workload,
        kinds=kinds,
        calibration=wanted.calibration,
    )
    search, best = searched(problem, wanted.strategy)
    clock.done("search")
    if best is None:
        raise PlanError(explain(problem))
    notes: tuple[str, ...] = ()
    if wanted.constraints or wanted.solver_seconds is not None:
        # Z3 is a large library, and workers need none.
        from mmcompile.plan.exact.constrained import constrained

        outcome = constrained(search, wanted.constraints, budget_s=wanted.solver_seconds or SOLVER_SECONDS)
        best, notes = outcome.best, outcome.notes
        clock.done("proof")
    resilience = None
    if wanted.fault_tolerance is not None:
        resilience = plan_resilience(problem, best.candidate, wanted.fault_tolerance)
        decided = bool(wanted.constraints or wanted.stages)
        notes = (*notes, *notes_of(resilience, best.candidate, constrained=decided))
        clock.done("templates")
    found = plan_of(search, best, strategy=wanted.strategy)
    cp = found.context_parallel
    choice = replace(
        choice,
        context_parallel=cp,
        head_stride=_shared(graph, cp, wanted.cluster, dtype).head_stride if cp > 1 else 0,
    )
    pricing = fresh(problem.pricing, table=table, given_cp=1)
    found = replace(
        found,
        attention=choice.attention,
        head_stride=choice.head_stride,
        notes=(*found.notes, *notes, *([str(wanted.packing)] if wanted.packing else [])),
        packing=wanted.packing,
        resilience=resilience,
        sample_rates=sample_rates(best.candidate, geometries(graph, table.loads, batch, packed=packed), pricing),
    )
    found = _linked(captured, found, choice)
    clock.done("links")
    return found


class _Clock:
    """Tells how long each phase took."""

    def __init__(self, on_phase: OnPhase) -> None:
        self._on_phase = on_phase
        self._since = time.perf_counter()

    def done(self, phase: str) -> None:
        now = time.perf_counter()
        self._on_phase(phase, now - self._since)
        self._since = now


def _replicas(graph: ModelGraph, wanted: Wanted) -> Mapping[str, int]:
    """Chain or component name -> replicas, where that is decided."""
    if isinstance(wanted.replicas, int):
        return {graph.loss_component: wanted.replicas}
    return wanted.replicas or {}


def _linked(captured: Capture, plan: Plan, choice: AttentionChoice) -> Plan:
    """The plan with what crosses between its stages; one that runs layers in several stages has no such programs."""
    layers = [(s.component, i) for stage in plan.stages for s in stage.segments for i in range(s.first, s.last)]
    if len(set(layers)) < len(layers):
        return plan
    parts = cut(with_shared_tokens(captured, choice).graph, plan)
    return replace(plan, links=links(parts), shared_values=parts.shared_values)


def _shared(graph: ModelGraph, num_ranks: int, cluster: Cluster, dtype: str) -> SharedTokens:
    return SharedTokens(graph=graph, num_ranks=num_ranks, cluster=cluster, dtype=dtype)


def _with_shared_tokens(graph: ModelGraph, table: CostTable, num_ranks: int, wanted: Wanted, dtype: str) -> CostTable:
    """The table with the costs of one rank for the component whose tokens are shared, which are known at the captured load only.

    Nothing is measured at a load that is not known; then no component is, for measured and analytic seconds do not compare.
    """
    layers = _shared(graph, num_ranks, wanted.cluster, dtype).costs(table.layers)
    if wanted.calibration is not None:
        return CostTable(layers=layers)
    rest = {name for name in layers if name != graph.loss_component}
    return CostTable(
        layers=layers,
        loads={name: load for name, load in table.loads.items() if name in rest},
        growing={name: costs for name, costs in table.growing.items() if name in rest},
        captured_loads={name: load for name, load in table.captured_loads.items() if name in rest},
    )


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
    here = processor_name(torch.device("cpu")) if wanted.cluster.is_local else None
    wanted.calibration.check(device=wanted.cluster.device.name, dtype=dtype, processor=here)
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
