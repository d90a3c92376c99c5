"""Bitfield attention on a CPU against scaled_dot_product_attention with the dense mask: time and peak memory, side by side.

Forward and backward of one layer of 16,384 tokens under the EE and MP masks of `attention_masks`. Each side lives in a process of
its own; in every round both run once, one after the other, so that whatever else the machine does meets both. Times are wall
clock, medians of the rounds; the speed-up is the median of the rounds' ratios. Peak memory is the growth of the largest resident
set (`ru_maxrss`) of a side's process from the moment queries, keys, values and the incoming gradient exist to the end: the mask,
outputs and gradients count, torch and the inputs do not. The dense mask is made from words tile by tile, in no more memory than
it takes itself.

    OMP_NUM_THREADS=1 python -P benchmarks/cpu_attention.py

Exits with 1 where bitfield attention is less than 3 times faster or takes more than a fifth of the memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MASKS = ("EE", "MP")
MIN_SPEEDUP = 3.0
MAX_MEMORY_RATIO = 0.2
SIDES = ("bitfield", "sdpa")
_GIB = 1 << 30


def main() -> None:
    """Print the table; exit with 1 if a target is missed."""
    options = _arguments()
    if options.side:
        _answer(options)
        return
    missed = False
    print(
        f"{options.tokens} tokens, {options.heads} heads, {options.kv_heads} key heads, head dim {options.dim}, float32"
    )
    print(f"{'mask':6} {'visible':>8} {'bitfield':>20} {'sdpa, dense mask':>20} {'faster':>8} {'memory':>8}")
    for mask in MASKS:
        ours, dense = _rounds(options, mask)
        speedup = median(b["seconds"] / a["seconds"] for a, b in zip(ours, dense, strict=True))
        memory = ours[-1]["bytes"] / dense[-1]["bytes"]
        missed |= speedup < MIN_SPEEDUP or memory > MAX_MEMORY_RATIO
        cells = [
            f"{median(x['seconds'] for x in side):.2f} s {side[-1]['bytes'] / _GIB:.3f} GiB" for side in (ours, dense)
        ]
        print(
            f"{mask:6} {ours[0]['visible']:8.1%} {cells[0]:>20} {cells[1]:>20} {speedup:7.2f}x {memory:7.3f}x",
            flush=True,
        )
    print(
        f"wanted: at least {MIN_SPEEDUP:g}x faster, at most {MAX_MEMORY_RATIO:g}x the memory: {'MISSED' if missed else 'met'}"
    )
    sys.exit(missed)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mask", default=MASKS[0], help=argparse.SUPPRESS)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    return parser.parse_args()


def _rounds(options: argparse.Namespace, mask: str) -> tuple[list[dict[str, float]], ...]:
    """Figures of each round, by side."""
    kept = {name: value for name, value in vars(options).items() if name not in ("mask", "side")}
    passed = [f"--{name.replace('_', '-')}={value}" for name, value in kept.items()]
    command = [sys.executable, "-P", __file__, *passed, f"--mask={mask}"]
    sides = [
        subprocess.Popen([*command, f"--side={side}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for side in SIDES
    ]
    figures: tuple[list[dict[str, float]], ...] = ([], [])
    for _ in range(options.rounds):
        for process, found in zip(sides, figures, strict=True):
            assert process.stdin and process.stdout
            print(file=process.stdin, flush=True)
            found.append(json.loads(process.stdout.readline()))
    for process in sides:
        process.communicate()
    return figures


def _answer(options: argparse.Namespace) -> None:
    """Run once for every line read, and print seconds, bytes and the visible share of all pairs."""
    # Only these processes load torch: the largest resident set of a process starts at that of its parent.
    import torch

    sys.path.insert(0, str(Path(__file__).parent))  # -P keeps it off
    from attention_masks import benchmark_mask

    from mmcompile.kernels.bitfield_attention import visible_pairs

    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, options.tokens, options.dim, requires_grad=True)
        for heads in (options.heads, options.kv_heads, options.kv_heads)
    )
    gradient = torch.randn(q.shape)
    words, positions = benchmark_mask(options.mask, options.tokens, options.seed)
    visible = visible_pairs(words, positions) / options.tokens**2
    before = _peak_bytes()
    attend = _bitfield(words, positions) if options.side == "bitfield" else _dense(words, positions)
    for _ in sys.stdin:
        q.grad = k.grad = v.grad = None
        start = time.perf_counter()
        attend(q, k, v).backward(gradient)
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "bytes": _peak_bytes() - before, "visible": visible}), flush=True)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _bitfield(words: torch.Tensor, positions: torch.Tensor) -> Callable[..., torch.Tensor]:
    from mmcompile.kernels.bitfield_attention import bitfield_attention

    return lambda q, k, v: bitfield_attention(q, k, v, words, positions=positions, impl="eager")


def _dense(words: torch.Tensor, positions: torch.Tensor) -> Callable[..., torch.Tensor]:
    import torch

    from mmcompile.kernels.bitfield_attention.masks.words import visible

    tokens = words.shape[1]
    mask = torch.empty(1, 1, tokens, tokens, dtype=torch.bool)
    for first in range(0, tokens, 128):
        rows = slice(first, first + 128)
        mask[0, 0, rows] = visible(words[0, rows], positions[0, rows], words[0], positions[0])
    attention = torch.nn.functional.scaled_dot_product_attention
    return lambda q, k, v: attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


if __name__ == "__main__":
    main()
