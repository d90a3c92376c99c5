"""The command line. Exit code 0: done; 1: a problem was found; 2: bad usage. A user's mistake never shows a traceback."""

from __future__ import annotations

import sys
import textwrap

import typer
from rich.markup import escape

from mmcompile.cli.check import check
from mmcompile.cli.console import ERRORS, print_json, silence_libraries
from mmcompile.cli.coordinate import coordinate
from mmcompile.cli.diff import diff
from mmcompile.cli.explain import explain
from mmcompile.cli.plan import plan
from mmcompile.cli.profile import profile
from mmcompile.cli.show import show
from mmcompile.cli.simulate import simulate
from mmcompile.cli.stages import stages
from mmcompile.cli.stats import stats
from mmcompile.cli.step import step
from mmcompile.cli.trace import trace
from mmcompile.cli.train import train
from mmcompile.errors import EngineError, MMCompileError
from mmcompile.passes.debug import DebugLevel, debug_level

EXAMPLES = {
    "plan": (
        "mmcompile plan examples/configs/llava-1.5-7b.json --cluster 2x8xA100-80G --train projector",
        "mmcompile plan examples/configs/llava-tiny.json --stages language_model=2 --microbatches 4 -o plan.json",
        "mmcompile plan examples.digits_llava:build_model --json",
        "mmcompile plan examples/configs/llava-tiny.json --cluster 6x1xcpu --fault-tolerance 1 -o spot.json",
    ),
    "stats": (
        "mmcompile stats synthetic:cocoqa:64 -o stats.json",
        "mmcompile stats stats.json --json",
    ),
    "check": (
        "mmcompile check examples/configs/llava-tiny.json --stats stats.json --train projector",
        "mmcompile check examples/configs/llava-tiny.json --stats stats.json --plan plan.json",
    ),
    "show": ("mmcompile show plan.json", "mmcompile show plan.json --json"),
    "stages": (
        "mmcompile stages plan.json --emit svg -o plan.svg",
        "mmcompile stages examples/configs/llava-tiny.json --plan plan.json --stage language_model.0 --emit source",
    ),
    "explain": (
        "mmcompile explain language_model.0 --plan plan.json",
        "mmcompile explain language_model.3 --plan plan.json examples/configs/llava-tiny.json",
    ),
    "simulate": (
        "mmcompile simulate --plan plan.json --schedule all",
        "mmcompile simulate --plan plan.json --microbatches 16 --emit png -o step.png",
        "mmcompile simulate examples/configs/llava-tiny.json --plan plan.json --stats stats.json",
        "mmcompile simulate --plan spot.json --trace examples/traces/spot.csv --emit png -o spot.png",
    ),
    "step": (
        "mmcompile plan examples/configs/llava-tiny.json --cluster 1x4xH100 --stats stats.json --global-batch 32 --replicas 2 "
        "--microbatches 4 --placement disjoint -o two.json",
        "mmcompile step --plan two.json --stats synthetic:cocoqa:64",
        "mmcompile step --plan two.json --stats stats.json --balance joint --step 3 --png step.png",
        "mmcompile step --plan two.json --stats stats.json --all",
    ),
    "diff": (
        "mmcompile plan examples/configs/llava-tiny.json --stages language_model=3 -o other.json",
        "mmcompile diff plan.json other.json",
    ),
    "profile": (
        "mmcompile profile examples/configs/llava-tiny.json --dtype float32 --sizes 64,256 -o calibration.json",
    ),
    "train": (
        "mmcompile train examples.digits_llava:build_model --data examples.digits_llava:build_samples "
        "--stages language_model=2 --train projector --train language_model --steps 20 --lr 3e-3 --out runs/digits",
        "mmcompile train examples.digits_llava:build_model --data examples.digits_llava:build_samples "
        "--fault-tolerance 1 --nodes 4 --train projector --train language_model --steps 20",
    ),
    "coordinate": (
        "mmcompile coordinate spot.json --out /shared/run1 --listen 10.0.0.1:29400 --secret ~/.run1",
        "mmcompile train MODEL --plan spot.json --data DATA --out /shared/run1 --coordinator 10.0.0.1:29400 --node $(hostname) "
        "--secret ~/.run1",
    ),
    "trace": ("mmcompile trace runs/digits",),
}
"""Shown by `--help`; they run as they stand in a checkout, in this order, but for `coordinate`, which needs several machines."""


def _wrapped(command: str) -> str:
    """The command in lines that fit the help's frame and still paste as one."""
    lines = textwrap.wrap(command, 74, break_long_words=False, break_on_hyphens=False)
    return " \\\n\n".join(escape(line) for line in lines)


app = typer.Typer(
    name="mmcompile",
    help="A compiler for training multimodal models on clusters.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="rich",
)
for _command in (plan, check, show, explain, diff, simulate, step, stages, stats, profile, train, coordinate, trace):
    _lines = "\n\n".join(_wrapped(command) for command in EXAMPLES[_command.__name__])
    app.command(epilog=f"[bold]Examples[/bold]\n\n{_lines}")(_command)


def main() -> None:
    """Run the command line."""
    try:
        debugging = debug_level() is not DebugLevel.OFF
    except MMCompileError as error:
        sys.exit(_report(error))
    silence_libraries()
    try:
        app(prog_name="mmcompile")
    except (MMCompileError, EngineError) as error:
        if debugging:
            ERRORS.print_exception()
        sys.exit(_report(error))


def _report(error: Exception) -> int:
    """Say what went wrong, on standard error; for programs that asked for JSON also as an object. Returns the exit code."""
    if "--json" in sys.argv:
        print_json({"error": {"kind": type(error).__name__, "message": str(error)}})
    ERRORS.print(f"[bold red]error[/bold red] {escape(str(error))}", soft_wrap=True)
    return 1
