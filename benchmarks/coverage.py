"""Capture every multimodal family of the zoo and say how it went: `make coverage` writes docs/coverage.md.

Each family is checked in a process of its own, since a failed export can poison the next. A family passes if loss and every
parameter gradient of the captured graph equal eager's to 1e-5, on the captured batch, on others and with parts frozen; if its
components are those that its authors built; and if a planned step of the engine gives the loss and the update of one of eager.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Annotated

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # for `zoo` and `support`, which the tests share with this file

import msgspec  # noqa: E402  (after the path)
import torch  # noqa: E402
import transformers  # noqa: E402
import typer  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: E402
from support.oracles.eager import NEGLIGIBLE  # noqa: E402
from zoo import ALL, FAMILIES  # noqa: E402
from zoo.checks import COLUMNS, COMPARED, FREE, TOLERANCE, UNSTABLE, WARM_UP, Check, Row, check_family  # noqa: E402
from zoo.free_sizes import FREE_FAMILIES  # noqa: E402

TIMEOUT_S = 600
WANTED = 115

_OF_OTHER_BATCHES = ("other values", "longer text", "other size")
_COLUMNS = ("family", "mode", *COLUMNS, "nodes", "s", "dynamic dims", "components", "why more captures", "why not more")


def rows(names: Sequence[str], jobs: int, console: Console) -> Iterator[Row]:
    """Check families in processes of their own, `jobs` at a time, in the order they end."""
    # A server that has loaded torch and transformers forks the processes: loading takes as long as a small family.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["zoo.checks", "transformers.modeling_utils", "mmcompile.api"])
    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, ThreadPoolExecutor(jobs) as pool:
        task = progress.add_task("capturing", total=len(names))
        for future in as_completed([pool.submit(_in_own_process, context, name) for name in names]):
            row = future.result()
            progress.update(task, advance=1, description=row.family)
            if row.wrong:
                progress.console.print(f"[red]{row.family} is wrong[/]: {'; '.join(row.wrong)}", highlight=False)
            elif not console.is_terminal:
                ended = "refused as expected" if row.refused else row.unexpected or "right"
                progress.console.print(f"{row.family}: {ended}", highlight=False)
            yield row


def _in_own_process(context: ForkServerContext, name: str) -> Row:
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_check, args=(name, theirs))
    process.start()
    theirs.close()
    try:
        if ours.poll(TIMEOUT_S):
            return msgspec.json.decode(ours.recv_bytes(), type=Row)
        return Row(family=name, failure=f"did not end within {TIMEOUT_S} s")
    except EOFError:
        process.join()
        return Row(family=name, failure=f"the process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()
        ours.close()


def _check(name: str, results: Connection) -> None:
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):
        try:
            row = check_family(ALL[name])
        except Exception as error:  # noqa: BLE001  (a row says what happened; the others are still to be checked)
            row = Row(family=name, failure=f"{type(error).__name__}: {error}"[:300])
    results.send_bytes(msgspec.json.encode(row))


def markdown(matrix: Sequence[Row]) -> str:
    """The matrix as docs/coverage.md."""
    passed, refused = sum(row.passed for row in matrix), sum(row.refused for row in matrix)
    others = sum(bool(row.unexpected) for row in matrix if not row.refused and not row.wrong)
    wrong = sum(bool(row.wrong) for row in matrix)
    lines = [
        "# Capture coverage",
        "",
        f"{passed} of {len(matrix)} multimodal families are right in every column, with no per-model code; {refused} are refused "
        f"with the line that decides, {others} are as eager with other components than written down, {wrong} differ. "
        f"Made by `make coverage` with torch {torch.__version__.split('+')[0]} and transformers {transformers.__version__}; tiny "
        "random configurations, float32, one CPU thread.",
        "",
        "- **captured batch**: loss and every parameter gradient of the graph against eager. `identical` means every bit; "
        "otherwise the largest difference of a gradient, relative to the parameter's largest (counted as at least "
        f"{NEGLIGIBLE:g} of the model's largest), which must be below {TOLERANCE:g}. Where eager's own "
        "gradient of a parameter changes by more when the weights change in the last bit, the graph's may differ by as much, up "
        f"to {UNSTABLE:g}; the cell then has both figures.",
        "- **other values**: the captured sizes, new tokens, pixels and sounds. **longer text**: more tokens. "
        "**other size**: more samples, longer text, other number of images. `same graph` ran without a new capture, "
        "`new bucket` through one more, because of sizes that may not vary, or because the model's Python reads other values "
        "from the batch (image grids, numbers of images, whether a mask is all true) than it read from the captured one.",
        f"- **captures for {FREE} free batches**: of any number of samples and media that the family takes, with text of any "
        f"length, and for {len(FREE_FAMILIES)} families pictures or clips of any size; that of the captured batch is counted. "
        f"The first {WARM_UP} are given to `warm_up`, as `mmcompile train` does with its first; the last {COMPARED} are compared "
        "with eager. **why more captures**: the line of Python that decided, for each after the first.",
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
    ended = f"REFUSED: {row.refusal}" if row.refusal else f"FAILED: {row.failure}" if row.failure else ""
    cells = (
        row.family,
        row.mode or ("REFUSED" if row.refused else "FAILED"),
        *(_cell(row.checks.get(column), bucket=column in _OF_OTHER_BATCHES) for column in COLUMNS),
        str(row.nodes),
        f"{row.capture_s:.1f}",
        dynamic or "none",
        components,
        "; ".join(row.why_captures),
        "; ".join((*row.reasons, *((ended,) if ended else ()))),
    )
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _cell(check: Check | None, *, bucket: bool) -> str:
    """The text of a check; with `bucket`, after whether the captured graph or a new one ran."""
    if check is None:
        return ""
    if not check.ok:
        return f"FAILED: {check.text}"
    where = f"new bucket ({check.misfit}), " if check.misfit else "same graph, "
    return (where if bucket else "") + _short(check.text)


def _short(text: str) -> str:
    """Only the figures of a difference: `gradients 2.5e-07`."""
    found = re.search(r"gradients by up to (\S+)", text)
    own = re.search(r"eager's own by (\S+)", text)
    return f"gradients {found.group(1)}{f' (own change {own.group(1)})' if own else ''}" if found else text


def main(
    families: Annotated[list[str] | None, typer.Argument(help="Families to check; all by default.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the matrix here, as Markdown.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the matrix as JSON.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes at a time.")] = 2,
) -> None:
    """Exit 1 if a family is wrong, or fewer than 115 are right in every column (where no family is named)."""
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
    passed, wrong = sum(row.passed for row in matrix), [row.family for row in matrix if row.wrong]
    wanted = 0 if families else WANTED
    refused = sum(row.refused for row in matrix)
    console.print(
        f"{passed} of {len(matrix)} families are right in every column (wanted: {wanted}), {refused} are refused as expected, "
        f"{len(matrix) - passed - refused - len(wrong)} have other components, wrong are {', '.join(wrong) or 'none'}",
        highlight=False,
    )
    raise typer.Exit(0 if passed >= wanted and not wrong else 1)


if __name__ == "__main__":
    typer.run(main)
