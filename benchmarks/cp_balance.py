"""Balance of context parallelism: max over mean of attention work per rank, for every distribution of token blocks.

Work is the number of 128 x 128 tiles a rank's queries visit. Masks are those of attention_masks.py, and packed documents whose
lengths have a long tail. Rows are sequence lengths and ranks with at least 8 blocks a rank. Last, the time to distribute 8,192
blocks (2^20 tokens) over 64 ranks.

Exits with 1 if `lpt`, the default, is above 1.005 (or more than one tile above the mean, where a tile is more than that), or if
the distribution takes more than 3 ms.

    python -P benchmarks/cp_balance.py [--json] [--out FILE] [--tokens 16384 ...]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(
    0, str(Path(__file__).resolve().parents[1] / "tests")
)  # for `support`, which the tests share with this file

import msgspec  # noqa: E402  (after the path)
import numpy as np  # noqa: E402
import torch  # noqa: E402
from attention_masks import benchmark_mask  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from support.oracles.token_policies import BlockPolicy, token_blocks  # noqa: E402

from mmcompile.kernels.bitfield_attention.masks.classify import BLOCK, Masks  # noqa: E402
from mmcompile.kernels.bitfield_attention.masks.words import pack  # noqa: E402
from mmcompile.kernels.bitfield_attention.parallel.token_blocks import distribute  # noqa: E402

TOKENS = (16384, 65536, 262144, 1048576)
RANKS = (2, 4, 8, 16, 32, 64)
LONG_TAIL = "MP long tail"
MASKS = ("causal", "EP", "EE", "EE-Gemma", "MP", "MP-Gemma", LONG_TAIL)
MIN_BLOCKS_PER_RANK = 8
MAX_BALANCE = 1.005
MAX_DISTRIBUTION_S = 3e-3

_REPEATS = 25
_SHORTEST_DOCUMENT = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One mask, length and number of ranks."""

    mask: str
    tokens: int
    ranks: int
    tiles: int
    """Of all ranks."""
    balance: dict[str, float]
    """By policy: max over mean of tiles."""
    token_skew: float
    """Of `lpt_free`: rows of every rank over the mean of tokens."""

    @property
    def limit(self) -> float:
        """What `lpt` must not exceed: work comes in whole tiles."""
        return max(MAX_BALANCE, 1 + self.ranks / self.tiles)

    @property
    def good(self) -> bool:
        return self.balance[BlockPolicy.LPT] <= self.limit


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All that was measured."""

    rows: tuple[Row, ...]
    distribution_s: float
    """Of 8,192 blocks of the MP mask over 64 ranks by `lpt`, the least of 25."""

    @property
    def good(self) -> bool:
        return all(row.good for row in self.rows) and self.distribution_s <= MAX_DISTRIBUTION_S


def mask(name: str, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[1, tokens] words and positions; seed 0."""
    return _long_tail(tokens) if name == LONG_TAIL else benchmark_mask(name, tokens)


def _long_tail(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal documents whose lengths follow a Pareto law of exponent 1, at most a quarter of the row."""
    generator = torch.Generator().manual_seed(0)
    draws = _SHORTEST_DOCUMENT / (
        1 - torch.rand(tokens // _SHORTEST_DOCUMENT, generator=generator, dtype=torch.float64)
    )
    ends = draws.clamp(max=tokens // 4).long().cumsum(0)
    document = torch.searchsorted(ends, torch.arange(tokens), right=True) + 1
    ones = torch.ones_like(document)
    words = pack(causal=ones.bool(), document=document, instance=0 * ones, modalities=ones)
    return words[None], torch.arange(tokens, dtype=torch.int32)[None]


def measure(lengths: Sequence[int]) -> Report:
    """Balance of every case, and the time of the largest distribution."""
    rows: list[Row] = []
    for name in MASKS:
        for tokens in lengths:
            work = Masks(*mask(name, tokens)).workload()
            fitting = [ranks for ranks in RANKS if tokens >= ranks * BLOCK * MIN_BLOCKS_PER_RANK]
            rows += [_row(name, tokens, ranks, work) for ranks in fitting]
    return Report(rows=tuple(rows), distribution_s=distribution_s())


def _row(name: str, tokens: int, ranks: int, work: np.ndarray) -> Row:
    found = {policy: token_blocks(work, tokens=tokens, ranks=ranks, policy=policy) for policy in BlockPolicy}
    return Row(
        mask=name,
        tokens=tokens,
        ranks=ranks,
        tiles=int(work.sum()),
        balance={policy: blocks.balance for policy, blocks in found.items()},
        token_skew=found[BlockPolicy.LPT_FREE].token_skew,
    )


def distribution_s() -> float:
    """Seconds, the least of 25: others use this machine too."""
    tokens, ranks = 1048576, 64
    work = Masks(*mask("MP", tokens)).workload()
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        distribute(work, tokens=tokens, ranks=ranks)
        times.append(time.perf_counter() - start)
    return min(times)


def show(report: Report) -> None:
    """Print the table."""
    table = Table("mask", "tokens", "ranks", *(str(policy) for policy in BlockPolicy), "lpt_free skew", "")
    for row in report.rows:
        figures = (f"{row.balance[policy]:.4f}" for policy in BlockPolicy)
        verdict = _verdict(row)
        table.add_row(row.mask, str(row.tokens), str(row.ranks), *figures, f"{row.token_skew:.2f}", verdict)
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table)
    worst = max(row.balance[BlockPolicy.LPT] for row in report.rows if row.limit == MAX_BALANCE)
    console.print(f"lpt at worst {worst:.4f} (limit {MAX_BALANCE}) where a tile is less than that; 8192 blocks over 64 ranks: "
                  f"{report.distribution_s * 1e3:.2f} ms (limit {MAX_DISTRIBUTION_S * 1e3:.0f} ms)")  # fmt: skip


def _verdict(row: Row) -> str:
    if not row.good:
        return f"lpt above {row.limit:.4f}"
    return f"a tile is {row.limit - 1:.1%}" if row.balance[BlockPolicy.LPT] > MAX_BALANCE else ""


def main() -> int:
    """Measure, print and judge; 0 if all is within its limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--out", type=Path, help="also write the JSON object to a file")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="sequence lengths")
    options = parser.parse_args()
    report = measure(options.tokens)
    text = msgspec.json.format(msgspec.json.encode(report)).decode()
    if options.out is not None:
        options.out.write_text(text + "\n")
    if options.json:
        print(text)
    else:
        show(report)
    return 0 if report.good else 1


if __name__ == "__main__":
    sys.exit(main())
