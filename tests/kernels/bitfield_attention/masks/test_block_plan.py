"""Classes of tiles are safe, lists hold each tile once, counts are exact, and all of it is fast and small."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.oracles.masks_oracle import dense_mask, random_batch, random_words

from mmcompile.errors import MaskError
from mmcompile.kernels.bitfield_attention.masks.block_plan import (
    BlockPlan,
    TileClass,
    TileLists,
    plan_blocks,
    visible_pairs,
)
from mmcompile.kernels.bitfield_attention.masks.classify import Masks, unpack_classes
from mmcompile.kernels.bitfield_attention.masks.launch_order import best_cap
from mmcompile.kernels.bitfield_attention.masks.words import pack


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A random mask with its blocks, as a planner sees it."""

    arguments: dict[str, Any]
    window: int | None
    block_q: int
    block_kv: int

    @property
    def blocks(self) -> dict[str, Any]:
        return {"window": self.window, "block_q": self.block_q, "block_kv": self.block_kv}

    def classes(self) -> torch.Tensor:
        keys = self.arguments.get("kv_words", self.arguments["words"]).shape[1]
        packed = Masks(**self.arguments, **self.blocks).packed()
        return torch.from_numpy(unpack_classes(packed)[..., : -(-keys // self.block_kv)])

    def mask(self) -> torch.Tensor:
        return dense_mask(**self.arguments, window=self.window)

    def tiles(self) -> torch.Tensor:
        """[batch, query blocks, key blocks, block_q, block_kv] bool; tokens past the end see nothing."""
        mask = self.mask()
        padding = (0, -mask.shape[2] % self.block_kv, 0, -mask.shape[1] % self.block_q)
        split = F.pad(mask, padding).unflatten(2, (-1, self.block_kv)).unflatten(1, (-1, self.block_q))
        return split.transpose(2, 3)


def random_case(seed: int, batch: int = 1) -> Case:
    rng = random.Random(seed)
    tokens = rng.randint(1, 220)
    words, positions = random_batch(seed, tokens, batch)
    arguments = {"words": words, "positions": positions}
    if rng.random() < 0.4:  # some keys only, in some order, as after sharding
        taken = torch.tensor(rng.sample(range(tokens), rng.randint(1, tokens)))
        taken = taken.sort().values if rng.random() < 0.7 else taken
        arguments |= {"kv_words": words[:, taken], "kv_positions": positions[:, taken]}
    window = rng.choice((None, None, 1, 5, 16, 60, 500))
    return Case(arguments=arguments, window=window, block_q=16, block_kv=rng.choice((16, 16, 16, 8, 24)))


def unsafe_tiles(classes: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
    some, every = tiles.any(-1).any(-1), tiles.all(-1).all(-1)
    uniform = (tiles == tiles[..., :1]).all(-1).all(-1)
    empty, full, row = (classes == kind for kind in (TileClass.EMPTY, TileClass.FULL, TileClass.ROW))
    return (empty & some) | (full & ~every) | (row & ~uniform)


def test_no_tile_of_2000_random_masks_is_unsafe() -> None:
    met = np.zeros(4, dtype=int)
    missed_full = false_nonempty = 0
    for seed in range(2000):
        case = random_case(seed)
        classes, tiles = case.classes(), case.tiles()
        assert not unsafe_tiles(classes, tiles).any(), f"seed {seed}"
        met += np.bincount(classes.flatten(), minlength=4)
        missed_full += int((tiles.all(-1).all(-1) & (classes != TileClass.FULL)).sum())
        false_nonempty += int((~tiles.any(-1).any(-1) & (classes != TileClass.EMPTY)).sum())
    assert (met > 500).all(), met
    assert missed_full < 0.05 * met[TileClass.FULL] and false_nonempty < 0.05 * met.sum()


@pytest.mark.parametrize("seed", range(100))
def test_workload_and_pairs_are_exact(seed: int) -> None:
    case = random_case(seed, batch=2)
    counts = Masks(**case.arguments, **case.blocks).workload()
    assert counts.dtype == np.int64
    assert np.array_equal(counts, (case.classes() != TileClass.EMPTY).sum(-1).numpy())
    assert visible_pairs(**case.arguments, window=case.window) == int(case.mask().sum())


def check_side(side: TileLists, classes: torch.Tensor) -> None:
    """Every tile in exactly one item, every block in an item, slots where a block has several."""
    rows = classes.reshape(-1, classes.shape[-1])
    listed = torch.zeros_like(rows)
    items = side.items.tolist()
    for row, _, *ranges in items:
        for kind, begin, end in zip((1, 2, 3), ranges[::2], ranges[1::2], strict=True):
            columns = side.other[begin:end].long()
            assert (listed[row, columns] == 0).all() and (columns.diff() > 0).all()
            listed[row, columns] = kind
    assert torch.equal(listed, rows)
    lengths = [sum(end - begin for begin, end in zip(x[2::2], x[3::2], strict=True)) for x in items]
    assert lengths == sorted(lengths, reverse=True)
    slots = {(row, slot) for row, first, end in side.splits.tolist() for slot in range(first, end)}
    whole = [row for row, slot, *_ in items if slot < 0]
    assert slots == {(row, slot) for row, slot, *_ in items if slot >= 0}
    assert sorted({row for row, _ in slots} | set(whole)) == list(range(len(rows)))
    assert len(set(whole)) + len(slots) == len(items) and {slot for _, slot in slots} == set(range(side.num_slots))
    assert torch.equal(side.bounds[:, 3] - side.bounds[:, 0], (rows != TileClass.EMPTY).sum(-1))


@pytest.mark.parametrize("cap", (None, 1, 2, 5, "auto"))
def test_items_of_both_sides_cover_each_tile_once(cap: int | Literal["auto"] | None) -> None:
    for seed in range(25):
        case = random_case(seed, batch=1 + seed % 3)
        plan = plan_blocks(**case.arguments, **case.blocks, cap=cap, num_programs=3)
        classes = case.classes()
        check_side(plan.queries, classes)
        check_side(plan.keys, classes.transpose(1, 2))
        assert num_tiles(plan) == [int((classes == kind).sum()) for kind in (1, 2, 3)]
        if isinstance(cap, int):
            assert all(sum(x[3::2]) - sum(x[2::2]) <= cap for x in plan.queries.items.tolist())


def num_tiles(plan: BlockPlan) -> list[int]:
    """Of each class: FULL, ROW, GENERAL."""
    return torch.diff(plan.queries.bounds).sum(0).tolist()


def test_large_plans_are_compressed_in_pieces() -> None:
    words, positions = random_words(0, 3000, "EE-Gemma")
    plan = plan_blocks(words, positions, block_q=1, block_kv=1)
    mask = dense_mask(words, positions)[0]
    for side, of in ((plan.queries, mask), (plan.keys, mask.T)):
        assert torch.equal(side.bounds[:, 3] - side.bounds[:, 0], of.sum(-1, dtype=torch.int32))
        row = torch.arange(len(of)).repeat_interleave(side.bounds[:, 3] - side.bounds[:, 0])
        listed = torch.zeros_like(of)
        listed[row, side.other.long()] = True
        assert torch.equal(listed, of)


def test_blocks_that_see_nothing_are_still_written() -> None:
    plan = plan_blocks(torch.zeros(2, 300, dtype=torch.int64))
    assert num_tiles(plan) == [0, 0, 0]
    assert sorted(plan.queries.items[:, 0].tolist()) == list(range(6)) and (plan.queries.items[:, 1] == -1).all()
    assert len(plan.queries.other) == 0 and plan.queries.num_slots == 0


def causal_words(tokens: int) -> torch.Tensor:
    one = torch.ones(1, tokens, dtype=torch.int64)
    return pack(causal=one.bool(), document=one, instance=torch.zeros_like(one), modalities=one)


def test_classes_of_a_causal_mask_are_exact() -> None:
    classes = unpack_classes(Masks(causal_words(2048)).packed())[0]
    expected = np.tril(np.full((16, 16), TileClass.FULL), -1) + np.diag(np.full(16, TileClass.GENERAL))
    assert (classes == expected).all()


def test_a_window_leaves_a_band() -> None:
    plan = plan_blocks(causal_words(128 * 64), window=256)
    # The block before, whole; the block itself and the one before that, in part.
    assert num_tiles(plan) == [63, 0, 64 + 62]


def test_text_after_images_of_other_modalities_is_by_row() -> None:
    """Text reads everything, images only themselves: blocks that hold both are ROW against whatever is before them."""
    tokens = torch.arange(64)
    text = tokens >= 56
    words = pack(
        causal=text,
        document=torch.ones_like(tokens),
        instance=torch.where(text, 0, tokens // 12 + 1),
        modalities=torch.where(text, 3, 2),
    )[None]
    classes = unpack_classes(Masks(words, block_q=16, block_kv=16).packed())[0, :4, :4]
    assert (classes[3] == [TileClass.ROW, TileClass.ROW, TileClass.ROW, TileClass.GENERAL]).all()


def test_splitting_pays_for_one_head_and_not_for_many() -> None:
    words = causal_words(16384)
    few, many = (plan_blocks(words, cap="auto", heads_per_launch=heads) for heads in (1, 64))
    assert few.queries.num_slots > 0 and few.keys.num_slots > 0
    assert many.queries.num_slots == 0 and many.keys.num_slots == 0


def test_best_cap_does_not_split_what_cannot_be_split() -> None:
    assert best_cap(np.ones(7, dtype=np.int64), programs=264, heads=1) is None
    assert best_cap(np.zeros(1, dtype=np.int64), programs=264, heads=1) is None
    cap = best_cap(np.array([1000, 1, 1, 1]), programs=8, heads=1)
    assert cap is not None and cap <= 256


PACKED_LIMIT_S = 1.0
ONE_DOCUMENT_LIMIT_S = 5.0
MAP_LIMIT_BYTES = 20_000_000
MILLION = 1 << 20


def million_tokens(documents: int) -> torch.Tensor:
    """Documents of equal length: text of 200 tokens and images of 800 in turn, which see only themselves."""
    tokens = torch.arange(MILLION)
    inside = tokens % (MILLION // documents)
    text = inside % 1000 < 200
    return pack(
        causal=text,
        document=tokens // (MILLION // documents) + 1,
        instance=torch.where(text, 0, inside // 1000 + 1),
        modalities=torch.where(text, 3, 2),
    )[None]


@pytest.mark.parametrize(
    ("documents", "limit_s"), ((128, PACKED_LIMIT_S), (1, ONE_DOCUMENT_LIMIT_S)), ids=("packed", "one")
)
def test_a_million_tokens_are_classed_quickly_and_in_little_memory(documents: int, limit_s: float) -> None:
    words = million_tokens(documents)
    start = time.perf_counter()
    packed = Masks(words).packed()
    elapsed_s = time.perf_counter() - start
    assert packed.nbytes <= MAP_LIMIT_BYTES
    assert elapsed_s <= limit_s


WORDS = causal_words(10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ({"words": WORDS.int()}, "words are torch.int32"),
        ({"words": WORDS[0]}, r"wanted int64 \[batch, tokens\]"),
        ({"words": WORDS[:, :0]}, "words are torch.int64"),
        ({"words": WORDS, "kv_words": WORDS.repeat(2, 1)}, "kv_words are"),
        ({"words": WORDS, "positions": torch.zeros(1, 9, dtype=torch.int32)}, "one for each word"),
        ({"words": WORDS, "positions": torch.zeros(1, 10)}, "positions are torch.float32"),
        ({"words": WORDS, "positions": torch.zeros(1, 10, dtype=torch.int32), "kv_words": WORDS}, "give kv_positions"),
        ({"words": WORDS, "window": 0}, "hides everything"),
        ({"words": WORDS, "cap": 0}, "does nothing"),
    ),
)
def test_wrong_arguments_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(MaskError, match=message):
        plan_blocks(**arguments)


def test_lengths_of_a_plan_are_those_of_the_arguments() -> None:
    plan: BlockPlan = plan_blocks(causal_words(300), kv_words=causal_words(500), window=7, block_q=64, block_kv=32)
    assert (plan.batch, plan.q_len, plan.kv_len, plan.block_q, plan.block_kv, plan.window) == (1, 300, 500, 64, 32, 7)
    assert plan.queries.bounds.shape == (5, 4) and plan.keys.bounds.shape == (16, 4)
