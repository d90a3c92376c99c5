"""The commands by name: a module each, imported only when its command runs; and how errors are shown."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from mmcompile.cli.console import print_error, print_json, print_traceback, silence_libraries
from mmcompile.errors import EngineError, MMCompileError
from mmcompile.passes.debug import DebugLevel, debug_level

COMMANDS: Mapping[str, str] = {
    "plan": "mmcompile.cli.commands.plan:plan",
    "stats": "mmcompile.cli.commands.stats:stats",
    "check": "mmcompile.cli.commands.check:check",
    "show": "mmcompile.cli.commands.show:show",
    "stages": "mmcompile.cli.commands.stages:stages",
    "explain": "mmcompile.cli.commands.explain:explain",
    "simulate": "mmcompile.cli.commands.simulate:simulate",
    "step": "mmcompile.cli.commands.step:step",
    "diff": "mmcompile.cli.commands.diff:diff",
    "passes": "mmcompile.cli.commands.passes:passes",
    "profile": "mmcompile.cli.commands.profile:profile",
    "train": "mmcompile.cli.commands.train:train",
    "coordinate": "mmcompile.cli.commands.coordinate:coordinate",
    "trace": "mmcompile.cli.commands.trace:trace",
}
"""Command -> its module and function."""

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "plan": (
        "mmcompile plan examples/configs/llava-1.5-7b.json --cluster 2x8xA100-80G --train projector",
        "mmcompile plan examples/configs/llava-tiny.json --stages language_model=2 --microbatches 4 -o plan.json",
        "mmcompile plan examples.digits_llava:build_model --json",
        "mmcompile plan examples/configs/llava-tiny.json --cluster 6x1xcpu --fault-tolerance 1 -o spot.json",
    ),
    "stats": ("mmcompile stats synthetic:cocoqa:64 -o stats.json", "mmcompile stats stats.json --json"),
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
    "passes": (
        "mmcompile passes",
        "mmcompile passes examples/configs/llava-tiny.json --train projector --run modality-dag,gradient-flow,cost",
        "mmcompile passes examples/configs/llava-tiny.json --run 'tensor-parallel{degrees=language_model:2},cost' --json",
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
"""Command -> examples in its help. They run as they stand in a checkout, in this order, but for `coordinate`, which needs several
machines."""

_HELP = {"help_option_names": ["-h", "--help"]}
# Its own class hides behind a name that changes with typer's version.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


class _ExampleCommand(TyperCommand):
    """A command whose help ends with examples in lines of their own, which can be pasted."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        examples = EXAMPLES.get(self.name or "", ())
        if examples:
            typer.echo("\n".join((" Examples", "", *examples, "")))


class _CommandGroup(TyperGroup):
    """Group of commands whose modules are imported only to run them; help is read from their source without an import."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        # Not imported, as it only serves lists and suggestions of similar names.
        return TyperCommand(cmd_name, help=_summary_of(cmd_name)) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in COMMANDS:
            return args[0], _command_of(args[0]), args[1:]
        return super().resolve_command(ctx, args)


def _summary_of(name: str) -> str:
    """Return the first line of a command's docstring, without importing its module."""
    tree = ast.parse((Path(__file__).parent / "commands" / f"{name}.py").read_text())
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    return (ast.get_docstring(next(functions)) or "").partition("\n\n")[0].replace("\n", " ")


def _command_of(name: str) -> Any:
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    module, _, function_name = COMMANDS[name].partition(":")
    function = vars(import_module(module))[function_name]
    single.command(name, cls=_ExampleCommand, context_settings=_HELP)(function)
    return typer.main.get_command(single)


app = typer.Typer(
    name="mmcompile",
    cls=_CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings=_HELP,
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"mmcompile {version('mmcompile')}")
        raise typer.Exit


@app.callback()
def _mmcompile(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A compiler for training multimodal models on clusters."""


def run() -> int:
    """Run the command line and return its exit code."""
    try:
        debugging = debug_level() is not DebugLevel.OFF
    except MMCompileError as error:
        return _report(error)
    silence_libraries()
    try:
        return app(prog_name="mmcompile", standalone_mode=False) or 0
    except _UsageError as error:
        return _report_usage(error)
    except (MMCompileError, EngineError) as error:
        if debugging:
            print_traceback()
        return _report(error)


def _report(error: Exception) -> int:
    """Print an error to standard error, and with `--json` also as JSON to standard output; return the exit code."""
    if "--json" in sys.argv:
        print_json({"error": {"kind": type(error).__name__, "message": str(error)}})
    print_error(str(error))
    return 1


def _report_usage(error: Any) -> int:
    from typer.rich_utils import rich_format_error

    if "--json" in sys.argv:
        print_json({"error": {"kind": "UsageError", "message": error.format_message()}})
    rich_format_error(error)
    return error.exit_code
