"""Training samples of the dataset that a user named (`--data`)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from mmcompile.cli.model import function_of
from mmcompile.data.collate import Sample
from mmcompile.errors import ConfigError

DATA_HELP = (
    "A folder of .safetensors files, each one sample (input_ids, labels, pixel_values, ... as a processor returns them), or "
    "package.module:function that returns a list of samples."
)


def load_samples(text: str) -> Sequence[Sample]:
    """Return the samples that `text` names (see `DATA_HELP`); a file is read each time its sample is indexed.

    Raises:
        ConfigError: nothing by that name, or no sample in it.
    """
    function = function_of(text)
    if function is not None:
        samples = list(function())
    elif Path(text).is_dir():
        samples = _StoredSamples(sorted(Path(text).glob("*.safetensors")))
    else:
        raise ConfigError(f"no data {text!r}: it is neither a folder nor package.module:function")
    if not samples:
        raise ConfigError(
            f"no samples in {text}: wanted .safetensors files, or a function that returns at least one sample"
        )
    return samples


class _StoredSamples(Sequence[Sample]):
    """Sequence of samples, each in a safetensors file that is read whenever the sample is indexed."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]  # no slices: they would read many files
        try:
            return load_file(self._files[index])
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"cannot read sample {self._files[index]}: {error}") from error


def epochs(num_samples: int, batch_size: int, seed: int) -> Iterator[list[int]]:
    """Yield the positions of each step's samples, without end; an epoch's order depends on the seed and its number only.

    A step may span two epochs, so that every sample is seen equally often.
    """
    pending: list[int] = []
    epoch = 0
    while True:
        while len(pending) < batch_size:
            order = list(range(num_samples))
            random.Random(f"{seed}-{epoch}").shuffle(order)
            pending += order
            epoch += 1
        yield pending[:batch_size]
        del pending[:batch_size]


def richest(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Return `count` samples to capture on: of the first 64 those with the most inputs, so that every modality is captured."""
    looked_at = [samples[index] for index in range(min(len(samples), max(64, count)))]
    return sorted(looked_at, key=len, reverse=True)[:count]
