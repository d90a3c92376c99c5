"""Seeded stand-ins for the datasets of the papers. Published figures where there are any, stated assumptions elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from mmcompile.data.sample import SampleShape
from mmcompile.errors import ConfigError

_DEFAULT_COUNT = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class LogNormal:
    """Lognormal distribution of a length, clipped to a range and rounded to a multiple."""

    mean: float
    """Mean of the lognormal distribution before clipping."""
    spread: float
    """Standard deviation of the length's logarithm; 0 for a constant length."""
    least: int = 1
    most: int = 1 << 20
    step: int = 1

    def draw(self, normal: np.ndarray) -> np.ndarray:
        """Return a length for each number in `normal`, a draw from the standard normal distribution; int64 in the same shape."""
        values = self.mean * np.exp(self.spread * normal - self.spread**2 / 2)
        return (np.clip(np.rint(values / self.step) * self.step, self.least, self.most)).astype(np.int64)


_NONE = LogNormal(mean=0.0, spread=0.0, least=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleKind:
    """One kind of sample in a synthetic dataset: distributions of its text, images and audio."""

    name: str
    weight: float = 1.0
    """Relative frequency of this kind; a sample has it with probability weight / (sum of all kinds' weights)."""
    text: LogNormal
    images: tuple[int, int] = (0, 0)
    """Smallest and largest number of images of a sample; all numbers between are equally likely."""
    patches: LogNormal = _NONE
    """Number of patches of one image."""
    alike: bool = False
    """True if all images of a sample have the same size (frames of a video)."""
    frames: LogNormal = _NONE
    """Number of frames of the sample's one audio clip; 0 for no clip."""
    correlation: float = 0.0
    """Correlation between the logarithm of text length and that of patches or frames."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Synthetic:
    """A synthetic dataset: a mix of sample kinds, with published and assumed numbers."""

    name: str
    parts: tuple[SampleKind, ...]
    source: str
    """Text that lists the dataset's published numbers, and their source."""
    assumed: str
    """Text that lists the dataset's properties for which no numbers are published, with the assumptions in their place."""


def synthetic(name: str, count: int | None = None, seed: int = 0) -> Iterator[SampleShape]:
    """Yield sample shapes of a published mix. Equal name, count and seed give equal samples.

    Args:
        name: one of `SYNTHETIC_DATASETS`.
        count: number of samples; 4,096 if not given.
        seed: seed of all draws.

    Raises:
        ConfigError: there is no such name, or `count` is below 1.
    """
    if name not in SYNTHETIC_DATASETS:
        raise ConfigError(f"no synthetic dataset {name!r}; there are {', '.join(SYNTHETIC_DATASETS)}")
    count = _DEFAULT_COUNT if count is None else count
    if count < 1:
        raise ConfigError(f"{count} samples of {name}; wanted at least 1")
    mix = SYNTHETIC_DATASETS[name]
    generator = np.random.default_rng(seed)
    weights = np.array([part.weight for part in mix.parts])
    kinds = generator.choice(len(mix.parts), size=count, p=weights / weights.sum())
    for index, kind in enumerate(kinds):
        yield _sample(f"{name}/{index}", mix.parts[kind], generator)


def _sample(name: str, part: SampleKind, generator: np.random.Generator) -> SampleShape:
    count = int(generator.integers(part.images[0], part.images[1] + 1))
    text, first = generator.standard_normal(2)
    media = part.correlation * text + math.sqrt(1 - part.correlation**2) * first
    rest = generator.standard_normal(max(0, count - 1))
    each = np.full(count, media) if part.alike else np.array([media, *rest][:count])
    frames = int(part.frames.draw(np.array(media)))
    return SampleShape(
        name=name,
        text_tokens=int(part.text.draw(np.array(text))),
        images=tuple(part.patches.draw(each).tolist()),
        audios=(frames,) if frames else (),
    )


_ENTRAIN = "Entrain (thesis ch. 4)"
_CHOSEN = "means and spreads chosen so that its tables of allocations come out"
_TOWER = 729  # SigLIP at 384 pixels, 14 a patch: (384 // 14)^2
_FRAMES_PER_S = 50  # Whisper: 100 mel steps a second, convolved by 2
_COCO = LogNormal(mean=1520, spread=0.10, least=256, most=2116, step=4)  # about 640 x 480, a few smaller, 14 a patch

_ENTRIES = (
    Synthetic(
        name="synthchartnet",
        parts=(
            SampleKind(
                name="chart to table",
                text=LogNormal(mean=270, spread=0.85, least=10, most=8192),
                patches=LogNormal(mean=4500, spread=0.5, least=256, most=16384, step=4),
                images=(1, 1),
            ),
        ),
        source=f"{_ENTRAIN}: vision to language model 1.27 with Llama3-3b (§4.7.3), the most variable of its four datasets; one "
        "chart and its table a sample, rendered at 120 DPI (dataset card)",
        assumed=f"both sizes, lognormal and independent; {_CHOSEN}",
    ),
    Synthetic(
        name="llava-150k",
        parts=(
            SampleKind(
                name="conversation, detail or reasoning",
                text=LogNormal(mean=265, spread=0.33, least=40, most=2048),
                patches=_COCO,
                images=(1, 1),
            ),
        ),
        source=f"{_ENTRAIN}: vision to language model 2.43 over the dataset (Fig. 4.5, language model not named); COCO images, "
        "2.3 exchanges of about 460 characters a sample (dataset files)",
        assumed=f"lognormal lengths, independent of the image; {_CHOSEN}",
    ),
    Synthetic(
        name="chartqa",
        parts=(
            SampleKind(
                name="chart questions",
                text=LogNormal(mean=130, spread=0.4, least=10, most=512),
                patches=LogNormal(mean=2000, spread=0.25, least=256, most=8192, step=4),
                images=(1, 1),
                correlation=0.3,
            ),
        ),
        source=f"{_ENTRAIN}, Tables C.4 and C.7: allocations of 16 devices only",
        assumed=f"charts near 800 x 500 pixels, one to two short questions in a chat template; {_CHOSEN}",
    ),
    Synthetic(
        name="cocoqa",
        parts=(
            SampleKind(
                name="photo questions",
                text=LogNormal(mean=102, spread=0.4, least=10, most=256),
                patches=_COCO,
                images=(1, 1),
            ),
        ),
        source=f"{_ENTRAIN}, Tables C.5 and C.8: allocations of 16 devices only; images of COCO, one-word answers",
        assumed=f"lognormal lengths, chat template included; {_CHOSEN}",
    ),
    Synthetic(
        name="dflop-mix",
        parts=(
            SampleKind(
                name="single image",
                weight=28 + 18 + 19,
                text=LogNormal(mean=200, spread=0.6, least=16, most=4096),
                patches=LogNormal(mean=4 * _TOWER, spread=0.5, least=2 * _TOWER, most=10 * _TOWER, step=_TOWER),
                images=(1, 1),
            ),
            SampleKind(
                name="several images",
                weight=60,
                text=LogNormal(mean=200, spread=0.4, least=16, most=4096),
                patches=LogNormal(mean=_TOWER, spread=0),
                images=(2, 6),
            ),
            SampleKind(
                name="video",
                weight=60,
                text=LogNormal(mean=250, spread=0.5, least=16, most=4096),
                patches=LogNormal(mean=_TOWER, spread=0),
                images=(4, 32),
                alike=True,
            ),
        ),
        source="DFLOP Table 2: 28k + 18k + 19k single-image, 60k multi-image and 60k video samples; several images spread "
        "narrowly, videos broadly and evenly (Fig. 11b)",
        assumed="729 patches a crop, image or frame (SigLIP-so400m, 384 pixels); 2 to 10 crops, 2 to 6 images, 4 to 32 frames; "
        "lengths of texts",
    ),
    Synthetic(
        name="orchmllm-mix",
        parts=(
            SampleKind(
                name="images and talk",
                weight=624,
                text=LogNormal(mean=300, spread=0.9, least=16, most=4096),
                patches=LogNormal(mean=1400, spread=0.45, least=64, most=4096),
                images=(1, 1),
            ),
            SampleKind(name="talk", weight=41, text=LogNormal(mean=900, spread=0.8, least=16, most=8192)),
            SampleKind(
                name="speech to text",
                weight=281,
                text=LogNormal(mean=45, spread=0.5, least=4, most=512),
                frames=LogNormal(mean=12.3 * _FRAMES_PER_S, spread=0.5, least=_FRAMES_PER_S, most=30 * _FRAMES_PER_S),
                correlation=0.9,
            ),
            SampleKind(
                name="questions about sounds",
                weight=21,
                text=LogNormal(mean=60, spread=0.9, least=4, most=1024),
                frames=LogNormal(mean=10 * _FRAMES_PER_S, spread=0.7, least=_FRAMES_PER_S, most=30 * _FRAMES_PER_S),
            ),
        ),
        source="OrchMLLM §8: LLaVA-1.5 instruction tuning, LibriSpeech and AIR-Bench, drawn from the whole; images of at most "
        "896 pixels, 14 a patch; text follows sound in transcripts and not in questions (§3.1)",
        assumed="samples of each from the datasets' cards (thousands); sizes of images, lengths of texts and sounds",
    ),
)

SYNTHETIC_DATASETS: Mapping[str, Synthetic] = {entry.name: entry for entry in _ENTRIES}
"""Name -> synthetic dataset."""
