"""Rows on their way between microbatches: what is copied, what is passed on as it is, and what is refused."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from support.graphs.hand_towers import WIDTH, parameters, placed_stages, programs_of, tower_samples, tower_step
from support.processes.tower_ranks import TowerJob, loaded_on, schedule_of
from torch import nn

from mmcompile.batching.step_plan import Range, StepPlan, ValueShape
from mmcompile.errors import EngineError, VerifyError
from mmcompile.planner.plan.placement import PlacedStage
from mmcompile.planner.schedule.schedule import Action, ActionKind
from mmcompile.runtime.comm.groups import Groups
from mmcompile.runtime.executor.loaded_stage import LoadedStage, Stages
from mmcompile.runtime.executor.p2p import P2P
from mmcompile.runtime.executor.row_routing import (
    Edge,
    RowRouting,
    RowSlice,
    added,
    assembled,
    check_covered,
    packed,
)

CPU = torch.device("cpu")


def shape_of(value: torch.Tensor) -> ValueShape:
    return ValueShape(name="v", shape=tuple(value.shape), dtype="float64")


def cut(size: int, parts: int, deal: random.Random) -> list[Range]:
    """A value of `size` rows in ranges, some of them empty."""
    bounds = sorted(deal.randrange(size + 1) for _ in range(parts - 1))
    return list(zip([0, *bounds], [*bounds, size], strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_gradients_take_the_transposed_way(seed: int) -> None:
    deal = random.Random(seed)
    made = torch.randn(deal.randint(0, 12), 3, dtype=torch.float64)
    ranges = cut(len(made), 5, deal)
    order = deal.sample(range(5), 5)
    into = dict(zip(order, packed([ranges[i] for i in order]), strict=True))
    groups = [tuple(range(5))[::2], tuple(range(5))[1::2]]
    parts = [(RowSlice(made, tuple(ranges[i] for i in group)), tuple(into[i] for i in group)) for group in groups]
    read = assembled(parts, shape_of(made), CPU)
    torch.testing.assert_close(read, torch.cat([made[slice(*ranges[i])] for i in order]), rtol=0, atol=0)
    arrived = [(RowSlice(rows.gathered(), packed(rows.ranges)), to) for rows, to in parts]
    assert torch.equal(assembled(arrived, shape_of(made), CPU), read)
    gradient = torch.randn_like(read)
    back = [(RowSlice(gradient, to), rows.ranges) for rows, to in parts]
    total = added(back, shape_of(made), CPU)
    torch.testing.assert_close((read * gradient).sum(), (made * total).sum(), rtol=1e-12, atol=1e-12)
    assert torch.equal(added(back, shape_of(made), CPU, total), total * 2)


def test_whole_values_in_order_are_not_copied() -> None:
    value = torch.randn(6, 2, dtype=torch.float64)
    ranges = ((0, 2), (2, 2), (2, 6))
    rows = RowSlice(value, ranges)
    assert rows.gathered() is value
    assert assembled([(rows, ranges)], shape_of(value), CPU) is value
    assert added([(rows, ranges)], shape_of(value), CPU) is value
    # One run of rows is a view: no buffer of its own.
    assert RowSlice(value, ((1, 2), (2, 5))).gathered().data_ptr() == value[1].data_ptr()


def test_rows_that_nobody_read_have_no_gradient() -> None:
    value = torch.ones(3, 2, dtype=torch.float64)
    assert torch.equal(added([], shape_of(value), CPU), torch.zeros(3, 2, dtype=torch.float64))
    part = added(
        [(RowSlice(value, ((0, 1),)), ((2, 3),)), (RowSlice(value, ((0, 1),)), ((2, 3),))], shape_of(value), CPU
    )
    assert part[:, 0].tolist() == [0, 0, 2]


@pytest.mark.parametrize(
    ("into", "words"),
    [
        ([(0, 2)], "row 2 never arrives"),
        ([(1, 4)], "row 0 never arrives"),
        ([(0, 1), (2, 4)], "row 1 never arrives"),
        ([(0, 3), (2, 4)], "row 2 arrives twice"),
        ([(0, 4), (0, 4)], "row 0 arrives twice"),
        ([(0, 5)], "row 4 does not exist"),
        ([], "row 0 never arrives"),
    ],
)
def test_every_row_arrives_once(into: Sequence[Range], words: str) -> None:
    check_covered([(2, 4), (0, 2), (3, 3)], 4, "features")
    check_covered([], 0, "features")
    with pytest.raises(VerifyError, match=f"features has 4 rows, but {words}"):
        check_covered(into, 4, "features")


def job(lag: int = 0, ranks: int = 2) -> TowerJob:
    """Two replicas of the vision tower, one of the language model."""
    return job_on(placed_stages({"vision": 2, "audio": 1, "language_model": 1}, ranks), lag)


def job_on(stages: tuple[PlacedStage, ...], lag: int = 0) -> TowerJob:
    samples = tower_samples([2, 1, 3, 1, 2, 2])
    deal = random.Random(lag)
    home = [(0, slot) for slot in (0, 1, 2, 2, 3, 4)]
    places = {
        "vision": [(index % 2, max(0, slot - deal.randint(0, lag))) for index, (_, slot) in enumerate(home)],
        "audio": [None] * 6,
        "language_model": home,
    }
    return TowerJob(step=tower_step(samples, places, stages, num_slots=5))


def with_exchange(plan: StepPlan, position: int, **changes: object) -> StepPlan:
    exchanges = list(plan.exchanges)
    exchanges[position] = replace(exchanges[position], **changes)  # type: ignore[arg-type]
    return replace(plan, exchanges=tuple(exchanges))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_name": "nothing"}, "nothing has no rows"),
        ({"into": ((0, 1),)}, r"rows \(0, 2\) of sample 0 are not as many as rows \(0, 1\)"),
        ({"rows": ((1, 3),)}, r"rows \(1, 3\) of sample 0 lie outside a value of 2 rows"),
        ({"samples": (0, 1)}, "1 ranges made, 1 read, 2 samples"),
    ],
)
def test_an_exchange_that_does_not_fit_is_refused(changes: dict[str, object], words: str) -> None:
    step = job().step
    first = step.plan.exchanges[0]
    assert (first.producer, first.samples) == ("vision.0", (0,))
    twin = replace(step.plan, exchanges=(first, *step.plan.exchanges))
    with pytest.raises(VerifyError, match=words):
        for rank in range(2):
            RowRouting(with_exchange(twin, 1, **changes), step.stages, rank)


def test_a_microbatch_goes_to_one_slot_of_a_stage() -> None:
    step = job().step
    second = [m.index for m in step.plan.microbatches if m.tower == "language_model"][1]
    twin = replace(step.plan, exchanges=(step.plan.exchanges[0], *step.plan.exchanges))
    with pytest.raises(
        VerifyError, match=r"microbatch 0 of vision\.0#0 goes to two microbatches of language_model\.1#0"
    ):
        for rank in range(2):
            RowRouting(with_exchange(twin, 1, target=second), step.stages, rank)


def test_a_reader_without_all_its_rows_is_refused() -> None:
    step = job(ranks=1).step
    plan = replace(step.plan, exchanges=step.plan.exchanges[1:])
    groups = Groups.connect(dist.HashStore(), 0, 1, CPU, local=True)  # pyright: ignore[reportPrivateImportUsage]
    held = {name: nn.Parameter(value) for name, value in parameters().items()}
    with pytest.raises(VerifyError, match=r"hidden_read, read by language_model\.1#0 .* row 0 never arrives"):
        P2P(groups, plan, step.stages, loaded_on(step, groups, held), ())


def test_rows_of_another_sample_are_found() -> None:
    """Rank 0 sends rows of sample 0, rank 1 expects them to be of sample 5."""
    dealt = placed_stages({"vision": 2, "audio": 1, "language_model": 1}, 1)
    stages = tuple(replace(stage, ranks=(int(stage.tower == "language_model"),)) for stage in dealt)
    planned = job_on(stages)
    actions = schedule_of(planned).ranks
    send = next(action for action in actions[0] if action.kind is ActionKind.SEND_F)
    receive = next(a for a in actions[1] if a.kind is ActionKind.RECV_F and a.peer == send.stage)
    assert (planned.step.plan.exchanges[0].producer, str(send)) == ("vision.0", "0SEND_F0>6")
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]

    def p2p_of(rank: int, plan: StepPlan, action: Action) -> tuple[P2P, list[Stages]]:
        groups = Groups.connect(store, rank, 2, CPU, local=True)
        held = {name: nn.Parameter(value) for name, value in parameters().items()}
        loaded = loaded_on(planned.step, groups, held)
        values = () if rank else planned.step.values
        return P2P(groups, plan, stages, loaded, [action], values=values, check_rows=True), loaded

    def sender() -> P2P:
        p2p, loaded = p2p_of(0, planned.step.plan, send)
        microbatch = p2p.microbatch(send.stage, send.microbatch)
        slot = next(slot for slot in loaded[microbatch][send.stage].outputs if slot.crossing)
        p2p.put_value(microbatch, send.stage, slot, torch.ones(2, WIDTH, dtype=torch.float64))
        p2p.send(send)
        return p2p

    def receiver() -> str:
        p2p, _ = p2p_of(1, with_exchange(planned.step.plan, 0, samples=(5,)), receive)
        with pytest.raises(VerifyError) as caught:
            p2p.receive(receive)
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        # The sender's P2P lives until its message has arrived.
        sent, message = pool.submit(sender), pool.submit(receiver)
        message.result()
    assert sent.result() is not None
    assert message.result().startswith(f"{receive} of step 1, ")
    assert message.result().endswith(": row 0 of 2 is of sample 0, wanted sample 5")


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_messages_between_two_stages_leave_and_arrive_in_the_same_order(lag: int) -> None:
    """Where there are no tags, nothing else tells them apart."""
    planned = job(lag, ranks=3)
    sent: dict[tuple[int, int, bool], list[tuple[int, int]]] = {}
    received: dict[tuple[int, int, bool], list[tuple[int, int]]] = {}
    for action in itertools.chain(*schedule_of(planned).ranks):
        backward = action.kind in (ActionKind.SEND_B, ActionKind.RECV_B)
        if action.peer is not None and action.kind.is_send:
            message = action.microbatch, action.other
            sent.setdefault((action.stage, action.peer, backward), []).append(message)
        elif action.peer is not None:
            message = action.other, action.microbatch
            received.setdefault((action.peer, action.stage, backward), []).append(message)
    assert sent == received


def test_tags_of_two_ranks_are_all_different() -> None:
    planned = job(lag=3)
    plan, stages = planned.step.plan, planned.step.stages
    tags = RowRouting(plan, stages, 0)
    found: dict[tuple[int, int], list[int]] = {}

    def use(producer: int, consumer: int, backward: bool, *used: int) -> None:
        ends = stages[producer].ranks[0], stages[consumer].ranks[0]
        found.setdefault((ends[1], ends[0]) if backward else ends, []).extend(used)

    for rank in range(2):
        for edge, positions in RowRouting(plan, stages, rank).edges.items():
            if stages[edge.producer].ranks[0] == rank != stages[edge.consumer].ranks[0]:
                number = plan.microbatches[edge.source].number
                for place, backward in itertools.product(range(len(positions)), (False, True)):
                    tag = tags.tag(number, edge, place, backward)
                    use(edge.producer, edge.consumer, backward, tag, tag + 1)
    for microbatch in plan.microbatches:
        mine = [at for at, s in enumerate(stages) if (s.tower, s.replica) == (microbatch.tower, microbatch.replica)]
        for producer, consumer in itertools.permutations(mine, 2):
            edge = Edge(microbatch.index, producer, microbatch.index, consumer)
            for place, backward in itertools.product(range(len(microbatch.links)), (False, True)):
                tag = tags.tag(microbatch.number, edge, place, backward)
                use(producer, consumer, backward, tag)
    assert found
    for used in found.values():
        assert len(set(used)) == len(used) and max(used) < tags.end_tag


def test_a_step_with_more_messages_than_tags_is_refused() -> None:
    step = job().step
    last = replace(step.plan.microbatches[-1], number=2**26)
    plan = replace(step.plan, microbatches=(*step.plan.microbatches[:-1], last))
    with pytest.raises(EngineError, match=r"step 1 has too many messages to number below 1073741824"):
        RowRouting(plan, step.stages, 0)


def test_ports_are_resolved_inside_the_tower_and_replica() -> None:
    stages = placed_stages({"vision": 2, "audio": 1, "language_model": 2}, 3)
    index = {stage.name: at for at, stage in enumerate(stages)}
    programs = programs_of("text+image").programs
    held = {name: nn.Parameter(value) for name, value in parameters().items()}

    def load(name: str) -> LoadedStage:
        placed = index[name]
        return LoadedStage.load(programs[stages[placed].program_name], held, stages, placed, device=CPU, compiled=False)

    vision, language = load("vision.0#1"), load("language_model.0#1")
    assert vision.outputs[0].consumers == (index["projector.0#1"],) and vision.outputs[0].crossing
    assert dict(vision.to_peer) == {index["projector.0#1"]: ("hidden",)}
    crossing = {slot.name: (slot.producer, slot.crossing) for slot in language.inputs}
    assert crossing == {"ids": (-1, False), "image_at": (-1, False), "picture_read": (-1, True)}
    assert not language.from_peer and language.to_peer.keys() == {index["language_model.1#1"]}
    # The same for both replicas, and however many there are.
    assert (vision.index, vision.key, load("vision.0#0").key) == (index["vision.0#1"], 0, 0)
    assert language.key == list(dict.fromkeys(stage.program_name for stage in stages)).index("language_model.0")
    whole = [stage for stage in stages if stage.program_name != "projector.0"]
    with pytest.raises(VerifyError, match=r"hidden of stage vision\.0 has the peer projector\.0, which no rank runs"):
        LoadedStage.load(programs["vision.0"], held, whole, 0, device=CPU, compiled=False)
    with pytest.raises(VerifyError, match=r"runs programs of vision\.0, got one of projector\.0"):
        LoadedStage.load(programs["projector.0"], held, stages, 0, device=CPU, compiled=False)
