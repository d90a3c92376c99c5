"""What the benchmarks of whole steps share: random steps from a pool of samples, rows of figures, the printed table."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from mmcompile.data.sample import SampleShape
from mmcompile.data.synthetic import synthetic

POOL = 20_000
"""Samples of a dataset from which steps are drawn, with replacement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One figure over all steps, and what was published."""

    group: str
    name: str
    mean: float
    low: float
    high: float
    unit: str
    published: str = ""
    """As printed in the paper; empty where it has no such figure."""

    @classmethod
    def of(cls, group: str, name: str, values: Sequence[float], unit: str, published: str = "") -> Row:
        """Mean and range of one value a step."""
        return cls(
            group=group,
            name=name,
            mean=float(np.mean(values)),
            low=float(np.min(values)),
            high=float(np.max(values)),
            unit=unit,
            published=published,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """Samples of a dataset as arrays [samples]."""

    shapes: tuple[SampleShape, ...]
    text: np.ndarray
    frames: np.ndarray

    @classmethod
    def of(cls, dataset: str, seed: int, count: int = POOL) -> Pool:
        shapes = tuple(synthetic(dataset, count, seed))
        return cls(
            shapes=shapes,
            text=np.array([shape.text_tokens for shape in shapes], dtype=np.int64),
            frames=np.array([shape.frames for shape in shapes], dtype=np.int64),
        )

    def draw(self, count: int, *seed: int) -> np.ndarray:
        """Indices of the samples of one step, int64 [count]."""
        return np.random.default_rng(seed).integers(len(self.shapes), size=count)


def arguments(doc: str | None, *, steps: int) -> argparse.ArgumentParser:
    """The options that all of them have.

    Args:
        doc: the module's docstring.
        steps: default number of random steps.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=steps, help="random steps; figures are means over them")
    return parser


def show(rows: Sequence[Row], *, as_json: bool) -> None:
    """Print all figures: a table, or `{"rows": [...]}`."""
    if as_json:
        print(msgspec.json.encode({"rows": rows}).decode())
        return
    table = Table("", "figure", "ours", "range", "published")
    group = None
    for row in rows:
        if row.group != group:
            table.add_section()
        spread = "" if row.low == row.high else f"{row.low:.3g} - {row.high:.3g}"
        name = "" if row.group == group else row.group
        table.add_row(name, row.name, f"{row.mean:.3g} {row.unit}", spread, row.published)
        group = row.group
    Console(width=150).print(table)
