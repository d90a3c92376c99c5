"""What torch says of each stage of a cut model: FLOPs of its forward and of its backward, and bytes kept between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmcompile.codegen.load import load_stage
from mmcompile.codegen.program import StageProgram
from mmcompile.codegen.stage_module import StageModule
from mmcompile.codegen.stage_programs import lower
from mmcompile.ir.capture import Capture
from mmcompile.planner.plan.plan import Plan
from support.graphs.split import even_plan, root_values
from support.oracles.flop_oracle import count_flops, saved_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRun:
    """One forward and backward of one stage."""

    forward_flops: int
    backward_flops: int
    saved_bytes: int
    """Distinct storages that autograd kept in the forward; parameters and buffers excluded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoweredStages:
    """The stages of a plan as modules that hold the model's own parameters, and the values of one batch."""

    plan: Plan
    modules: Mapping[str, tuple[StageProgram, StageModule]]
    roots: Mapping[str, Any]
    permanent: tuple[Tensor, ...]

    def run(self) -> dict[str, StageRun]:
        """Stage name -> what torch counts, under the model's present `requires_grad` flags.

        Every link is cut from autograd. A gradient goes back where autograd itself asks for one.
        """
        made: dict[str, Tensor] = {}
        arguments: dict[str, list[Any]] = {}
        results: dict[str, tuple[Tensor, ...]] = {}
        forward: dict[str, int] = {}
        kept: dict[str, int] = {}
        for name, (program, module) in self.modules.items():
            given = [_given(port.name, port.kind == "link", made, self.roots) for port in program.inputs]

            def run(module: StageModule = module, given: list[Any] = given) -> tuple[Tensor, ...]:
                return module(*given)

            kept[name] = saved_bytes(run, self.permanent)
            results[name], forward[name] = count_flops(run)
            arguments[name] = given
            made |= {port.name: value for port, value in zip(program.outputs, results[name], strict=True)}
        backward = dict(self._backward(arguments, results))
        return {
            name: StageRun(forward_flops=forward[name], backward_flops=backward[name], saved_bytes=kept[name])
            for name in self.modules
        }

    def _backward(
        self, arguments: Mapping[str, list[Any]], results: Mapping[str, tuple[Tensor, ...]]
    ) -> Iterator[tuple[str, int]]:
        back: dict[str, Tensor] = {}
        for name, (program, _) in reversed(list(self.modules.items())):
            seeds = {port.name: back.get(port.name) for port in program.outputs}
            if program.is_loss:
                seeds["loss_sum"] = torch.ones(())
            pairs = [
                (value, seeds[port.name])
                for port, value in zip(program.outputs, results[name], strict=True)
                if value.requires_grad and seeds[port.name] is not None
            ]
            backward = partial(torch.autograd.backward, [value for value, _ in pairs], [seed for _, seed in pairs])
            flops = count_flops(backward)[1] if pairs else 0
            for port, value in zip(program.inputs, arguments[name], strict=True):
                if port.kind == "link" and value.grad is not None:
                    back[port.name] = back.get(port.name, 0) + value.grad
            yield name, flops


def _given(name: str, is_link: bool, made: Mapping[str, Tensor], roots: Mapping[str, Any]) -> Any:
    return made[name].detach().requires_grad_(made[name].requires_grad) if is_link else roots[name]


def lowered(found: Capture, model: nn.Module, batch: Mapping[str, Any], stages: Mapping[str, int]) -> LoweredStages:
    """Cut a capture evenly, lower it, and load every stage.

    Args:
        found: annotated by gradient-flow with everything trainable, so that links carry all they may have to.
        model: what was captured; stages hold its parameters.
        batch: completed, as captured.
        stages: component -> number of stages; one for the others.
    """
    plan = even_plan(found.graph, stages)
    programs = lower(found, plan).programs
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    order = in_order(programs)
    return LoweredStages(
        plan=plan,
        modules={name: (programs[name], load_stage(programs[name], tensors)) for name in order},
        roots=root_values(found, batch),
        permanent=(*model.parameters(), *model.buffers()),
    )


def in_order(programs: Mapping[str, StageProgram]) -> list[str]:
    """Names of programs, producers first."""
    order: list[str] = []
    while len(order) < len(programs):
        waiting = [name for name in programs if name not in order]
        ready = [n for n in waiting if {peer for port in programs[n].inputs for peer in port.peers} <= set(order)]
        assert ready, f"stages wait for each other: {waiting}"
        order += ready
    return order
