"""`DatasetStats`: composition of a dataset, as the shapes of its samples."""

from __future__ import annotations

import heapq
import os
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from mmcompile.data.sample import SampleShape
from mmcompile.errors import ConfigError
from mmcompile.files import write_atomic
from mmcompile.units import format_count

_STATS_VERSION = 1
_MAX_SAMPLES = 20_000
"""Largest number of sample shapes kept of a dataset; a larger dataset is sampled."""
NUM_WORST = 64
"""Number of heaviest samples kept for each measure, so that a worst microbatch of up to 64 samples can be made."""
_PROGRESS_EVERY = 1_000
_PERCENTS = (1, 5, 25, 50, 75, 95, 99, 100)

Progress = Callable[[int], None]
"""Callback that takes the number of samples read so far."""

_MEASURES: Mapping[str, Callable[[SampleShape], int]] = {
    "patches": lambda shape: shape.patches,
    "frames": lambda shape: shape.frames,
    "text tokens": lambda shape: shape.text_tokens,
    "total": lambda shape: shape.patches + shape.frames + shape.text_tokens,
}
"""Name of a measure of size -> function that returns it for a sample; `total` is rows of encoders plus text tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Distribution of one quantity: mean, standard deviation and percentiles."""

    mean: float
    std: float
    percentiles: tuple[float, ...]
    """Values at the percents `_PERCENTS`, ascending; the last is the maximum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Worst:
    """The heaviest samples of a dataset by one measure, heaviest first."""

    measure: str
    samples: tuple[SampleShape, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetStats:
    """The joint distribution of a dataset's modalities. `str(stats)` is the table; JSON round-trips."""

    name: str
    count: int
    """Exact number of samples of the dataset."""
    samples: tuple[SampleShape, ...]
    """Shapes of all samples, or of `_MAX_SAMPLES` drawn at random if the dataset has more."""
    spreads: Mapping[str, Spread]
    """Quantity -> distribution: `patches per image` and `frames per sound` over images and audio clips.

    `images`, `sounds`, `patches`, `frames`, `text tokens` and `total` over samples.
    """
    correlations: Mapping[str, float]
    """Pair of quantities (`patches ~ text tokens`) -> Pearson correlation over samples.

    Pairs with a constant one are left out.
    """
    worst: tuple[Worst, ...]
    """Heaviest samples of the whole dataset by each of `_MEASURES`, among samples with that modality."""
    version: int = _STATS_VERSION

    @classmethod
    def of(
        cls,
        shapes: Iterable[SampleShape],
        *,
        name: str,
        max_samples: int = _MAX_SAMPLES,
        progress: Progress | None = None,
    ) -> DatasetStats:
        """Read the shapes of a dataset once, in constant memory.

        Args:
            shapes: shapes of all samples, in any order.
            name: name of the dataset in reports.
            max_samples: largest number of shapes kept; a larger dataset is sampled uniformly (reservoir).
            progress: called every `_PROGRESS_EVERY` samples and at the end.
        """
        kept: list[SampleShape] = []
        heaps: dict[str, list[tuple[int, int, SampleShape]]] = {measure: [] for measure in _MEASURES}
        generator = random.Random(0)
        count = 0
        for shape in shapes:
            for measure, weigh in _MEASURES.items():
                _push(heaps[measure], (weigh(shape), -count, shape))
            if count < max_samples:
                kept.append(shape)
            elif (slot := generator.randrange(count + 1)) < max_samples:
                kept[slot] = shape
            count += 1
            if progress is not None and count % _PROGRESS_EVERY == 0:
                progress(count)
        if progress is not None:
            progress(count)
        columns = _columns(kept)
        return cls(
            name=name,
            count=count,
            samples=tuple(kept),
            spreads={quantity: _spread(values) for quantity, values in columns.items() if len(values)},
            correlations=_correlations(columns),
            worst=tuple(
                Worst(measure=measure, samples=tuple(shape for _, _, shape in sorted(heap, reverse=True)))
                for measure, heap in heaps.items()
                if heap
            ),
        )

    @property
    def is_sampled(self) -> bool:
        """True if `samples` are only a part of the dataset."""
        return self.count > len(self.samples)

    @property
    def shares(self) -> dict[str, float]:
        """Fraction of samples, 0..1, with `images`, with `sounds` (audio clips) and with `text`."""
        has = {
            "images": [bool(shape.images) for shape in self.samples],
            "sounds": [bool(shape.audios) for shape in self.samples],
            "text": [shape.text_tokens > 0 for shape in self.samples],
        }
        return {what: sum(flags) / max(1, len(flags)) for what, flags in has.items()}

    def heaviest(self) -> tuple[SampleShape, ...]:
        """Shapes kept of the dataset, followed by the heaviest samples of the whole dataset that are not among them."""
        if not self.is_sampled:
            return self.samples
        kept = set(self.samples)
        worst = dict.fromkeys(shape for entry in self.worst for shape in entry.samples)
        return (*self.samples, *(shape for shape in worst if shape not in kept))

    def to_json(self) -> str:
        """Return the statistics as JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> DatasetStats:
        """Read statistics from JSON text. Raises ConfigError if the text has another form or version."""
        try:
            version = msgspec.json.decode(text, type=_Versioned).version
            if version != _STATS_VERSION:
                raise ConfigError(
                    f"dataset statistics have version {version}, this mmcompile reads {_STATS_VERSION}; make them again"
                )
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"this is no dataset statistics: {error}; make them again, or give a folder of images or a .jsonl of shapes"
            ) from error

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the statistics to a JSON file atomically, and return its path."""
        return write_atomic(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> DatasetStats:
        """Read statistics from a file. Raises ConfigError if it cannot be read or has another form or version."""
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read dataset statistics {path}: {error.strerror}") from error
        return cls.from_json(text)

    def __str__(self) -> str:
        sampled = f", {len(self.samples)} of them kept" if self.is_sampled else ""
        parts = [f"{share:.0%} with {what}" for what, share in self.shares.items() if share > 0]
        lines = [", ".join([f"{self.name}: {self.count} samples{sampled}", *parts])]
        heads = [f"p{percent}" for percent in _PERCENTS[:-1]] + ["max"]
        lines.append(f"{'':<18}{'mean':>9}{'std':>9}" + "".join(f"{head:>9}" for head in heads))
        for quantity, spread in self.spreads.items():
            figures = (spread.mean, spread.std, *spread.percentiles)
            lines.append(f"{quantity:<18}" + "".join(f"{_short(figure):>9}" for figure in figures))
        lines += [f"correlation {pair}: {value:+.2f}" for pair, value in self.correlations.items()]
        for worst in self.worst:
            names = [f"{shape.name} ({_MEASURES[worst.measure](shape)})" for shape in worst.samples[:3]]
            lines.append(f"most {worst.measure}: {', '.join(names)}")
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Versioned:
    version: int


def _short(figure: float) -> str:
    return f"{figure:.3g}" if figure < 100 else format_count(round(figure))


def _push(heap: list[tuple[int, int, SampleShape]], entry: tuple[int, int, SampleShape]) -> None:
    """Add a sample to a heap that keeps its `NUM_WORST` heaviest samples; a sample of weight 0 is left out.

    Args:
        entry: (weight, -index, sample); of samples with equal weight the earlier is kept.
    """
    if entry[0] == 0:
        return
    if len(heap) < NUM_WORST:
        heapq.heappush(heap, entry)
    elif entry > heap[0]:
        heapq.heapreplace(heap, entry)


def _columns(samples: list[SampleShape]) -> dict[str, np.ndarray]:
    per_sample: dict[str, list[int]] = {
        "images": [len(shape.images) for shape in samples],
        "sounds": [len(shape.audios) for shape in samples],
        **{measure: [weigh(shape) for shape in samples] for measure, weigh in _MEASURES.items()},
    }
    per_unit = {
        "patches per image": [patches for shape in samples for patches in shape.images],
        "frames per sound": [frames for shape in samples for frames in shape.audios],
    }
    columns = {name: np.array(values, dtype=np.float64) for name, values in {**per_unit, **per_sample}.items()}
    return {name: values for name, values in columns.items() if values.any()}


def _spread(values: np.ndarray) -> Spread:
    return Spread(
        mean=float(values.mean()),
        std=float(values.std()),
        percentiles=tuple(float(value) for value in np.percentile(values, _PERCENTS)),
    )


def _correlations(columns: Mapping[str, np.ndarray]) -> dict[str, float]:
    names = [name for name in ("patches", "frames", "text tokens") if name in columns and np.ptp(columns[name]) > 0]
    return {
        f"{first} ~ {second}": float(np.corrcoef(columns[first], columns[second])[0, 1])
        for index, first in enumerate(names)
        for second in names[index + 1 :]
    }
