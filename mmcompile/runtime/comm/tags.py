"""Tags of messages: what tells apart all that moves between two ranks in a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mmcompile.batching.step_plan import StepPlan
from mmcompile.errors import EngineError
from mmcompile.planner.plan.placement import PlacedStage
from mmcompile.runtime.comm.row_routing import Edge

_FIRST_GRADIENT = 2**30
"""Those of links and batch inputs are below."""
_END_GRADIENT = 2**31 - 16
"""Above are those of control messages."""
IDS = 1
"""Added to the tag of rows for the message that says whose they are."""


class Tags:
    """Numbers that tell apart all messages of a step between two ranks, the same on both sides.

    The number of the microbatch that makes a value, and the stages that make and read it, leave no choice of the microbatch that
    reads it; so with the place of the value among those of its edge, and the direction, they are enough. Stages count among those
    of their rank. NCCL needs no tags: both sides of a schedule have the messages of two stages in the same order.
    """

    def __init__(self, plan: StepPlan, stages: Sequence[PlacedStage]) -> None:
        on_rank: Counter[int] = Counter()
        self._place: list[int] = []
        for stage in stages:
            self._place.append(on_rank[stage.ranks[0]])
            on_rank[stage.ranks[0]] += 1
        edges = Counter((e.source, e.producer, e.target, e.consumer) for e in plan.exchanges)
        self._num_values = max([1, *(len(m.links) for m in plan.microbatches), *edges.values()])
        self._num_stages = max(on_rank.values())
        numbers = 1 + max((m.number for m in plan.microbatches), default=0)
        self.end = numbers * self._num_values * self._num_stages**2 * 4
        """Past the last one."""
        if self.end + len(plan.microbatches) > _FIRST_GRADIENT:
            raise EngineError(
                f"step {plan.step} has too many messages to number below {_FIRST_GRADIENT}: {numbers} microbatches and lags x "
                f"{self._num_values} values x {self._num_stages} stages of a rank squared; use fewer microbatches a step"
            )

    def of(self, number: int, edge: Edge, place: int, backward: bool) -> int:
        """Tag of a value on an edge; the one after it is free."""
        stages = self._place[edge.producer] * self._num_stages + self._place[edge.consumer]
        return (((number * self._num_values + place) * self._num_stages**2 + stages) * 2 + int(backward)) * 2


def gradient_tags(place: int, num_places: int, bucket: int) -> tuple[int, int]:
    """Tags of both phases of a bucket of gradients.

    Args:
        place: of its parameters' owners among the `num_places` sets of owners that all ranks know of.
        bucket: its number among those of the set, which only the owners know.

    Raises:
        EngineError: there are more buckets than tags.
    """
    room = (_END_GRADIENT - _FIRST_GRADIENT) // (2 * num_places)
    if bucket >= room:
        raise EngineError(
            f"gradients of one set of ranks travel in more than {room} buckets, of {num_places} sets: there are no more tags; "
            "use larger buckets"
        )
    first = _FIRST_GRADIENT + 2 * (place * room + bucket)
    return first, first + 1
