"""`LoadedStage`: a stage program on this rank, its ports resolved to ranks and stage indices once and for all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmcompile.lower.load import load_stage
from mmcompile.lower.program import Port, StageProgram
from mmcompile.plan.placement import PlacedStage


@dataclass(frozen=True, kw_only=True, slots=True)
class InputSlot:
    """One argument of a stage. `producer` is the index of the stage a link comes from, -1 for other kinds."""

    name: str
    kind: str
    producer: int
    gradient: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputSlot:
    """One result of a stage that goes to other stages, by index."""

    position: int
    name: str
    consumers: tuple[int, ...]
    gradient: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedStage:
    """A stage ready to run.

    `from_peer`, `to_peer`, `gradients_from`, `gradients_to` list the value names that cross per stage on the other side,
    in the order of this program's ports, for the actions RECV_F, SEND_F, RECV_B and SEND_B.
    """

    index: int
    run: Callable[..., tuple[Tensor, ...]]
    inputs: tuple[InputSlot, ...]
    outputs: tuple[OutputSlot, ...]
    roots: frozenset[str]
    loss: int | None
    """Position of the loss among the results, if this is the loss stage."""
    tokens: int | None
    """Position of the number of valid tokens, if it counts them."""
    from_peer: Mapping[int, tuple[str, ...]]
    to_peer: Mapping[int, tuple[str, ...]]
    gradients_from: Mapping[int, tuple[str, ...]]
    gradients_to: Mapping[int, tuple[str, ...]]

    @classmethod
    def load(
        cls,
        program: StageProgram,
        tensors: Mapping[str, Tensor],
        stages: Sequence[PlacedStage],
        *,
        device: torch.device,
        compiled: bool,
    ) -> LoadedStage:
        """Build the module of a program on parameters and buffers by original name."""
        index = {stage.name: position for position, stage in enumerate(stages)}
        module = load_stage(program, tensors, device)
        inputs = tuple(_input(port, index) for port in program.inputs)
        outputs = tuple(
            OutputSlot(
                position=position, name=port.name, consumers=tuple(index[p] for p in port.peers), gradient=port.gradient
            )
            for position, port in enumerate(program.outputs)
            if port.peers
        )
        into = [(slot.producer, slot.name, slot.gradient) for slot in inputs if slot.kind == "link"]
        out = [(consumer, slot.name, slot.gradient) for slot in outputs for consumer in slot.consumers]
        return cls(
            index=index[program.stage],
            run=torch.compile(module, backend="inductor", dynamic=None) if compiled else module,
            inputs=inputs,
            outputs=outputs,
            roots=root_names(program),
            loss=_position(program, "loss_sum"),
            tokens=_position(program, "num_tokens"),
            from_peer=_by_peer((peer, name) for peer, name, _ in into),
            to_peer=_by_peer((peer, name) for peer, name, _ in out),
            gradients_from=_by_peer((peer, name) for peer, name, gradient in out if gradient),
            gradients_to=_by_peer((peer, name) for peer, name, gradient in into if gradient),
        )


def root_names(program: StageProgram) -> frozenset[str]:
    """Batch inputs a stage reads, given or computed by the planner."""
    return frozenset(port.name for port in program.inputs if port.kind in ("root", "host"))


def _position(program: StageProgram, name: str) -> int | None:
    names = [port.name for port in program.outputs]
    return names.index(name) if program.is_loss and name in names else None


def _input(port: Port, index: Mapping[str, int]) -> InputSlot:
    producer = index[port.peers[0]] if port.kind == "link" else -1
    return InputSlot(name=port.name, kind=port.kind, producer=producer, gradient=port.gradient)


def _by_peer(pairs: Iterable[tuple[int, str]]) -> dict[int, tuple[str, ...]]:
    grouped: dict[int, tuple[str, ...]] = {}
    for peer, name in pairs:
        grouped[peer] = (*grouped.get(peer, ()), name)
    return grouped
