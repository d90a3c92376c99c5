"""`mmcompile profile`: how long do the layers of a model take on this machine?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from mmcompile.cli.config_options import with_config
from mmcompile.cli.console import busy, errors, print_result
from mmcompile.cli.model import load_model, set_trainable
from mmcompile.cli.options import JsonOption, ModelArgument
from mmcompile.config import ExampleConfig, ModelConfig
from mmcompile.costmodel.cluster import Cluster
from mmcompile.data.collate import collate
from mmcompile.errors import ConfigError
from mmcompile.ir.sample_inputs import example_batch
from mmcompile.profile import CPU_SIZES, GPU_SIZES, ROUNDS
from mmcompile.profile import profile as measure
from mmcompile.runtime.runtime_probe import probe_runtime

_MEDIA = ("images", "image_size", "audios")
_LEAST_TEXT = 8
"""Least number of text tokens in a measured sample, in addition to the tokens of its images and sounds."""


@with_config
def profile(
    model: ModelArgument,
    media: Annotated[ExampleConfig, _MEDIA],
    config: Annotated[ModelConfig, ("train", "dtype")],
    cluster: Annotated[
        str, typer.Option(help="The devices to measure: 'local' for CPU cores, else as for plan (8xH100).")
    ] = "local",
    sizes: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Tokens of the language model to measure at, once as one sample and once as several.",
            show_default="64,256,1024; on a GPU also 4096,16384",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Of each measurement; the median counts.")] = ROUNDS,
    runtime: Annotated[
        bool, typer.Option(help="Measure messages, actions and the optimizer too, with two processes.")
    ] = True,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the calibration here, as JSON.")] = None,
    json: JsonOption = False,
) -> None:
    """Measure one layer of each kind of MODEL on this machine, and fit seconds over the size of a microbatch.

    Weights are random and none are read. Nothing is written until all is measured.
    """
    where = Cluster.parse(cluster)
    device = _device(where, runtime)
    with busy(f"building {model}"):
        module, batch = load_model(model, "none", config.dtype)
        set_trainable(module, config.train)
        if batch is None:
            measured = _parse_sizes(sizes, GPU_SIZES if device.type == "cuda" else CPU_SIZES)
            batches = make_batches(module, measured, {name: getattr(media, name) for name in _MEDIA})
        else:
            if sizes is not None:
                raise ConfigError(
                    f"--sizes has no effect: {model} comes with a batch of its own, measured 1, 2 and 4 times"
                )
            batches = [collate([batch] * count, None) for count in (1, 2, 4)]
    with _progress() as told:
        made = measure(module, batches, device_name=where.device.name, device=device, rounds=rounds, on_progress=told)
        if runtime:
            told("messages, actions and optimizer, between two processes", 1.0)
            made = replace(made, runtime=probe_runtime(device=device.type))
    if output is not None:
        made.save(output)
    print_result(json, made, str(made), output)


def _parse_sizes(text: str | None, default: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers in a text such as `64,256`, ascending; `default` for None. Raises ConfigError for another text."""
    if text is None:
        return tuple(default)
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"--sizes {text!r} is no list of numbers of tokens, for example 64,256,1024")
    return tuple(sorted({int(part) for part in parts}))


def make_batches(model: nn.Module, sizes: Sequence[int], media: dict[str, int]) -> list[dict[str, Any]]:
    """Return microbatches of about `sizes` language-model tokens: of each size one with 1 sample, then one with 2, 4, 8, ...

    So the cost per token can be told apart from the cost per squared length, and encoders get different numbers of images. A
    sample is at least as long as its images and sounds need. `media` are arguments of `example_batch`, such as `images`.
    """
    first = example_batch(model, batch_size=1, text_tokens=_LEAST_TEXT, **media)
    taken = first["input_ids"].shape[1] - _LEAST_TEXT
    wanted = [(1, size) for size in sizes] + [(2 ** (i + 1), size) for i, size in enumerate(sizes)]
    shapes = dict.fromkeys((count, max(_LEAST_TEXT, size // count - taken)) for count, size in wanted)
    return [example_batch(model, batch_size=count, text_tokens=text, **media) for count, text in shapes]


def _device(cluster: Cluster, runtime: bool) -> torch.device:
    if cluster.is_local:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"a {cluster.device.name} is measured on one, and this machine has no CUDA device; "
            "run `mmcompile profile` there, or use --cluster local"
        )
    if runtime and torch.cuda.device_count() < 2:
        raise ConfigError("messages are measured between two GPUs, and this machine has one; add --no-runtime")
    return torch.device("cuda", 0)


@contextlib.contextmanager
def _progress() -> Generator[Callable[[str, float], None]]:
    """Show a bar on standard error; yield the function (text beside the bar, fraction done) that updates it."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors(), transient=True) as bar:
        task = bar.add_task("measuring", total=1.0)
        yield lambda text, share: bar.update(task, description=text, completed=share)
