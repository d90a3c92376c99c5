"""Which chains are balanced as one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.plans.hand_plan import Part, hand_plan

from mmcompile.errors import PlanError
from mmcompile.planner.plan.balance_groups import towers
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.plan.plan_record import Link


def linked(*pairs: tuple[str, str], names: tuple[str, ...], **replicas: int) -> Plan:
    """Chains of two stages, with links between them as `pairs` say."""
    plan = hand_plan([Part(name=name, layers=2, stages=2, dp=replicas.get(name, 1)) for name in names])
    inside = [(f"{name}.0", f"{name}.1") for name in names]
    ends = [*inside, *((f"{a}.1", f"{b}.0") for a, b in pairs)]
    return replace(plan, links=tuple(Link(source=a, target=b, tensors=(), gradient=(), num_bytes=0) for a, b in ends))


def names(plan: Plan) -> dict[str, tuple[str, ...]]:
    return {name: tuple(chain.name for chain in chains) for name, chains in towers(plan).items()}


def test_encoders_with_their_projectors_and_the_language_model_last() -> None:
    order = ("vision", "audio", "projector", "language_model")
    plan = linked(("vision", "projector"), ("projector", "language_model"), ("audio", "language_model"), names=order)
    assert names(plan) == {
        "vision": ("vision", "projector"),
        "audio": ("audio",),
        "language_model": ("language_model",),
    }
    assert list(towers(plan))[-1] == "language_model"


def test_encoders_that_feed_each_other_are_one_tower() -> None:
    order = ("vision", "audio", "language_model")
    plan = linked(("vision", "audio"), ("vision", "language_model"), ("audio", "language_model"), names=order)
    assert names(plan) == {"vision": ("vision", "audio"), "language_model": ("language_model",)}


def test_encoders_that_only_meet_in_the_language_model_are_apart() -> None:
    plan = linked(
        ("vision", "language_model"), ("audio", "language_model"), names=("vision", "audio", "language_model")
    )
    assert names(plan) == {"vision": ("vision",), "audio": ("audio",), "language_model": ("language_model",)}


def test_what_the_last_chain_feeds_is_of_its_tower() -> None:
    order = ("vision", "talker", "vocoder", "language_model")
    feeds = (("vision", "language_model"), ("language_model", "talker"), ("talker", "vocoder"))
    assert names(linked(*feeds, names=order)) == {
        "vision": ("vision",),
        "talker": ("talker", "vocoder", "language_model"),
    }


def test_a_model_of_one_chain() -> None:
    assert names(linked(names=("language_model",))) == {"language_model": ("language_model",)}


def test_one_tower_has_one_number_of_replicas() -> None:
    order = ("vision", "projector", "language_model")
    pairs = (("vision", "projector"), ("projector", "language_model"))
    assert names(linked(*pairs, names=order, vision=3, projector=3, language_model=2)) == {
        "vision": ("vision", "projector"),
        "language_model": ("language_model",),
    }
    with pytest.raises(PlanError, match="vision has 3, projector has 1; plan with the same replicas for vision, proj"):
        towers(linked(*pairs, names=order, vision=3))
