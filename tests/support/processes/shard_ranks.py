"""Context-parallel ranks as real gloo processes: each runs all stages of a model on its own tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmcompile.codegen.load import load_stage
from mmcompile.codegen.program import PatternPrograms, StageProgram
from mmcompile.planner.plan.placement import shard_name
from support.processes.spawn_ranks import RankContext, spawn_ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One model and batch."""

    programs: PatternPrograms
    tensors: Mapping[str, Tensor]
    """Parameters and buffers."""
    roots: Mapping[str, Any]
    """Inputs that are the same on all ranks, by port name."""
    own: tuple[Mapping[str, Tensor], ...]
    """Inputs of each rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one rank computed."""

    loss_sum: float
    num_tokens: int
    gradients: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """All ranks' shares, and what one rank with all tokens computes."""

    shares: list[Share]
    whole: Share

    def assert_equal(self) -> None:
        """The shares add up, to 1e-9."""
        assert sum(part.num_tokens for part in self.shares) == self.whole.num_tokens
        assert abs(sum(part.loss_sum for part in self.shares) / self.whole.loss_sum - 1) < 1e-9
        assert {name for part in self.shares for name in part.gradients} == self.whole.gradients.keys()
        for name, wanted in self.whole.gradients.items():
            got = sum((part.gradients[name] for part in self.shares), torch.zeros_like(wanted))
            # Some gradients are zero but for rounding (biases of keys).
            assert (got - wanted).abs().max() <= 1e-9 * wanted.abs().max() + 1e-13, name


def ran_by(jobs: Mapping[str, tuple[Job, Job]], num_ranks: int) -> dict[str, Ran]:
    """Run (job of the ranks, job of one rank) pairs."""
    shares = spawn_ranks(_on_rank, [spread for spread, _ in jobs.values()], num_ranks)
    return {
        name: Ran(shares=found, whole=share(whole, 0))
        for (name, (_, whole)), found in zip(jobs.items(), shares, strict=True)
    }


def _on_rank(context: RankContext, job: Job) -> Share:
    context.register("cp")
    return share(job, context.rank)


def share(job: Job, rank: int) -> Share:
    """Forward and backward of one rank, stage by stage; links are cut from autograd, and flagged gradients go back."""
    own = job.own[rank] if job.own else {}
    values: dict[str, Any] = {**job.roots, **own, **{shard_name(name, rank): value for name, value in own.items()}}
    made: dict[str, Tensor] = {}
    ran = []
    gradients: dict[str, Tensor] = {}
    for program in _in_order(job.programs, rank):
        arguments = [
            made[port.name].detach().requires_grad_(port.gradient) if port.kind == "link" else values[port.name]
            for port in program.inputs
        ]
        stage = load_stage(program, job.tensors)
        results = stage(*arguments)
        made |= {port.name: result for port, result in zip(program.outputs, results, strict=True)}
        ran.append((program, stage, arguments, results))
    back = {"loss_sum": torch.ones_like(made["loss_sum"])}
    for program, stage, arguments, results in reversed(ran):
        pairs = [
            (result, back[port.name])
            for port, result in zip(program.outputs, results, strict=True)
            if result.requires_grad and port.name in back
        ]
        if pairs:
            torch.autograd.backward([result for result, _ in pairs], [seed for _, seed in pairs])
        for port, value in zip(program.inputs, arguments, strict=True):
            if port.kind == "link" and value.grad is not None:
                back[port.name] = back.get(port.name, 0) + value.grad
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients.get(name, 0) + parameter.grad
                parameter.grad = None
    return Share(loss_sum=float(made["loss_sum"].detach()), num_tokens=int(made["num_tokens"]), gradients=gradients)


def _in_order(programs: PatternPrograms, rank: int) -> Iterator[StageProgram]:
    """Programs of a rank and of stages that are whole, producers first."""
    waiting = {n: p for n, p in programs.programs.items() if "@" not in n or n == shard_name(n.split("@")[0], rank)}
    done: set[str] = set()
    while waiting:
        ready = [n for n, p in waiting.items() if {peer for port in p.inputs for peer in port.peers} <= done]
        assert ready, f"stages wait for each other: {sorted(waiting)}"
        for name in ready:
            yield waiting.pop(name)
            done.add(name)
