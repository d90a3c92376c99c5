"""`Programs`: stage programs, each of one layer, that a worker has, by pattern (capture of the model for one kind of batch)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from mmcompile.codegen.program import PatternPrograms, StageProgram
from mmcompile.errors import PlanError
from mmcompile.ir.graph import ParameterSpec
from mmcompile.planner.plan.by_layers import layer_of
from mmcompile.planner.plan.placement import PlacedStage
from mmcompile.planner.resilience.job import LayerId
from mmcompile.planner.resilience.resilience import Resilience
from mmcompile.runtime.comm import wire
from mmcompile.runtime.comm.groups import Groups


class Programs:
    """Keeps a worker's layer programs by pattern (capture of the model for one kind of batch), and finds their parameters.

    Args:
        known: programs that every worker has from the start.
    """

    def __init__(self, known: Iterable[PatternPrograms]) -> None:
        self._patterns = {programs.pattern: programs for programs in known}
        self.late: list[PatternPrograms] = []
        """Programs captured while training, which restarted workers lack."""

    def __contains__(self, pattern: str) -> bool:
        return pattern in self._patterns

    def of(self, pattern: str) -> Mapping[str, StageProgram]:
        """Return stage name -> program, for the pattern (capture of the model for one kind of batch) of this name."""
        return self._patterns[pattern].programs

    def add(self, programs: PatternPrograms) -> None:
        """Add stage programs that were captured while training; programs of a known `PatternPrograms.pattern` have no effect."""
        if programs.pattern not in self._patterns:
            self._patterns[programs.pattern] = programs
            self.late.append(programs)

    def parameters(self) -> dict[LayerId, tuple[ParameterSpec, ...]]:
        """Return layer -> all parameters that any stage program of the layer reads."""
        found: dict[LayerId, dict[str, ParameterSpec]] = {}
        for stage, program in self._all():
            found.setdefault(layer_of(stage), {}).update({spec.name: spec for spec in program.parameters})
        return {layer: tuple(specs.values()) for layer, specs in found.items()}

    def aliases(self) -> dict[str, str]:
        """Return the name under which a tied parameter is held, by each of its other names."""
        return {alias: spec.name for _, program in self._all() for spec in program.parameters for alias in spec.aliases}

    def holders(self, stages: Sequence[PlacedStage]) -> dict[str, tuple[int, ...]]:
        """Return which stages hold each trainable parameter, by name: indices in `stages`."""
        names: dict[str, set[str]] = {}
        for stage, program in self._all():
            names.setdefault(stage, set()).update(spec.name for spec in program.parameters if spec.trainable)
        found: dict[str, list[int]] = {}
        for index, stage in enumerate(stages):
            for name in names.get(stage.program_name, ()):
                found.setdefault(name, []).append(index)
        return {name: tuple(held) for name, held in sorted(found.items())}

    def check(self, resilience: Resilience) -> None:
        """Raise PlanError if a layer has trainable parameters in the programs but not in the templates, or the reverse."""
        for layer, specs in self.parameters().items():
            trains = any(spec.trainable for spec in specs)
            sizes = resilience.layer_bytes.get(layer.chain, ())
            planned = layer.index < len(sizes) and sizes[layer.index] > 0
            if trains != planned:
                has, said = ("trains" if trains else "is frozen"), ("with" if planned else "without")
                raise PlanError(
                    f"layer {layer} {has}, and the plan's templates were made for one {said} state to copy; plan this model again"
                )

    def _all(self) -> Iterable[tuple[str, StageProgram]]:
        return (item for programs in self._patterns.values() for item in programs.programs.items())


def share(groups: Groups, programs: Programs, patterns: Sequence[PatternPrograms] = ()) -> None:
    """Broadcast stage programs (`patterns`, empty on other ranks) from rank 0, and add them to `programs` on all ranks."""
    sent = None if groups.rank else wire.encode([_with_constants(pattern, {}) for pattern in patterns])
    known = wire.decode(wire.broadcast(groups, sent), list[PatternPrograms])
    if not known:
        return
    if groups.rank == 0:
        constants = {
            f"{pattern.pattern}/{stage}/{name}": tensor
            for pattern in patterns
            for stage, program in pattern.programs.items()
            for name, tensor in program.constants.items()
        }
        for rank in range(1, groups.world_size):
            wire.send_tensors(groups, rank, constants)
        for pattern in patterns:
            programs.add(pattern)
        return
    found: dict[tuple[str, str], dict[str, Tensor]] = {}
    for path, tensor in wire.receive_tensors(groups, 0).items():
        name, stage, constant = path.split("/", 2)
        found.setdefault((name, stage), {})[constant] = tensor
    for pattern in known:
        programs.add(_with_constants(pattern, found))


def _with_constants(
    pattern: PatternPrograms, constants: Mapping[tuple[str, str], Mapping[str, Tensor]]
) -> PatternPrograms:
    return replace(
        pattern,
        programs={
            stage: replace(program, constants=constants.get((pattern.pattern, stage), {}))
            for stage, program in pattern.programs.items()
        },
    )
