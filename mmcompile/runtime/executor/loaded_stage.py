"""`LoadedStage`: a stage program on this rank, its ports resolved to placed stages when it is loaded.

A port names its peer stages as their programs do, without replica or shard. A peer in the same balance group is the placed stage
with that name in the same replica. The replica and the microbatch of a peer in another balance group differ by step: the row
exchanges of the step plan name them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmcompile.codegen.compiled import load_compiled_stage
from mmcompile.codegen.load import load_stage
from mmcompile.codegen.program import Port, StageProgram
from mmcompile.codegen.stage_module import StageModule
from mmcompile.errors import VerifyError
from mmcompile.planner.plan.placement import PlacedStage


@dataclass(frozen=True, kw_only=True, slots=True)
class InputSlot:
    """One argument of a stage: a link from another stage, a batch input, or a size."""

    name: str
    kind: str
    producer: int
    """Index of the stage that makes the argument for the same microbatch; -1 for batch inputs, sizes, and if `crossing`."""
    crossing: bool
    """True for a tensor from a stage whose microbatches have other samples (an encoder's, for the language model)."""
    gradient: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputSlot:
    """One result of a stage that other stages read."""

    position: int
    name: str
    consumers: tuple[int, ...]
    """Indices of the stages that get the result for the same microbatch; () if none, or if another shard sends it to them."""
    crossing: bool
    """True if stages whose microbatches have other samples (such as the language model's, after an encoder) read the result."""
    gradient: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedStage:
    """Runs a stage program on this rank's parameters, and has the names of the values that it exchanges with other stages.

    For peers in the same balance group, `from_peer` has the names of the values received from each peer (RECV_F), `to_peer` of
    values sent (SEND_F), `gradients_from` of values whose gradient is received (RECV_B), and `gradients_to` sent (SEND_B). All
    four map the index of a peer stage to names, in the order of this program's ports.
    """

    index: int
    """Index of the stage in the placement, which lists every replica and shard of a stage."""
    key: int
    """Key of the stage's random numbers: the position of its program among all stage programs. Replicas and tensor-parallel
    shards have the same key, since they compute the same values.
    """
    name: str
    """Name of the stage in stage programs, without replica or shard."""
    run: StageModule
    inputs: tuple[InputSlot, ...]
    outputs: tuple[OutputSlot, ...]
    trainable: tuple[str, ...]
    """Original names of the parameters whose gradient a backward may compute."""
    loss: int | None
    """Position of the loss among the results; None if the stage computes no loss."""
    tokens: int | None
    """Position of the number of valid tokens among the results; None if the stage counts none."""
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
        placed: int,
        *,
        device: torch.device,
        compiled: bool,
    ) -> LoadedStage:
        """Build the module of a program on parameters and buffers by original name.

        Args:
            stages: all placed stages; each replica and shard of a stage is one.
            placed: index of the stage that is to run the program; the program may belong to several replicas.
            compiled: run compiled code, made at the first call and shared by all stages that differ in names only.

        Raises:
            VerifyError: the program belongs to another stage, or names a peer that is not placed.
        """
        tower = _tower(program, stages, placed)
        load = load_compiled_stage if compiled else load_stage
        inputs = tuple(_input(port, tower) for port in program.inputs)
        outputs = tuple(
            _output(port, at, tower) for at, port in enumerate(program.outputs) if port.peers or port.gradient
        )
        into = [
            (slot.producer, slot.name, slot.gradient) for slot in inputs if slot.kind == "link" and not slot.crossing
        ]
        out = [(consumer, slot.name, slot.gradient) for slot in outputs for consumer in slot.consumers]
        return cls(
            index=placed,
            key=_key(stages, placed),
            name=program.stage,
            run=load(program, tensors, device),
            inputs=inputs,
            outputs=outputs,
            trainable=tuple(spec.name for spec in program.parameters if spec.trainable),
            loss=_position(program, "loss_sum"),
            tokens=_position(program, "num_tokens"),
            from_peer=_by_peer((peer, name) for peer, name, _ in into),
            to_peer=_by_peer((peer, name) for peer, name, _ in out),
            gradients_from=_by_peer((peer, name) for peer, name, gradient in out if gradient),
            gradients_to=_by_peer((peer, name) for peer, name, gradient in into if gradient),
        )


Stages = Mapping[int, LoadedStage]
"""Stages by which this rank runs a microbatch, by index in the placement (`LoadedStage.index`)."""


def _position(program: StageProgram, name: str) -> int | None:
    names = [port.name for port in program.outputs]
    return names.index(name) if program.is_loss and name in names else None


def _key(stages: Sequence[PlacedStage], placed: int) -> int:
    names = [(stage.tower, stage.same_values) for stage in stages]
    return list(dict.fromkeys(names)).index(names[placed])


def _tower(program: StageProgram, stages: Sequence[PlacedStage], placed: int) -> dict[str, int]:
    """Return program name -> index in `stages`, of all stages with the same `tower` and `replica` as `stages[placed]`.

    Raises VerifyError if `program` belongs to another stage, or exchanges values with a stage that is not placed.
    """
    here = stages[placed]
    if here.program_name != program.stage:
        raise VerifyError(f"placed stage {here.name} runs programs of {here.program_name}, got one of {program.stage}")
    known = {stage.program_name for stage in stages}
    for port in (*program.inputs, *program.outputs):
        if not known.issuperset(port.peers):
            missing = ", ".join(peer for peer in port.peers if peer not in known)
            raise VerifyError(f"value {port.name} of stage {program.stage} has the peer {missing}, which no rank runs")
    return {
        stage.program_name: at
        for at, stage in enumerate(stages)
        if (stage.tower, stage.replica) == (here.tower, here.replica)
    }


def _input(port: Port, tower: Mapping[str, int]) -> InputSlot:
    link = port.kind == "link"
    producer = tower.get(port.peers[0], -1) if link else -1
    return InputSlot(
        name=port.name, kind=port.kind, producer=producer, crossing=link and producer < 0, gradient=port.gradient
    )


def _output(port: Port, position: int, tower: Mapping[str, int]) -> OutputSlot:
    return OutputSlot(
        position=position,
        name=port.name,
        consumers=tuple(tower[peer] for peer in port.peers if peer in tower),
        crossing=not tower.keys() >= set(port.peers),
        gradient=port.gradient,
    )


def _by_peer(pairs: Iterable[tuple[int, str]]) -> dict[int, tuple[str, ...]]:
    grouped: dict[int, tuple[str, ...]] = {}
    for peer, name in pairs:
        grouped[peer] = (*grouped.get(peer, ()), name)
    return grouped
