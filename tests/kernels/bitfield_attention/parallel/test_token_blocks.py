"""Token blocks: every token on one rank, equal counts, balance, and the errors."""

from __future__ import annotations

import random
import time
from itertools import combinations

import numpy as np
import pytest
import torch
from support.oracles.token_policies import BlockPolicy, token_blocks

from mmcompile.errors import ConfigError
from mmcompile.kernels.bitfield_attention.parallel.token_blocks import choose_block, distribute, padded_length

EQUAL = [policy for policy in BlockPolicy if policy is not BlockPolicy.LPT_FREE]


def documents(blocks: int, seed: int) -> np.ndarray:
    """Work of packed causal documents of random lengths."""
    rng = random.Random(seed)
    parts = []
    while sum(map(len, parts)) < blocks:
        parts.append(np.arange(1, rng.randint(2, max(2, blocks // 4))))
    return np.concatenate(parts)[:blocks]


@pytest.mark.parametrize("policy", BlockPolicy)
@pytest.mark.parametrize(
    ("tokens", "ranks", "block"), [(1000, 4, 16), (128, 2, 128), (17, 3, 16), (777, 1, 32), (4096, 8, 128)]
)
def test_every_token_is_on_one_rank_and_restore_undoes_rearrange(
    policy: BlockPolicy, tokens: int, ranks: int, block: int
) -> None:
    work = documents(-(-tokens // block), seed=tokens)
    blocks = token_blocks(work, tokens=tokens, ranks=ranks, block=block, policy=policy)
    order = blocks.order
    assert order.shape == (ranks, blocks.local_tokens) and order.dtype == torch.int64
    assert order[order >= 0].sort().values.tolist() == list(range(tokens))
    sequence = torch.randn(tokens)
    padded = torch.cat([sequence, torch.tensor([torch.nan])])  # index -1 takes the last
    assert torch.equal(padded[order].flatten()[blocks.restore()], sequence)
    assert sum(blocks.work) == work.sum()
    assert blocks.balance == pytest.approx(max(blocks.work) / (sum(blocks.work) / ranks))


@pytest.mark.parametrize("policy", EQUAL)
def test_equal_counts_need_no_more_rows_than_padding(policy: BlockPolicy) -> None:
    tokens, ranks, block = 1000, 3, 16
    blocks = token_blocks(documents(63, 0), tokens=tokens, ranks=ranks, block=block, policy=policy)
    assert blocks.local_tokens * ranks == padded_length(tokens, ranks, block) == 1008
    assert blocks.token_skew == 1008 / 1000


@pytest.mark.parametrize("policy", BlockPolicy)
def test_tokens_of_a_rank_keep_their_order(policy: BlockPolicy) -> None:
    blocks = token_blocks(documents(40, 1), tokens=640, ranks=4, block=16, policy=policy)
    for row in blocks.order:
        assert row[row >= 0].diff().gt(0).all()


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("contiguous", [[0, 1, 2], [3, 4, 5]]),
        ("stripe", [[0, 2, 4], [1, 3, 5]]),
        ("zigzag", [[0, 1, 5], [2, 3, 4]]),
        ("ptrr", [[0, 3, 4], [1, 2, 5]]),
    ],
)
def test_policies_of_fixed_form(policy: str, expected: list[list[int]]) -> None:
    blocks = token_blocks([6, 5, 4, 3, 2, 1], tokens=96, ranks=2, block=16, policy=policy)
    assert blocks.blocks.tolist() == expected


def test_random_depends_on_its_seed_only() -> None:
    def order(seed: int) -> list[list[int]]:
        return token_blocks(np.ones(64), tokens=1024, ranks=4, block=16, policy="random", seed=seed).blocks.tolist()

    assert order(1) == order(1) != order(2)


def test_the_same_work_gives_the_same_blocks() -> None:
    work = documents(512, 3)
    first, second = (token_blocks(work, tokens=512 * 128, ranks=16) for _ in range(2))
    assert torch.equal(first.blocks, second.blocks)


def test_rows_of_a_batch_are_added() -> None:
    work = torch.from_numpy(np.stack([documents(64, 1), documents(64, 2)]))
    both, total = (token_blocks(x, tokens=8192, ranks=4) for x in (work, work.sum(0)))
    assert torch.equal(both.blocks, total.blocks)


@pytest.mark.parametrize("seed", range(20))
def test_lpt_is_at_most_a_third_above_the_best(seed: int) -> None:
    """Against all ways to give 12 blocks to 2 ranks, 6 each; the bound of LPT is 4/3."""
    work = np.random.default_rng(seed).pareto(1.0, 12)
    work = (10 * work + 1).astype(np.int64)
    best = min(max(work[list(half)].sum(), work.sum() - work[list(half)].sum()) for half in combinations(range(12), 6))
    blocks = token_blocks(work, tokens=12 * 128, ranks=2)
    assert max(blocks.work) * 3 <= best * 4


@pytest.mark.parametrize("ranks", (2, 8, 32, 64))
@pytest.mark.parametrize("seed", range(3))
def test_lpt_is_balanced_where_a_rank_has_many_blocks(ranks: int, seed: int) -> None:
    blocks = token_blocks(documents(16 * ranks, seed), tokens=16 * ranks * 128, ranks=ranks)
    assert max(blocks.work) <= max(1.005 * sum(blocks.work) / ranks, -(-sum(blocks.work) // ranks))


def test_few_blocks_are_split_anew_where_lpt_is_not_enough() -> None:
    """Eight blocks a rank, and no small ones left to even out the last: plain LPT is 1 % off here."""
    work = np.concatenate([np.full(8, 8), np.arange(9, 129)])
    blocks = token_blocks(work, tokens=128 * 128, ranks=16)
    assert blocks.balance <= 1.005
    assert blocks.token_skew == 1


def test_lpt_free_evens_out_a_giant_with_more_tokens_elsewhere() -> None:
    work = [100] + [1] * 63
    capped = token_blocks(work, tokens=64 * 16, ranks=4, block=16, policy="lpt_free")
    free = token_blocks(work, tokens=64 * 16, ranks=4, block=16, policy="lpt_free", token_cap=4.0)
    assert (capped.blocks >= 0).sum(1).max() == 20  # 1.25 times 16
    assert (free.blocks >= 0).sum(1).tolist() == [1, 21, 21, 21]
    assert free.balance == pytest.approx(100 / (163 / 4))


def test_no_work_at_all_is_balanced() -> None:
    assert token_blocks([0, 0], tokens=32, ranks=2, block=16).balance == 1.0


def test_blocks_past_the_end_are_free() -> None:
    blocks = token_blocks([3], tokens=5, ranks=4, block=16)
    assert sorted(blocks.work) == [0, 0, 0, 3]
    assert (blocks.order >= 0).sum() == 5


@pytest.mark.parametrize(
    ("tokens", "ranks", "block", "length"),
    [
        (1 << 20, 64, 128, 1 << 20),
        (4096, 8, 128, 4096),
        (4095, 8, 64, 4096),
        (1000, 4, 32, 1024),
        (10, 4, 16, 64),
        (1, 1, 16, 16),
    ],
)
def test_blocks_shrink_for_short_sequences(tokens: int, ranks: int, block: int, length: int) -> None:
    assert choose_block(tokens, ranks) == block
    assert padded_length(tokens, ranks) == length


def test_a_million_tokens_are_distributed_in_milliseconds() -> None:
    """The benchmark cp_balance holds it to 3 ms; here machines may be busy."""
    work = documents(8192, 0)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        distribute(work, tokens=8192 * 128, ranks=64)
        times.append(time.perf_counter() - start)
    assert min(times) < 15e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 0}, "at least 1 rank, got 0"),
        ({"tokens": 33}, r"33 tokens in blocks of 16 need the work of 3 blocks, got \[2\]"),
        ({"tokens": 0}, "0 tokens in blocks of 16"),
    ],
)
def test_errors(options: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"tokens": 32, "ranks": 2, "block": 16, **options}
    with pytest.raises(ConfigError, match=message):
        distribute([1, 2], **arguments)  # pyright: ignore[reportArgumentType]
