"""Seconds to plan one pipeline template, for every cell of the published table (nodes x devices a node x layers).

Layers take about 10 ms forward and backward on one device, vary by a twentieth, and are 1.8 times as fast on two devices, 3.2
times on four, 5.8 times on eight. Figures are CPU seconds of one thread, the best of three runs; published ones are seconds.
Then all 24 templates of the largest cell at once, and that cell with so little memory that microbatches in flight decide.

Exits with 1 if a cell of 10 s or more is not 100 times as fast as published, one of 1,000 s or more not 1,000 times, or if
anything takes more than 3 s.

Source of the published seconds: Oobleck / Cornstarch / Entrain dissertation, Table 2.3.

    python -P benchmarks/templates.py [--json]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

import msgspec
from rich.console import Console
from rich.table import Table

from mmcompile.planner.templates.generate import fastest_templates
from mmcompile.planner.templates.layer_table import ChainLayers, LayerTable, SharedLayers

LAYERS = (24, 32, 64, 96)
PUBLISHED_S = {
    (8, 1): (0.28, 0.71, 9.65, 68.50),
    (8, 4): (0.41, 1.15, 11.58, 74.56),
    (8, 8): (0.54, 1.50, 20.98, 109.76),
    (16, 1): (3.37, 7.45, 66.35, 540.36),
    (16, 4): (4.56, 10.41, 108.10, 649.67),
    (16, 8): (4.90, 11.78, 176.04, 1213.63),
    (24, 1): (11.35, 30.11, 262.47, 1477.54),
    (24, 4): (14.78, 45.80, 472.53, 2153.84),
    (24, 8): (15.59, 49.25, 520.08, 3297.92),
}
"""(nodes, devices a node) -> by layers."""
MOST_S = 3.0
SPEED_UP = ((1000.0, 1000.0), (10.0, 100.0))
"""(published seconds or more, times as fast)."""

_REPEATS = 3
_LAYER_S = 0.010
_SHARED_WELL = 0.9
"""Of the time two devices would save, for each doubling."""
_GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One entry of the table."""

    nodes: int
    devices: int
    layers: int
    published_s: float
    seconds: float
    gap: float
    """0: proved to be the optimum."""

    @property
    def limit_s(self) -> float:
        factor = next((factor for least, factor in SPEED_UP if self.published_s >= least), 0.0)
        return min(MOST_S, self.published_s / factor) if factor else MOST_S

    @property
    def kept(self) -> bool:
        return self.seconds <= self.limit_s and self.gap == 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args()
    cells = [
        _cell(nodes, devices, layers, published_s)
        for (nodes, devices), row in PUBLISHED_S.items()
        for layers, published_s in zip(LAYERS, row, strict=True)
    ]
    nodes, devices, layers = 24, 8, 96
    every_s, _ = _planned(layer_table(layers, devices), range(1, nodes + 1))
    tight_s, _ = _planned(layer_table(layers, devices, memory_bytes=80 * _GIB), [nodes])
    kept = all(cell.kept for cell in cells) and max(every_s, tight_s) <= MOST_S
    if options.json:
        result = {"cells": cells, "every_size_s": every_s, "memory_bound_s": tight_s, "kept": kept}
        print(msgspec.json.encode(result).decode())
        return 0 if kept else 1
    console = Console()
    console.print(_table(cells))
    console.print(f"{nodes} x {devices}, {layers} layers, templates of 1 to {nodes} nodes at once: {every_s:.3f} s")
    console.print(f"{nodes} x {devices}, {layers} layers, memory decides: {tight_s:.3f} s")
    slow = [cell for cell in cells if not cell.kept]
    least = min(cell.published_s / cell.seconds for cell in cells if cell.published_s >= SPEED_UP[-1][0])
    console.print(f"cells below the promise: {len(slow)}; least times as fast, of 10 s or more: {least:,.0f}")
    return 0 if kept else 1


def layer_table(layers: int, devices: int, memory_bytes: int | None = None) -> LayerTable:
    """One chain of random layers; they fill 80 GiB a device if 4 of them on 8 devices are far from the loss."""
    rng = random.Random(0)
    seconds = [rng.uniform(0.95, 1.05) * _LAYER_S for _ in range(layers)]
    seconds[-1] *= 1.8  # the head
    counts = [count for count in (1, 2, 4, 8) if count <= devices]
    return LayerTable(
        chains=(
            ChainLayers(
                name="language_model",
                shared=tuple(
                    SharedLayers(
                        devices=count,
                        forward_s=tuple(each / 3 / _speed(count) for each in seconds),
                        backward_s=tuple(each * 2 / 3 / _speed(count) for each in seconds),
                        parameter_bytes=(12 * _GIB // count,) * layers,
                        activation_bytes=(9 * _GIB // count,) * layers,
                    )
                    for count in counts
                ),
            ),
        ),
        devices_per_node=devices,
        memory_bytes=memory_bytes,
    )


def _speed(devices: int) -> float:
    return devices * _SHARED_WELL ** log2(devices)


def _cell(nodes: int, devices: int, layers: int, published_s: float) -> Cell:
    table = layer_table(layers, devices)
    runs = [_planned(table, [nodes]) for _ in range(_REPEATS)]
    return Cell(
        nodes=nodes,
        devices=devices,
        layers=layers,
        published_s=published_s,
        seconds=min(seconds for seconds, _ in runs),
        gap=runs[0][1],
    )


def _planned(table: LayerTable, node_counts: Sequence[int]) -> tuple[float, float]:
    """CPU seconds, and the largest gap of a template to the optimum."""
    began = time.process_time()
    found = fastest_templates(table, node_counts)
    seconds = time.process_time() - began
    return seconds, max(template.gap for template in found.values())


def _table(cells: Sequence[Cell]) -> Table:
    table = Table("nodes", "devices", "layers", "published [s]", "ours [s]", "times", "limit [s]", "")
    for cell in cells:
        table.add_row(
            str(cell.nodes),
            str(cell.devices),
            str(cell.layers),
            f"{cell.published_s:,.2f}",
            f"{cell.seconds:.3f}",
            f"{cell.published_s / cell.seconds:,.0f}",
            f"{cell.limit_s:.3f}",
            "kept" if cell.kept else "MISSED",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
