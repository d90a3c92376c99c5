"""Train a small LLaVA to read scanned digits on five nodes, one of which dies on the way.

The model is Hugging Face's LLaVA at toy size: a frozen, random CLIP tower, and a projector and a Llama that are trained.
A sample is a conversation: an image, a question in words, a one-word answer. scikit-learn brings the 1,797 images.

A node is a process of this machine. The plan has templates of pipelines for 2 and 3 nodes; two pipelines run, so that no layer is
lost with a node. After a third of the steps a worker is killed; the others go on within a moment, and its node comes back.

    python examples/digits_llava.py --out demo_out

writes plan.json, stages/*.py, run/, timeline.png, trace.json and metrics.json there, and exits with 1 if fewer than 95 % of the
held-out images are read rightly. With --calm nobody is killed, and the trained model is the same to the bit.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import mmcompile as mm
from mmcompile.files import write_atomic
from mmcompile.report.pictures.perfetto import write_chrome_trace
from mmcompile.report.pictures.stage_graph import stage_graph_text
from mmcompile.report.pictures.timeline import draw_timeline
from mmcompile.report.run_folder import write_programs
from mmcompile.runtime.elastic.elastic_engine import ElasticEngine

IMAGE_SIZE, PATCH_SIZE = 32, 8
NUM_PATCHES = (IMAGE_SIZE // PATCH_SIZE) ** 2
WORDS = ("<pad>", "<image>", "<s>", "which", "digit", "is", "this", "?", *"0123456789")
QUESTION = "which digit is this ?"
IGNORE = -100

NUM_HELD_OUT = 297
NUM_STEPS, BATCH_SIZE, NUM_MICROBATCHES = 900, 60, 4
KILLED_AFTER = 300
PEAK_LEARNING_RATE = 3e-3
CLUSTER = "5x1xcpu"
WANTED_ACCURACY = 0.95

Sample = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics:
    """What the demo reached; written as metrics.json."""

    accuracy: float
    """Share of held-out images read rightly."""
    processes: int
    """That train; the coordinator, the store and one agent a node come to them."""
    recoveries_s: tuple[float, ...]
    """From each change of members to the next step that counts."""
    steps: int
    loss: float
    """Of the last step."""
    train_seconds: float


def build_model() -> LlavaForConditionalGeneration:
    """The model with random weights, its tower frozen."""
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
        projection_dim=64,
    )
    text = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        pad_token_id=WORDS.index("<pad>"),
        bos_token_id=WORDS.index("<s>"),
        eos_token_id=None,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=WORDS.index("<image>"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )
    model = LlavaForConditionalGeneration(config)
    mm.freeze(model, ["projector", "language_model", "lm_head"])
    return model


def build_samples() -> list[Sample]:
    """All images as conversations, in a fixed random order."""
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16.0, dtype=torch.float32).view(-1, 1, 8, 8)
    images = nn.functional.interpolate(images, size=IMAGE_SIZE, mode="nearest").expand(-1, 3, -1, -1)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0)).tolist()
    return [conversation(images[index : index + 1], str(digits[index])) for index in order]


def conversation(image: Tensor, answer: str) -> Sample:
    """What a processor would return: the image [1, 3, H, W], text ids [1, S], and labels on the answer alone."""
    words = ["<s>", *["<image>"] * NUM_PATCHES, *QUESTION.split(), answer]
    ids = torch.tensor([[WORDS.index(word) for word in words]])
    labels = torch.full_like(ids, IGNORE)
    labels[:, -1] = ids[:, -1]
    return {"pixel_values": image, "input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def batch_of(samples: Sequence[Sample]) -> Sample:
    """Samples of equal length as one batch."""
    return {key: torch.cat([sample[key] for sample in samples]) for key in samples[0]}


def one_cycle(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Warm up to the peak, then down to nothing."""
    return OneCycleLR(optimizer, PEAK_LEARNING_RATE, total_steps=NUM_STEPS)


def accuracy_of(model: nn.Module, samples: Sequence[Sample]) -> float:
    """Share of samples whose answer is the model's most likely next word; plain eager, one process."""
    batch = batch_of(samples)
    answers = batch.pop("labels")[:, -1]
    model.eval()
    with torch.no_grad():
        logits = model(**batch).logits
    return (logits[:, -2].argmax(-1) == answers).float().mean().item()


def train(engine: ElasticEngine, console: Console, *, calm: bool) -> float:
    """Run all steps under a progress bar and kill a worker on the way; returns the last loss."""
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}  {task.fields[rate]:,.0f} images/s"),
        TimeRemainingColumn(),
    )
    loss = float("nan")
    told = 0
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=NUM_STEPS, loss=loss, rate=0.0)
        for metrics in engine.train():
            loss = metrics.loss
            progress.update(task, advance=1, loss=loss, rate=metrics.num_samples / metrics.seconds)
            if metrics.step == KILLED_AFTER and not calm:
                console.print(f"step {metrics.step}: killing the worker of node1")
                engine.kill("node1")
            for recovery in engine.recoveries[told:]:
                told += 1
                console.print(
                    f"step {metrics.step}: went on after {recovery.total_s:.2f} s ({recovery.cause})", markup=False
                )
    return loss


def run(out: Path, console: Console, *, calm: bool) -> Metrics:
    """Plan, train, evaluate, and write everything to a folder."""
    model, samples = build_model(), build_samples()
    held_out, training = samples[:NUM_HELD_OUT], samples[NUM_HELD_OUT:]
    batch = batch_of(training[: BATCH_SIZE // NUM_MICROBATCHES])

    plan = mm.plan(model, batch, cluster=CLUSTER, num_microbatches=NUM_MICROBATCHES, fault_tolerance=1)
    write_atomic(out / "plan.json", plan.to_json())
    console.print(str(plan), "", stage_graph_text(plan), "", sep="\n", highlight=False, soft_wrap=True, markup=False)
    write_programs(out, mm.stage_programs(model, batch, plan))

    shutil.rmtree(out / "run", ignore_errors=True)
    start = time.perf_counter()
    with mm.elastic(
        model,
        batch,
        plan,
        data=mm.MapBatches(training, BATCH_SIZE, seed=1),
        num_steps=NUM_STEPS,
        folder=out / "run",
        optimizer=functools.partial(torch.optim.AdamW, lr=PEAK_LEARNING_RATE, weight_decay=0.05),
        scheduler=one_cycle,
        clip_norm=1.0,
        reduction="fixed",
    ) as engine:
        loss = train(engine, console, calm=calm)
        seconds = time.perf_counter() - start
        engine.pull()
        measured, recoveries = engine.trace(), engine.recoveries
    metrics = Metrics(
        accuracy=accuracy_of(model, held_out),
        processes=len(engine.processes),
        recoveries_s=tuple(round(recovery.total_s, 3) for recovery in recoveries),
        steps=NUM_STEPS,
        loss=loss,
        train_seconds=seconds,
    )
    draw_timeline(out / "timeline.png", measured)
    write_chrome_trace(out / "trace.json", measured)
    write_atomic(out / "metrics.json", msgspec.json.format(msgspec.json.encode(metrics), indent=2) + b"\n")
    return metrics


def main() -> int:
    """Run the demo; 0 if it read enough held-out images rightly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder to write to (default: demo_out)")
    parser.add_argument("--calm", action="store_true", help="kill nobody")
    arguments = parser.parse_args()
    out: Path = arguments.out
    torch.set_num_threads(1)
    console = Console()
    metrics = run(out, console, calm=arguments.calm)
    console.print(
        f"held-out accuracy {metrics.accuracy:.1%} (wanted {WANTED_ACCURACY:.0%}) on {NUM_HELD_OUT} images, "
        f"{metrics.processes} processes, {metrics.steps} steps in {metrics.train_seconds:.0f} s, "
        f"changes of members overcome in {', '.join(f'{seconds:.2f} s' for seconds in metrics.recoveries_s) or 'no time'}",
        soft_wrap=True,
    )
    for name, what in (
        ("plan.json", "where every layer runs"),
        ("stages/", "the program of each stage"),
        ("run/", "log and events of the coordinator, and the trained model as a checkpoint"),
        ("timeline.png", "the last step, as measured"),
        ("trace.json", "the same for Perfetto or chrome://tracing"),
        ("metrics.json", "the figures above"),
    ):
        console.print(f"  {out / name}{'/' if name.endswith('/') else ''}  {what}", highlight=False, soft_wrap=True)
    return 0 if metrics.accuracy >= WANTED_ACCURACY else 1


if __name__ == "__main__":
    sys.exit(main())
