"""Membership changes as the planner receives them, and messages about a membership to nodes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from mmcompile.planner.resilience.membership import Decision, MembershipChange
from mmcompile.runtime.control.log import History, Member
from mmcompile.runtime.control.messages import Advice, Generation, Hello, Refused


class Planner(Protocol):
    """Plans each member's work in a generation, within milliseconds, since all members wait for the plan.

    The control plane is independent of models. A plan may depend on the change only, since a restarted coordinator asks again. An
    MMCompileError ends training with its text.
    """

    def plan(self, change: MembershipChange) -> Decision:
        """Return the decision for a membership change: a plan, a wait, lost state, or the end."""
        ...


def holders(history: History) -> tuple[Member, ...]:
    """Return the members of the last active generation: they hold the state of the last committed step."""
    return history.active.members if history.active is not None else ()


def in_order(members: Collection[Member], history: History) -> tuple[Member, ...]:
    """Sort members: those that hold state first, in their old order, so that ranks change little."""
    order = {member: index for index, member in enumerate(holders(history))}
    return tuple(sorted(members, key=lambda member: order.get(member, len(order))))


def change_of(
    members: tuple[Member, ...], connected: Mapping[str, Member], draining: Collection[str], history: History
) -> MembershipChange:
    """Return the planner's input: how the nodes of the last active generation change to `members`, those of the next one.

    Args:
        connected: connected nodes by name. A node of the last active generation is lost if it is absent, or has new workers.
        draining: names of nodes that are about to leave.
    """
    previous = holders(history)
    return MembershipChange(
        members=tuple(member.node for member in members),
        num_workers=tuple(member.num_workers for member in members),
        lost=tuple(member.node for member in previous if connected.get(member.node) != member),
        joined=tuple(member.node for member in members if member not in previous),
        draining=tuple(sorted(draining)),
        previous=tuple(member.node for member in previous),
        previous_payload=history.active.payload if history.active is not None else None,
        committed=history.committed,
    )


def generations_of(
    members: tuple[Member, ...], payload: str, *, history: History, store: str, cause: str
) -> dict[str, Generation]:
    """Return the messages that announce a new generation to its members, by node; `payload`: the planner's plan as JSON text."""
    previous, messages, rank = holders(history), dict[str, Generation](), 0
    for member in members:
        messages[member.node] = Generation(
            number=history.generation,
            rank=rank,
            world_size=sum(other.num_workers for other in members),
            nodes=tuple(other.node for other in members),
            joined=tuple(other.node for other in members if other not in previous),
            active=history.active.generation if history.active is not None else 0,
            committed=history.committed,
            cursor=history.cursor,
            payload=payload,
            store=store,
            cause=cause,
        )
        rank += member.num_workers
    return messages


def refusal_of(
    hello: Hello, connected: Mapping[str, Member], dead: Collection[str], known: Collection[Member], history: History
) -> Refused | None:
    """Return the coordinator's refusal of a node that asks to join (by `hello`); None if the node may join.

    Args:
        connected: connected nodes, by name.
        dead: sets of workers (`Hello.incarnation`) that counted as lost or were released.
        known: nodes whose workers hold the state of the last committed step, or are about to receive that state.
    """
    other = connected.get(hello.node)
    if other is not None and other.incarnation != hello.incarnation:
        reason = f"a node named {hello.node} is connected already; if it is this one, its old connection ends soon"
        return Refused(reason=reason, advice=Advice.RETRY)
    remembered = any((member.node, member.incarnation) == (hello.node, hello.incarnation) for member in known)
    if hello.incarnation in dead or (hello.generation > 0 and not remembered):
        reason = f"{hello.node} was given up after generation {hello.generation}; its workers hold old state"
        return Refused(reason=reason, advice=Advice.RESTART)
    if hello.generation > history.generation or hello.committed > history.committed:
        reason = (
            f"{hello.node} is at step {hello.committed} of generation {hello.generation}, the coordinator's log ends at step "
            f"{history.committed} of generation {history.generation}: start the coordinator with the log of this run"
        )
        return Refused(reason=reason, advice=Advice.GIVE_UP)
    return None
