"""`P2P`: every tensor that moves to, from or inside one rank during one step.

Within a balance group, a value goes from one stage to others of the same microbatch. To another balance group, its rows go by
the exchanges of the step plan: each rank sends rows directly to each rank that reads them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmcompile.batching.step_plan import StepPlan
from mmcompile.ir.graph import torch_dtype
from mmcompile.planner.plan.placement import PlacedStage
from mmcompile.planner.schedule.schedule import Action, ActionKind
from mmcompile.runtime.comm.groups import ARRIVED, Groups, Lane, Work, wait
from mmcompile.runtime.executor.batch_inputs import BatchInputs
from mmcompile.runtime.executor.loaded_stage import InputSlot, LoadedStage, OutputSlot, Stages
from mmcompile.runtime.executor.row_routing import (
    IDS,
    Edge,
    RowRouting,
    RowSlice,
    added,
    assembled,
    check_samples,
    num_rows,
    packed,
    row_samples,
)

_AHEAD = 4
"""Maximum number of actions whose receives start early: gloo sends a message without delay if its receive has started."""

_Value = str | int
"""Tensor in a message: a value by its name, or rows of a value by the position of their exchange in `StepPlan.exchanges`."""


class P2P:
    """Sends and receives a rank's tensors in a step; posts receives ahead, and passes tensors between its stages by reference.

    **Why waiting for sends cannot deadlock.** A slot is a microbatch's place in the schedule. To bound memory, a send first
    waits for earlier sends whose receiver takes them `window` or more slots before the send's own slot. `window` is 1 + the
    greatest depth of a stage (number of stage boundaries on its longest path to the loss). The schedule gives every
    action a key (`mmcompile.planner.schedule.order`), which is larger than the keys of all actions that it waits for. Two
    forwards, or two backwards, that are `window` slots apart have keys in the order of their slots, on any stages. So a send
    waits only for receives of smaller keys: of all waiting ranks, the one with the smallest key has nothing left to wait for.
    Deferral needs no larger window, since the slot that counts is that of the receiver.
    """

    def __init__(
        self,
        groups: Groups,
        plan: StepPlan,
        stages: Sequence[PlacedStage],
        loaded: Sequence[Stages],
        actions: Sequence[Action],
        *,
        values: Sequence[Mapping[str, Tensor]] = (),
        check_rows: bool = False,
    ) -> None:
        """Prepare the messages of a step.

        Args:
            stages: all placed stages; each replica and shard of a stage is one.
            loaded: this rank's stages, per microbatch of the step; empty for a microbatch that only other ranks run.
            actions: this rank's part of the schedule.
            values: batch inputs by name, per microbatch, on rank 0; () on other ranks.
            check_rows: with the rows of an exchange (`StepPlan.exchanges`), send each row's sample number; receivers check it.

        Raises:
            EngineError: the step has more messages than there are tags.
            VerifyError: exchanges do not give every reader every row exactly once.
        """
        self._groups = groups
        self._plan = plan
        self._stages = stages
        self._loaded = loaded
        self._check_rows = check_rows
        self._routes = RowRouting(plan, stages, groups.rank)
        self._routes.check(loaded)
        self._window = 1 + max(stage.depth for stage in stages)
        self._index = {(m.tower, m.replica, m.number): m.index for m in plan.microbatches}
        self._places = [{name: place for place, name in enumerate(shapes)} for shapes in self._routes.shapes]
        self._values: dict[tuple[int, int, str], Tensor] = {}
        self._gradients: dict[tuple[int, int, str], dict[int, Tensor]] = {}
        self._rows: dict[int, RowSlice] = {}
        self._row_gradients: dict[int, RowSlice] = {}
        self._outbox: dict[tuple[ActionKind, Edge, _Value], Tensor] = {}
        self._sent: dict[ActionKind, deque[tuple[int, Work, Tensor]]] = {
            ActionKind.SEND_F: deque(),
            ActionKind.SEND_B: deque(),
        }
        self._upcoming = deque(action for action in actions if action.kind.is_receive)
        self._posted: deque[tuple[Action, list[_Receive]]] = deque()
        self._inputs = BatchInputs(groups, plan, loaded, values, tag=self._routes.end_tag)
        self._post()

    def batch_inputs(self, microbatch: int) -> Mapping[str, Tensor]:
        """Return the batch inputs of a microbatch, on the device. Each stage that runs the microbatch calls this once."""
        return self._inputs.take(microbatch)

    def microbatch(self, stage: int, number: int) -> int:
        """Return the step plan's index of a stage's microbatch `number`; each balance group and replica numbers its own."""
        placed = self._stages[stage]
        return self._index[placed.tower, placed.replica, number]

    def is_local(self, stage: int) -> bool:
        """Return whether this rank runs a stage."""
        return self._stages[stage].ranks[0] == self._groups.rank

    def put_value(self, microbatch: int, stage: int, slot: OutputSlot, value: Tensor) -> None:
        """Store a stage's result for its readers: at once for stages of this rank, until SEND_F for stages of other ranks."""
        for consumer in slot.consumers:
            # Laid out as if it had been sent: where stages are must not change a bit of what they compute. It is a new tensor on
            # the same storage if it is so already; the consumer's autograd graph starts there.
            if self.is_local(consumer):
                self._values[microbatch, consumer, slot.name] = value.detach().contiguous()
            else:
                edge = Edge(microbatch, stage, microbatch, consumer)
                self._outbox[ActionKind.SEND_F, edge, slot.name] = value.detach()
        for position in self._routes.made.get((microbatch, stage, slot.name), ()):
            rows = RowSlice(value.detach(), self._plan.exchanges[position].rows)
            edge = self._routes.edge[position]
            if self.is_local(edge.consumer):
                self._rows[position] = rows
            else:
                self._outbox[ActionKind.SEND_F, edge, position] = rows.gathered()

    def take_value(self, microbatch: int, stage: int, slot: InputSlot) -> Tensor:
        """Return a value that a stage reads, assembled from the rows of all stages that computed it."""
        if not slot.crossing:
            return self._values.pop((microbatch, stage, slot.name))
        positions = self._routes.read.get((microbatch, stage, slot.name), ())
        parts = [(self._rows.pop(position), self._plan.exchanges[position].into) for position in positions]
        return assembled(parts, self._routes.shapes[microbatch][slot.name], self._groups.device)

    def put_gradient(self, microbatch: int, stage: int, slot: InputSlot, gradient: Tensor) -> None:
        """Store the gradient of a stage's link input, to be returned to all stages that computed the value."""
        if slot.crossing:
            for position in self._routes.read.get((microbatch, stage, slot.name), ()):
                exchange, edge = self._plan.exchanges[position], self._routes.edge[position]
                rows = RowSlice(gradient, exchange.into)
                if exchange.gradient and self.is_local(edge.producer):
                    self._row_gradients[position] = rows
                elif exchange.gradient:
                    self._outbox[ActionKind.SEND_B, edge, position] = rows.gathered()
        elif self.is_local(slot.producer):
            self._gradients.setdefault((microbatch, slot.producer, slot.name), {})[stage] = gradient.contiguous()
        else:
            edge = Edge(microbatch, slot.producer, microbatch, stage)
            self._outbox[ActionKind.SEND_B, edge, slot.name] = gradient

    def take_gradient(self, microbatch: int, stage: int, slot: OutputSlot) -> Tensor:
        """Return the gradient of a stage's result, summed over readers in its balance group (in plan order), then row exchanges.

        Zeros if another shard of the stage sends the same result, since that shard receives the gradient.
        """
        total: Tensor | None = None
        if slot.consumers:
            parts = self._gradients.pop((microbatch, stage, slot.name))
            total = parts[slot.consumers[0]]
            for consumer in slot.consumers[1:]:
                total = total + parts[consumer]
        if slot.crossing:
            positions = self._routes.made.get((microbatch, stage, slot.name), ())
            exchanges = [(position, self._plan.exchanges[position]) for position in positions]
            back = [(self._row_gradients.pop(position), e.rows) for position, e in exchanges if e.gradient]
            total = added(back, self._routes.shapes[microbatch][slot.name], self._groups.device, total)
        if total is None:
            shape = self._routes.shapes[microbatch][slot.name]
            return torch.zeros(shape.shape, dtype=torch_dtype(shape.dtype), device=self._groups.device)
        return total

    def send(self, action: Action) -> None:
        """Start to send the values (SEND_F) or gradients (SEND_B) that the action's stage stored for its peer."""
        edge = self._edge(action)
        own, slot = (self._slot(action, index) for index in self._ends(action))
        sent = self._sent[action.kind]
        while sent and sent[0][0] <= own - self._window:
            wait(sent.popleft()[1])
        lane = self._lane(action.stage, _peer(action))
        for item in self._items(action, edge):
            tensor = self._outbox.pop((action.kind, edge, item.value)).contiguous()
            if tensor.numel() == 0:
                continue
            tag = self._tag(action, edge, item)
            if (ids := self._ids(item)) is not None:
                ids = ids.to(self._groups.device)
                sent.append((slot, self._groups.send(ids, lane, tag + IDS), ids))
            sent.append((slot, self._groups.send(tensor, lane, tag), tensor))

    def receive(self, action: Action) -> None:
        """Wait until the peer's values (RECV_F) or gradients (RECV_B) have arrived."""
        posted, messages = self._posted.popleft()
        assert posted == action, f"received out of order: {posted} is due, not {action}"
        for message in messages:
            if message.ids is not None:
                wait(message.ids[0])
                self._check_ids(action, message.item, message.ids[1])
            wait(message.work)
            self._keep(action, message.item.value, message.tensor)
        self._post()

    def finish(self) -> None:
        """Block until every message that this rank sent has arrived."""
        for sent in self._sent.values():
            while sent:
                wait(sent.popleft()[1])
        self._inputs.finish()

    def _keep(self, action: Action, value: _Value, tensor: Tensor) -> None:
        microbatch = self._ends(action)[0]
        forward = action.kind is ActionKind.RECV_F
        if isinstance(value, int):
            rows = RowSlice(tensor, packed(self._plan.exchanges[value].rows))
            (self._rows if forward else self._row_gradients)[value] = rows
        elif forward:
            self._values[microbatch, action.stage, value] = tensor
        else:
            self._gradients.setdefault((microbatch, action.stage, value), {})[_peer(action)] = tensor

    def _post(self) -> None:
        while self._upcoming and len(self._posted) < _AHEAD:
            action = self._upcoming.popleft()
            edge = self._edge(action)
            self._posted.append((action, [self._awaited(action, edge, item) for item in self._items(action, edge)]))

    def _awaited(self, action: Action, edge: Edge, item: _Item) -> _Receive:
        tensor = torch.empty(item.shape, dtype=item.dtype, device=self._groups.device)
        if tensor.numel() == 0:
            return _Receive(ARRIVED, item, tensor, None)
        lane = self._lane(_peer(action), action.stage)
        tag = self._tag(action, edge, item)
        before = None
        if (ids := self._ids(item)) is not None:
            ids = torch.empty_like(ids, device=self._groups.device)
            before = self._groups.receive(ids, lane, tag + IDS), ids
        return _Receive(self._groups.receive(tensor, lane, tag), item, tensor, before)

    def _items(self, action: Action, edge: Edge) -> list[_Item]:
        if edge.source == edge.target:
            stage = self._loaded[edge.source][action.stage]
            names = _moved(stage, action.kind)[_peer(action)]
            shapes, places = self._routes.shapes[edge.source], self._places[edge.source]
            return [_Item(name, places[name], shapes[name].shape, torch_dtype(shapes[name].dtype)) for name in names]
        forward = action.kind in (ActionKind.SEND_F, ActionKind.RECV_F)
        items: list[_Item] = []
        for place, position in enumerate(self._routes.edges[edge]):
            exchange = self._plan.exchanges[position]
            if forward or exchange.gradient:
                made = self._routes.shapes[edge.source][exchange.name]
                shape = (num_rows(exchange.rows), *made.shape[1:])
                items.append(_Item(position, place, shape, torch_dtype(made.dtype)))
        return items

    def _ids(self, item: _Item) -> Tensor | None:
        if not self._check_rows or isinstance(item.value, str):
            return None
        return row_samples(self._plan.exchanges[item.value])

    def _check_ids(self, action: Action, item: _Item, got: Tensor) -> None:
        assert isinstance(item.value, int)
        exchange, source = self._plan.exchanges[item.value], self._stages[_peer(action)].name
        where = (
            f"{action} of step {self._plan.step}, {exchange.name} from {source} to {self._stages[action.stage].name}"
        )
        check_samples(got, exchange, where)

    def _ends(self, action: Action) -> tuple[int, int]:
        """Return the microbatches of an action's own stage and of its peer stage, as indices in `StepPlan.microbatches`."""
        return self.microbatch(action.stage, action.microbatch), self.microbatch(_peer(action), action.other)

    def _edge(self, action: Action) -> Edge:
        here, there = self._ends(action)
        if action.kind in (ActionKind.SEND_F, ActionKind.RECV_B):
            return Edge(here, action.stage, there, _peer(action))
        return Edge(there, _peer(action), here, action.stage)

    def _slot(self, action: Action, microbatch: int) -> int:
        plan = self._plan.microbatches[microbatch]
        return plan.slot + (plan.lag if action.kind is ActionKind.SEND_B else 0)

    def _lane(self, source: int, target: int) -> Lane:
        return Lane(self._stages[source].ranks[0], self._stages[target].ranks[0], f"{source}>{target}")

    def _tag(self, action: Action, edge: Edge, item: _Item) -> int:
        backward = action.kind in (ActionKind.SEND_B, ActionKind.RECV_B)
        return self._routes.tag(self._plan.microbatches[edge.source].number, edge, item.place, backward)


@dataclass(frozen=True, slots=True)
class _Item:
    """One tensor in the message from one stage to another, with its shape and dtype."""

    value: _Value
    place: int
    """Position among the tensors between the two stages, the same at sender and receiver."""
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Receive:
    """One tensor that this rank is receiving: the pending message, and the buffer that it fills."""

    work: Work
    item: _Item
    tensor: Tensor
    ids: tuple[Work, Tensor] | None
    """Message before the rows, and its buffer: the sample number of each row (int64 [rows]). None if rows are not checked."""


def _moved(stage: LoadedStage, kind: ActionKind) -> Mapping[int, tuple[str, ...]]:
    return {
        ActionKind.SEND_F: stage.to_peer,
        ActionKind.RECV_F: stage.from_peer,
        ActionKind.SEND_B: stage.gradients_to,
        ActionKind.RECV_B: stage.gradients_from,
    }[kind]


def _peer(action: Action) -> int:
    assert action.peer is not None, f"action {action} has no peer"
    return action.peer
