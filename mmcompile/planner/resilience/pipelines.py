"""Pipelines with nodes: what runs, what a change of membership leads to, or why training stops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmcompile.planner.resilience.copies import Copy
from mmcompile.planner.resilience.job import LayerId
from mmcompile.planner.resilience.regroup import Rule
from mmcompile.planner.resilience.template import Template
from mmcompile.units import format_bytes, format_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """A template bound to nodes."""

    template: Template
    nodes: tuple[int, ...]
    """`nodes[k]` plays the template's node k."""
    num_microbatches: int
    """Of a step."""

    @property
    def iteration_s(self) -> float:
        return self.template.iteration_s(self.num_microbatches)

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.nodes))}] x {self.num_microbatches}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Spare:
    """A node that is alive and runs nothing."""

    node: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Membership:
    """What runs next."""

    pipelines: tuple[Pipeline, ...]
    spares: tuple[Spare, ...]
    copies: tuple[Copy, ...]
    """What must be sent first, by round."""
    rule: Rule
    reason: str
    """Why this and not another."""
    kept_bytes: int
    """Of layers that their node held already."""

    @property
    def iteration_s(self) -> float:
        """Seconds of a step: those of its slowest pipeline."""
        return max(pipeline.iteration_s for pipeline in self.pipelines)

    @property
    def copied_bytes(self) -> int:
        return sum(copy.num_bytes for copy in self.copies)

    @property
    def num_nodes(self) -> int:
        """In pipelines."""
        return sum(len(pipeline.nodes) for pipeline in self.pipelines)

    def __str__(self) -> str:
        lines = [
            f"{self.rule}: {len(self.pipelines)} pipelines on {self.num_nodes} nodes, a step in "
            f"{format_seconds(self.iteration_s)}",
            f"  because {self.reason}",
            *(f"  {pipeline}" for pipeline in self.pipelines),
        ]
        if self.copies:
            rounds = 1 + max(copy.round for copy in self.copies)
            sources = len({copy.source for copy in self.copies})
            lines.append(
                f"  copies {len(self.copies)} layers, {format_bytes(self.copied_bytes)}, from {sources} nodes in {rounds} "
                f"rounds; {format_bytes(self.kept_bytes)} stay in place"
            )
        lines += [f"  spare node {spare.node}: {spare.reason}" for spare in self.spares]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """Too few nodes for the promise: save, say so, exit. Every layer still has a holder."""

    num_nodes: int
    needed_nodes: int
    reason: str

    def __str__(self) -> str:
        return f"stop: {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StateLost:
    """Layers that nobody holds any more: only a checkpoint brings them back, into pipelines that `instantiate` gives."""

    layers: tuple[LayerId, ...]

    @property
    def reason(self) -> str:
        return f"no node holds {ranges(self.layers)} any more; go back to the last checkpoint"

    def __str__(self) -> str:
        return f"state lost: {self.reason}"


def ranges(layers: Sequence[LayerId]) -> str:
    """`llm[0], llm[1], llm[2], vision[4]` -> `"llm[0:3], vision[4]"`; layers of a chain in order."""
    runs: list[tuple[str, int, int]] = []
    for layer in layers:
        if runs and runs[-1][0] == layer.chain and runs[-1][2] == layer.index:
            runs[-1] = (layer.chain, runs[-1][1], layer.index + 1)
        else:
            runs.append((layer.chain, layer.index, layer.index + 1))
    return ", ".join(
        f"{chain}[{first}]" if last == first + 1 else f"{chain}[{first}:{last}]" for chain, first, last in runs
    )
