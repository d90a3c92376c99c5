"""A text-only chain of equal stages: our engine against torch.distributed.pipelining's Schedule1F1B.

Both train the same transformer blocks with the same split, microbatches, data and optimizer, in the same two processes, one
thread each, in alternation. A round times a few steps of one, then of the other. Prints seconds per step of each round and,
last, the ratio of medians (ours / torch, as throughput); exits with 1 if it is below 1.0.

    python -P benchmarks/chain.py [--rounds 15] [--steps 2]
"""

from __future__ import annotations

import argparse
import functools
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

from mmcompile.codegen.program import PatternPrograms, Port, PreparedMicrobatch, StageProgram
from mmcompile.data.collate import Sample, Value
from mmcompile.ir.graph import ParameterSpec
from mmcompile.planner.plan.placement import PlacedStage, Placement
from mmcompile.runtime.engine import Engine

NUM_STAGES = 2
BLOCKS_PER_STAGE = 4
WIDTH = 256
NUM_HEADS = 4
VOCABULARY = 512
LENGTH = 64
SAMPLES_PER_MICROBATCH = 2
NUM_MICROBATCHES = 8
OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-4)


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, NUM_HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Chain(nn.Module):
    """Token embedding, blocks, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_STAGES * BLOCKS_PER_STAGE))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)


class TorchStage(nn.Module):
    """One stage of the chain, for PipelineStage."""

    def __init__(self, chain: Chain, index: int) -> None:
        super().__init__()
        self.embed = chain.embed if index == 0 else None
        self.blocks = chain.blocks[index * BLOCKS_PER_STAGE : (index + 1) * BLOCKS_PER_STAGE]
        self.head = chain.head if index == NUM_STAGES - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


BLOCK_SOURCE = """
        h = functional.layer_norm(x, (WIDTH,), t["P.norm1.weight"], t["P.norm1.bias"])
        h = functional.linear(h, t["P.qkv.weight"], t["P.qkv.bias"])
        q, k, v = h.view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        h = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + functional.linear(h, t["P.out.weight"], t["P.out.bias"])
        h = functional.layer_norm(x, (WIDTH,), t["P.norm2.weight"], t["P.norm2.bias"])
        h = functional.gelu(functional.linear(h, t["P.up.weight"], t["P.up.bias"]))
        x = x + functional.linear(h, t["P.down.weight"], t["P.down.bias"])
"""

LOSS_SOURCE = """
        logits = functional.linear(x, t["head.weight"])
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss, (labels != -100).sum()
"""


def stage_source(index: int) -> str:
    """The same stage as `TorchStage`, as a stage program."""
    arguments = "input_ids" if index == 0 else "x"
    arguments += ", labels" if index == NUM_STAGES - 1 else ""
    lines = [
        "from torch.nn import functional",
        "class Stage(StageModule):",
        f"    def forward(self, {arguments}):",
        "        t = self.t",
    ]
    if index == 0:
        lines.append('        x = functional.embedding(input_ids, t["embed.weight"])')
    for block in range(index * BLOCKS_PER_STAGE, (index + 1) * BLOCKS_PER_STAGE):
        source = BLOCK_SOURCE.replace("P.", f"blocks.{block}.")
        lines.append(source.replace("WIDTH", str(WIDTH)).replace("HEADS", str(NUM_HEADS)))
    lines.append(LOSS_SOURCE if index == NUM_STAGES - 1 else "        return (x,)")
    return "\n".join(lines)


PLAN = Placement(
    stages=tuple(PlacedStage(name=f"lm.{i}", ranks=(i,), depth=NUM_STAGES - 1 - i) for i in range(NUM_STAGES)),
    num_microbatches=NUM_MICROBATCHES,
)


class ChainSource:
    """`ProgramSource` of the chain: one pattern."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        programs = {stage.name: self._program(i) for i, stage in enumerate(PLAN.stages)}
        self._programs = PatternPrograms(pattern="chain", programs=programs, per_token=True)

    def parameters(self) -> Mapping[str, Tensor]:
        return dict(self._chain.named_parameters())

    def prepare(self, batch: Mapping[str, Value]) -> PreparedMicrobatch:
        values = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
        shape = (*values["input_ids"].shape, WIDTH)
        return PreparedMicrobatch(
            programs=self._programs,
            sizes={},
            values=values,
            link_shapes={f"x{i}": shape for i in range(NUM_STAGES - 1)},
            num_tokens=int((values["labels"] != -100).sum()),
        )

    def _program(self, index: int) -> StageProgram:
        last = index == NUM_STAGES - 1
        first = (
            Port(name="input_ids", kind="root", shape=(), dtype="int64")
            if index == 0
            else _link(index - 1, f"lm.{index - 1}")
        )
        labels = Port(name="labels", kind="root", shape=(), dtype="int64")
        loss = tuple(Port(name=name, kind="link", shape=(), dtype="float32") for name in ("loss_sum", "num_tokens"))
        prefixes = tuple(f"blocks.{b}." for b in range(index * BLOCKS_PER_STAGE, (index + 1) * BLOCKS_PER_STAGE))
        prefixes += ("embed.",) if index == 0 else ()
        prefixes += ("head.",) if last else ()
        return StageProgram(
            stage=f"lm.{index}",
            pattern="chain",
            source=stage_source(index),
            inputs=(first, labels) if last else (first,),
            outputs=loss if last else (_link(index, f"lm.{index + 1}"),),
            parameters=tuple(
                ParameterSpec(name=name, shape=tuple(parameter.shape), dtype="float32", trainable=True)
                for name, parameter in self._chain.named_parameters()
                if name.startswith(prefixes)
            ),
            buffers=(),
            is_loss=last,
            has_backward=True,
        )


def _link(index: int, peer: str) -> Port:
    return Port(name=f"x{index}", kind="link", shape=(), dtype="float32", gradient=True, peers=(peer,))


def make_samples() -> list[Sample]:
    ids = torch.randint(0, VOCABULARY, (NUM_MICROBATCHES * SAMPLES_PER_MICROBATCH, LENGTH))
    return [{"input_ids": row[None], "labels": row[None].roll(-1, 1)} for row in ids]


def torch_step(rank: int, samples: list[Sample]) -> Callable[[], float]:
    """One training step with Schedule1F1B; returns the loss on the last rank, 0 elsewhere."""
    torch.manual_seed(0)
    module = TorchStage(Chain(), rank)
    stage = PipelineStage(module, rank, NUM_STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(
        stage,
        NUM_MICROBATCHES,
        loss_fn=lambda logits, labels: functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
    )
    optimizer = OPTIMIZER(module.parameters())

    def step() -> float:
        ids = torch.cat([_tensor(sample["input_ids"]) for sample in samples])
        labels = torch.cat([_tensor(sample["labels"]) for sample in samples])
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(ids)
        else:
            schedule.step(target=labels, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).detach().mean()) if losses else 0.0

    return step


def our_step(samples: list[Sample]) -> tuple[Engine, Callable[[], float]]:
    """One training step with the engine; returns the loss."""
    torch.manual_seed(0)
    engine = Engine(PLAN, ChainSource(Chain()), optimizer=OPTIMIZER, device="cpu")
    return engine, lambda: engine.step(samples).loss


def measure(step: Callable[[], float], num_steps: int) -> float:
    """Seconds per step, all ranks starting together."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    dist.barrier()
    return (time.perf_counter() - start) / num_steps


def run_rank(rounds: int, num_steps: int) -> NoReturn:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    samples = make_samples()
    theirs = torch_step(rank, samples)
    engine, ours = our_step(samples)
    with engine:
        for _ in range(2):
            expected, loss = theirs(), ours()
            if rank == NUM_STAGES - 1 and abs(expected - loss) > 1e-4:
                raise SystemExit(f"losses differ: torch {expected}, ours {loss}")
        times = [(measure(ours, num_steps), measure(theirs, num_steps)) for _ in range(rounds)]
    dist.destroy_process_group()
    raise SystemExit(report(times) if rank == 0 else 0)


def report(times: list[tuple[float, float]]) -> int:
    print(f"{NUM_STAGES} stages of {BLOCKS_PER_STAGE} blocks, width {WIDTH}, {NUM_MICROBATCHES} microbatches of "
          f"{SAMPLES_PER_MICROBATCH} x {LENGTH} tokens; seconds per step")  # fmt: skip
    print("round     ours    torch")
    for number, (ours, theirs) in enumerate(times):
        print(f"{number:5d} {ours:8.4f} {theirs:8.4f}")
    ratio = statistics.median(theirs for _, theirs in times) / statistics.median(ours for ours, _ in times)
    print(f"throughput, ours / torch: {ratio:.3f}")
    return int(ratio < 1.0)


def start_ranks() -> int:
    """Start one process a stage, and return the exit code of the first that failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        **os.environ,
        "WORLD_SIZE": str(NUM_STAGES),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen([sys.executable, "-P", *sys.argv], env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(NUM_STAGES)
    ]
    return max(rank.wait() for rank in ranks)


def _tensor(value: Value) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def main() -> NoReturn:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="alternations (default 15)")
    parser.add_argument("--steps", type=int, default=2, help="steps timed in a round (default 2)")
    options = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(options.rounds, options.steps)
    raise SystemExit(start_ranks())


if __name__ == "__main__":
    main()
