"""Membership types: a change of nodes, the pipelines that the remaining nodes run, and the decisions between the two.

The planner, the control plane and the elastic engine share them. A node is a number in simulations and a name in a run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeAlias

from mmcompile.planner.resilience.copies import LayerCopy
from mmcompile.planner.resilience.job import LayerId, Node, layer_runs
from mmcompile.planner.resilience.regroup import RegroupRule
from mmcompile.units import format_bytes, format_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePipeline(Generic[Node]):
    """A pipeline template bound to nodes. The number of nodes names the template."""

    nodes: tuple[Node, ...]
    """Nodes in the order of the template's nodes."""
    num_microbatches: int
    """Microbatches of a step that this pipeline trains."""

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.nodes))}] x {self.num_microbatches}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Spare(Generic[Node]):
    """A node that is alive and runs nothing."""

    node: Node
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MembershipPlan(Generic[Node]):
    """The pipelines that run next, the spare nodes, and the copies of layers that come first."""

    pipelines: tuple[NodePipeline[Node], ...]
    spares: tuple[Spare[Node], ...]
    copies: tuple[LayerCopy[Node], ...] = ()
    """Copies from node to node, by round."""
    rule: RegroupRule
    reason: str
    """Why these pipelines and no others."""
    iteration_s: float
    """Seconds of a step: those of the slowest pipeline."""
    kept_bytes: int
    """Bytes of layers that their node held before."""

    @property
    def copied_bytes(self) -> int:
        """Bytes of all copies."""
        return sum(copy.num_bytes for copy in self.copies)

    @property
    def num_nodes(self) -> int:
        """Nodes in pipelines."""
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
class MembershipChange:
    """A change of the members of a run, which needs a plan."""

    members: tuple[str, ...]
    """Nodes in the order of their ranks: members that hold state, then those that joined. Empty if no node is left."""
    num_workers: tuple[int, ...]
    """Workers of each member."""
    lost: tuple[str, ...]
    """Members of the last active generation whose state is gone."""
    joined: tuple[str, ...]
    """Members that hold no state. A node whose workers were replaced is also in `lost`."""
    draining: tuple[str, ...]
    """Nodes that will be taken away. One that is also in `members` only sends its state: it gets no work."""
    previous: tuple[str, ...]
    """Members of the last active generation in order of their ranks."""
    previous_payload: str | None
    """JSON text of the last active generation's plan, which assigns layers to nodes."""
    committed: int
    """Number of the last committed step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """Decision to continue with a plan."""

    payload: str
    """JSON text of the plan, given to all workers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """Decision to wait for more nodes."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """Decision to end training. Every layer may still have a holder."""

    reason: str

    def __str__(self) -> str:
        return f"stop: {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StateLost:
    """Some layers have no holder any more: only a checkpoint restores them, into pipelines that `instantiate` returns."""

    layers: tuple[str, ...]
    """Names of the layers, as `layer_ranges` writes them."""
    checkpoint_step: int | None = None
    """Step of the last checkpoint; None if there is none."""
    cursor: str | None = None
    """Cursor that was committed with the checkpoint's step."""
    payload: str = ""
    """JSON text of the plan for nodes that have loaded the checkpoint."""

    @property
    def reason(self) -> str:
        """The lost layers in one sentence."""
        return f"no node holds {', '.join(self.layers)} any more; go back to the last checkpoint"

    def __str__(self) -> str:
        return f"state lost: {self.reason}"


Decision: TypeAlias = Planned | Wait | Stop | StateLost
"""Answer of the planner to a membership change."""


def layer_ranges(layers: Iterable[LayerId]) -> tuple[str, ...]:
    """Name runs of layers: `llm[0], llm[1], llm[2], vision[4]` -> `("llm[0:3]", "vision[4]")`; layers of a chain in order."""
    return tuple(
        f"{chain}[{first}]" if last == first + 1 else f"{chain}[{first}:{last}]"
        for chain, runs in layer_runs(layers).items()
        for first, last in runs
    )
