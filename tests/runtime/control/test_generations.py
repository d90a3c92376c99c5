"""Every order of events on small worlds, and the rules one by one. No sockets, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from support.processes.control_world import Budget, World, explore

from mmcompile.planner.resilience.membership import Decision, MembershipChange, Planned, StateLost, Stop, Wait
from mmcompile.runtime.control.effects import Arm, CloseLink, Effect, Send, TimerKind, Write
from mmcompile.runtime.control.events import EventKind, RunEvent
from mmcompile.runtime.control.generations import Generations
from mmcompile.runtime.control.log import History
from mmcompile.runtime.control.messages import (
    Advice,
    Commit,
    Fault,
    Finished,
    Generation,
    Hello,
    Phase,
    Reached,
    Reduced,
    Refused,
    Release,
    Suspend,
)

ORDERS = {
    "nothing": (2, Budget()),
    "one of two killed": (2, Budget(kills=1)),
    "one of three killed": (3, Budget(kills=1)),
    "two of two killed": (2, Budget(kills=2)),
    "coordinator killed": (2, Budget(crashes=1)),
    "coordinator killed twice": (1, Budget(crashes=2)),
    "coordinator and a node killed": (2, Budget(crashes=1, kills=1)),
    "a node joins": (2, Budget(joins=1)),
    "a node joins while the coordinator is killed": (1, Budget(joins=1, crashes=1)),
    "a node must go": (2, Budget(drains=1)),
    "a node must go while the coordinator is killed": (2, Budget(drains=1, crashes=1)),
    "a node joins and one is killed": (1, Budget(joins=1, kills=1)),
    "a node joins while another is killed": (2, Budget(joins=1, kills=1)),
    "a node must go while another is killed": (2, Budget(drains=1, kills=1)),
    "one is killed and a time is over": (2, Budget(kills=1, timers=1)),
}
MANY = (
    "one of three killed",
    "coordinator and a node killed",
    "a node must go while the coordinator is killed",
    "a node joins while another is killed",
    "a node must go while another is killed",
)
"""Tens of thousands of worlds each."""
LIMIT = 200_000


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in MANY else []) for name in ORDERS]
)
def test_every_order_of_events(name: str) -> None:
    """No step is committed twice, skipped or by half a generation; and no order leads to a world where nothing can happen."""
    start, budget = ORDERS[name]
    ends: list[str] = []

    def visit(world: World) -> None:
        alive = [node.name for node in world.nodes.values() if node.alive]
        if world.history.ended is None:
            # Too few for a start, or all are dead.
            assert not alive or (world.generations.phase is Phase.WAITING and world.history.active is None), world.key()
            return
        assert not alive, f"{alive} were not released"
        assert not world.history.ended.success or world.history.committed == world.num_steps
        ends.append(world.history.ended.reason)

    explore(World(num_steps=1, budget=budget, start=start), crashes=bool(budget.crashes), visit=visit, limit=LIMIT)
    assert "all 1 steps are done" in ends


@dataclass(kw_only=True)
class Script:
    """Says what a test wants and keeps what it was asked."""

    decisions: list[Decision] = field(default_factory=list)
    asked: list[MembershipChange] = field(default_factory=list)

    def plan(self, change: MembershipChange) -> Decision:
        self.asked.append(change)
        return self.decisions.pop(0) if self.decisions else Planned(payload=f"{len(self.asked)}")


@dataclass(kw_only=True)
class Room:
    """A coordinator's decisions, with a memory."""

    planner: Script = field(default_factory=Script)
    generations: Generations = field(init=False)
    effects: list[Effect] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generations = Generations(self.planner, History(), store="host:1", max_attempts=3)
        self.effects = self.generations.start()

    def join(self, node: str, *, num_workers: int = 1) -> None:
        hello = hello_of(node, num_workers=num_workers)
        assert self.generations.refusal(hello) is None
        self.effects = self.generations.join(hello)

    def settle(self) -> None:
        """Everybody goes through all phases."""
        while self.generations.phase is not Phase.ACTIVE:
            for member in self.generations.members:
                for worker in range(member.num_workers):
                    message = Reached(generation=self.number, phase=self.generations.phase, worker=worker)
                    self.effects = self.generations.heard(member.node, message)

    def reduce(self, step: int) -> None:
        number = 0
        for member in self.generations.members:
            for worker in range(member.num_workers):
                message = Reduced(
                    generation=self.number, step=step, worker=worker, microbatches=(number,), cursor=str(step)
                )
                self.effects = self.generations.heard(member.node, message)
                number += 1

    @property
    def number(self) -> int:
        return self.generations.history.generation

    def sent(self, kind: type) -> dict[str, object]:
        """Node -> message of a kind, among the last effects."""
        sends = [effect for effect in self.effects if isinstance(effect, Send)]
        return {effect.node: effect.message for effect in sends if isinstance(effect.message, kind)}

    def causes(self, kind: EventKind) -> list[str | None]:
        return [effect.cause for effect in self.effects if isinstance(effect, RunEvent) and effect.kind is kind]


def hello_of(
    node: str, *, incarnation: str = "", generation: int = 0, num_workers: int = 1, committed: int = 0
) -> Hello:
    return Hello(
        node=node,
        incarnation=incarnation or f"{node}1",
        num_workers=num_workers,
        generation=generation,
        committed=committed,
    )


def room_of(*nodes: str, decisions: list[Decision] | None = None) -> Room:
    """An active generation of these nodes."""
    room = Room(planner=Script(decisions=[Wait(reason="more")] * (len(nodes) - 1)))
    for node in nodes:
        room.join(node)
    room.settle()
    room.planner.decisions = decisions or []
    return room


def test_ranks_follow_each_other_and_survivors_keep_their_order() -> None:
    room = Room(planner=Script(decisions=[Wait(reason="more")] * 2))
    for node, num_workers in (("a", 2), ("b", 1), ("c", 2)):
        room.join(node, num_workers=num_workers)
    firsts = [(message.rank, message.world_size) for message in prepares(room).values()]
    assert firsts == [(0, 5), (2, 5), (3, 5)]
    room.settle()
    room.effects = room.generations.leave("b", "b1", "gone")
    assert [message.rank for message in prepares(room).values()] == [0, 2]
    assert {message.nodes for message in prepares(room).values()} == {("a", "c")}


def prepares(room: Room) -> dict[str, Generation]:
    return {node: message for node, message in room.sent(Generation).items() if isinstance(message, Generation)}


def test_a_commit_is_written_before_it_is_sent() -> None:
    room = room_of("a", "b")
    room.reduce(1)
    kinds = [type(effect) for effect in room.effects]
    assert kinds.index(Write) < kinds.index(Send)
    assert room.sent(Commit) == {"a": Commit(step=1), "b": Commit(step=1)}
    assert room.generations.history.cursor == "1"


def test_reports_of_older_generations_and_other_steps_do_not_count() -> None:
    room = room_of("a", "b")
    old = room.number
    room.effects = room.generations.leave("b", "b1", "gone")
    room.settle()
    for generation, step in ((old, 1), (room.number, 2), (room.number + 1, 1)):
        report = Reduced(generation=generation, step=step, worker=0, microbatches=(), cursor=None)
        assert room.generations.heard("a", report) == []
    assert room.generations.heard("a", Finished(generation=old, step=0, worker=0)) == []
    assert room.generations.history.committed == 0


def test_one_microbatch_twice_ends_training() -> None:
    room = room_of("a", "b")
    for node in ("a", "b"):
        report = Reduced(generation=room.number, step=1, worker=0, microbatches=(7,), cursor=None)
        room.effects = room.generations.heard(node, report)
    assert room.causes(EventKind.ENDED) == ["microbatches [7] of step 1 were trained twice: a bug of the plan"]
    assert room.generations.history.committed == 0


@pytest.mark.parametrize("phase", [Phase.PREPARE, Phase.RENDEZVOUS, Phase.READY])
def test_a_loss_supersedes_every_phase(phase: Phase) -> None:
    room = room_of("a", "b", "c")
    room.effects = room.generations.leave("c", "c1", "gone")
    while room.generations.phase is not phase:
        for node in ("a", "b"):
            message = Reached(generation=room.number, phase=room.generations.phase, worker=0)
            room.effects = room.generations.heard(node, message)
    before = room.number
    room.effects = room.generations.leave("b", "b1", "gone too")
    assert (room.generations.phase, room.number) == (Phase.PREPARE, before + 1)
    assert room.planner.asked[-1].lost == ("b", "c"), "both are missing since the last active generation"
    assert list(room.sent(Generation)) == ["a"]


def test_a_node_that_joins_waits_for_the_end_of_the_step_and_holds_nothing() -> None:
    room = room_of("a", "b")
    room.join("c")
    assert not room.sent(Generation)
    room.reduce(1)
    assert room.planner.asked[-1].joined == ("c",)
    assert {message.joined for message in prepares(room).values()} == {("c",)}
    assert {message.committed for message in prepares(room).values()} == {1}
    kinds = [type(effect.message) for effect in room.effects if isinstance(effect, Send) and effect.node == "a"]
    assert kinds == [Commit, Generation]


def test_a_node_that_must_go_is_released_once_the_others_are_active() -> None:
    room = room_of("a", "b")
    room.effects = room.generations.drain("b")
    assert not room.sent(Generation)
    room.reduce(1)
    assert list(room.sent(Generation)) == ["a"]
    assert list(room.sent(Suspend)) == ["b"]
    room.settle()
    assert list(room.sent(Release)) == ["b"]
    assert CloseLink(node="b") in room.effects


def test_a_node_that_must_go_hands_over_first_what_only_it_holds() -> None:
    lost = StateLost(layers=("x",), checkpoint_step=None, cursor=None, payload="")
    room = room_of("a", "b", decisions=[lost, Planned(payload="hand over")])
    room.generations.drain("b")
    room.reduce(1)
    assert list(room.sent(Generation)) == ["a", "b"]
    assert room.planner.asked[-1].draining == ("b",)
    room.settle()
    room.reduce(2)
    assert list(room.sent(Generation)) == ["a"]


def test_lost_state_goes_back_to_the_checkpoint_and_nobody_counts_as_holder() -> None:
    lost = StateLost(layers=("x", "y"), checkpoint_step=1, cursor="one", payload="load")
    room = room_of("a", "b")
    for step in (1, 2, 3):
        room.reduce(step)
    room.planner.decisions = [lost]
    room.effects = room.generations.leave("b", "b1", "gone")
    (message,) = prepares(room).values()
    assert (message.committed, message.cursor, message.payload, message.joined) == (1, "one", "load", ("a",))
    assert message.active == 0
    assert room.causes(EventKind.ROLLED_BACK) == ["no node holds x, y"]
    room.settle()
    room.reduce(2)
    assert room.generations.history.committed == 2


def test_lost_state_without_checkpoint_ends_training_and_names_the_layers() -> None:
    room = room_of("a", "b", decisions=[StateLost(layers=("x", "y"), checkpoint_step=None, cursor=None, payload="")])
    room.effects = room.generations.leave("b", "b1", "b lost power")
    (cause,) = room.causes(EventKind.ENDED)
    assert cause == "no node holds x, y after step 0 (b lost power), and there is no checkpoint"
    (release,) = room.sent(Release).values()
    assert release == Release(reason=cause, success=False)


def test_too_few_nodes_wait_and_keep_their_state() -> None:
    room = room_of("a", "b", decisions=[Wait(reason="two are needed")])
    room.reduce(1)
    room.planner.decisions = [Wait(reason="two are needed")]
    room.effects = room.generations.leave("b", "b1", "gone")
    assert list(room.sent(Suspend)) == ["a"]
    room.join("c")
    assert room.planner.asked[-1].joined == ("c",)
    assert prepares(room)["c"].committed == 1


def test_the_planner_can_stop() -> None:
    room = room_of("a", "b", decisions=[Stop(reason="not worth it")])
    room.effects = room.generations.leave("b", "b1", "gone")
    assert room.causes(EventKind.ENDED) == ["not worth it"]


def test_training_stops_when_it_gets_nowhere() -> None:
    room = room_of("a", "b")
    for _ in range(3):
        fault = Fault(generation=room.number, worker=0, error="reset")
        assert Arm(timer=TimerKind.FAULT, generation=room.number) in room.generations.heard("a", fault)
        room.effects = room.generations.expired(TimerKind.FAULT, room.number)
    (cause,) = room.causes(EventKind.ENDED)
    assert cause is not None and cause.startswith("3 generations in a row without a committed step; the last: a link")


def test_a_fault_that_is_explained_makes_no_further_generation() -> None:
    room = room_of("a", "b", "c")
    faulty = room.number
    room.generations.heard("a", Fault(generation=faulty, worker=0, error="reset"))
    room.generations.leave("b", "b1", "gone")
    assert room.generations.expired(TimerKind.FAULT, faulty) == []


def test_who_holds_up_a_recovery_is_given_up() -> None:
    room = room_of("a", "b", "c")
    room.effects = room.generations.leave("c", "c1", "gone")
    assert Arm(timer=TimerKind.ATTEMPT, generation=room.number) in room.effects
    room.generations.heard("a", Reached(generation=room.number, phase=Phase.PREPARE, worker=0))
    room.effects = room.generations.expired(TimerKind.ATTEMPT, room.number)
    assert list(room.sent(Generation)) == ["a"]
    (refused,) = room.sent(Refused).values()
    assert isinstance(refused, Refused) and refused.advice is Advice.RESTART
    assert room.generations.refusal(hello_of("b")) is not None


def test_the_first_start_may_take_its_time() -> None:
    room = Room()
    room.join("a")
    assert not [effect for effect in room.effects if isinstance(effect, Arm)]


@pytest.mark.parametrize(
    ("hello", "advice"),
    [
        (hello_of("a", incarnation="a2"), Advice.RETRY),
        (hello_of("z", generation=1), Advice.RESTART),
        (hello_of("b"), Advice.RESTART),
        (hello_of("b", incarnation="b2"), None),
        (hello_of("a"), None),
        (hello_of("a", generation=1, committed=1), Advice.GIVE_UP),
        (hello_of("a", generation=9), Advice.GIVE_UP),
    ],
)
def test_who_may_join(hello: Hello, advice: Advice | None) -> None:
    room = room_of("a", "b")
    room.generations.leave("b", "b1", "gone")
    refused = room.generations.refusal(hello)
    assert (refused.advice if refused is not None else None) is advice


def test_a_restarted_coordinator_gives_up_members_that_do_not_come_back() -> None:
    room = room_of("a", "b")
    again = Generations(room.planner, room.generations.history, store="", max_attempts=3)
    assert again.phase is Phase.WAITING
    assert Arm(timer=TimerKind.RESUME, generation=1) in again.start()
    again.join(hello_of("a", generation=1))
    room.effects = again.expired(TimerKind.RESUME, 1)
    assert room.causes(EventKind.DETECTED) == ["the coordinator was restarted; b did not come back"]
    assert list(room.sent(Generation)) == ["a"]
