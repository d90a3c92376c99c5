"""Capture every multimodal family of the zoo and say how it went: `make coverage` writes docs/coverage.md.

Each family is checked in a process of its own, since a failed export can poison the next. A family passes if loss and every
parameter gradient of the captured graph equal eager's to 1e-5, on the captured batch, on others and with parts frozen; if its
components are those that its authors built; and if a planned step of the engine gives the loss and the update of one of eager.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # for `zoo` and `oracles`, which the tests share with this file

import msgspec  # noqa: E402  (after the path)
import torch  # noqa: E402
import transformers  # noqa: E402
import typer  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: E402
from support.oracles.eager import NEGLIGIBLE, Difference, difference, eager_outcome, graph_outcome, misfit  # noqa: E402
from zoo import ALL, FAMILIES, Batch, Family  # noqa: E402
from zoo.expected import PATHS, edges_of, kinds_of  # noqa: E402

import mmcompile as mm  # noqa: E402
from mmcompile.errors import MMCompileError  # noqa: E402
from mmcompile.ir.capture import Capture, capture  # noqa: E402
from mmcompile.ir.graph import ModelGraph  # noqa: E402

TOLERANCE = 1e-5
TIMEOUT_S = 600
WANTED = 115

_COLUMNS = (
    "family",
    "mode",
    "captured batch",
    "other values",
    "longer text",
    "other size",
    "parts frozen",
    "engine step",
    "nodes",
    "s",
    "dynamic dims",
    "components",
    "why not more",
)

LONGER_TEXT = 9
"""Tokens added for the check of longer text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A batch that was run through a captured graph and through the eager model."""

    ok: bool
    misfit: str
    """Why the batch needed a new graph (another bucket): other `sizes` or `values read`; empty if it did not."""
    text: str
    """`identical`, or the differences."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the matrix."""

    family: str
    passed: bool
    mode: str = ""
    nodes: int = 0
    capture_s: float = 0.0
    components: tuple[tuple[str, int], ...] = ()
    """Name and number of layers."""
    unexpected: str = ""
    """How components and edges differ from those in `zoo.expected`; empty if they do not."""
    frozen: Check | None = None
    """The captured batch, captured anew with parts of the model frozen: the first of `freezings` that differs, if any."""
    engine: Check | None = None
    """A step of SGD in the engine, by a plan made for one device, against one of eager: loss and updated parameters."""
    dynamic: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Input and its dims that may vary without a new capture."""
    captured_batch: str = ""
    other_values: Check | None = None
    """The captured sizes with other tokens, pixels and sounds."""
    longer_text: Check | None = None
    """The captured samples and media, with more tokens."""
    other_size: Check | None = None
    """More samples, longer text and, where the model takes it, more media a sample."""
    reasons: tuple[str, ...] = ()
    """Why better modes do not hold, or what failed."""


def check_family(family: Family) -> Row:
    """Capture a family and compare four batches with eager."""
    model = family.build()
    batch, second = family.batch(), family.second_batch()
    longer = replace(family.first, length=family.first.length + LONGER_TEXT)
    started = time.perf_counter()
    captured = capture(model, batch, dynamic=second)
    capture_s = time.perf_counter() - started
    first = _compared(model, captured, batch)
    other_values = _check(model, captured, batch, family.draw(family.first, seed=7))
    longer_text = _check(model, captured, batch, family.draw(longer, seed=8))
    other_size = _check(model, captured, batch, second)
    graph = captured.graph
    unexpected = _unexpected(family.name, graph)
    frozen, engine = _frozen(model, graph, batch), _engine_step(family, batch)
    checks = (other_values, longer_text, other_size, frozen, engine)
    return Row(
        family=family.name,
        passed=first.within(TOLERANCE) and all(check.ok for check in checks) and not unexpected,
        mode=graph.mode.value,
        nodes=sum(node.op == "call_function" for node in graph.module.graph.nodes),
        capture_s=capture_s,
        components=tuple((component.name, len(component.layers)) for component in graph.components),
        dynamic=tuple((name, tuple(dims)) for name, dims in graph.dynamic.items()),
        captured_batch="identical" if first.identical else str(first),
        other_values=other_values,
        longer_text=longer_text,
        other_size=other_size,
        unexpected=unexpected,
        frozen=frozen,
        engine=engine,
        reasons=(*graph.reasons, *((graph.loss.reason,) if graph.loss.reason else ())),
    )


def _check(model: torch.nn.Module, captured: Capture, batch: Batch, other: Batch) -> Check:
    """Run `other` through the graph captured on `batch` if it holds, else through a new one."""
    why = misfit(model, captured, other)
    if why is not None:
        captured = capture(model, other, dynamic=batch, reference=captured.graph.components)
    found = _compared(model, captured, other)
    return Check(ok=found.within(TOLERANCE), misfit=why or "", text="identical" if found.identical else str(found))


def _compared(model: torch.nn.Module, captured: Capture, batch: Batch) -> Difference:
    """The graph's outcome beside eager's, from the same random numbers."""
    torch.manual_seed(0)
    got = graph_outcome(model, captured, batch)
    torch.manual_seed(0)
    return difference(got, eager_outcome(model, batch))


def _unexpected(name: str, graph: ModelGraph) -> str:
    """How the components of a family differ from the expected ones; empty if they do not."""
    paths = PATHS.get(name)
    if paths is None:
        return "zoo.expected has no line for it"
    edges, kinds = {(a, b) for a, b, _ in graph.edges}, {c.name: c.kind.value for c in graph.components}
    if (edges, kinds) == (edges_of(paths), kinds_of(paths)):
        return ""
    found = ", ".join(f"{a} > {b}" for a, b in sorted(edges)) or ", ".join(kinds)
    return f"found {found}; expected {paths}"


def freezings(graph: ModelGraph) -> Iterator[tuple[str, frozenset[str]]]:
    """(what is frozen, names of parameters that train): a model's front, its back, and all but its vectors.

    The front are the encoders and projectors, or half of the layers where there is one component.
    """
    specs, parts = graph.specs, [{p for layer in c.layers for p in layer.parameters} for c in graph.components]
    if len(parts) == 1:
        layers = [set(layer.parameters) for layer in graph.components[0].layers]
        parts = [set().union(*layers[: len(layers) // 2]), set().union(*layers[len(layers) // 2 :])]
    back = frozenset(specs[name].name for name in parts[-1])
    front = frozenset(specs[name].name for part in parts[:-1] for name in part) - back
    vectors = frozenset(spec.name for spec in graph.parameters if len(spec.shape) < 2)
    for what, trains in (("front", back), ("back", front), ("all but vectors", vectors)):
        if trains:
            yield what, trains


def _frozen(model: torch.nn.Module, graph: ModelGraph, batch: Batch) -> Check:
    worst = ""
    for what, trains in freezings(graph):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trains)
        if not model(**batch)["loss"].requires_grad:  # a tokenizer of pixels in front, whose codes have no gradient
            continue
        found = _compared(model, capture(model, batch), batch)
        if not found.within(TOLERANCE):
            return Check(ok=False, misfit="", text=f"{what} frozen: {found}")
        worst = worst or ("" if found.identical else str(found))
    model.requires_grad_(True)
    return Check(ok=True, misfit="", text=worst or "identical")


def _engine_step(family: Family, batch: Batch) -> Check:
    """Compare a planned step of the engine on `batch`, which counts as one sample, with one of eager."""
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    alone, model = family.build(), family.build()
    loss = alone(**batch)["loss"]
    loss.backward()
    sgd(alone.parameters()).step()
    options = {"cluster": "1x1xcpu", "num_microbatches": 1, "allow_unused": True, "optimizer": sgd}
    with mm.parallelize(model, batch, **options) as engine:
        got = engine.step([batch]).loss
        engine.pull()
    wanted, trained = float(loss), dict(model.named_parameters())
    moved = max(float((trained[name] - other).abs().max()) for name, other in alone.named_parameters())
    if abs(got - wanted) > TOLERANCE * abs(wanted) or moved > TOLERANCE:
        return Check(ok=False, misfit="", text=f"loss {got} for {wanted}, parameters differ by {moved:.1e}")
    return Check(ok=True, misfit="", text="identical" if got == wanted and not moved else f"parameters {moved:.1e}")


def rows(names: Sequence[str], jobs: int, console: Console) -> Iterator[Row]:
    """Check families in processes of their own, `jobs` at a time, in the order they end."""
    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, ThreadPoolExecutor(jobs) as pool:
        task = progress.add_task("capturing", total=len(names))
        for future in as_completed([pool.submit(_in_own_process, name) for name in names]):
            row = future.result()
            progress.update(task, advance=1, description=row.family)
            if not row.passed:
                progress.console.print(f"[red]{row.family} failed[/]: {'; '.join(_failures(row))}", highlight=False)
            yield row


def _in_own_process(name: str) -> Row:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-P", str(Path(__file__).resolve()), "--one", name]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    except subprocess.TimeoutExpired:
        return Row(family=name, passed=False, reasons=(f"did not end within {TIMEOUT_S} s",))
    if ended.returncode != 0:
        last = (ended.stderr.strip() or "no message").splitlines()[-1]
        return Row(family=name, passed=False, reasons=(f"the process ended with {ended.returncode}: {last}",))
    return msgspec.json.decode(ended.stdout.splitlines()[-1], type=Row)


def _failures(row: Row) -> list[str]:
    checks = {
        "other values": row.other_values,
        "longer text": row.longer_text,
        "other size": row.other_size,
        "frozen": row.frozen,
        "engine": row.engine,
    }
    failed = [f"{what}: {check.text}" for what, check in checks.items() if check is not None and not check.ok]
    return [
        text for text in (row.captured_batch, row.unexpected, *failed, *row.reasons) if text and text != "identical"
    ]


def markdown(matrix: Sequence[Row]) -> str:
    """The matrix as docs/coverage.md."""
    passed = sum(row.passed for row in matrix)
    lines = [
        "# Capture coverage",
        "",
        f"{passed} of {len(matrix)} multimodal families are captured with no per-model code. Made by `make coverage` with "
        f"torch {torch.__version__.split('+')[0]} and transformers {transformers.__version__}; tiny random configurations, "
        "float32, one CPU thread.",
        "",
        "- **captured batch**: loss and every parameter gradient of the graph against eager. `identical` means every bit; "
        "otherwise the largest difference of a gradient, relative to the parameter's largest (counted as at least "
        f"{NEGLIGIBLE:g} of the model's largest), which must be below {TOLERANCE:g}.",
        "- **other values**: the captured sizes, new tokens, pixels and sounds. **longer text**: more tokens. "
        "**other size**: more samples, longer text, other number of images. `same graph` ran without a new capture, "
        "`new bucket` through one more, because of sizes that may not vary, or because the model's Python reads other values "
        "from the batch (image grids, numbers of images, whether a mask is all true) than it read from the captured one.",
        "- **dynamic dims**: input and dims that may vary without a new capture; **why not more** says what fixed the "
        "others. **nodes**: calls in the graph. **s**: seconds to capture.",
        "- **parts frozen**: the graph captured anew with the front of the model frozen (encoders and projectors, or half the "
        "layers), the back, and all but vectors, each against eager. **engine step**: loss and parameters after one planned step "
        "of SGD in the engine, against one of eager.",
        "- **components**: found from the graph, with their number of layers, and compared with those that the authors built "
        "(`tests/zoo/expected.py`).",
        "",
        "| " + " | ".join(_COLUMNS) + " |",
        "|---" * len(_COLUMNS) + "|",
    ]
    return "\n".join([*lines, *map(_line, matrix)]) + "\n"


def _line(row: Row) -> str:
    dynamic = ", ".join(f"{name} {list(dims)}" for name, dims in row.dynamic)
    components = ", ".join(f"{name} {layers}" for name, layers in row.components)
    components += f" (UNEXPECTED: {row.unexpected})" if row.unexpected else ""
    cells = (
        row.family,
        row.mode or "FAILED",
        _short(row.captured_batch),
        _cell(row.other_values),
        _cell(row.longer_text),
        _cell(row.other_size),
        _cell(row.frozen, compared=False),
        _cell(row.engine, compared=False),
        str(row.nodes),
        f"{row.capture_s:.1f}",
        dynamic or "none",
        components,
        "; ".join(row.reasons),
    )
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _cell(check: Check | None, *, compared: bool = True) -> str:
    """The text of a check; with `compared`, after whether the captured graph or a new one ran."""
    if check is None:
        return ""
    if not check.ok:
        return f"FAILED: {check.text}"
    where = f"new bucket ({check.misfit}), " if check.misfit else "same graph, "
    return (where if compared else "") + _short(check.text)


def _short(text: str) -> str:
    """Only the figure of a difference: `gradients 2.5e-07`."""
    found = re.search(r"gradients by up to (\S+)", text)
    return f"gradients {found.group(1)}" if found else text


def main(
    families: Annotated[list[str] | None, typer.Argument(help="Families to check; all by default.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the matrix here, as Markdown.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the matrix as JSON.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes at a time.")] = 2,
    one: Annotated[
        str | None, typer.Option(hidden=True, help="Check one family in this process, print its row.")
    ] = None,
) -> None:
    """Exit 1 if fewer than 115 families pass (or, with families named, any of them fails)."""
    if one is not None:
        torch.set_num_threads(1)
        try:
            row = check_family(ALL[one])
        except MMCompileError as error:
            row = Row(family=one, passed=False, reasons=(str(error),))
        print(msgspec.json.encode(row).decode())
        return
    names = list(families or FAMILIES)
    unknown = [name for name in names if name not in ALL]
    if unknown:
        raise typer.BadParameter(f"no family {', '.join(unknown)}; there are {', '.join(ALL)}")
    console = Console(stderr=True)
    found = {row.family: row for row in rows(names, jobs, console)}
    matrix = [found[name] for name in names]
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(markdown(matrix))
    if as_json:
        print(msgspec.json.encode(matrix).decode())
    passed = sum(row.passed for row in matrix)
    wanted = len(names) if families else WANTED
    console.print(f"{passed} of {len(matrix)} families pass (wanted: {wanted})", highlight=False)
    raise typer.Exit(0 if passed >= wanted else 1)


if __name__ == "__main__":
    typer.run(main)
