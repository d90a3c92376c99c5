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
    """Pipeline template bound to nodes; the template is that for `len(nodes)` nodes."""

    nodes: tuple[Node, ...]
    """Nodes of the pipeline, in the order of the template's nodes."""
    num_microbatches: int
    """Number of microbatches of a step that the pipeline trains."""

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.nodes))}] x {self.num_microbatches}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Spare(Generic[Node]):
    """Node that is alive but runs no pipeline, with the reason."""

    node: Node
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MembershipPlan(Generic[Node]):
    """Plan for one membership: its pipelines, spare nodes, and the copies of layers to make before training continues."""

    pipelines: tuple[NodePipeline[Node], ...]
    spares: tuple[Spare[Node], ...]
    copies: tuple[LayerCopy[Node], ...] = ()
    """Copies of layers from node to node, in order of rounds."""
    rule: RegroupRule
    reason: str
    """Reason why these pipelines were chosen."""
    iteration_s: float
    """Predicted seconds of a step, equal to those of the slowest pipeline."""
    kept_bytes: int
    """Bytes of layers that stay on a node that held them before."""

    @property
    def copied_bytes(self) -> int:
        """Total bytes of all copies."""
        return sum(copy.num_bytes for copy in self.copies)

    @property
    def num_nodes(self) -> int:
        """Number of nodes that run a pipeline."""
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
    """Change of the members of a run, for which the next pipelines must be planned."""

    members: tuple[str, ...]
    """Names of nodes in the order of their ranks: first members that hold state, then new ones. Empty if no node is left."""
    num_workers: tuple[int, ...]
    """Number of workers of each member, in the order of `members`."""
    lost: tuple[str, ...]
    """Names of members of the last active generation whose state is gone."""
    joined: tuple[str, ...]
    """Names of members that hold no state. A node whose workers were replaced is in `joined` and in `lost`."""
    draining: tuple[str, ...]
    """Names of nodes that are about to leave. One that is also in `members` sends its state but runs no pipeline."""
    previous: tuple[str, ...]
    """Names of members of the last active generation, in the order of their ranks."""
    previous_payload: str | None
    """JSON text of the last active generation's plan, which assigns layers to nodes."""
    committed: int
    """Number of the last committed step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """Decision to continue training with the plan whose JSON text is `payload`."""

    payload: str
    """JSON text of the plan, sent to all workers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """Decision to wait for more nodes, with the reason."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """Decision to end training, with the reason, for example too few nodes. Unlike `StateLost`, it needs no layer to be lost."""

    reason: str

    def __str__(self) -> str:
        return f"stop: {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StateLost:
    """Decision to go back to a checkpoint, as layers have no holder any more. `instantiate` makes the pipelines that load it."""

    layers: tuple[str, ...]
    """Names of the lost layers, as `layer_ranges` writes them."""
    checkpoint_step: int | None = None
    """Step of the last checkpoint; None if there is none."""
    cursor: str | None = None
    """Cursor of the data that was committed with the checkpoint's step; None if there is none."""
    payload: str = ""
    """JSON text of the plan for nodes that have loaded the checkpoint; "" if there is none."""

    @property
    def reason(self) -> str:
        """Sentence that names the lost layers."""
        return f"no node holds {', '.join(self.layers)} any more; go back to the last checkpoint"

    def __str__(self) -> str:
        return f"state lost: {self.reason}"


Decision: TypeAlias = Planned | Wait | Stop | StateLost
"""Decision of the planner after a membership change."""


def layer_ranges(layers: Iterable[LayerId]) -> tuple[str, ...]:
    """Return names of ranges of layers: `llm[0], llm[1], llm[2], vision[4]` -> `("llm[0:3]", "vision[4]")`."""
    return tuple(
        f"{chain}[{first}]" if last == first + 1 else f"{chain}[{first}:{last}]"
        for chain, runs in layer_runs(layers).items()
        for first, last in runs
    )
