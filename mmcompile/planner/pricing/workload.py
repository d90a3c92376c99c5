"""`Workload`: loads that a dataset's samples bring to each component of a model, microbatch by microbatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mmcompile.costmodel.load import NO_LOAD, Load
from mmcompile.data.sample import SampleShape
from mmcompile.data.stats import DatasetStats
from mmcompile.errors import PlanError
from mmcompile.ir.graph import ModelGraph
from mmcompile.passes.cost.cost_table import CostTable
from mmcompile.planner.plan.geometry import Geometry
from mmcompile.planner.pricing.geometries import geometries
from mmcompile.planner.pricing.sample_sizes import SampleRows, SampleSizes


@dataclass(frozen=True, kw_only=True, slots=True)
class WorstMicrobatch:
    """Heaviest microbatch of each component. Each of them can occur, but not all at the same time."""

    loads: Mapping[str, Load]
    samples: Mapping[str, tuple[str, ...]]
    """Component -> names of the samples in its heaviest microbatch, heaviest sample first; () without a dataset."""


# (rows of samples in one component, names of these samples), heaviest first.
_Ranking = tuple[SampleRows, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Rows and squared lengths that microbatches of a dataset, or copies of the captured batch, bring to each component."""

    geometries: Mapping[str, Geometry]
    captured: Mapping[str, Load]
    """Component -> rows and squared lengths (`Load`) that the captured batch brings to it."""
    num_samples: int
    """Number of samples in the captured batch."""
    stats: DatasetStats | None = None
    _rows: Mapping[str, SampleRows] = field(default_factory=dict, repr=False, compare=False)
    _ascending: Mapping[str, SampleRows] = field(default_factory=dict, repr=False, compare=False)
    """Component -> rows (tokens, patches) and sums of squared sequence lengths of each sample, both arrays sorted ascending."""
    _rankings: Mapping[str, _Ranking] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        graph: ModelGraph,
        table: CostTable,
        batch: Mapping[str, object],
        stats: DatasetStats | None = None,
        *,
        packed: bool = False,
    ) -> Workload:
        """Return the workload of a dataset, with rules from sample shape to load read from the captured model.

        Args:
            graph: model captured from `batch`.
            table: costs of the model, with the load of each component in that batch.
            stats: statistics of the dataset; None for microbatches like the captured one.
            packed: True if the language model gets a microbatch's samples one after the other, without padding.

        Raises:
            PlanError: the dataset is empty.
        """
        found = geometries(graph, table.loads, batch, packed=packed)
        return cls.from_geometries(found, table.loads, graph.num_samples, stats)

    @classmethod
    def from_geometries(
        cls,
        geometries: Mapping[str, Geometry],
        captured: Mapping[str, Load],
        num_samples: int,
        stats: DatasetStats | None = None,
    ) -> Workload:
        """Return the workload of a dataset for components of known geometry.

        Raises:
            PlanError: the dataset is empty.
        """
        if stats is None:
            return cls(geometries=geometries, captured=captured, num_samples=num_samples)
        if not stats.samples:
            raise PlanError(f"dataset {stats.name} has no samples; give one with at least one")
        heaviest = stats.heaviest()
        sizes = SampleSizes.of_shapes(heaviest)
        tables = {name: sizes.rows(geometry) for name, geometry in geometries.items()}
        rows = {name: table[np.arange(len(stats.samples))] for name, table in tables.items()}
        return cls(
            geometries=geometries,
            captured=captured,
            num_samples=num_samples,
            stats=stats,
            _rows=rows,
            _ascending={
                name: SampleRows(rows=np.sort(table.rows), squares=np.sort(table.squares))
                for name, table in rows.items()
            },
            _rankings={name: _ranking(table, heaviest) for name, table in tables.items()},
        )

    def loads(self, samples: Sequence[SampleShape]) -> dict[str, Load]:
        """Return component -> load of a microbatch made of the given samples."""
        sizes = SampleSizes.of_shapes(samples)
        return {name: _joined(geometry, sizes.rows(geometry)) for name, geometry in self.geometries.items()}

    def mean(self, samples_per_microbatch: float) -> dict[str, Load]:
        """Return component -> expected load of a microbatch of samples drawn at random, padding included.

        It is computed by a formula, without random numbers.
        """
        size = _checked(samples_per_microbatch)
        if self.stats is None:
            return self._like_captured(size)
        return {name: _mean(geometry, self._ascending[name], size) for name, geometry in self.geometries.items()}

    def draw(self, num_microbatches: int, samples_per_microbatch: float, seed: int = 0) -> dict[str, SampleRows]:
        """Return component -> rows and squared lengths [microbatches] of random microbatches, each drawn from the whole dataset.

        Args:
            samples_per_microbatch: mean number of samples of a microbatch; if it is not whole, sizes differ by one.
        """
        size = _checked(samples_per_microbatch)
        bounds = np.rint(np.arange(num_microbatches + 1) * size).astype(np.int64)
        sizes = np.diff(bounds)
        if self.stats is None:
            loads = {name: self.captured[name] * (1 / self.num_samples) for name in self.geometries}
            return {
                name: SampleRows(rows=own.tokens * sizes, squares=own.squares * sizes) for name, own in loads.items()
            }
        drawn = np.random.default_rng(seed).integers(len(self.stats.samples), size=(num_microbatches, sizes.max()))
        present = np.arange(drawn.shape[1]) < sizes[:, None]
        found: dict[str, SampleRows] = {}
        for name, geometry in self.geometries.items():
            table = self._rows[name]
            rows = np.where(present, table.rows[drawn], 0.0)
            pairs = np.where(present, table.squares[drawn], 0.0)
            found[name] = (
                SampleRows(rows=rows.max(axis=1) * sizes, squares=pairs.max(axis=1) * sizes)
                if geometry.pads
                else SampleRows(rows=rows.sum(axis=1), squares=pairs.sum(axis=1))
            )
        return found

    def worst(self, samples_per_microbatch: float) -> WorstMicrobatch:
        """Return, for each component, the heaviest microbatch that the dataset's samples can make.

        Heaviest means most rows, then most squared lengths. A sample repeats only if the dataset has too few. The
        dataset's worst samples are included even if the statistics cover a part of it.
        """
        size = int(np.ceil(_checked(samples_per_microbatch)))
        if self.stats is None:
            return WorstMicrobatch(loads=self._like_captured(size), samples={name: () for name in self.geometries})
        loads, names = {}, {}
        for name, geometry in self.geometries.items():
            table, ranked = self._rankings[name]
            loads[name] = _joined(geometry, table[np.arange(size) % len(table.rows)])
            names[name] = ranked[:size]
        return WorstMicrobatch(loads=loads, samples=names)

    def absent(self) -> tuple[str, ...]:
        """Return the components for which no sample of the dataset has a row."""
        return tuple(name for name, table in self._rows.items() if not table.rows.any())

    def _like_captured(self, samples: float) -> dict[str, Load]:
        return {name: self.captured[name] * (samples / self.num_samples) for name in self.geometries}


def _checked(samples_per_microbatch: float) -> float:
    if samples_per_microbatch < 1:
        raise PlanError(f"a microbatch of {samples_per_microbatch:g} samples; each has at least 1")
    return samples_per_microbatch


def _ranking(table: SampleRows, samples: Sequence[SampleShape]) -> _Ranking:
    order = np.lexsort((-table.squares, -table.rows))
    return table[order], tuple(samples[index].name for index in order if table.rows[index] > 0)


def _joined(geometry: Geometry, table: SampleRows) -> Load:
    """Return the load of one microbatch that holds all samples of `table`, padded to the longest if the component pads."""
    if not len(table.rows):
        return NO_LOAD
    if geometry.pads:
        count = len(table.rows)
        return Load(tokens=float(table.rows.max()) * count, squares=float(table.squares.max()) * count)
    return Load(tokens=float(table.rows.sum()), squares=float(table.squares.sum()))


def _mean(geometry: Geometry, ascending: SampleRows, size: float) -> Load:
    """Return the expected load of a microbatch of `size` samples drawn at random.

    With padding, the longest of s samples out of n sorted ascending is the i-th with probability (i/n)^s - ((i-1)/n)^s.
    """
    if not geometry.pads:
        return Load(tokens=float(ascending.rows.mean()) * size, squares=float(ascending.squares.mean()) * size)
    count = len(ascending.rows)
    weights = np.diff((np.arange(count + 1) / count) ** size)
    return Load(tokens=float(ascending.rows @ weights) * size, squares=float(ascending.squares @ weights) * size)
