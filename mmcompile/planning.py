"""Planning from a captured model and a request: costs, space of the search, the search itself, links between stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mmcompile.codegen.cut import cut
from mmcompile.codegen.stage_programs import links
from mmcompile.config import DEFAULT_MICROBATCHES, SOLVER_SECONDS, Components, PlanRequest
from mmcompile.costmodel.calibration import Calibration
from mmcompile.costmodel.cluster import Cluster
from mmcompile.data.readers import read_stats
from mmcompile.data.stats import DatasetStats
from mmcompile.errors import ConfigError, PlanError
from mmcompile.ir.capture import Capture
from mmcompile.ir.graph import ModelGraph, component_of, info
from mmcompile.passes.base import AnyPass
from mmcompile.passes.cost.cost_table import CostTable
from mmcompile.passes.gradient_flow import GradientFlow, GradientReport
from mmcompile.passes.layer_kinds import layer_kinds
from mmcompile.passes.pipeline import analyse
from mmcompile.passes.tensor_parallel.tensor_axes import TensorAxes, tensor_axes
from mmcompile.passes.untrained import untrained
from mmcompile.planner.plan.constraints import Constraint, decided_stages, parse_constraint
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.plan.plan_record import Fingerprint, Packing
from mmcompile.planner.planning_passes import run_planning_passes, with_context_parallel
from mmcompile.planner.pricing.geometries import geometries
from mmcompile.planner.pricing.pricing import Pricing
from mmcompile.planner.pricing.shared_tokens import SharedTokens
from mmcompile.planner.pricing.workload import Workload
from mmcompile.planner.search.branch_and_bound import BranchAndBound
from mmcompile.planner.search.build_problem import with_chains
from mmcompile.planner.search.candidate import Candidate, Strategy
from mmcompile.planner.search.infeasible import explain
from mmcompile.planner.search.outcome import plan_of, sample_rates
from mmcompile.planner.search.problem import ChainPrices, Problem
from mmcompile.planner.search.recompute_by_layer import by_layer
from mmcompile.planner.search.settings import RECOMPUTES, SearchSpace
from mmcompile.planner.strategies.search import AUTO, searched
from mmcompile.planner.templates.plan_resilience import notes_of, plan_resilience
from mmcompile.runtime.monitoring.timer import processor_name
from mmcompile.units import format_seconds

_KEPT = 2
"""Largest number of undivided tensors that a note on tensor parallelism names; further ones are only counted."""

OnPhase = Callable[[str, float], None]
"""Callback that receives the name of a planning phase and its seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanInputs:
    """Values of options that a `PlanRequest` holds as text or file name."""

    cluster: Cluster
    stats: DatasetStats | None = None
    calibration: Calibration | None = None
    constraints: tuple[Constraint, ...] = ()
    packing: Packing | None = None
    """Isolation of documents packed into one row; None if samples are padded, each in its own row."""
    passes: tuple[AnyPass, ...] = ()
    """Passes of the user, run before layers are priced (`mmcompile.passes.catalog.PLANNING`)."""
    strategy: Strategy | None = None
    """Strategy of the user, which the request names; None for a strategy of mmcompile."""

    @classmethod
    def read(
        cls,
        *,
        cluster: Cluster | str,
        stats: DatasetStats | str | Path | None = None,
        calibration: Calibration | str | Path | None = None,
        constraints: Sequence[Constraint | str] = (),
        passes: Sequence[AnyPass] = (),
        strategy: Strategy | str = AUTO,
    ) -> PlanInputs:
        """Return the inputs of a plan; texts are parsed and files are read.

        Raises:
            ConfigError: a text has another form, or a file cannot be read.
        """
        return cls(
            cluster=Cluster.parse(cluster) if isinstance(cluster, str) else cluster,
            stats=stats if isinstance(stats, DatasetStats | None) else read_stats(stats),
            calibration=calibration if isinstance(calibration, Calibration | None) else Calibration.load(calibration),
            constraints=tuple(parse_constraint(own) if isinstance(own, str) else own for own in constraints),
            passes=tuple(passes),
            strategy=None if isinstance(strategy, str) else strategy,
        )


def search_space(request: PlanRequest, cluster: Cluster, *, can_share_tokens: bool) -> SearchSpace:
    """Return the parallel degrees and modes that the search may choose: those requested, where the request gives some.

    Elsewhere: all possible ones with a global batch (context parallelism only if `can_share_tokens`), one default without.
    """
    if request.global_batch is None:
        space = SearchSpace(microbatches=(request.num_microbatches or DEFAULT_MICROBATCHES,))
    else:
        cp = request.context_parallel or 1
        space = SearchSpace.everything(cluster, context_parallel=can_share_tokens)
        space = replace(space, cp=space.cp if cp == 1 else (cp,))
    chosen = request.recompute
    return replace(
        space,
        tp=_tensor_degrees(request, space),
        schedules=space.schedules if request.schedule is None else (request.schedule,),
        placements=space.placements if request.placement is None else (request.placement,),
        recomputes=RECOMPUTES if chosen == "auto" else space.recomputes if chosen is None else (chosen,),
        microbatches=space.microbatches if request.num_microbatches is None else (request.num_microbatches,),
    )


def _tensor_degrees(request: PlanRequest, space: SearchSpace) -> tuple[int, ...]:
    """Return the tensor-parallel degrees to search: those of the request or, if it leaves them open, of the search space."""
    match request.tensor_parallel:
        case None:
            return space.tp
        case int():
            return (request.tensor_parallel,)
        case _:
            return tuple(sorted({1, *request.tensor_parallel.values()}))


def recomputes_by_layer(request: PlanRequest) -> bool:
    """Return True if recomputation is chosen layer by layer, as far as the memory of the layer's rank requires.

    Published strategies choose one mode for all layers, unless the request is "auto". Templates need the same mode in all
    pipelines.
    """
    free = request.recompute is None and request.global_batch is not None and request.strategy == AUTO
    return request.fault_tolerance is None and (request.recompute == "auto" or free)


def make_plan(
    captured: Capture,
    batch: Mapping[str, Any],
    request: PlanRequest,
    inputs: PlanInputs,
    fingerprint: Fingerprint,
    on_phase: OnPhase = lambda name, seconds: None,
) -> Plan:
    """Find the plan of a request for a captured model.

    Args:
        captured: capture annotated by gradient-flow.
        batch: captured batch, completed with positions.
        inputs: values of options that the request holds as text or file names.
        fingerprint: model and library versions that the plan is made for.
        on_phase: receives the seconds of `"cost"`, `"search"`, `"proof"` and `"templates"` where there are any, and `"links"`.

    Raises:
        PlanError, ConfigError: see `mmcompile.plan`.
    """
    attention = request.attention or ("bitfield" if (request.context_parallel or 1) > 1 else "model")
    clock = _Clock(on_phase)
    autocast = _components(captured.graph, request.autocast)
    gradients = analyse(GradientFlow(), captured.graph)
    captured, table = run_planning_passes(captured, batch, attention=attention, autocast=autocast, own=inputs.passes)
    graph = captured.graph
    dtype = "bfloat16" if graph.loss_component in autocast else graph.main_dtype
    _check_calibration(inputs, dtype)
    # The context-parallel degree is searched only then.
    searches_tokens = (
        request.attention == "bitfield" and request.context_parallel is None and bool(request.global_batch)
    )
    can_share_tokens = searches_tokens and _can_share_tokens(captured)
    space = search_space(request, inputs.cluster, can_share_tokens=can_share_tokens)
    axes = tensor_axes(graph, max(space.tp), table) if max(space.tp) > 1 else {}
    clock.done("cost")
    problem = _problem(graph, table, batch, request, inputs, fingerprint, dtype=dtype, space=space, axes=axes)
    search, best = searched(problem, inputs.strategy or request.strategy)
    clock.done("search")
    if best is None:
        raise PlanError(explain(problem))
    best, notes = _proven(search, best, request, inputs, clock)
    best, more = _relaxed(search, best, request, inputs)
    resilience = None
    if request.fault_tolerance is not None:
        resilience = plan_resilience(problem, best, request.fault_tolerance)
        decided = bool(inputs.constraints or request.stages)
        more = (*more, *notes_of(resilience, best, constrained=decided))
        clock.done("templates")
    found = plan_of(search, best, strategy=request.strategy)
    _check_shared(found, request.fsdp)
    cp = found.context_parallel
    shared = SharedTokens(graph=graph, num_ranks=cp, cluster=inputs.cluster, dtype=dtype)
    pricing = replace(problem.pricing, table=table, given_cp=1)
    loads = geometries(graph, table.loads, batch, packed=inputs.packing is not None)
    found = replace(
        found,
        attention=attention,
        autocast=autocast,
        head_stride=shared.head_stride if cp > 1 else 0,
        notes=(
            *found.notes,
            *(() if request.allow_unused else _untrained(graph, gradients, problem.prices.workload)),
            *notes,
            *more,
            *([str(inputs.packing)] if inputs.packing else []),
            *(
                _tensor_note(name, chain.tp, axes[name])
                for chain in found.chains
                for name in chain.components
                if chain.tp > 1
            ),
        ),
        packing=inputs.packing,
        resilience=resilience,
        sample_rates=sample_rates(best, loads, pricing),
    )
    found = _linked(captured, found)
    clock.done("links")
    return found


class _Clock:
    """Timer that reports the seconds of each planning phase to a callback when the phase ends."""

    def __init__(self, on_phase: OnPhase) -> None:
        self._on_phase = on_phase
        self._since = time.perf_counter()

    def done(self, phase: str) -> None:
        now = time.perf_counter()
        self._on_phase(phase, now - self._since)
        self._since = now


def _problem(
    graph: ModelGraph,
    table: CostTable,
    batch: Mapping[str, Any],
    request: PlanRequest,
    inputs: PlanInputs,
    fingerprint: Fingerprint,
    *,
    dtype: str,
    space: SearchSpace,
    axes: Mapping[str, TensorAxes],
) -> Problem:
    runnable, cp = request.global_batch is None, request.context_parallel or 1
    packed = inputs.packing is not None
    by_chain = request.tensor_parallel if isinstance(request.tensor_parallel, Mapping) else None
    pricing = Pricing(
        table=_with_shared_tokens(graph, table, cp, inputs, dtype) if runnable and cp > 1 else table,
        cluster=inputs.cluster,
        dtype=dtype,
        merging=frozenset(consumer for _, consumer, _ in graph.edges),
        token_sharing=frozenset((graph.loss_component,)),
        kinds={} if inputs.calibration is None else layer_kinds(graph),
        calibration=inputs.calibration,
        given_cp=cp if runnable else 1,
        tensor_degrees={name: found.degrees for name, found in axes.items()},
        tensor_shares={name: found.layers for name, found in axes.items()},
    )
    workload = None if runnable else Workload.of(graph, table, batch, inputs.stats, packed=packed)
    problem = Problem(
        prices=ChainPrices(graph=graph, pricing=pricing, workload=workload),
        fingerprint=fingerprint,
        stages={**decided_stages(inputs.constraints), **(request.stages or {})},
        replicas=_replicas(graph, request),
        tensor_parallel=by_chain or {},
        fsdp=_fsdp(graph, request),
        entries=_entries(graph),
        space=space,
        global_batch=request.global_batch,
    )
    return with_chains(problem, request.projector)


def _proven(
    search: BranchAndBound, best: Candidate, request: PlanRequest, inputs: PlanInputs, clock: _Clock
) -> tuple[Candidate, tuple[str, ...]]:
    """Return the exact solver's candidate and notes on it. Without constraints or a solver time in the request, return `best`."""
    if not inputs.constraints and request.solver_seconds is None:
        return best, ()
    # Z3 is a large library, and workers need none.
    from mmcompile.planner.exact.constrained import constrained

    found = constrained(search, inputs.constraints, budget_s=request.solver_seconds or SOLVER_SECONDS)
    clock.done("proof")
    return found


def _relaxed(
    search: BranchAndBound, best: Candidate, request: PlanRequest, inputs: PlanInputs
) -> tuple[Candidate, tuple[str, ...]]:
    """Return `best` with recomputation chosen for each layer, and a note on it, if that is faster; else `best` and no note."""
    if not recomputes_by_layer(request):
        return best, ()
    found = by_layer(search, best, inputs.constraints)
    if found is best:
        return best, ()
    seconds = format_seconds(best.iteration_s)
    return found, (f"recompute by layer, as the memory needs; with one mode for all a step takes {seconds}",)


def _components(graph: ModelGraph, given: Components | None) -> tuple[str, ...]:
    """Return the component names that an option's value stands for: all for True, none for False or None."""
    if isinstance(given, bool):
        return tuple(component.name for component in graph.components) if given else ()
    return tuple(given or ())


def _replicas(graph: ModelGraph, request: PlanRequest) -> Mapping[str, int]:
    """Return chain or component name -> number of replicas requested; a plain number is for the loss component."""
    if isinstance(request.replicas, int):
        return {graph.loss_component: request.replicas}
    return request.replicas or {}


def _untrained(graph: ModelGraph, report: GradientReport, workload: Workload | None) -> tuple[str, ...]:
    """Return notes on what is set to train and gets no gradient, in the captured batch or from any sample of the dataset."""
    stats, absent = (None, ()) if workload is None else (workload.stats, workload.absent())
    return tuple(map(str, untrained(graph, report, "" if stats is None else stats.name, absent)))


def _fsdp(graph: ModelGraph, request: PlanRequest) -> Collection[str]:
    chosen = _components(graph, request.fsdp)
    names = [component.name for component in graph.components]
    unknown = [name for name in chosen if name not in names]
    if unknown:
        raise PlanError(
            f"no component {unknown[0]!r} whose replicas could share parameters; they are {', '.join(names)}"
        )
    return chosen


def _check_shared(plan: Plan, fsdp: Components | None) -> None:
    for name in () if isinstance(fsdp, bool) else fsdp or ():
        chain = next(chain for chain in plan.chains if name in chain.components)
        if not chain.fsdp:
            raise ConfigError(
                f"fsdp of {name} has no effect: {chain.name} has 1 replica, which has nobody to share parameters with; give it "
                "more replicas, or leave it out"
            )
    if fsdp is True and not any(chain.fsdp for chain in plan.chains):
        raise ConfigError("fsdp has no effect: every chain has 1 replica; give replicas, or leave fsdp out")


def _tensor_note(name: str, degree: int, own: TensorAxes) -> str:
    if degree not in own.degrees:
        why = own.reasons.get(degree, f"{degree} is no power of two")
        return f"{name} is no even work for {degree} ranks that share tensors: {why}; what does not divide is computed by each"
    kept = own.kept[degree]
    whole = f"; whole: {'; '.join(kept[:_KEPT])}" if kept else ""
    more = f" and {len(kept) - _KEPT} more" if len(kept) > _KEPT else ""
    return f"{degree} ranks share {own.shares[degree]:.0%} of the parameters of {name}{whole}{more}"


def _linked(captured: Capture, plan: Plan) -> Plan:
    """Return the plan with links and shared values from the captured graph; unchanged if several stages run the same layer."""
    layers = [layer for stage in plan.stages for layer in stage.layers]
    if len(set(layers)) < len(layers):
        return plan
    parts = cut(with_context_parallel(captured, plan.context_parallel, plan.head_stride).graph, plan)
    return replace(plan, links=links(parts), shared_values=parts.shared_values)


def _with_shared_tokens(
    graph: ModelGraph, table: CostTable, num_ranks: int, inputs: PlanInputs, dtype: str
) -> CostTable:
    """Return the cost table for context parallelism: the loss component's costs are those of one of `num_ranks` ranks.

    Each rank computes a part of the tokens. The new costs hold only for the captured batch, so the component's loads, by which
    measured seconds are looked up, are removed. With a calibration all loads are removed: measured seconds do not compare with
    analytic ones, so all components then have analytic ones.
    """
    shared = SharedTokens(graph=graph, num_ranks=num_ranks, cluster=inputs.cluster, dtype=dtype)
    layers = shared.costs(table.layers)
    if inputs.calibration is not None:
        return CostTable(layers=layers)
    loads, growing, captured_loads = dict(table.loads), dict(table.growing), dict(table.captured_loads)
    for known in (loads, growing, captured_loads):
        known.pop(graph.loss_component, None)
    return CostTable(layers=layers, loads=loads, growing=growing, captured_loads=captured_loads)


def _can_share_tokens(captured: Capture) -> bool:
    """Return True if every layer but attention computes each token from that token alone, as context parallelism needs."""
    try:
        with_context_parallel(captured, num_ranks=2, head_stride=1)
    except PlanError:
        return False
    return True


def _check_calibration(inputs: PlanInputs, dtype: str) -> None:
    if inputs.calibration is not None:
        here = processor_name(torch.device("cpu")) if inputs.cluster.is_local else None
        inputs.calibration.check(device=inputs.cluster.device.name, dtype=dtype, processor=here)


def _entries(graph: ModelGraph) -> dict[tuple[str, str], int]:
    """Return (producer component, consumer component) -> index of the consumer's first layer that reads a producer's value."""
    first: dict[tuple[str, str], int] = {}
    for node in graph.module.graph.nodes:
        for source in node.all_input_nodes if node.op == "call_function" else ():
            if source.op == "call_function" and not info(source).shared and not info(node).shared:
                pair = (component_of(source), component_of(node))
                if pair[0] != pair[1]:
                    first[pair] = min(first.get(pair, info(node).layer), info(node).layer)
    return first
