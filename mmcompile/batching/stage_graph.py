"""What a microbatch does in the stages of its tower, from the ports of its programs."""

from __future__ import annotations

from collections.abc import Sequence

from mmcompile.codegen.program import PatternPrograms
from mmcompile.planner.schedule.schedule import Flow, FlowEdge


def flow_of(programs: PatternPrograms, stages: Sequence[str]) -> Flow:
    """What a microbatch of a pattern does in some stages: which have work, the edges between them, their backwards.

    Args:
        stages: of one tower, as programs name them, in plan order. Edges to and from other stages are left out.
    """
    present = {name: programs.programs[name] for name in stages if name in programs.programs}
    gradient: dict[tuple[str, str], bool] = {}
    for program in present.values():
        for port in program.inputs:
            if port.kind == "link" and port.peers[0] in present:
                edge = (port.peers[0], program.stage)
                gradient[edge] = gradient.get(edge, False) or port.gradient
    return Flow(
        stages=tuple(present),
        edges=tuple(FlowEdge(source=a, target=b, gradient=value) for (a, b), value in gradient.items()),
        backward=tuple(name for name, program in present.items() if program.has_backward),
    )
