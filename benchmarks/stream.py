"""Streams of 200 microbatches that all differ, for 23 families: how many need a capture, and what the others cost.

The family's own processor makes each microbatch from 0 to 4 pictures of free sizes or clips of free length, and free text. Each
family is measured in a process of its own (`stream_family.py`), one after another. Promises: at most 3 captures in the first 20
microbatches, or a reason for each, and none after them; loss and gradients of all equal to eager's to 1e-5 (1e-9 in float64);
steps of the engine in two processes at 0.9 of the speed of eager in one process with two threads (Qwen2.5-VL: 1.0). Exits with 1
if one is broken.

    python -P benchmarks/stream.py [FAMILY ...] [--microbatches 200] [--dtype float32] [--rounds 12] [--json] [--out FILE]
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]

import msgspec  # noqa: E402  (after the path)
import torch  # noqa: E402
import transformers  # noqa: E402
import typer  # noqa: E402
from rich.console import Console  # noqa: E402
from stream_family import FIRST, Row  # noqa: E402
from zoo.streams import STREAM_FAMILIES  # noqa: E402

TIMEOUT_S = 3600
MOST_CAPTURES = 3
LEAST_THROUGHPUT, OF_QWEN = 0.9, 1.0


class Precision(StrEnum):
    """Floats of model and inputs."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"


TOLERANCE = {Precision.FLOAT32: 1e-5, Precision.FLOAT64: 1e-9}
_COLUMNS = (
    "family",
    "microbatches",
    f"captures in the first {FIRST}",
    "after them",
    "capture, CPU s",
    "replay, CPU ms",
    "loss",
    "gradients",
    "engine / eager",
    "step ms, engine and eager",
    "broken promises",
    "why more than the plan's capture",
    "written by hand",
)


def measured(family: str, microbatches: int, precision: Precision, rounds: int) -> Row:
    """Measure a family in a process of its own."""
    options = ("--microbatches", str(microbatches), "--dtype", precision.value, "--rounds", str(rounds))
    command = [sys.executable, "-P", str(ROOT / "benchmarks" / "stream_family.py"), family, *options]
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Row(family=family, failure=f"did not end within {TIMEOUT_S} s")
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return Row(family=family, failure=f"the process ended with {done.returncode}: {' '.join(last)}")
    return msgspec.json.decode(lines[-1], type=Row)


def broken(row: Row, precision: Precision) -> list[str]:
    """Return the promises that a row breaks."""
    early, late = counts(row)
    least = OF_QWEN if row.family == "qwen2_5_vl" else LEAST_THROUGHPUT
    found = [f"FAILED: {row.failure}"] if row.failure else []
    if early > MOST_CAPTURES and len(row.reasons) < early - 1:
        found.append(f"{early} captures in the first {FIRST}, without a reason for each")
    found += [f"{late} captures after the first {FIRST}"] if late else []
    if max(row.loss, row.gradient) > TOLERANCE[precision]:
        found.append(f"off by {max(row.loss, row.gradient):.1e} ({row.worst})")
    if row.throughput is not None and row.throughput < least:
        found.append(f"throughput {row.throughput:.2f}, {least} promised")
    return found


def counts(row: Row) -> tuple[int, int]:
    """Return the captures in the first `FIRST` microbatches, and after them."""
    early = sum(index < FIRST for index in row.captures)
    return early, len(row.captures) - early


def markdown(rows: Sequence[Row], precision: Precision) -> str:
    """Return the table, as Markdown."""
    versions = f"torch {torch.__version__.split('+')[0]} and transformers {transformers.__version__}"
    lines = [
        f"Tiny random models in {precision}, {versions}.",
        "",
        "| " + " | ".join(_COLUMNS) + " |",
        "|---" * len(_COLUMNS) + "|",
    ]
    return "\n".join([*lines, *(_line(row, precision) for row in rows)]) + "\n"


def _line(row: Row, precision: Precision) -> str:
    early, late = counts(row)
    places = ", ".join(str(index) for index in row.captures)
    cells = (
        row.family,
        str(row.microbatches),
        f"{early} (at {places})" if row.captures else "0",
        str(late),
        f"{row.capture_s:.1f}",
        f"{row.replay_ms:.1f}",
        f"{row.loss:.1e}",
        f"{row.gradient:.1e}",
        "" if row.throughput is None else f"{row.throughput:.2f}",
        "" if row.throughput is None else f"{row.step_ms[0]:.0f}, {row.step_ms[1]:.0f}",
        "; ".join(broken(row, precision)),
        "; ".join(row.reasons),
        STREAM_FAMILIES[row.family].by_hand,
    )
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def main(
    families: Annotated[list[str] | None, typer.Argument(help="Families to measure; all by default.")] = None,
    microbatches: Annotated[int, typer.Option(min=2, help="Length of a stream.")] = 200,
    dtype: Annotated[Precision, typer.Option(help="Floats of models and inputs.")] = Precision.FLOAT32,
    rounds: Annotated[int, typer.Option(min=0, help="Rounds of throughput; 0 leaves it out.")] = 12,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the table here, as Markdown.")] = None,
) -> None:
    """Exit 1 if a family breaks a promise."""
    names = list(families or STREAM_FAMILIES)
    unknown = [name for name in names if name not in STREAM_FAMILIES]
    if unknown:
        raise typer.BadParameter(f"no stream of {', '.join(unknown)}; there are {', '.join(STREAM_FAMILIES)}")
    console, rows = Console(stderr=True), list[Row]()
    for name in names:
        rows.append(measured(name, microbatches, dtype, rounds))
        console.print(f"{name}: {'; '.join(broken(rows[-1], dtype)) or 'as promised'}", highlight=False, markup=False)
        if out is not None:  # after each family, since all together take hours
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(markdown(rows, dtype))
    print(msgspec.json.encode(rows).decode() if as_json else markdown(rows, dtype))
    raise typer.Exit(any(broken(row, dtype) for row in rows))


if __name__ == "__main__":
    typer.run(main)
