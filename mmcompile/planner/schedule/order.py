"""Order of forwards and backwards on each rank: integer keys, one rule for each kind of schedule.

Let r(s) be the longest path from stage s to a sink, counting only edges that cross ranks, and M the number of
microbatches. Each rank runs what it has by ascending key:

                 forward of m in s    backward of m in s
    gpipe        m - r                M + m + r             all forwards, then all backwards
    1f1b         2m - r               2m + r + 1
    eager-1f1b   2m - 2r              2m + 2r + 1           1f1b as if each crossing were two
    zb-h1        2m - r               2m + r + 1            the backward in two parts, the second after the sends

**1f1b.** In a stage with r = d this reads F0 .. F(d-1), then F(d) B0, F(d+1) B1, ...: a warm-up of d. Stages of one rank
interleave by the same keys.

**eager-1f1b.** A message under way takes time too: counting the link as a stage of its own doubles the warm-up to 2d, so
that the next input is there when a stage turns to it. It pays with d more microbatches in flight.

**zb-h1.** A backward is I, the input gradient, which stages before wait for, and W, the weight gradient, on which no stage
  depends. I runs in the place of the backward, its gradients leave at once, W follows. So nothing ever starts later than under
1f1b, no stage holds more, and each hop of the way back costs I instead of I + W: a chain of equal stages idles (S - 1)(F + I)
instead of (S - 1)(F + I + W). The paper's H1 saves W once more a hop by letting the stages near the loss hold as many
microbatches as the first; here they do not, since the stage at the loss also holds logits.

**Why nothing deadlocks.** An edge that crosses ranks raises r by at least one towards its source, so along every dependency
the forward key rises, and the backward key rises; an edge inside a rank has equal keys at worst, and the tie-break orders
it: forwards from the far stage to the near one, backwards the other way. A backward's key is above its own forward's. So the
keys order *all* actions of all ranks consistently with every dependency, for any DAG, any map of stages to ranks, and any
subset of stages in a microbatch.

Source: longest path instead of the stage index, Cornstarch §4.1 (Oobleck / Cornstarch / Entrain dissertation, Ch. 3); GPipe,
Huang et al. 2019; eager 1F1B, Zhuang et al., "On Optimizing the Communication of Model Parallelism", MLSys 2023; ZB-H1, Qi et
al., "Zero Bubble Pipeline Parallelism", ICLR 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mmcompile.config import ScheduleKind

Key = tuple[int, int, int]
Side = tuple[int, int]
"""One end of a message: (stage index, microbatch number)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderKeys:
    """Sort keys that give the order of all forwards and backwards of a step on each rank."""

    kind: ScheduleKind
    num_microbatches: int
    depth: tuple[int, ...]
    crossings: tuple[int, ...]
    """Entry s: number of edges that cross ranks on the longest path from stage s to a sink, [stages]."""

    def forward_key(self, stage: int, microbatch: int) -> Key:
        """Return the sort key of a forward; a rank runs its forwards and backwards in ascending order of keys."""
        step, first, _ = ticks(self.kind, self.crossings[stage], self.num_microbatches)
        return first + step * microbatch, -self.depth[stage], stage

    def backward_key(self, stage: int, microbatch: int) -> Key:
        """Return the sort key of a backward, comparable to those of forwards."""
        step, _, first = ticks(self.kind, self.crossings[stage], self.num_microbatches)
        return first + step * microbatch, self.depth[stage], stage


def ticks(kind: ScheduleKind, crossings: int, num_microbatches: int) -> tuple[int, int, int]:
    """Return (step, forward, backward): microbatch m's sort key is `forward + step * m` in the forward, likewise in the backward.

    `crossings` is the number of edges that cross ranks on the longest path from the stage to a sink. 1F1B: 2 give (2, -2, 3).
    """
    match kind:
        case "gpipe":
            return 1, -crossings, num_microbatches + crossings
        case "1f1b" | "zb-h1":
            return 2, -crossings, crossings + 1
        case "eager-1f1b":
            return 2, -2 * crossings, 2 * crossings + 1


def crossings(
    edges: Iterable[tuple[int, int]], rank: Sequence[int], depth: Sequence[int], together: Iterable[Sequence[int]] = ()
) -> tuple[int, ...]:
    """Return the longest path from each stage to a sink, counted in edges that cross ranks.

    Args:
        edges: (source stage, target stage); depth falls along each edge.
        together: groups of stages of equal depth that exchange values in every computation. All stages of a group get the longest
            path of any, so that their ranks compute in the same order.
    """
    found = [0] * len(rank)
    joined: dict[int, list[Sequence[int]]] = {}
    for stages in together:
        joined.setdefault(depth[stages[0]], []).append(stages)
    # Sources of equal depth are not joined by an edge, so targets are final when their sources are visited.
    by_depth: dict[int, list[tuple[int, int]]] = {level: [] for level in joined}
    for edge in edges:
        by_depth.setdefault(depth[edge[0]], []).append(edge)
    for level, leaving in sorted(by_depth.items()):
        for source, target in leaving:
            found[source] = max(found[source], found[target] + int(rank[source] != rank[target]))
        for stages in joined.get(level, ()):
            longest = max(found[stage] for stage in stages)
            for stage in stages:
                found[stage] = longest
    return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageOrder:
    """Order of messages on both sides: those sent right after each computation, and those received right before it."""

    sends: Mapping[Side, Sequence[Side]]
    """Sending (stage, microbatch) -> receiving (stage, microbatch) pairs, in the order of sends."""
    receives: Mapping[Side, Sequence[tuple[Side, Side]]]
    """Computation -> messages (receiver, sender) received right before it, for itself or a later computation of its stage."""


def in_order_of_sends(pairs: Iterable[tuple[Side, Side]], turn: Callable[[Side], tuple[int, ...]]) -> MessageOrder:
    """Return an order of messages in which the receiver of each pair of stages has them in the order in which the sender sends.

    So a message is received before the first computation that needs this message or one that the pair sends later: if microbatch
    5 needs the first message and microbatch 3 the second, both are received before microbatch 3. That costs no time, as messages
    of a pair follow one another, and cannot deadlock, as a message received early was sent before one that is needed then.

    Args:
        pairs: (sender, receiver) of each message.
        turn: sort key of the computations of a stage.
    """
    sends: dict[Side, list[Side]] = {}
    receives: dict[Side, list[tuple[Side, Side]]] = {}
    first: dict[tuple[int, int], Side] = {}
    ordered = sorted(pairs, key=lambda pair: (turn(pair[0]), pair[0], turn(pair[1]), pair[1]))
    for sender, receiver in reversed(ordered):
        channel = (sender[0], receiver[0])
        first[channel] = min(receiver, first.get(channel, receiver), key=lambda side: (turn(side), side))
        sends.setdefault(sender, []).append(receiver)
        receives.setdefault(first[channel], []).append((receiver, sender))
    return MessageOrder(
        sends={side: found[::-1] for side, found in sends.items()},
        receives={side: found[::-1] for side, found in receives.items()},
    )
