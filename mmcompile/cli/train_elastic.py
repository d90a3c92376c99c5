"""`mmcompile train` by a plan with templates: nodes may die, join and leave while a live display shows who is there."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmcompile.cli.planning import Subject
from mmcompile.cli.run_display import RunDisplay
from mmcompile.config import Reduction
from mmcompile.data.batches import MapBatches
from mmcompile.data.collate import Sample
from mmcompile.elastic_run import elastic, join
from mmcompile.errors import ConfigError
from mmcompile.planner.plan.plan import Plan
from mmcompile.runtime.control.secret import Endpoint, read_secret
from mmcompile.runtime.monitoring.metrics import StepMetrics

RUN = "run"
"""Folder of the log, the events and the checkpoint, inside the run folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeAt:
    """The node that this machine is, and the coordinator of the run."""

    node: str
    at: Endpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticOptions:
    """Options of `mmcompile train` that a run with templates has."""

    steps: int
    batch_size: int
    lr: float
    clip_norm: float | None
    seed: int
    compile: bool
    reduction: Reduction
    balance: str
    save_every: int | None
    save: Path | None
    """Where the checkpoint of the end goes."""
    export: Path | None
    """Where the trained model goes."""
    folder: Path | None
    """Of the log, the events and checkpoints; None to keep them no longer than the run."""
    at: NodeAt | None
    """Where another machine coordinates; None to play all nodes here."""


def refuse_elastic(**given: bool) -> None:
    """Refuse options that a run with templates does not have. Raises ConfigError."""
    if found := [name for name, value in given.items() if value]:
        raise ConfigError(
            f"--{found[0]} does not go together with templates, whose run reads its own data and goes on by itself: plan without "
            "--fault-tolerance, or drop it"
        )
    if "RANK" in os.environ:
        raise ConfigError(
            "a run with templates starts its own processes, so that it can replace them: start it once, not under torchrun"
        )


def train_elastic(
    model: nn.Module, plan: Plan, subject: Subject, samples: Sequence[Sample], options: ElasticOptions
) -> list[StepMetrics]:
    """Train to the last step; metrics of every step that was committed, none where another machine has the coordinator."""
    if options.at is not None:
        _take_part(model, plan, subject, samples, options, options.at)
        return []
    display = RunDisplay(options.steps)
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mmcompile-"))) / RUN
        engine = stack.enter_context(
            elastic(model, subject.batch, plan, folder=folder, on_event=display.note, **_settings(samples, options))
        )
        stack.enter_context(display.progress)
        done = list(engine.train())
        if options.save is not None:
            engine.save(options.save)
        if options.export is not None:
            engine.export(options.export)
        return done


def node_at(coordinator: str | None, node: str | None, secret: Path | None) -> NodeAt | None:
    """The options of a run over several machines. Raises ConfigError: some are missing."""
    given = {"--coordinator": coordinator, "--node": node, "--secret": secret}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if coordinator is None or node is None or secret is None:
        raise ConfigError(f"{', '.join(given)} go together, and {', '.join(missing)} is missing")
    return NodeAt(node=node, at=Endpoint.parse(coordinator, read_secret(secret)))


def _take_part(
    model: nn.Module, plan: Plan, subject: Subject, samples: Sequence[Sample], options: ElasticOptions, at: NodeAt
) -> None:
    if options.folder is None:
        raise ConfigError(
            "--coordinator needs --out, a folder that all nodes and the coordinator share, for checkpoints"
        )
    join(model, subject.batch, plan, node=at.node, at=at.at, folder=options.folder, **_settings(samples, options))


def _settings(samples: Sequence[Sample], options: ElasticOptions) -> dict[str, Any]:
    return {
        "data": MapBatches(samples, options.batch_size, options.seed),
        "num_steps": options.steps,
        "seed": options.seed,
        "optimizer": functools.partial(torch.optim.AdamW, lr=options.lr),
        "clip_norm": options.clip_norm,
        "compile": options.compile,
        "reduction": options.reduction,
        "balance": options.balance,
        "save_every": options.save_every,
    }
