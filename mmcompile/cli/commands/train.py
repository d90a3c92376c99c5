"""`mmcompile train`: train a model as a pipeline of processes on this machine, or on the ranks of torchrun."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from mmcompile import api
from mmcompile.batching.balance.auto import Auto
from mmcompile.batching.balance.registry import balancer
from mmcompile.captured_model import CapturedModel
from mmcompile.cli.config_options import flag, refuse_typed, with_config
from mmcompile.cli.console import busy, print_json, print_text
from mmcompile.cli.data import DATA_HELP, epochs, load_samples, richest
from mmcompile.cli.model import load_model, set_trainable
from mmcompile.cli.options import JsonOption, ModelArgument, default_cache
from mmcompile.cli.planning import WITH_PLAN, make_plan
from mmcompile.cli.run_display import capturing, print_capture, step_progress
from mmcompile.cli.train_elastic import RUN, check_elastic, node_at, train_elastic
from mmcompile.config import DEFAULT_MICROBATCHES, ElasticConfig, ModelConfig, PlanRequest, RunConfig, TrainConfig
from mmcompile.costmodel.cluster import Cluster
from mmcompile.costmodel.hardware import LOCAL_NAME
from mmcompile.data.collate import Sample, collate
from mmcompile.errors import ConfigError
from mmcompile.files import write_atomic
from mmcompile.planner.plan.plan import Plan
from mmcompile.planning import PlanInputs
from mmcompile.report.run_folder import PLAN, write_events, write_programs
from mmcompile.runtime.engine import Engine, StepMetrics

_DECIDED = (
    *("stages", "projector", "schedule", "recompute", "autocast", "attention", "context_parallel", "tensor_parallel"),
    *("replicas", "fsdp", "num_microbatches", "fault_tolerance"),
)
"""Fields of a `PlanRequest` that are options of `mmcompile train`, and that a given plan decides."""
_WARM_BATCHES = 4
"""Number of batches from which captures are learned before step 1."""
_FIELDS = (*_DECIDED, "allow_unused")
"""All fields of a `PlanRequest` that are options of `mmcompile train`."""


@with_config
def train(
    context: typer.Context,
    model: ModelArgument,
    data: Annotated[str, typer.Option(help=DATA_HELP, show_default=False)],
    request: Annotated[PlanRequest, _FIELDS],
    options: TrainConfig,
    config: ModelConfig,
    run: RunConfig,
    elastic: ElasticConfig,
    plan: Annotated[
        Path | None, typer.Option(help="Train by this plan instead of making one.", show_default=False)
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Nodes to play on this machine, each a process; needs --fault-tolerance.", show_default=False
        ),
    ] = None,
    coordinator: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Be one node of a run that `mmcompile coordinate` serves.", show_default=False
        ),
    ] = None,
    node: Annotated[str | None, typer.Option(help="Name of this node, with --coordinator.", show_default=False)] = None,
    secret: Annotated[
        Path | None, typer.Option(help="File with the secret of the run, with --coordinator.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder: plan, stage sources, measured events.", show_default=False)
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Checkpoint folder to continue from, up to --steps.", show_default=False)
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Checkpoint folder to write at the end, for --resume.", show_default=False)
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="Folder to write the trained model to, for from_pretrained.", show_default=False)
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            envvar="MMCOMPILE_CACHE",
            help="Folder of your own for captures, so that a second start makes none.",
            show_default="~/.cache/mmcompile",
            show_envvar=False,
        ),
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Read and store no captures.")] = False,
    json: JsonOption = False,
) -> None:
    """Train MODEL on DATA, one process a stage, with AdamW.

    Starts its processes on this machine; under torchrun (--no-python mmcompile train ...) it uses the launched ones.

    With --fault-tolerance, or a plan made with it, nodes may die, and training continues with the others.
    """
    if plan is not None:
        refuse_typed(context, (*_DECIDED, "nodes"), WITH_PLAN)
    if (request.fault_tolerance is None) != (nodes is None) and plan is None:
        raise ConfigError(
            "--fault-tolerance and --nodes go together: how many nodes there are, and how many may fail at once"
        )
    if options.balance is not None:
        balancer(options.balance)  # a wrong name is told before anything is read
    samples = load_samples(data)
    torch.manual_seed(run.seed)
    with busy(f"loading {model}"):
        module, _ = load_model(model, "random" if config.random_weights else "stored", config.dtype)
        set_trainable(module, config.train)
    folder = None if no_cache else cache or default_cache()
    made, subject, chosen = _planned(module, samples, run, plan, request, nodes, folder)
    leading = int(os.environ.get("RANK", "0")) == 0
    if out is not None and leading:
        write_atomic(out / PLAN, made.to_json())
        write_programs(out, api.stage_programs(module, subject.batch, made, cache=folder))
    if made.resilience is not None:
        check_elastic(options, run, resume)
        at = node_at(coordinator, node, secret, elastic)
        done = train_elastic(
            subject,
            made,
            samples,
            run,
            options,
            elastic,
            allow_unused=request.allow_unused,
            folder=None if out is None else out / RUN,
            cache=folder,
            at=at,
            save=save,
            export=export,
        )
        if done:
            _report(done, out, save, export, json, traced=False)
        return
    _refuse_elastic(elastic, coordinator=coordinator, node=node, secret=secret)
    settings: dict[str, Any] = asdict(options) | {"balance": options.balance or Auto.name}
    with api.parallelize(
        module,
        plan=made,
        optimizer=functools.partial(torch.optim.AdamW, lr=run.lr),
        batch=None if run.pack else subject.batch,
        packing=chosen if run.pack else None,
        allow_unused=request.allow_unused,
        cache=folder,
        on_capture=print_capture,
        **settings,
    ) as engine:
        if resume is not None:
            engine.load(resume)
            if engine.num_steps >= run.steps:
                raise ConfigError(f"checkpoint {resume} is at step {engine.num_steps} already; ask for more --steps")
        done = _run(engine, samples, run, options.accumulate, traced=out is not None)
        if out is not None and leading:
            write_events(out, engine.trace())
        if save is not None:
            engine.save(save)
        if export is not None:
            engine.export(export)
    if leading:
        _report(done, out, save, export, json)


def _refuse_elastic(elastic: ElasticConfig, **given: object) -> None:
    """Raise ConfigError if an option of fault-tolerant runs is set: one of `elastic`, or one in `given` that is not None."""
    typed = {flag(own): getattr(elastic, own.name) != own.default for own in fields(elastic)}
    for option, value in (typed | {f"--{name}": value is not None for name, value in given.items()}).items():
        if value:
            raise ConfigError(f"{option} has no effect without templates: plan with --fault-tolerance, or drop it")


def _planned(
    model: nn.Module,
    samples: Sequence[Sample],
    run: RunConfig,
    path: Path | None,
    request: PlanRequest,
    nodes: int | None,
    cache: Path | None,
) -> tuple[Plan, CapturedModel, Sequence[Sample]]:
    """Return (plan, captured model, samples of the captured batch). The plan is read from `path`, or made if that is None."""
    stored = None if path is None else Plan.load(path)
    count = request.num_microbatches or DEFAULT_MICROBATCHES
    if stored is not None:
        count = stored.num_microbatches * stored.chains[-1].dp
    chosen = richest(samples, max(-(-run.batch_size // count), 2 if run.pack else 1))
    batch = None if run.pack else collate(chosen)
    subject = CapturedModel.of(model, batch, chosen if run.pack else None, cache)
    cluster = Cluster.parse("local" if nodes is None else f"{nodes}x1x{LOCAL_NAME}")
    made = stored or make_plan(subject, replace(request, num_microbatches=count), PlanInputs(cluster=cluster))
    if run.batch_size < made.num_microbatches * made.chains[-1].dp:
        raise ConfigError(
            f"--batch-size {run.batch_size} is less than the {made.num_microbatches} microbatches of a step, in each of "
            f"{made.chains[-1].dp} replicas; raise it, or plan for fewer"
        )
    return made, subject, chosen


def _run(
    engine: Engine, samples: Sequence[Sample], run: RunConfig, to_a_step: int, *, traced: bool
) -> list[StepMetrics]:
    done: list[StepMetrics] = []
    first, end = engine.num_steps * to_a_step, run.steps * to_a_step
    chosen = itertools.islice(epochs(len(samples), run.batch_size, run.seed), first, end)
    batches = ([samples[index] for index in own] for own in chosen)
    warm = list(itertools.islice(batches, _WARM_BATCHES))
    with capturing() as on_capture:
        engine.warm_up(warm, on_capture=on_capture)
    batches = itertools.chain(warm, batches)
    with step_progress(disable=engine.rank != 0) as progress:
        task = progress.add_task("step", total=run.steps, completed=engine.num_steps, loss=float("nan"), beside="")
        for metrics in engine.train(batches, trace={run.steps} if traced else ()):
            done.append(metrics)
            progress.update(task, completed=engine.num_steps, loss=metrics.loss, beside=_rate(metrics))
    return done


def _rate(metrics: StepMetrics) -> str:
    """Return the speed of a step as text: tokens with a label per second; samples per second if tokens are not counted."""
    if metrics.num_tokens:
        return f"{metrics.num_tokens / metrics.seconds:,.0f} tokens/s"
    return f"{metrics.num_samples / metrics.seconds:,.0f} samples/s"


def _report(
    done: Sequence[StepMetrics],
    out: Path | None,
    save: Path | None,
    export: Path | None,
    json: bool,
    *,
    traced: bool = True,
) -> None:
    figures: dict[str, Any] = {
        "steps": done[-1].step,
        "loss": done[-1].loss,
        "tokens": sum(metrics.num_tokens for metrics in done),
        "samples": sum(metrics.num_samples for metrics in done),
        "seconds": sum(metrics.seconds for metrics in done),
    }
    if json:
        named = {"out": out, "checkpoint": save, "model": export}
        print_json(figures | {name: None if folder is None else str(folder) for name, folder in named.items()})
        return
    print_text(
        f"{figures['steps']} steps, {figures['samples']} samples in {figures['seconds']:.1f} s; last loss {figures['loss']:.4f}"
    )
    if out is not None:
        print_text(f"run folder {out}" + (f"; `mmcompile trace {out}` draws its last step" if traced else ""))
    if save is not None:
        print_text(f"checkpoint {save}")
    if export is not None:
        print_text(f"model {export}")
