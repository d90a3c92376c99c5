"""A model of nodes and links around `Generations`, in which every order of events can be tried.

A node is what agent, worker and `Membership` do together: it answers each message at once. Messages of a link keep their
order; all else can happen in any order, and a coordinator can die between any two of its effects.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from mmcompile.planner.resilience.membership import Decision, MembershipChange, Planned, Stop, Wait
from mmcompile.runtime.control.effects import Arm, CloseLink, Effect, Send, TimerKind, Write
from mmcompile.runtime.control.generations import Generations
from mmcompile.runtime.control.log import Activated, Committed, History, RolledBack
from mmcompile.runtime.control.messages import (
    Advance,
    Commit,
    Drain,
    Finished,
    Generation,
    Hello,
    Message,
    Phase,
    Reached,
    Reduced,
    Refused,
    Release,
    Suspend,
)

PREPARE = Generation(
    number=3,
    rank=1,
    world_size=2,
    nodes=("a", "b"),
    joined=(),
    active=2,
    committed=7,
    cursor=None,
    payload='{"x": [1]}',
    store="h:1",
    cause="ü\n",
)
"""The order to get ready for generation 3, which takes over from generation 2 after step 7."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnyNodes:
    """Starts with `start` nodes and goes on with any."""

    start: int

    def plan(self, change: MembershipChange) -> Decision:
        if not change.previous and len(change.members) < self.start:
            return Wait(reason="start")
        if change.previous and set(change.members) <= set(change.joined):
            return Stop(reason="nobody holds the state")
        return Planned(payload="{}")


@dataclass(kw_only=True)
class Node:
    name: str
    inbox: list[Message] = field(default_factory=list)
    outbox: list[Message | None] = field(default_factory=list)
    """None: the end of the connection."""
    alive: bool = True
    generation: int = 0
    rank: int = 0
    active: int = 0
    """Last generation it saw active."""
    applied: int = 0
    known: int = 0
    """Last step it heard to be committed."""
    target: int = 0
    """Step its state will be at once the generation is ready."""
    asked: Message | None = None

    def hello(self) -> Hello:
        return Hello(node=self.name, incarnation=self.name, num_workers=1, generation=self.active, committed=self.known)

    def ask(self, message: Message) -> None:
        self.asked = message
        self.outbox.append(message)

    def take(self, message: Message, num_steps: int) -> None:
        if isinstance(message, Commit | Generation):
            self.known = message.step if isinstance(message, Commit) else message.committed
        match message:
            case Generation() if message.number > self.generation:
                if isinstance(self.asked, Reduced) and self.asked.step <= message.committed:
                    self.apply(self.asked.step)
                if self.name in message.joined:
                    self.target = message.committed
                else:
                    assert self.applied == message.committed, f"{self} has not what {message} says"
                    self.target = self.applied
                self.generation, self.rank = message.number, message.rank
                self.ask(Reached(generation=self.generation, phase=Phase.PREPARE, worker=0))
            case Advance() if message.generation == self.generation and isinstance(self.asked, Reached):
                if list(Phase).index(message.phase) == list(Phase).index(self.asked.phase) + 1:
                    self.advance(message.phase, num_steps)
            case Commit() if isinstance(self.asked, Reduced) and self.asked.step <= message.step:
                self.apply(self.asked.step)
                self.next(num_steps)
            case Suspend():
                self.asked = None
            case Release() | Refused():
                self.alive = False
            case _:
                pass

    def advance(self, phase: Phase, num_steps: int) -> None:
        if phase is Phase.ACTIVE:
            self.applied, self.active = self.target, self.generation
            self.next(num_steps)
        else:
            self.ask(Reached(generation=self.generation, phase=phase, worker=0))

    def apply(self, step: int) -> None:
        assert step == self.applied + 1, f"{self} applies {step}"
        self.applied, self.asked = step, None

    def next(self, num_steps: int) -> None:
        if self.applied == num_steps:
            self.ask(Finished(generation=self.generation, step=self.applied, worker=0))
        else:
            step = self.applied + 1
            self.ask(Reduced(generation=self.generation, step=step, worker=0, microbatches=(self.rank,), cursor=None))


@dataclass(kw_only=True)
class Budget:
    """How many of each disturbance may still happen."""

    kills: int = 0
    crashes: int = 0
    joins: int = 0
    drains: int = 0
    timers: int = 0


@dataclass(kw_only=True)
class World:
    num_steps: int
    budget: Budget
    start: int
    nodes: dict[str, Node] = field(default_factory=dict)
    history: History = field(default_factory=History)
    """What is in the log."""
    armed: set[tuple[TimerKind, int]] = field(default_factory=set)
    generations: Generations = field(init=False)

    def __post_init__(self) -> None:
        for name in "abcd"[: self.start]:
            self.add(name)
        self.boot()

    def add(self, name: str) -> None:
        node = Node(name=name)
        node.outbox.append(node.hello())
        self.nodes[name] = node

    def boot(self) -> None:
        self.armed.clear()
        self.generations = Generations(AnyNodes(start=self.start), self.history, store="", max_attempts=50)
        self.execute(self.generations.start(), None)

    def crash(self) -> None:
        """The coordinator dies and starts again; nodes connect again."""
        for node in self.nodes.values():
            node.inbox.clear()
            node.outbox.clear()
            if node.alive:
                node.outbox.append(node.hello())
                if node.asked is not None:
                    node.outbox.append(node.asked)
        self.boot()

    def execute(self, effects: list[Effect], stop: int | None) -> None:
        """Carry out the first `stop` effects, then crash; all of them for None."""
        for effect in effects[:stop]:
            match effect:
                case Write():
                    self.check_record(effect.record)
                    self.history = self.history.after(effect.record)
                case Send() if effect.node in self.nodes and self.nodes[effect.node].alive:
                    self.nodes[effect.node].inbox.append(effect.message)
                case Arm():
                    self.armed.add((effect.timer, effect.generation))
                case CloseLink():
                    self.nodes[effect.node].outbox.clear()
                case _:
                    pass
        if stop is not None:
            self.budget.crashes -= 1
            self.crash()

    def check_record(self, record: object) -> None:
        """What may never happen. That numbers only rise is asserted by `History`."""
        assert not isinstance(record, RolledBack)
        if isinstance(record, Activated):
            # All that are active in it know it, so nobody can still report in an older one.
            for member in record.members:
                assert self.nodes[member.node].generation == record.generation
        if isinstance(record, Committed):
            active = self.history.active
            assert active is not None and active.generation == record.generation
            assert record.microbatches == tuple(range(len(active.members)))
            for member in active.members:
                node = self.nodes[member.node]
                assert node.applied == record.step - 1, f"{node} when {record}"

    def moves(self) -> list[tuple[str, ...]]:
        """All that can happen next, apart from where in its effects the coordinator dies."""
        found: list[tuple[str, ...]] = []
        for name, node in self.nodes.items():
            if node.inbox and node.alive:
                found.append(("take", name))
            if node.outbox:
                found.append(("hear", name))
            if node.alive and self.budget.kills:
                found.append(("kill", name))
            if node.alive and self.budget.drains:
                found.append(("drain", name))
        if self.budget.joins and self.generations.phase is not Phase.ENDED:
            found.append(("join",))
        # A timer that is needed to go on fires in the end; those that fire too early are limited.
        if self.budget.timers or not found:
            found.extend(("expire", timer, str(number)) for timer, number in sorted(self.armed))
        return found

    def do(self, move: tuple[str, ...], stop: int | None = None) -> int:
        """Do it; returns how many effects it had."""
        match move:
            case ("take", name):
                node = self.nodes[name]
                node.take(node.inbox.pop(0), self.num_steps)
                return 0
            case ("hear", name):
                effects = self.hear(self.nodes[name])
            case ("kill", name):
                self.budget.kills -= 1
                node = self.nodes[name]
                node.alive = False
                node.inbox.clear()
                node.outbox.append(None)
                return 0
            case ("drain", name):
                self.budget.drains -= 1
                self.nodes[name].outbox.append(Drain())
                return 0
            case ("join",):
                self.budget.joins -= 1
                self.add("abcdef"[len(self.nodes)])
                return 0
            case ("expire", timer, number):
                self.budget.timers -= bool(self.budget.timers)
                self.armed.discard((TimerKind(timer), int(number)))
                effects = self.generations.expired(TimerKind(timer), int(number))
            case _:
                raise ValueError(move)
        self.execute(effects, stop)
        return len(effects)

    def hear(self, node: Node) -> list[Effect]:
        message = node.outbox.pop(0)
        match message:
            case None:
                return self.generations.leave(node.name, node.name, "killed")
            case Hello():
                if (refused := self.generations.refusal(message)) is not None:
                    node.outbox.clear()
                    node.inbox.append(refused)
                    return []
                return self.generations.join(message)
            case Drain():
                return self.generations.drain(node.name)
            case Reached() | Reduced() | Finished():
                return self.generations.heard(node.name, message)
            case _:
                raise ValueError(message)

    def key(self) -> str:
        """Equal for worlds that go on in the same ways."""
        return repr((self.nodes, self.budget, self.history, sorted(self.armed), sorted_state(self.generations)))


def sorted_state(generations: Generations) -> list[tuple[str, str]]:
    return [
        (name, repr(sorted(value, key=repr)) if isinstance(value, set) else repr(value))
        for name, value in sorted(vars(generations).items())
        if name not in ("_planner", "_out")
    ]


def explore(world: World, *, crashes: bool, visit: Callable[[World], None], limit: int) -> int:
    """Try every order of events, depth first; returns the number of different worlds.

    Args:
        visit: called with each world in which nothing can happen any more.
    """
    seen: set[str] = set()
    stack = [world]
    while stack:
        now = stack.pop()
        key = now.key()
        if key in seen:
            continue
        seen.add(key)
        assert len(seen) <= limit, f"more than {limit} worlds"
        moves = now.moves()
        if not moves:
            visit(now)
        for move in moves:
            stack.extend(_after(now, move, crashes=crashes))
    return len(seen)


def _after(world: World, move: tuple[str, ...], *, crashes: bool) -> Iterator[World]:
    following = copy.deepcopy(world)
    num_effects = following.do(move)
    yield following
    if crashes and world.budget.crashes:
        for stop in range(num_effects):
            following = copy.deepcopy(world)
            following.do(move, stop)
            yield following
