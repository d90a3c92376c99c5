"""From a captured model and what is wanted to a plan: costs, space of the search, the search itself, links between stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mmcompile.codegen.attention_choice import AttentionChoice, with_shared_tokens, with_words
from mmcompile.codegen.cut import cut
from mmcompile.codegen.stage_passes import with_autocast
from mmcompile.codegen.stage_programs import links
from mmcompile.config import Attention, EncoderPlacement, ProjectorPlacement, Recomputation, Recompute, ScheduleKind
from mmcompile.costmodel.calibration import Calibration
from mmcompile.costmodel.cluster import Cluster
from mmcompile.data.collate import Sample
from mmcompile.data.stats import DatasetStats
from mmcompile.errors import ConfigError, PlanError
from mmcompile.ir.capture import Capture
from mmcompile.ir.graph import ModelGraph, component_of, info
from mmcompile.passes.cost.cost import Cost
from mmcompile.passes.cost.cost_table import CostTable
from mmcompile.passes.layer_kinds import layer_kinds
from mmcompile.passes.tensor_parallel.tensor_axes import TensorAxes, tensor_axes
from mmcompile.planner.plan.constraints import Constraint, decided_stages
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.plan.plan_record import Fingerprint, Packing
from mmcompile.planner.pricing.geometries import geometries
from mmcompile.planner.pricing.shared_tokens import SharedTokens
from mmcompile.planner.pricing.workload import Workload
from mmcompile.planner.search.infeasible import explain
from mmcompile.planner.search.outcome import plan_of
from mmcompile.planner.search.projector_only import fresh
from mmcompile.planner.search.recompute_by_layer import by_layer
from mmcompile.planner.search.sample_rates import sample_rates
from mmcompile.planner.search.settings import RECOMPUTES, SearchSpace
from mmcompile.planner.strategies.search import problem_of, searched
from mmcompile.planner.strategies.strategies import AUTO
from mmcompile.planner.templates.plan_resilience import notes_of, plan_resilience
from mmcompile.runtime.monitoring.timer import processor_name
from mmcompile.units import format_seconds

DEFAULT_MICROBATCHES = 4
SOLVER_SECONDS = 5.0
_KEPT = 2
"""Tensors that stay whole, in a note."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What a plan is asked to be; the arguments of `mmcompile.planner`, read and checked."""

    cluster: Cluster
    num_microbatches: int | None = None
    stages: Mapping[str, int] | None = None
    projector: ProjectorPlacement | None = None
    attention: AttentionChoice
    autocast: bool | Sequence[str] = False
    """Components that compute in bfloat16 under autocast; True: all."""
    search_tokens: bool = False
    """Whether the ranks that share tokens are searched."""
    global_batch: int | None = None
    stats: DatasetStats | None = None
    strategy: str = AUTO
    schedule: ScheduleKind | None = None
    recompute: Recomputation | None = None
    placement: EncoderPlacement | None = None
    tensor_parallel: int | Mapping[str, int] | None = None
    """Ranks that share the tensors of every chain, or of each chain or component named."""
    replicas: int | Mapping[str, int] | None = None
    """Of the language model, or of each chain or component named."""
    fsdp: bool | Sequence[str] = False
    """Components whose replicas share their parameters; True: all."""
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
        shares = self.tensor_parallel
        for name, number in shares.items() if isinstance(shares, Mapping) else (("", shares),):
            if number is not None and number < 1:
                raise ConfigError(f"tensor_parallel of {name or 'every chain'} is {number}; give 1 or more")
        if self.fault_tolerance is not None and self.fault_tolerance < 0:
            raise ConfigError(
                f"fault_tolerance is {self.fault_tolerance}; give the number of nodes that may fail at once, 0 or more"
            )
        if self.global_batch is not None:
            if self.fsdp:
                raise ConfigError(
                    f"fsdp={self.fsdp} has no effect with a global batch, where the search decides it: take strategy 'fsdp', or "
                    "give replicas and no global batch"
                )
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
            tp=self._shares(space),
            schedules=space.schedules if self.schedule is None else (self.schedule,),
            placements=space.placements if self.placement is None else (self.placement,),
            recomputes=self._recomputes(space),
            microbatches=space.microbatches if self.num_microbatches is None else (self.num_microbatches,),
        )

    def _recomputes(self, space: SearchSpace) -> tuple[Recompute, ...]:
        """Modes that all layers may have; "auto" goes on from the cheapest that fits."""
        match self.recompute:
            case None:
                return space.recomputes
            case "auto":
                return RECOMPUTES
            case _:
                return (self.recompute,)

    @property
    def recomputes_by_layer(self) -> bool:
        """Whether layers are to compute again no more than their rank's memory needs.

        Not what a published search decided, unless asked for; and not with templates, whose pipelines all compute the same again.
        """
        searched = self.recompute is None and self.global_batch is not None and self.strategy == AUTO
        return self.fault_tolerance is None and (self.recompute == "auto" or searched)

    def _shares(self, space: SearchSpace) -> tuple[int, ...]:
        """Numbers of ranks that may share tensors, of any chain."""
        match self.tensor_parallel:
            case None:
                return space.tp
            case int():
                return (self.tensor_parallel,)
            case _:
                return tuple(sorted({1, *self.tensor_parallel.values()}))


def check_agrees(
    plan: Plan,
    attention: Attention | None,
    context_parallel: int | None,
    packing: Sequence[Sample] | None,
    **decided: object,
) -> None:
    """Refuse options that a plan has decided otherwise.

    Args:
        decided: other options by name; None for those not given.

    Raises:
        ConfigError: naming the option.
    """
    if attention not in (None, plan.attention) or context_parallel not in (None, plan.context_parallel):
        raise ConfigError(
            f"the plan has attention {plan.attention!r} and context_parallel {plan.context_parallel}, asked were "
            f"{attention!r} and {context_parallel}: a plan decides these; leave them out, or make another plan"
        )
    for name, value in decided.items():
        if value is not None:
            raise ConfigError(
                f"{name}={value} has no effect together with a plan: the plan decides it; drop one of the two"
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
        PlanError, ConfigError: as `mmcompile.planner`.
    """
    choice, clock = wanted.attention, _Clock(on_phase)
    autocast = _autocast(captured.graph, wanted)
    captured = with_words(with_autocast(captured, autocast), choice, batch)
    graph = captured.graph
    dtype = "bfloat16" if graph.loss_component in autocast else graph.main_dtype
    kinds = _checked_kinds(graph, wanted, dtype)
    table = Cost().run(graph)
    engine_runs_it = wanted.global_batch is None
    costs: CostTable = table
    if engine_runs_it and choice.context_parallel > 1:
        costs = _with_shared_tokens(graph, table, choice.context_parallel, wanted, dtype)
    can_share = wanted.search_tokens and _can_share_tokens(captured, choice)
    packed = wanted.packing is not None
    workload = None if engine_runs_it else Workload.of(graph, table, batch, wanted.stats, packed=packed)
    space = wanted.space(can_share)
    axes = tensor_axes(graph, max(space.tp), table) if max(space.tp) > 1 else {}
    clock.done("cost")
    problem = problem_of(
        graph,
        costs,
        wanted.cluster,
        dtype=dtype,
        fingerprint=fingerprint,
        stages={**decided_stages(wanted.constraints), **(wanted.stages or {})},
        replicas=_replicas(graph, wanted),
        tensor_parallel=wanted.tensor_parallel if isinstance(wanted.tensor_parallel, Mapping) else None,
        tensor_degrees={name: found.degrees for name, found in axes.items()},
        tensor_shares={name: found.layers for name, found in axes.items()},
        fsdp=_fsdp(graph, wanted),
        projector=wanted.projector,
        entries=_entries(graph),
        shards=choice.context_parallel if engine_runs_it else 1,
        space=space,
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
        from mmcompile.planner.exact.constrained import constrained

        outcome = constrained(search, wanted.constraints, budget_s=wanted.solver_seconds or SOLVER_SECONDS)
        best, notes = outcome.best, outcome.notes
        clock.done("proof")
    if wanted.recomputes_by_layer:
        uniform, best = best, by_layer(search, best, wanted.constraints)
        if best is not uniform:
            seconds = format_seconds(uniform.iteration_s)
            notes = (*notes, f"recompute by layer, as the memory needs; with one mode for all a step takes {seconds}")
    resilience = None
    if wanted.fault_tolerance is not None:
        resilience = plan_resilience(problem, best.candidate, wanted.fault_tolerance)
        decided = bool(wanted.constraints or wanted.stages)
        notes = (*notes, *notes_of(resilience, best.candidate, constrained=decided))
        clock.done("templates")
    found = plan_of(search, best, strategy=wanted.strategy)
    _check_shared(found, wanted.fsdp)
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
        autocast=autocast,
        head_stride=choice.head_stride,
        notes=(
            *found.notes,
            *notes,
            *([str(wanted.packing)] if wanted.packing else []),
            *(
                _shared_note(name, chain.tp, axes)
                for chain in found.chains
                for name in chain.components
                if chain.tp > 1
            ),
        ),
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


def _autocast(graph: ModelGraph, wanted: Wanted) -> tuple[str, ...]:
    if isinstance(wanted.autocast, bool):
        return tuple(component.name for component in graph.components) if wanted.autocast else ()
    return tuple(wanted.autocast)


def _replicas(graph: ModelGraph, wanted: Wanted) -> Mapping[str, int]:
    """Chain or component name -> replicas, where that is decided."""
    if isinstance(wanted.replicas, int):
        return {graph.loss_component: wanted.replicas}
    return wanted.replicas or {}


def _fsdp(graph: ModelGraph, wanted: Wanted) -> Collection[str]:
    """Components whose replicas share their parameters."""
    names = [component.name for component in graph.components]
    if isinstance(wanted.fsdp, bool):
        return names if wanted.fsdp else ()
    unknown = [name for name in wanted.fsdp if name not in names]
    if unknown:
        raise PlanError(
            f"no component {unknown[0]!r} whose replicas could share parameters; they are {', '.join(names)}"
        )
    return wanted.fsdp


def _check_shared(plan: Plan, fsdp: bool | Sequence[str]) -> None:
    """Refuse shared parameters of a single replica."""
    for name in () if isinstance(fsdp, bool) else fsdp:
        chain = next(chain for chain in plan.chains if name in chain.components)
        if not chain.fsdp:
            raise ConfigError(
                f"fsdp of {name} has no effect: {chain.name} has 1 replica, which has nobody to share parameters with; give it "
                "more replicas, or leave it out"
            )
    if fsdp is True and not any(chain.fsdp for chain in plan.chains):
        raise ConfigError("fsdp has no effect: every chain has 1 replica; give replicas, or leave fsdp out")


def _shared_note(name: str, degree: int, axes: Mapping[str, TensorAxes]) -> str:
    """What tensor parallelism does of a component, and what it leaves whole."""
    own = axes[name]
    if degree not in own.degrees:
        why = own.reasons.get(degree, f"{degree} is no power of two")
        return f"{name} is no even work for {degree} ranks that share tensors: {why}; what does not divide is computed by each"
    kept = own.kept[degree]
    whole = f"; whole: {'; '.join(kept[:_KEPT])}" if kept else ""
    more = f" and {len(kept) - _KEPT} more" if len(kept) > _KEPT else ""
    return f"{degree} ranks share {own.shares[degree]:.0%} of the parameters of {name}{whole}{more}"


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
