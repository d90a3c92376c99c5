"""`Generations`: the coordinator's decisions, without sockets, files or clock.

Every input returns the effects to carry out, in order. State that must survive a crash is a `Write` ahead of the messages that
depend on it, so a coordinator that is killed between two effects and starts again from its log only repeats messages.

Rules:
    - A generation number is used once. Members of generation g do no further work in it once g + 1 reaches them.
    - A step is committed when every worker of the active generation has reported it, and only in order.
    - A lost member ends the generation in any phase; a node that joins or must go waits for the end of a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container

from mmcompile.errors import MMCompileError
from mmcompile.planner.resilience.membership import Decision, Planned, StateLost, Stop, Wait
from mmcompile.runtime.control import messages as msg
from mmcompile.runtime.control.effects import Arm, CloseLink, Effect, Send, TimerKind, Write
from mmcompile.runtime.control.events import EventKind, RunEvent, committed_event
from mmcompile.runtime.control.log import Activated, Committed, Ended, History, Member, Prepared, Record, RolledBack
from mmcompile.runtime.control.membership_view import Planner, change_of, generations_of, holders, in_order, refusal_of
from mmcompile.runtime.control.messages import Phase

_NEXT = {Phase.PREPARE: Phase.RENDEZVOUS, Phase.RENDEZVOUS: Phase.READY, Phase.READY: Phase.ACTIVE}
_DONE = {Phase.PREPARE: EventKind.PREPARED, Phase.RENDEZVOUS: EventKind.RENDEZVOUS, Phase.READY: EventKind.READY}
_ALIVE = "all members are alive"


class Generations:
    """State machine of membership, generations and commits.

    Args:
        history: history in the log, empty at the first start.
        store: host:port of the store, sent to workers.
        max_attempts: number of generations in a row without a commit before training stops.
    """

    def __init__(self, planner: Planner, history: History, *, store: str, max_attempts: int) -> None:
        self._planner = planner
        self._store = store
        self._max_attempts = max_attempts
        self.history = history
        self.phase = Phase.WAITING
        self.members: tuple[Member, ...] = ()
        """Members of the generation that is active or in preparation."""
        self._connected: dict[str, Member] = {}
        self._draining: set[str] = set()
        self._dead: set[str] = set()
        """Incarnations that counted as lost or were released; their workers must not join again."""
        self._reached: set[tuple[str, int]] = set()
        self._reduced: dict[tuple[str, int], msg.Reduced] = {}
        self._finished: set[tuple[str, int]] = set()
        self._sent: dict[str, msg.Generation] = {}
        self._attempts = 0
        self._interrupted = False
        self._out: list[Effect] = []

    @property
    def generation(self) -> int:
        """Number of the last generation, active or in preparation."""
        return self.history.generation

    def start(self) -> list[Effect]:
        """Return the effects of a coordinator that starts from the log's history; called once, before all other methods."""
        active = self.history.active
        if self.history.ended is not None:
            self.phase = Phase.ENDED
        elif active is not None:
            self.phase, self.members = Phase.RESUMING, active.members
            self._emit(EventKind.RESTARTED)
            self._out.append(Arm(timer=TimerKind.RESUME, generation=self.generation))
        return self._take()

    def refusal(self, hello: msg.Hello) -> msg.Refused | None:
        """Return the coordinator's refusal of a node that asks to join (by `hello`); None if the node may join."""
        return refusal_of(hello, self._connected, self._dead, (*self.members, *holders(self.history)), self.history)

    def join(self, hello: msg.Hello) -> list[Effect]:
        """Handle the connection of a new node, or of a member that reconnects, once `refusal` admits it; return the effects."""
        member = Member(node=hello.node, incarnation=hello.incarnation, num_workers=hello.num_workers)
        back = member in self.members
        self._connected[hello.node] = member
        if self.phase is Phase.ENDED:
            self._release(hello.node)
        elif back and self.phase is not Phase.RESUMING:
            self._resend(member)
        elif not back:
            self._emit(EventKind.JOINED, node=hello.node)
        if self.phase is Phase.RESUMING:
            self._resume(give_up=False)
        elif self.phase is Phase.WAITING:
            self._reconfigure(f"{hello.node} joined", None)
        return self._take()

    def leave(self, node: str, incarnation: str, cause: str) -> list[Effect]:
        """Count a node as lost, since its connection or lease ended, or its agent reported dead workers; return the effects."""
        member = self._connected.get(node)
        if member is not None and member.incarnation == incarnation:
            self._lose(member, cause)
        return self._take()

    def drain(self, node: str) -> list[Effect]:
        """Mark a node to leave after this step, since it will be taken away; return the effects."""
        if node in self._connected and node not in self._draining and self.phase is not Phase.ENDED:
            self._emit(EventKind.DRAINING, node=node)
            self._draining.add(node)
            if self._connected[node] not in self.members:
                self._release(node)
        return self._take()

    def heard(self, node: str, message: msg.Report) -> list[Effect]:
        """Handle a worker's report, unless it is of another generation or comes at the wrong time; return the effects.

        A broken link to another worker is usually explained soon by the loss of a member.
        """
        current, committed = message.generation == self.generation, self.history.committed
        runs = current and self.phase not in (Phase.WAITING, Phase.ENDED)
        match message:
            case msg.Reached() if current and message.phase is self.phase and self.phase in _NEXT:
                self._reached.add((node, message.worker))
                if self._complete(self._reached):
                    self._advance()
            case msg.Reduced() if message.step <= committed:
                self._send(node, msg.Commit(step=message.step))
            case msg.Reduced() if self._counts(message) and message.step == committed + 1:
                self._reduced[node, message.worker] = message
                self._commit_if_complete()
            case msg.Finished() if self._counts(message) and message.step == committed:
                self._finished.add((node, message.worker))
                self._finish_if_complete()
            case msg.Abort() if runs:
                self._emit(EventKind.FAULT, node=node, cause=message.reason)
                self._end(message.reason, success=False)
            case msg.Fault() if runs:
                self._emit(EventKind.FAULT, node=node, cause=message.error)
                self._out.append(Arm(timer=TimerKind.FAULT, generation=self.generation))
            case _:
                pass
        return self._take()

    def expired(self, timer: TimerKind, generation: int) -> list[Effect]:
        """Handle the end of a timer that was started for `generation`; return the effects."""
        current = generation == self.generation
        if timer is TimerKind.RESUME and self.phase is Phase.RESUMING:
            self._resume(give_up=True)
        elif timer is TimerKind.FAULT and current and self.phase in (*_NEXT, Phase.ACTIVE):
            self._interrupted |= self.phase is Phase.ACTIVE
            self._reconfigure(f"a link between workers broke in generation {generation} and {_ALIVE}", None)
        elif timer is TimerKind.ATTEMPT and current and self.phase in _NEXT:
            self._give_up_silent()
        return self._take()

    def _counts(self, message: msg.Reduced | msg.Finished) -> bool:
        """Return whether a message belongs to the active generation, also while members reconnect to a restarted coordinator."""
        active = self.history.active
        known = active is not None and active.generation == self.generation == message.generation
        return known and self.phase in (Phase.ACTIVE, Phase.RESUMING)

    def _complete(self, workers: Container[tuple[str, int]]) -> bool:
        return all(self._answered(member, workers) for member in self.members)

    def _answered(self, member: Member, workers: Container[tuple[str, int]]) -> bool:
        return all((member.node, worker) in workers for worker in range(member.num_workers))

    def _lose(self, member: Member, cause: str) -> None:
        self._forget(member.node)
        if self.phase is Phase.RESUMING:
            self._resume(give_up=False)
        elif self.phase is not Phase.ENDED and (member in self.members or self.phase is Phase.WAITING):
            self._interrupted |= self.phase is Phase.ACTIVE
            self._reconfigure(cause, member.node)

    def _give_up_silent(self) -> None:
        silent = [member for member in self.members if not self._answered(member, self._reached)]
        for member in silent:
            if self._connected.get(member.node) == member:
                cause = f"{member.node} did not finish phase {self.phase} of generation {self.generation} in time"
                self._send(member.node, msg.Refused(reason=cause, advice=msg.Advice.RESTART))
                self._out.append(CloseLink(node=member.node))
                self._forget(member.node)
        self._reconfigure(f"{', '.join(member.node for member in silent)} held up phase {self.phase}", None)

    def _resume(self, *, give_up: bool) -> None:
        """Continue after a restart of the coordinator, once all members have reconnected.

        Args:
            give_up: count members that have not reconnected as lost, and continue without them.
        """
        back = [member for member in self.members if self._connected.get(member.node) == member]
        # A node with new workers shows that the old ones are gone.
        missing = [
            member.node
            for member in self.members
            if member.node not in self._connected and member.incarnation not in self._dead
        ]
        if missing and not give_up:
            return
        active = self.history.active
        assert active is not None
        if len(back) == len(self.members) and active.generation == self.generation:
            self.phase = Phase.ACTIVE
            self._emit(EventKind.RESUMED)
            for member in self.members:
                self._resend(member)
            self._finish_if_complete()
            self._commit_if_complete()
            return
        self._interrupted = True
        gone = [member.node for member in self.members if member not in back]
        cause = f"{', '.join(gone)} did not come back" if gone else "a generation was in preparation"
        self._reconfigure(f"the coordinator was restarted; {cause}", None)

    def _resend(self, member: Member) -> None:
        node, generation = member.node, self.generation
        if self.history.committed:
            self._send(node, msg.Commit(step=self.history.committed))
        if node in self._sent:
            self._send(node, self._sent[node])
        for phase in (Phase.RENDEZVOUS, Phase.READY, Phase.ACTIVE):
            if self.phase in (*_NEXT, Phase.ACTIVE) and list(Phase).index(phase) <= list(Phase).index(self.phase):
                self._send(node, msg.Advance(generation=generation, phase=phase))

    def _reconfigure(self, cause: str, node: str | None) -> None:
        """Begin the next generation with all connected nodes that are not to leave."""
        if self.phase is not Phase.WAITING:
            self._emit(EventKind.DETECTED, node=node, cause=cause)
        if self._attempts >= self._max_attempts:
            self._end(
                f"{self._attempts} generations in a row without a committed step; the last: {cause}", success=False
            )
            return
        members = self._candidates(draining=False)
        decision = self._ask(members)
        if isinstance(decision, StateLost) and self._draining:
            # A node that must go still holds what nobody else does: it hands it over first.
            members = self._candidates(draining=True)
            decision = self._ask(members)
        match decision:
            case Stop():
                self._end(decision.reason, success=False)
            case Wait():
                self._wait(decision.reason)
            case StateLost():
                self._roll_back(members, decision, cause)
            case Planned():
                self._begin(members, decision.payload, cause)

    def _candidates(self, *, draining: bool) -> tuple[Member, ...]:
        """Return the connected nodes for a new generation, nodes with training state first.

        Args:
            draining: include nodes that are to leave.
        """
        stay = [member for member in self._connected.values() if draining or member.node not in self._draining]
        return in_order(stay, self.history)

    def _ask(self, members: tuple[Member, ...]) -> Decision:
        change = change_of(members, self._connected, self._draining, self.history)
        try:
            return self._planner.plan(change)
        except MMCompileError as error:
            return Stop(reason=f"no plan for {', '.join(change.members) or 'no nodes'}: {error}")

    def _roll_back(self, members: tuple[Member, ...], lost: StateLost, cause: str) -> None:
        names = ", ".join(lost.layers)
        if lost.checkpoint_step is None:
            reason = f"no node holds {names} after step {self.history.committed} ({cause}), and there is no checkpoint"
            self._end(reason, success=False)
            return
        self._write(RolledBack(step=lost.checkpoint_step, cursor=lost.cursor))
        self._emit(EventKind.ROLLED_BACK, step=lost.checkpoint_step, cause=f"no node holds {names}")
        self._begin(members, lost.payload, cause)

    def _begin(self, members: tuple[Member, ...], payload: str, cause: str) -> None:
        """Send a new generation to its members, and suspend members of the last generation that are not in it."""
        left = [
            member for member in self.members if self._connected.get(member.node) == member and member not in members
        ]
        had_state = self.history.active is not None
        self._write(Prepared(generation=self.generation + 1))
        self._attempts += 1
        self.phase, self.members = Phase.PREPARE, members
        self._clear()
        self._sent = generations_of(members, payload, history=self.history, store=self._store, cause=cause)
        self._emit(EventKind.PREPARE, cause=cause)
        for node, message in self._sent.items():
            self._send(node, message)
        for member in left:
            self._send(member.node, msg.Suspend(generation=self.generation, reason="the node must go"))
        if had_state:
            # The first start may take as long as it takes: programs are compiled and weights are read.
            self._out.append(Arm(timer=TimerKind.ATTEMPT, generation=self.generation))

    def _wait(self, reason: str) -> None:
        self._emit(EventKind.WAITING, cause=reason)
        if self.phase is not Phase.WAITING:
            for node in self._connected:
                self._send(node, msg.Suspend(generation=self.generation, reason=reason))
        self.phase, self.members = Phase.WAITING, ()
        self._clear()
        self._release_drained()

    def _advance(self) -> None:
        self._emit(_DONE[self.phase])
        self.phase = _NEXT[self.phase]
        self._reached.clear()
        if self.phase is Phase.ACTIVE:
            payload = next(iter(self._sent.values())).payload
            self._write(Activated(generation=self.generation, members=self.members, payload=payload))
            self._emit(EventKind.ACTIVE)
            if self._interrupted:
                self._emit(EventKind.REPLAYED, step=self.history.committed + 1)
            self._interrupted = False
        for member in self.members:
            self._send(member.node, msg.Advance(generation=self.generation, phase=self.phase))
        if self.phase is Phase.ACTIVE:
            self._release_drained()

    def _finish_if_complete(self) -> None:
        if self.phase is Phase.ACTIVE and self._complete(self._finished):
            self._end(f"all {self.history.committed} steps are done", success=True)

    def _commit_if_complete(self) -> None:
        if self.phase is not Phase.ACTIVE or not self._complete(self._reduced):
            return
        reports = [
            self._reduced[member.node, worker] for member in self.members for worker in range(member.num_workers)
        ]
        counts = Counter(number for report in reports for number in report.microbatches)
        if twice := sorted(number for number, count in counts.items() if count > 1):
            self._end(
                f"microbatches {twice} of step {reports[0].step} were trained twice: a bug of the plan", success=False
            )
            return
        step, ids = reports[0].step, tuple(sorted(counts))
        cursor = next((report.cursor for report in reports if report.cursor is not None), None)
        committed = Committed(generation=self.generation, step=step, microbatches=ids, cursor=cursor)
        self._write(committed)
        self._out.append(committed_event(committed))
        self._reduced.clear()
        self._attempts = 0
        for member in self.members:
            self._send(member.node, msg.Commit(step=step))
        self._change_between_steps()

    def _change_between_steps(self) -> None:
        joining = [node for node, member in self._connected.items() if member not in self.members]
        leaving = sorted(self._draining)
        if joining or leaving:
            causes = [
                f"{', '.join(nodes)} {verb}" for nodes, verb in ((joining, "joined"), (leaving, "must go")) if nodes
            ]
            self._reconfigure("; ".join(causes), None)

    def _end(self, reason: str, *, success: bool) -> None:
        self._write(Ended(reason=reason, success=success))
        self._emit(EventKind.ENDED, cause=reason)
        self.phase = Phase.ENDED
        for node in list(self._connected):
            self._release(node)

    def _release_drained(self) -> None:
        for node in sorted(self._draining):
            if self._connected[node] not in self.members:
                self._release(node)

    def _release(self, node: str) -> None:
        ended = self.history.ended
        reason, success = (ended.reason, ended.success) if ended is not None else ("the node was asked to go", True)
        self._emit(EventKind.RELEASED, node=node)
        self._send(node, msg.Release(reason=reason, success=success))
        self._out.append(CloseLink(node=node))
        self._forget(node)

    def _forget(self, node: str) -> None:
        self._dead.add(self._connected.pop(node).incarnation)
        self._draining.discard(node)

    def _take(self) -> list[Effect]:
        effects, self._out = self._out, []
        return effects

    def _emit(
        self, kind: EventKind, *, node: str | None = None, step: int | None = None, cause: str | None = None
    ) -> None:
        self._out.append(RunEvent(kind=kind, generation=self.generation, node=node, step=step, cause=cause))

    def _send(self, node: str, message: msg.Message) -> None:
        self._out.append(Send(node=node, message=message))

    def _write(self, record: Record) -> None:
        self.history = self.history.after(record)
        self._out.append(Write(record=record))

    def _clear(self) -> None:
        self._reached.clear()
        self._reduced.clear()
        self._finished.clear()
        self._sent = {}
