"""`Mail`: every tensor that moves to, from or inside one rank during one step."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mmcompile.ir.graph import torch_dtype
from mmcompile.plan.placement import PlacedStage
from mmcompile.plan.simulator.schedule import Action, ActionKind
from mmcompile.runtime.groups import Groups, Lane, Work, wait
from mmcompile.runtime.roots import Parcel, parcels
from mmcompile.runtime.stages import LoadedStage
from mmcompile.step.step_plan import MicrobatchPlan, StepPlan, ValueShape

_AHEAD = 4
"""Receives posted before their turn: gloo sends at once into a posted buffer, else it asks first and loses a round trip."""
_ROOTS_AHEAD = 2
"""Parcels of batch inputs received before their turn."""

Stages = Mapping[int, LoadedStage]
"""By index, the stages of this rank that take part in a microbatch."""


class Mail:
    """Posts receives ahead of the action list, sends, and hands tensors between stages of one rank by reference.

    A send waits for those of `world_size` microbatches before, which bounds the tensors held. That cannot deadlock: in
    the order of keys that all schedules have, a receive is never more than the number of rank crossings behind its send.
    """

    def __init__(
        self,
        groups: Groups,
        plan: StepPlan,
        stages: Sequence[PlacedStage],
        loaded: Sequence[Stages],
        actions: Sequence[Action],
    ) -> None:
        """
        Args:
            loaded: per microbatch, this rank's stages.
            actions: this rank's part of the schedule.
        """
        self._groups = groups
        self._plan = plan
        self._stages = stages
        self._loaded = loaded
        self._shapes = [_link_shapes(microbatch) for microbatch in plan.microbatches]
        self._num_links = max((len(microbatch.links) for microbatch in plan.microbatches), default=0)
        self._values: dict[tuple[int, int, str], Tensor] = {}
        self._gradients: dict[tuple[int, int, str], dict[int, Tensor]] = {}
        self._outbox: dict[Action, list[Tensor]] = {}
        self._sent: dict[ActionKind, deque[tuple[int, Work, Tensor]]] = {
            ActionKind.SEND_F: deque(),
            ActionKind.SEND_B: deque(),
        }
        self._upcoming = deque(action for action in actions if action.kind.is_receive)
        self._posted: deque[tuple[Action, list[tuple[Work, str, Tensor]]]] = deque()
        self._roots = _Roots(groups, plan, loaded, tag=self._tag(len(plan.microbatches), 0, 0, 0))
        self._post()

    def send_roots(self, values: Sequence[Mapping[str, Tensor]], reads: Sequence[Mapping[int, frozenset[str]]]) -> None:
        """Rank 0: start to send the batch inputs, and keep its own.

        Args:
            values: per microbatch, every root by name.
            reads: per microbatch, rank -> names its stages read.
        """
        self._roots.send(values, reads)

    def roots(self, microbatch: int) -> Mapping[str, Tensor]:
        """Batch inputs of a microbatch, on the device. Each of its stages takes them once."""
        return self._roots.take(microbatch)

    def is_local(self, stage: int) -> bool:
        return self._stages[stage].ranks[0] == self._groups.rank

    def put_value(self, microbatch: int, stage: int, name: str, consumer: int, value: Tensor) -> None:
        """A stage's result on its way to a consumer: kept for a stage of this rank, else until its SEND_F."""
        if self.is_local(consumer):
            # A new tensor on the same storage: the consumer's autograd graph starts there.
            self._values[microbatch, consumer, name] = value.detach()
        else:
            send = Action(stage=stage, kind=ActionKind.SEND_F, microbatch=microbatch, peer=consumer)
            self._outbox.setdefault(send, []).append(value.detach())

    def take_value(self, microbatch: int, stage: int, name: str) -> Tensor:
        return self._values.pop((microbatch, stage, name))

    def put_gradient(self, microbatch: int, stage: int, name: str, producer: int, gradient: Tensor) -> None:
        """The gradient of a stage's link input on its way back."""
        if self.is_local(producer):
            self._gradients.setdefault((microbatch, producer, name), {})[stage] = gradient
        else:
            send = Action(stage=stage, kind=ActionKind.SEND_B, microbatch=microbatch, peer=producer)
            self._outbox.setdefault(send, []).append(gradient)

    def take_gradient(self, microbatch: int, stage: int, name: str, consumers: tuple[int, ...]) -> Tensor:
        """Sum of the gradients of all consumers, added in plan order."""
        parts = self._gradients.pop((microbatch, stage, name))
        total = parts[consumers[0]]
        for consumer in consumers[1:]:
            total = total + parts[consumer]
        return total

    def send(self, action: Action) -> None:
        """SEND_F or SEND_B: start to send what the stage left for this peer."""
        sent = self._sent[action.kind]
        while sent and sent[0][0] <= action.microbatch - self._groups.world_size:
            wait(sent.popleft()[1])
        stage = self._loaded[action.microbatch][action.stage]
        peer = _peer(action)
        forward = action.kind is ActionKind.SEND_F
        names = stage.to_peer[peer] if forward else stage.gradients_to[peer]
        lane = self._lane(action.stage, peer)
        for name, tensor in zip(names, self._outbox.pop(action), strict=True):
            tag = self._tag(
                action.microbatch, self._link(action, name), peer if forward else action.stage, int(not forward)
            )
            tensor = tensor.contiguous()
            if tensor.numel():
                sent.append((action.microbatch, self._groups.send(tensor, lane, tag), tensor))

    def receive(self, action: Action) -> None:
        """RECV_F or RECV_B: wait until the peer's tensors are here."""
        posted, messages = self._posted.popleft()
        assert posted == action, f"received out of order: {posted} is due, not {action}"
        for work, name, tensor in messages:
            if tensor.numel():
                wait(work)
            if action.kind is ActionKind.RECV_F:
                self._values[action.microbatch, action.stage, name] = tensor
            else:
                self._gradients.setdefault((action.microbatch, action.stage, name), {})[_peer(action)] = tensor
        self._post()

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        for sent in self._sent.values():
            while sent:
                wait(sent.popleft()[1])
        self._roots.finish()

    def _post(self) -> None:
        while self._upcoming and len(self._posted) < _AHEAD:
            action = self._upcoming.popleft()
            self._posted.append((action, self._messages(action)))

    def _messages(self, action: Action) -> list[tuple[Work, str, Tensor]]:
        stage = self._loaded[action.microbatch][action.stage]
        peer = _peer(action)
        forward = action.kind is ActionKind.RECV_F
        lane = self._lane(peer, action.stage)
        messages: list[tuple[Work, str, Tensor]] = []
        for name in stage.from_peer[peer] if forward else stage.gradients_from[peer]:
            shape = self._shapes[action.microbatch][name][1]
            tensor = torch.empty(shape.shape, dtype=torch_dtype(shape.dtype), device=self._groups.device)
            tag = self._tag(
                action.microbatch, self._link(action, name), action.stage if forward else peer, int(not forward)
            )
            messages.append((self._groups.receive(tensor, lane, tag) if tensor.numel() else _ARRIVED, name, tensor))
        return messages

    def _lane(self, source: int, target: int) -> Lane:
        return Lane(
            source=self._stages[source].ranks[0], target=self._stages[target].ranks[0], name=f"{source}>{target}"
        )

    def _link(self, action: Action, name: str) -> int:
        return self._shapes[action.microbatch][name][0]

    def _tag(self, microbatch: int, link: int, consumer: int, backward: int) -> int:
        return ((microbatch * self._num_links + link) * len(self._stages) + consumer) * 2 + backward


class _Arrived:
    """The work of a message without bytes, which is never sent."""

    def wait(self) -> bool:
        return True


_ARRIVED = _Arrived()


class _Roots:
    """Batch inputs of one rank: sent by rank 0 in parcels, received a few parcels ahead."""

    def __init__(self, groups: Groups, plan: StepPlan, loaded: Sequence[Stages], *, tag: int) -> None:
        self._groups = groups
        self._plan = plan
        self._tag = tag
        self._arrived: dict[int, Mapping[str, Tensor]] = {}
        self._readers = [len(stages) for stages in loaded]
        self._names = [frozenset[str]().union(*(stage.roots for stage in stages.values())) for stages in loaded]
        self._upcoming = deque(enumerate(parcels(plan, self._names) if groups.rank else ()))
        self._posted: deque[tuple[Work, Parcel, Tensor]] = deque()
        self._sent: list[tuple[Work, Tensor]] = []
        self._post()

    def send(self, values: Sequence[Mapping[str, Tensor]], reads: Sequence[Mapping[int, frozenset[str]]]) -> None:
        for microbatch, names in enumerate(self._names):
            self._arrived[microbatch] = {name: values[microbatch][name].to(self._groups.device) for name in names}
        for rank in range(1, self._groups.world_size):
            names = [readers.get(rank, frozenset()) for readers in reads]
            for number, parcel in enumerate(parcels(self._plan, names)):
                buffer = parcel.pack(values)
                if parcel.num_bytes:
                    self._sent.append((self._groups.send_control(buffer, rank, self._tag + number), buffer))

    def take(self, microbatch: int) -> Mapping[str, Tensor]:
        if self._names[microbatch] and microbatch not in self._arrived:
            self._receive_until(microbatch)
        self._readers[microbatch] -= 1
        # The last of its stages takes them away; autograd keeps what backwards need.
        return self._arrived.get(microbatch, {}) if self._readers[microbatch] else self._arrived.pop(microbatch, {})

    def finish(self) -> None:
        for work, _ in self._sent:
            wait(work)

    def _receive_until(self, microbatch: int) -> None:
        while microbatch not in self._arrived:
            work, parcel, buffer = self._posted.popleft()
            wait(work)
            self._arrived |= parcel.unpack(buffer.to(self._groups.device))
            self._post()

    def _post(self) -> None:
        while self._upcoming and len(self._posted) < _ROOTS_AHEAD:
            number, parcel = self._upcoming.popleft()
            buffer = parcel.empty()
            work = self._groups.receive_control(buffer, 0, self._tag + number) if parcel.num_bytes else _ARRIVED
            self._posted.append((work, parcel, buffer))


def _link_shapes(microbatch: MicrobatchPlan) -> dict[str, tuple[int, ValueShape]]:
    return {shape.name: (position, shape) for position, shape in enumerate(microbatch.links)}


def _peer(action: Action) -> int:
    assert action.peer is not None, f"action {action} has no peer"
    return action.peer
