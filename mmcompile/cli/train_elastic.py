"""`mmcompile train` by a plan with templates: nodes may die, join and leave while a live display shows who is there."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mmcompile.batching.balance.arrival_order import Arrival
from mmcompile.captured_model import CapturedModel
from mmcompile.cli.run_display import RunDisplay, print_capture
from mmcompile.config import ElasticConfig, RunConfig, TrainConfig
from mmcompile.data.batches import MapBatches
from mmcompile.data.collate import Sample
from mmcompile.elastic_run import elastic, join
from mmcompile.errors import ConfigError
from mmcompile.planner.plan.plan import Plan
from mmcompile.runtime.control.secret import Endpoint, read_secret
from mmcompile.runtime.control.times import Times
from mmcompile.runtime.monitoring.metrics import StepMetrics

RUN = "run"
"""Folder of the log, the events and the checkpoint, inside the run folder."""


def check_elastic(options: TrainConfig, run: RunConfig, resume: Path | None) -> None:
    """Raise ConfigError for options that a run with templates lacks, or if a launcher such as torchrun started this process."""
    given = {
        "correct": options.correct,
        "pack": run.pack,
        "resume": resume is not None,
        "accumulate": options.accumulate != 1,
        "master-weights": options.master_weights,
        "shard-optimizer": options.shard_optimizer,
    }
    if found := [name for name, value in given.items() if value]:
        raise ConfigError(
            f"--{found[0]} does not go together with templates, whose run reads its own data and goes on by itself: plan without "
            "--fault-tolerance, or drop it"
        )
    if "RANK" in os.environ:
        raise ConfigError(
            "a run with templates starts its own processes, so that it can replace them: start it once, not under torchrun"
        )


def node_at(
    coordinator: str | None, node: str | None, secret: Path | None, config: ElasticConfig
) -> tuple[str, Endpoint] | None:
    """Return the name of this machine's node and the address of its coordinator; None to play all nodes here.

    Raises:
        ConfigError: some, but not all, of `--coordinator`, `--node` and `--secret` are given.
    """
    given = {"--coordinator": coordinator, "--node": node, "--secret": secret}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if coordinator is None or node is None or secret is None:
        raise ConfigError(f"{', '.join(given)} go together, and {', '.join(missing)} is missing")
    times = Times(recovery_deadline_s=config.recovery_deadline_s)
    return node, replace(Endpoint.parse(coordinator, read_secret(secret)), times=times)


def train_elastic(
    subject: CapturedModel,
    plan: Plan,
    samples: Sequence[Sample],
    run: RunConfig,
    options: TrainConfig,
    config: ElasticConfig,
    *,
    allow_unused: bool,
    folder: Path | None,
    cache: Path | None,
    at: tuple[str, Endpoint] | None,
    save: Path | None,
    export: Path | None,
) -> list[StepMetrics]:
    """Train to the last step and return the metrics of every committed step; [] where another machine has the coordinator.

    Args:
        allow_unused: train although some of what is set to train gets no gradient.
        folder: folder of the log, the events and checkpoints; None to keep them no longer than the run.
        cache: folder of captures; None for one in `folder`.
        at: name of this node and address of its coordinator; None to play all nodes here.
        save: folder of the checkpoint of the end.
        export: folder of the trained model.
    """
    settings: dict[str, Any] = {
        "data": MapBatches(samples, run.batch_size, run.seed),
        "num_steps": run.steps,
        "seed": run.seed,
        "optimizer": functools.partial(torch.optim.AdamW, lr=run.lr),
        "clip_norm": options.clip_norm,
        "compile": options.compile,
        "reduction": options.reduction,
        "balance": options.balance or Arrival.name,
        "save_every": config.save_every,
        "max_restarts": config.max_restarts,
        "allow_unused": allow_unused,
        "cache": cache,
        "on_capture": print_capture,
    }
    if at is not None:
        if folder is None:
            raise ConfigError(
                "--coordinator needs --out, a folder that all nodes and the coordinator share, for checkpoints"
            )
        join(subject.model, subject.batch, plan, node=at[0], at=at[1], folder=folder, **settings)
        return []
    display = RunDisplay(run.steps)
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mmcompile-"))) / RUN
        deadline_s = config.recovery_deadline_s
        engine = stack.enter_context(
            elastic(
                subject.model,
                subject.batch,
                plan,
                folder=folder,
                recovery_deadline_s=deadline_s,
                on_event=display.note,
                **settings,
            )
        )
        stack.enter_context(display.progress)
        done = list(engine.train())
        if save is not None:
            engine.save(save)
        if export is not None:
            engine.export(export)
        return done
