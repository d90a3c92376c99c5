"""`Line`: the chains of a table laid end to end as integer arrays, and the time of a pipeline cut from them.

Stages follow each other over the devices in the order of the line, chains that feed others first. Every chain has one
*path* to the loss: all of its stages, then those of the chain it feeds from the stage that holds the entry layer on, and
so forth. A stage takes t for forward and backward of a microbatch; k* is the slowest stage (the last of equals), w its time.
The longest path has S stages. A step of N_b = 4 S microbatches then takes

    T  = T1 + T2 + T3
    T1 = largest sum of t over a path
    T2 = (N_b - number of stages behind k* on its path - 2) w
    T3 = sum of t over the path of k*, from k* on

A single chain of S stages has S - 1 - k* stages behind k*: T2 = (N_b - S + k* - 1) w, as published. Times are whole
picoseconds, so that sums are exact and ties are ties on every machine.

Source: Oobleck / Cornstarch / Entrain dissertation, Eq. 2.1 to 2.4, there for one chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mmcompile.planner.resilience.template import Template, TemplateStage
from mmcompile.planner.templates.layer_table import LayerTable, SharedLayers

_PER_SECOND = 10**12
INFINITE = 2**60
MICROBATCHES_A_STAGE = 4
_NEVER = 2**31


@dataclass(frozen=True, kw_only=True, slots=True)
class LineStage:
    """Contiguous layers as one stage: layers `first` to `last` (excluded) of a `Line`, on `Line.widths[width]` devices."""

    first: int
    last: int
    width: int
    """Index into `Line.widths`: the stage has `Line.widths[width]` devices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Time of a pipeline in picoseconds: `fill + b * slowest` for b microbatches."""

    fill: int
    slowest: int
    longest: int
    """Number of stages on the longest path."""

    @property
    def total(self) -> int:
        """Step time T in picoseconds for `MICROBATCHES_A_STAGE` microbatches per stage of the longest path."""
        return self.fill + MICROBATCHES_A_STAGE * self.longest * self.slowest


@dataclass(frozen=True, kw_only=True)
class Line:
    """Layers of all chains, numbered from 0 through all chains, with the costs of every possible stage as integer arrays.

    Entry [w, i, j] of an array [widths, layers + 1, layers + 1] is for the stage of layers i..j-1 on `widths[w]` devices.
    """

    names: tuple[str, ...]
    starts: tuple[int, ...]
    """Index of the first layer of each chain; the last entry is the number of all layers."""
    widths: tuple[int, ...]
    """Widths, ascending: the possible numbers of devices of a stage, for example (1, 2, 4)."""
    devices_per_node: int
    times: NDArray[np.int64]
    """Entry [w, i, j]: picoseconds of a microbatch in the stage of layers i..j-1 on `widths[w]` devices; `INFINITE` if the stage
    is empty, has layers of two chains, or exceeds the memory even with one microbatch."""
    deepest: NDArray[np.int64]
    """Entry [w, i, j]: largest number of stages that may follow the stage of layers i..j-1 on `widths[w]` devices; -1 if it does
    not fit. With d stages between it and the loss, its memory must hold d + 1 microbatches."""
    least: NDArray[np.int64]
    """Picoseconds of forward and backward of each layer on its fastest number of devices, without sends, [layers]."""
    chain_of: NDArray[np.int64]
    """Index of the chain that each layer belongs to, [layers]."""
    begins: NDArray[np.int64]
    """Entry [p, c]: first layer of chain c that is on the path from chain p to the loss; the number of layers if none is."""

    @classmethod
    def of(cls, table: LayerTable) -> Line:
        """Return the layers of all chains of a table, one chain after the other."""
        starts = np.cumsum([0, *(chain.num_layers for chain in table.chains)]).tolist()
        total = starts[-1]
        shape = (len(table.devices), total + 1, total + 1)
        times, deepest = np.full(shape, INFINITE), np.full(shape, -1)
        for chain, first in zip(table.chains, starts, strict=False):
            inside = slice(first, first + chain.num_layers + 1)
            for index, shared in enumerate(chain.shared):
                own, limit = _ranges(shared, table.memory_bytes)
                times[index, inside, inside], deepest[index, inside, inside] = own, limit
        return cls(
            names=tuple(chain.name for chain in table.chains),
            starts=tuple(starts),
            widths=table.devices,
            devices_per_node=table.devices_per_node,
            times=times,
            deepest=deepest,
            least=np.concatenate([np.min([_busy(each) for each in chain.shared], axis=0) for chain in table.chains]),
            chain_of=np.repeat(np.arange(len(table.chains)), [chain.num_layers for chain in table.chains]),
            begins=_begins(table, starts),
        )

    @property
    def num_layers(self) -> int:
        """Number of layers of all chains."""
        return self.starts[-1]

    @property
    def is_chain(self) -> bool:
        """True if every chain feeds the next at its first layer, so that all stages are on one path."""
        return bool((self.begins[0] == self.starts[:-1]).all())

    @cached_property
    def least_path(self) -> int:
        """Picoseconds of the longest path with every layer on its fastest number of devices, without sends."""
        on = np.arange(self.num_layers) >= self.begins[:, self.chain_of]
        return int((on * self.least).sum(axis=1).max())

    def most_stages(self, num_nodes: int) -> int:
        """Return an upper bound of the number of stages of a pipeline on `num_nodes` nodes, from layers, devices and memory."""
        by_memory = int(self.deepest.max()) + 1
        return min(self.num_layers, num_nodes * self.devices_per_node, by_memory)

    def time(self, piece: LineStage) -> int:
        """Return the picoseconds of a stage's forward and backward of one microbatch."""
        return int(self.times[piece.width, piece.first, piece.last])

    def on_path(self, path: int, piece: LineStage) -> bool:
        """Return whether a stage is on the path from the chain with index `path` to the loss."""
        return piece.last > int(self.begins[path, self.chain_of[piece.first]])

    def timing(self, pieces: Sequence[LineStage]) -> Timing:
        """Return the time of a pipeline made of the given stages, which are in the order of layers."""
        times = [self.time(piece) for piece in pieces]
        paths = [[self.on_path(path, piece) for piece in pieces] for path in range(len(self.names))]
        filled = max(sum(time for time, on in zip(times, path, strict=True) if on) for path in paths)
        longest = max(map(sum, paths))
        slowest = max(times)
        last = len(times) - 1 - times[::-1].index(slowest)
        own = paths[self.chain_of[pieces[last].first]][last + 1 :]
        behind = sum(time for time, on in zip(times[last + 1 :], own, strict=True) if on)
        fill = filled + slowest + behind - (sum(own) + 2) * slowest
        return Timing(fill=fill, slowest=slowest, longest=longest)

    def fits(self, pieces: Sequence[LineStage]) -> bool:
        """Return whether each stage's memory holds its microbatches in flight: one more than the stages behind it to the loss."""
        for index, piece in enumerate(pieces):
            path = int(self.chain_of[piece.first])
            depth = sum(self.on_path(path, later) for later in pieces[index + 1 :])
            if depth > self.deepest[piece.width, piece.first, piece.last]:
                return False
        return True

    def template(self, num_nodes: int, pieces: Sequence[LineStage], gap: float) -> Template:
        """Return the template of a pipeline of `num_nodes` nodes with the given stages; `gap` is that of `Template`."""
        timing, stages, device = self.timing(pieces), [], 0
        for piece in pieces:
            chain, width = int(self.chain_of[piece.first]), self.widths[piece.width]
            stages.append(
                TemplateStage(
                    chain=self.names[chain],
                    first=piece.first - self.starts[chain],
                    last=piece.last - self.starts[chain],
                    devices=tuple(range(device, device + width)),
                    seconds=self.time(piece) / _PER_SECOND,
                )
            )
            device += width
        return Template(
            num_nodes=num_nodes,
            stages=tuple(stages),
            fill_s=timing.fill / _PER_SECOND,
            slowest_s=timing.slowest / _PER_SECOND,
            gap=gap,
        )


def _ranges(shared: SharedLayers, memory_bytes: int | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return two int64 arrays [layers + 1, layers + 1] for one chain. Entry [i, j] is for a stage of layers i..j-1.

    The first has the stage's picoseconds for a microbatch. The second has the largest number of later stages with which its
    microbatches in flight fit the memory, -1 if it never fits.
    """
    count = len(shared.forward_s)
    zeros = (0.0,) * count
    busy = _prefix(_busy(shared))
    send = np.concatenate([[0], _picoseconds(shared.send_s or zeros)])
    back = np.concatenate([[0], _picoseconds(shared.return_s or zeros)])
    times = (busy + send)[None, :] - (busy - back)[:, None]
    fixed, saved = _prefix(np.array(shared.parameter_bytes)), _prefix(np.array(shared.activation_bytes))
    held, kept = fixed[None, :] - fixed[:, None], saved[None, :] - saved[:, None]
    if memory_bytes is None:
        deepest = np.full_like(times, _NEVER)
    else:
        room = memory_bytes - shared.working_bytes - held
        deepest = np.where(kept > 0, room // np.maximum(kept, 1) - 1, np.where(room >= 0, _NEVER, -1))
    index = np.arange(count + 1)
    stage = (index[:, None] < index[None, :]) & (deepest >= 0)
    return np.where(stage, times, INFINITE), np.where(stage, deepest, -1)


def _busy(shared: SharedLayers) -> NDArray[np.int64]:
    return _picoseconds(shared.forward_s) + _picoseconds(shared.backward_s)


def _begins(table: LayerTable, starts: Sequence[int]) -> NDArray[np.int64]:
    names = [chain.name for chain in table.chains]
    begins = np.full((len(names), len(names)), starts[-1])
    for path in range(len(names)):
        chain = table.chains[path]
        begins[path, path] = starts[path]
        while chain.feeds is not None:
            index = names.index(chain.feeds)
            begins[path, index] = starts[index] + chain.entry
            chain = table.chains[index]
    return begins


def _picoseconds(values: Sequence[float]) -> NDArray[np.int64]:
    return np.rint(np.array(values, dtype=np.float64) * _PER_SECOND).astype(np.int64)


def _prefix(values: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(values)])
