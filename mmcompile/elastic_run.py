"""`elastic`: train on nodes that may die, by the templates of a plan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmcompile.batching.balance.arrival_order import Arrival
from mmcompile.batching.balance.assignment import SampleCosts
from mmcompile.batching.balance.balancer import Balancer
from mmcompile.batching.balance.registry import balancer
from mmcompile.batching.sample_costs import costs_of_samples
from mmcompile.batching.step_planner import Collate, StepPlanner
from mmcompile.captured_model import CapturedModel, fingerprint_of, padding
from mmcompile.codegen.program import PreparedMicrobatch
from mmcompile.codegen.program_cache import OnCapture, Patterns
from mmcompile.config import Reduction
from mmcompile.data.batches import Batches
from mmcompile.data.collate import Sample
from mmcompile.data.collate import collate as padded
from mmcompile.errors import ConfigError, PlanError
from mmcompile.ir.functional import changed_buffers
from mmcompile.passes.untrained import refuse_untrained
from mmcompile.planner.plan.by_layers import by_layers
from mmcompile.planner.plan.placement import PlacedStage, Placement
from mmcompile.planner.plan.plan import Plan, check_fingerprint
from mmcompile.planner.resilience.resilience import Resilience
from mmcompile.runtime.control.events import RunEvent
from mmcompile.runtime.control.secret import Endpoint
from mmcompile.runtime.control.times import Times
from mmcompile.runtime.elastic.elastic_engine import ElasticEngine
from mmcompile.runtime.elastic.elastic_job import ElasticJob
from mmcompile.runtime.elastic.node import run_node
from mmcompile.runtime.elastic.programs import Programs
from mmcompile.runtime.elastic.warm_up import warm_up
from mmcompile.runtime.engine import DEFAULT_OPTIMIZER
from mmcompile.runtime.optim.optimizer import OptimizerSpec, SchedulerFactory
from mmcompile.runtime.optim.param_groups import ParameterGroup

_WARM_STEPS = 2
_CAPTURES = "captures"
"""Name of the folder of captures in that of a run."""


def elastic(
    model: nn.Module,
    batch: Mapping[str, Any] | None,
    plan: Plan,
    *,
    nodes: Sequence[str] | None = None,
    recovery_deadline_s: float = Times().recovery_deadline_s,
    max_restarts: int = 3,
    on_event: Callable[[RunEvent], None] | None = None,
    **settings: Any,
) -> ElasticEngine:
    """Train on several nodes, and continue when some of them die: no step is lost, no sample trained twice or left out.

    Every step has the same samples in the same microbatches for any nodes; each is committed once. With
    `reduction="fixed"` a run with failures ends with the same bits as one without.

    Args:
        model, batch, plan: arguments of `elastic_job`.
        nodes: names of the nodes; by default as many as the plan's cluster has. Each is simulated by processes of this machine.
        recovery_deadline_s: longest time from a failure to the next step; all other waits follow from it.
        max_restarts: largest number of times that a node's workers are restarted.
        on_event: called with every line of the event log while `train` runs.
        settings: settings of `elastic_job`: data, num_steps, folder, optimizer, ...

    Raises:
        PlanError, ConfigError: as `elastic_job`, or fewer nodes than the plan's fault tolerance needs.
    """
    job = elastic_job(model, batch, plan, **settings)
    names = nodes or [f"node{index}" for index in range(job.resilience.num_nodes)]
    times = Times(recovery_deadline_s=recovery_deadline_s)
    return ElasticEngine(job, names, times=times, max_restarts=max_restarts, on_event=on_event)


def join(
    model: nn.Module,
    batch: Mapping[str, Any] | None,
    plan: Plan,
    *,
    node: str,
    at: Endpoint,
    max_restarts: int = 3,
    **settings: Any,
) -> None:
    """Run one node of a run that `mmcompile coordinate` serves, until the run ends or the node is released.

    Args:
        node: name of this node, unique in the run.
        at: address of the coordinator.
        settings: settings of `elastic_job`, the same on all nodes; `folder` is one that all machines share.

    Raises:
        EngineError: the node was given up, or training ended before its last step.
    """
    run_node(elastic_job(model, batch, plan, **settings), node, at, max_restarts=max_restarts)


def elastic_job(
    model: nn.Module,
    batch: Mapping[str, Any] | None,
    plan: Plan,
    *,
    data: Batches,
    num_steps: int,
    folder: str | Path,
    seed: int = 0,
    optimizer: Callable[..., torch.optim.Optimizer] = DEFAULT_OPTIMIZER,
    groups: Sequence[ParameterGroup] = (),
    scheduler: SchedulerFactory | None = None,
    clip_norm: float | None = None,
    accumulate: int = 1,
    master_weights: bool = False,
    shard_optimizer: bool = False,
    compile: bool = False,
    reduction: Reduction = "fast",
    balance: str | Balancer = Arrival.name,
    pad: Mapping[str, int | float] | None = None,
    collate: Collate | None = None,
    save_every: int | None = None,
    allow_unused: bool = False,
    cache: str | Path | None = None,
    on_capture: OnCapture | None = None,
) -> ElasticJob:
    """Return the job that a run's workers share: the model captured layer by layer, for the first steps' batch sizes too.

    Args:
        model: module with real weights; `ElasticEngine.pull` copies trained weights into it.
        batch: one microbatch, with every modality in it, as for `parallelize`.
        plan: plan with `fault_tolerance`, of one device a stage.
        data: the samples of each step (`mmcompile.MapBatches` or `mmcompile.IterableBatches` of a dataset); a sample is one
            conversation, as a processor returns it.
        folder: new folder for the log, the events, and the checkpoint.
        seed: seed of random numbers in the model.
        optimizer, groups, scheduler, clip_norm, compile, pad, collate: as for `Engine`.
        master_weights: as for `Engine`; masters start from the parameters.
        accumulate, shard_optimizer: of `Engine`, and refused here: a step is one call, and what a rank updates after a commit
            must not depend on other ranks, which may be gone.
        reduction: arithmetic of gradient sums (`mmcompile.config.Reduction`).
        balance: balancer, or its name, that assigns the samples of a step to microbatches.
        save_every: number of steps between checkpoints; by default only the end is saved.
        allow_unused: train although some of what is set to train gets no gradient.
        cache: folder of captures that all nodes share, so that a new rank 0 has those of earlier ones; by default in `folder`.
        on_capture: as for `parallelize`.

    Raises:
        PlanError: the plan has no templates, or is of another model.
        ConfigError: too few samples, options that have no effect together, or a parameter that is set to train gets no gradient.
    """
    if collate is not None and pad is not None:
        raise ConfigError("pad has no effect together with collate, which joins samples: leave one of them out")
    if shard_optimizer:
        raise ConfigError(
            "shard_optimizer does not go with fault tolerance: a rank that updates alone may die before it tells the others, "
            "after the step was committed; leave it out"
        )
    if accumulate != 1:
        raise ConfigError(
            f"accumulate is {accumulate}; with fault tolerance a step is one batch of the data: give larger batches, and plan "
            "with more microbatches"
        )
    resilience = _resilience(plan)
    subject = CapturedModel.of(model, batch, cache=Path(folder) / _CAPTURES if cache is None else cache)
    captured = subject.capture()
    check_fingerprint(plan, fingerprint_of(captured.graph))
    if not allow_unused:
        refuse_untrained(captured.graph)
    if changed := changed_buffers(captured.graph.calls):
        raise ConfigError(
            f"the model changes buffers in its forward ({', '.join(sorted(changed)[:3])}), whose values are lost with a node; "
            "put these modules in eval mode, or train without fault tolerance"
        )
    layers = by_layers(plan)
    patterns = Patterns(model, layers, captured, subject.batch, on_capture, store=subject.store)
    pads = padding(model) if pad is None else pad
    job = ElasticJob(
        resilience=resilience,
        layers=layers,
        patterns=patterns,
        model=model,
        data=data,
        num_steps=num_steps,
        seed=seed,
        optimizer=OptimizerSpec.of(optimizer, groups, master_weights=master_weights),
        scheduler=scheduler,
        clip_norm=clip_norm,
        compiled=compile,
        reduction=reduction,
        collate=collate or (lambda samples, names: padded(samples, pads, names)),
        balancer=balancer(balance) if isinstance(balance, str) else balance,
        costs=functools.partial(_costs, plan),
        folder=Path(folder),
        save_every=save_every,
    )
    job.user.masters_for(job.optimizer, master_weights)
    if compile:
        compile_layers(job)
    else:
        _first_microbatches(job)
    Programs(patterns.captured()).check(resilience)
    return job


def _resilience(plan: Plan) -> Resilience:
    """Return a plan's pipeline templates. Raises PlanError if it has none, or if a template's stage is on several devices."""
    found = plan.resilience
    if found is None:
        raise PlanError("the plan has no templates for the day nodes die: plan with fault_tolerance=1 or more")
    wide = [stage for template in found.templates for stage in template.stages if len(stage.devices) > 1]
    if wide:
        raise PlanError(
            f"template stage {wide[0]} is on several devices, and the engine runs one a stage: plan with tensor_parallel=1"
        )
    return found


def compile_layers(job: ElasticJob) -> int:
    """Compile each distinct layer of the first steps, so that workers forked later have it; return the number of graphs."""
    return warm_up(_first_microbatches(job), job.patterns.parameters())


def _first_microbatches(job: ElasticJob) -> Collection[PreparedMicrobatch]:
    """Return one microbatch for each different capture of the model that the first steps need.

    Workers that are forked later inherit these captures.
    """
    stages = tuple(PlacedStage(name=stage.name, ranks=(0,), depth=stage.depth) for stage in job.layers.stages)
    placement = Placement(stages=stages, num_microbatches=job.resilience.num_microbatches)
    planner = StepPlanner(placement, job.patterns, collate=job.collate, balancer=job.balancer, costs=job.costs)
    found: dict[str, PreparedMicrobatch] = {}
    job.data.seek(None)
    steps = [job.data.read() for _ in range(min(_WARM_STEPS, job.num_steps))]
    for samples in steps:
        if len(samples) < job.resilience.num_microbatches:
            raise ConfigError(
                f"a step of {len(samples)} samples cannot fill the plan's {job.resilience.num_microbatches} microbatches: use "
                "larger batches, or plan with fewer microbatches"
            )
    job.patterns.warm_up([batch for samples in steps for batch in planner.microbatches(samples)])
    for step, samples in enumerate(steps, 1):
        planned = planner.plan(step, samples)
        found |= {prepared.programs.pattern: prepared for prepared in planned.prepared}
    job.data.seek(None)
    return found.values()


def _costs(plan: Plan, samples: Sequence[Sample]) -> SampleCosts:
    costs = costs_of_samples(plan, samples)
    # A pipeline computes all components of a sample.
    return SampleCosts(components=("",), costs=costs.costs.sum(axis=0, keepdims=True))
