"""`stable_batch`: the smallest batch whose random draws all give components the same devices (Entrain, Algorithm 2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, log
from typing import TypeAlias

import msgspec
import numpy as np

from mmcompile.errors import ConfigError
from mmcompile.planner.strategies.entrain import allocate

Allocation: TypeAlias = tuple[int, ...]
"""Devices of each component."""

WorkOf = Callable[[np.ndarray], np.ndarray]
"""Samples drawn [batches, n], by position in the dataset -> work of each component in each batch [batches, components]."""

DEFAULT_CAP = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """An allocation and how many batches gave it."""

    devices: Allocation
    batches: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One batch size: the reference batch and the `k` batches held against it."""

    size: int
    stable: bool
    seen: tuple[Seen, ...]
    """Most frequent first; the reference batch is counted."""
    share_mean: tuple[float, ...]
    """Mean share of work [0..1] of each component over the batches."""
    share_std: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stability:
    """Batch size from which an allocation is stable. `str(stability)` is the table."""

    components: tuple[str, ...]
    devices: int
    alpha: float
    p_error: float
    num_trials: int
    """k: batches that must all agree with the reference."""
    cap: int
    trials: tuple[Trial, ...]
    """In ascending batch size."""

    @property
    def stable_size(self) -> int | None:
        """b_min; None if no size up to the cap is stable."""
        return next((trial.size for trial in self.trials if trial.stable), None)

    @property
    def allocations(self) -> tuple[Allocation, ...]:
        """Allocations for the components: one if stable, else those of the largest size, most frequent first.

        One allocation if stable, else those of the largest size, most frequent first.
        """
        return tuple(seen.devices for seen in self.trials[-1].seen)

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Stability:
        return msgspec.json.decode(text, type=cls)

    def __str__(self) -> str:
        head = (
            f"{self.num_trials} batches a size (alpha {self.alpha:g}, p_error {self.p_error:g}), {self.devices} devices"
        )
        lines = [
            f"{head}, {' : '.join(self.components)}",
            f"{'batch':>7}  {'stable':<7}{'share of work':<28}allocations",
        ]
        for trial in self.trials:
            shares = " : ".join(
                f"{mean:.3f}±{std:.3f}" for mean, std in zip(trial.share_mean, trial.share_std, strict=True)
            )
            seen = ", ".join(f"{format_allocation(item.devices)} x{item.batches}" for item in trial.seen)
            lines.append(f"{trial.size:>7}  {'yes' if trial.stable else 'no':<7}{shares:<28}{seen}")
        lines.append(self._verdict())
        return "\n".join(lines)

    def _verdict(self) -> str:
        texts = [format_allocation(devices) for devices in self.allocations]
        if self.stable_size is not None:
            return f"batches of {self.stable_size} samples or more give {texts[0]}"
        return (
            f"not stable at {self.cap} samples, the most that was tried: the mean is next to a rounding boundary, and "
            f"{' and '.join(texts[:2])} are about as good"
        )


def format_allocation(devices: Sequence[int]) -> str:
    """`(9, 7)` -> `"9:7"`."""
    return ":".join(map(str, devices))


def num_trials(alpha: float = 0.05, p_error: float = 0.05) -> int:
    """Batches that must all agree: `k = ceil(ln(alpha) / ln(1 - p_error))` (Entrain, Eq. C.5).

    If a batch disagreed with probability `p_error` or more, all k would agree with probability `alpha` at most.

    Raises:
        ConfigError: a value outside (0, 1).
    """
    if not (0 < alpha < 1 and 0 < p_error < 1):
        raise ConfigError(f"alpha is {alpha} and p_error {p_error}; both lie between 0 and 1")
    return ceil(log(alpha) / log(1 - p_error))


def stable_batch(
    work: WorkOf | np.ndarray,
    components: Sequence[str],
    devices: int,
    *,
    num_samples: int | None = None,
    alpha: float = 0.05,
    p_error: float = 0.05,
    start: int = 1,
    cap: int = DEFAULT_CAP,
    factor: int = 2,
    stop: bool = True,
    minimum: int = 1,
    seed: int = 0,
) -> Stability:
    """Double the batch size until a reference batch and k more give the same allocation (Entrain, Algorithm 2).

    Args:
        work: [samples, components], work of every sample; or a function of the samples drawn, for work that is no sum
            over samples (padding).
        components: their names.
        devices: of one replica, to share between the components.
        num_samples: in the dataset; needed with a function.
        alpha: one minus the confidence.
        p_error: share of batches that may give another allocation.
        start: first batch size.
        cap: largest batch size. If the mean lies on a rounding boundary no size is stable.
        factor: from one size to the next.
        stop: end at the first stable size; False tries all sizes to the cap.
        minimum: devices that every component gets.
        seed: of the draws.

    Raises:
        ConfigError: no samples, sizes that are no sizes, too few devices.
    """
    population = len(work) if isinstance(work, np.ndarray) else num_samples or 0
    if population < 1 or not 1 <= start <= cap or factor < 2:
        raise ConfigError(
            f"{population} samples, batch sizes from {start} to {cap} in steps of x{factor}; wanted at least one sample, "
            "1 <= start <= cap, and a factor of 2 or more"
        )
    count = num_trials(alpha, p_error)
    generator = np.random.default_rng(seed)
    trials: list[Trial] = []
    size = start
    while size <= cap:
        drawn = generator.integers(population, size=(count + 1, size))
        batches = work[drawn].sum(axis=1) if isinstance(work, np.ndarray) else work(drawn)
        trials.append(_trial(size, batches, components, devices, minimum))
        if trials[-1].stable and stop:
            break
        size *= factor
    return Stability(
        components=tuple(components),
        devices=devices,
        alpha=alpha,
        p_error=p_error,
        num_trials=count,
        cap=cap,
        trials=tuple(trials),
    )


def _trial(size: int, work: np.ndarray, components: Sequence[str], devices: int, minimum: int) -> Trial:
    """Judge batches [k + 1, components]; the first is the reference."""
    found = Counter(
        tuple(allocate(dict(zip(components, batch, strict=True)), devices, minimum).values()) for batch in work.tolist()
    )
    shares = work / work.sum(axis=1, keepdims=True)
    return Trial(
        size=size,
        stable=len(found) == 1,
        seen=tuple(Seen(devices=allocation, batches=batches) for allocation, batches in found.most_common()),
        share_mean=tuple(shares.mean(axis=0).tolist()),
        share_std=tuple(shares.std(axis=0).tolist()),
    )
