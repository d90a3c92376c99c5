"""Placements of whole replicas of the hand-written stages."""

from __future__ import annotations

from collections.abc import Sequence

from mmcompile.planner.plan.placement import PlacedStage, Placement
from support.graphs.hand_stages import LANGUAGE


def replicas(num_microbatches: int, *ranks: Sequence[int]) -> Placement:
    """Return whole replicas of one tower; per replica, the ranks of vision.0 and language_model.0 to 2 are given."""
    return Placement(
        stages=tuple(
            PlacedStage(name=f"{name}#{replica}", program=name, ranks=(rank,), depth=3 - index, replica=replica)
            for index, name in enumerate(("vision.0", *LANGUAGE))
            for replica, of_replica in enumerate(ranks)
            for rank in [of_replica[index]]
        ),
        num_microbatches=num_microbatches,
        num_replicas=(len(ranks),),
    )


PLACEMENTS = {
    # Ranks 1 and 2 hold one stage of each replica; the tied embedding is on four ranks.
    "crossed": replicas(3, (0, 0, 1, 2), (3, 3, 2, 1)),
    # Rank 0 holds two replicas of the loss stage, and rank 1 all of a third replica.
    "stacked": replicas(2, (0, 1, 1, 0), (2, 2, 0, 0), (1, 1, 1, 1)),
}
