"""Layers between real processes: the right bytes everywhere, nothing but what is missing, and no damage unnoticed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from support.models.layer_models import (
    CHAIN,
    FROZEN_ONLY,
    NOTHING,
    NUM_LAYERS,
    OPTIMIZERS,
    bits,
    initial,
    layer,
    trained_store,
)
from support.plans.template_jobs import even_template
from support.processes.copy_ranks import NUM_RANKS, Case, Outcome, copied, copy, device
from torch import Tensor

from mmcompile.planner.resilience.copies import LayerCopy, plan_copies
from mmcompile.planner.resilience.job import Job
from mmcompile.runtime.elastic.layer_message import (
    FRAME_BYTES,
    DamagedLayer,
    Entry,
    Header,
    chunks,
    entries_of,
    header_length,
    open_header,
    seal,
)
from mmcompile.runtime.elastic.layer_store import bytes_of

TRAINING = (0, 1, 3, 5)


def size_of(index: int, optimizer: str, num_steps: int = 3, scale: int = 1) -> int:
    bundle = trained_store(optimizer, num_steps, scale=scale).bundle(layer(index))
    return sum(tensor.numel() * tensor.element_size() for tensor in bundle.values())


def random_case(seed: int) -> Case:
    """What templates need after nodes came and went, as the planner has it copied."""
    rng = random.Random(seed)
    optimizer = rng.choice(list(OPTIMIZERS))
    job = Job(
        templates=(even_template(1, NUM_LAYERS, chain=CHAIN),),
        devices_per_node=1,
        fault_tolerance=0,
        num_microbatches=1,
        layer_bytes={CHAIN: tuple(size_of(index, optimizer) for index in range(NUM_LAYERS))},
    )
    holdings = {node: np.array([rng.random() < 0.4 for _ in range(NUM_LAYERS)]) for node in range(NUM_RANKS)}
    holdings[rng.randrange(NUM_RANKS)] |= ~np.any([*holdings.values()], axis=0)
    needed = {node: np.array([rng.random() < 0.7 for _ in range(NUM_LAYERS)]) for node in range(NUM_RANKS)}
    copies = [
        LayerCopy(
            layer=one.layer,
            source=device(one.source),
            destination=device(one.destination),
            num_bytes=one.num_bytes,
            round=one.round,
        )
        for one in plan_copies(job, needed, holdings)
    ]
    rng.shuffle(copies)
    return Case(
        copies=tuple(copies),
        holdings=tuple(tuple(map(int, np.flatnonzero(holdings[node]))) for node in range(NUM_RANKS)),
        optimizer=optimizer,
        chunk_bytes=rng.choice([1, 7, 64, 1000, 2**20]),
    )


RING = Case(
    copies=tuple(copy(node, (node + 1) % NUM_RANKS, TRAINING[node]) for node in range(NUM_RANKS)),
    holdings=tuple((index,) for index in TRAINING),
    chunk_bytes=100_000,
    scale=20_000,
)
"""All send and receive at once, far more than sockets hold."""
SWAP = Case(
    copies=(copy(0, 1, 0), copy(1, 0, 5), copy(0, 1, 3, round=4), copy(1, 0, 1, round=4)),
    holdings=((0, 3), (1, 5), (), ()),
    chunk_bytes=3 * 2**20,
    scale=60_000,
)
FLIPPED = [
    # Messages 0 and 1 are the header and its frame.
    Case(copies=(copy(1, 0, 3),), holdings=((0,), (3,), (), ()), chunk_bytes=chunk_bytes, flips=((1, message, place),))
    for chunk_bytes, message, place in [(2**20, 2, 0), (2**20, 2, -1), (100, 2, 33), (100, 5, 83), (8, 20, 3)]
]
CASES = {
    **{f"random {seed}": random_case(seed) for seed in range(12)},
    "ring": RING,
    "swap": SWAP,
    "nothing": Case(copies=(), holdings=((0,), (), (), (1,))),
    "stale": Case(copies=(copy(2, 0, 3), copy(3, 2, 5)), holdings=((0, 3), (1,), (3,), (5,)), steps=(1, 3, 3, 3)),
    "never updated": Case(copies=(copy(0, 1, 0), copy(0, 2, 3, round=1)), holdings=((0, 3), (), (), ()), steps=(0,) * 4),
    "frozen": Case(copies=(copy(0, 1, FROZEN_ONLY),), holdings=((FROZEN_ONLY,), (), (), ())),
    **{f"flipped {index}": case for index, case in enumerate(FLIPPED)},
    "liar": Case(copies=(copy(2, 3, 1), copy(3, 0, 5)), holdings=((), (), (1,), (5,)), liars=(2,)),
    "not held": Case(copies=(copy(0, 1, 3),), holdings=((0,), (), (), ())),
    "twice": Case(copies=(copy(0, 1, 3), copy(0, 2, 3)), holdings=((3,), (), (), ())),
    "to itself": Case(copies=(copy(0, 0, 3),), holdings=((3,), (), (), ())),
    "frame": Case(copies=(copy(0, 1, 3),), holdings=((3,), (), (), ()), flips=((0, 0, 2),)),
    "header": Case(copies=(copy(0, 1, 3),), holdings=((3,), (), (), ()), flips=((0, 1, 90),)),
    "left": Case(copies=(copy(0, 1, 3),), holdings=((3,), (), (), ()), leaves=(1,), chunk_bytes=10),
}  # fmt: skip
GOOD = [name for name in CASES if name.startswith("random")] + ["ring", "swap", "nothing", "stale", "never updated"]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Outcome]]:
    return dict(zip(CASES, copied(list(CASES.values())), strict=True))


@pytest.mark.parametrize("name", GOOD)
def test_right_bytes_everywhere(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    case = CASES[name]
    truth = trained_store(case.optimizer, max(case.steps), scale=case.scale)
    stale = trained_store(case.optimizer, min(case.steps), scale=case.scale)
    wanted = {index: truth.bundle(layer(index)) for index in TRAINING}
    for node, outcome in enumerate(outcomes[name]):
        assert outcome.error == ""
        arrived = {one.layer.index for one in case.copies if one.destination == device(node)}
        held = arrived | set(case.holdings[node])
        # A tied parameter may make another layer whole.
        assert {one.index for one in outcome.held} >= held - {NOTHING}
        for index in held & set(TRAINING):
            own = (
                wanted[index] if case.steps[node] == max(case.steps) or index in arrived else stale.bundle(layer(index))
            )
            assert same(outcome.bundles[layer(index)], own), index

        rounds = sorted(case.copies, key=lambda one: one.round)
        sent = [one.layer.index for one in rounds if one.source == device(node)]
        sizes = {index: sum(t.numel() * t.element_size() for t in wanted[index].values()) for index in TRAINING}
        messages = iter(outcome.messages)
        for index in sent:
            assert next(messages) == FRAME_BYTES and next(messages) > 0
            full, rest = divmod(sizes[index], case.chunk_bytes)
            chunk_sizes = [case.chunk_bytes] * full + [rest] * (rest > 0)
            assert [next(messages) for _ in chunk_sizes] == chunk_sizes
        assert not list(messages)


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype
        and left[name].shape == right[name].shape
        and left[name].stride() == right[name].stride()
        and left[name]
        .contiguous()
        .view(-1)
        .view(torch.uint8)
        .equal(right[name].contiguous().view(-1).view(torch.uint8))
        for name in left
    )


def test_plans_move_layers_and_skip_those_without_bytes() -> None:
    """The random cases say something, and frozen layers never move."""
    cases = [case for name, case in CASES.items() if name.startswith("random")]
    assert all(sum(one.round > 0 for one in case.copies) for case in cases)
    assert {one.layer.index for case in cases for one in case.copies} == set(TRAINING)
    needed_frozen = [case for case in cases if any(FROZEN_ONLY not in held for held in case.holdings)]
    assert needed_frozen


def test_a_layer_without_bytes_costs_none(outcomes: dict[str, list[Outcome]]) -> None:
    """Planners skip it; a worker that is told to copy it all the same has nothing to send."""
    for outcome in outcomes["frozen"]:
        assert outcome.error == "" and len(outcome.messages) in (0, 2), "more than a frame and a header were sent"
    assert layer(FROZEN_ONLY) in outcomes["frozen"][1].held


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("flipped")])
def test_a_flipped_byte_is_noticed(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    receiver = outcomes[name][0]
    assert receiver.error.startswith(
        "EngineError: copy of layer language_model[3] from node1/0 to node0/0: what came has digest"
    )
    assert "it was not used" in receiver.error
    assert receiver.held == {layer(0)}
    assert same(receiver.bundles[layer(0)], trained_store().bundle(layer(0)))


def test_memory_that_changed_is_noticed(outcomes: dict[str, list[Outcome]]) -> None:
    receiver = outcomes["liar"][3]
    assert receiver.error.startswith("EngineError: copy of layer language_model[1] from node2/0 to node3/0: what came")
    assert receiver.held == {layer(5)}
    # What it had to send in that round went out before.
    assert same(outcomes["liar"][0].bundles[layer(5)], trained_store().bundle(layer(5)))


@pytest.mark.parametrize(("name", "what"), [("frame", "the length of its header"), ("header", "its header")])
def test_a_damaged_header_is_noticed(name: str, what: str, outcomes: dict[str, list[Outcome]]) -> None:
    sender, receiver = outcomes[name][:2]
    assert receiver.error.startswith(
        f"EngineError: copy of layer language_model[3] from node0/0 to node1/0: {what} changed on the way; it was not used"
    )
    assert not receiver.held
    assert sender.error.startswith("PeerLost")


def test_what_check_raises_ends_the_copies(outcomes: dict[str, list[Outcome]]) -> None:
    sender, receiver = outcomes["left"][:2]
    assert receiver.error == "Left: the generation is over"
    assert not receiver.held
    assert sender.error.startswith("PeerLost")


@pytest.mark.parametrize(
    ("name", "nodes", "words"),
    [
        ("not held", (0,), "VerifyError: layer language_model[3] is asked for and is not held here: ['3.across'"),
        ("twice", (0,), "VerifyError: copy of layer language_model[3] from node0/0 to node2/0: a worker sends or receives twice"),
        ("to itself", (0, 1, 2, 3), "VerifyError: copy of layer language_model[3] from node0/0 to node0/0: wanted another"),
    ],
)  # fmt: skip
def test_plans_that_cannot_be(
    name: str, nodes: tuple[int, ...], words: str, outcomes: dict[str, list[Outcome]]
) -> None:
    for node in nodes:
        assert outcomes[name][node].error.startswith(words)


@pytest.mark.parametrize("chunk_bytes", [1, 5, 16, 10_000])
def test_chunks(chunk_bytes: int) -> None:
    bundle = trained_store().bundle(layer(3))
    entries = entries_of(bundle)
    found = list(chunks([bundle[entry.name] for entry in entries], chunk_bytes))
    flat = b"".join(bytes(chunk.tolist()) for chunk in found)
    assert all(len(chunk) == chunk_bytes for chunk in found[:-1]) and 0 < len(found[-1]) <= chunk_bytes
    assert flat == b"".join(bits(bundle)[entry.name][2] for entry in entries)
    places = np.cumsum([0, *(entry.num_bytes for entry in entries)])
    read = {
        entry.name: entry.read(torch.frombuffer(bytearray(flat), dtype=torch.uint8)[start:end])
        for entry, start, end in zip(entries, places, places[1:], strict=False)
    }
    assert same(read, bundle)


def test_chunks_of_one_tensor_are_not_copies() -> None:
    tensor = torch.arange(1000.0)
    found = list(chunks([tensor], 512))
    assert [chunk.data_ptr() - tensor.data_ptr() for chunk in found] == list(range(0, 4000, 512))
    assert bytes_of(tensor).data_ptr() == tensor.data_ptr()


def test_headers_open_or_are_damaged() -> None:
    """Whichever bit changes."""
    header = Header(layer=layer(3), digest="ab", entries=entries_of(initial()))
    frame, data = seal(header)
    assert header_length(frame) == len(data)
    assert open_header(frame, data) == header
    assert isinstance(header.entries[0], Entry)
    for place in range(8 * len(frame)):
        with pytest.raises(DamagedLayer):
            header_length(flipped(frame, place))
    for place in range(8 * len(data)):
        with pytest.raises(DamagedLayer):
            open_header(frame, flipped(data, place))


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
