"""`mmcompile passes`: the order of the compiler, and the findings of its passes in a model."""

from __future__ import annotations

import textwrap
from typing import Annotated, Any

import typer

from mmcompile.cli.config_options import typed_options, with_config
from mmcompile.cli.console import busy, print_json, print_text
from mmcompile.cli.options import MODEL_HELP, OF_MODEL, JsonOption
from mmcompile.config import ExampleConfig, ModelConfig
from mmcompile.errors import ConfigError
from mmcompile.passes.catalog import OWN, PASSES, PLANNING, STAGES, OrderedPass, PassEntry

_WIDTH = 100
_DEFAULT = "modality-dag,gradient-flow,cost"
_ORDERS = {"planning": PLANNING, "stages": STAGES}


@with_config
def passes(
    context: typer.Context,
    example: ExampleConfig,
    config: Annotated[ModelConfig, ("train", "dtype")],
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help=f"Captured, and passes run over it. {MODEL_HELP}", show_default=False),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            metavar="PASSES",
            help="Passes that run over MODEL: names joined by commas, with fields in braces: "
            "'tensor-parallel{degrees=language_model:2},gradient-flow,cost'.",
            show_default=_DEFAULT,
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Print the order of passes, with the reason of each place; or the findings of passes in a model."""
    if model is None:
        for name, option in typed_options(context).items():
            if name == "run" or name in OF_MODEL:
                raise ConfigError(f"{option} has no effect without MODEL, over which passes run")
        _print_orders(json)
        return
    found = _run(model, config, example, run or _DEFAULT)
    if json:
        print_json(found)
        return
    for name, text in found["results"]:
        print_text(f"{name}\n{textwrap.indent(text, '  ')}")
    for line in found["rewrites"]:
        print_text(line)


def _print_orders(json: bool) -> None:
    if json:
        print_json(
            {
                "passes": [_entry(entry) for entry in PASSES],
                **{name: [_place(own) for own in order] for name, order in _ORDERS.items()},
            }
        )
        return
    known = {entry.name: entry for entry in PASSES}
    for name, order in _ORDERS.items():
        print_text(f"{name}, in order")
        for number, own in enumerate(order, start=1):
            print_text(f"\n{_text(number, own, known.get(own.name))}")
        print_text("\n")
    ordered = {own.name for order in _ORDERS.values() for own in order}
    print_text("others")
    for entry in PASSES:
        if entry.name not in ordered:
            print_text(f"    {entry.name}: {entry.summary}")


def _text(number: int, own: OrderedPass, entry: PassEntry | None) -> str:
    lines = [f"{number:>2}. {own.name} — {entry.summary if entry else 'passes of your own, in the order given'}"]
    if entry is not None:
        requires = ", ".join(entry.requires) or "nothing"
        ensures = ", ".join(entry.ensures) or "nothing"
        lines.append(f"    {entry.kind}; requires {requires}; ensures {ensures}")
    lines.append(f"    when: {own.when}")
    lines += textwrap.wrap(f"reason: {own.reason}", _WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def _entry(entry: PassEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "class": f"mmcompile.passes.{entry.module}.{entry.class_name}",
        "kind": entry.kind,
        "summary": entry.summary,
        "requires": [*entry.requires],
        "ensures": [*entry.ensures],
        "used in": [name for name, order in _ORDERS.items() if entry.name in {own.name for own in order}],
    }


def _place(own: OrderedPass) -> dict[str, Any]:
    return {"name": own.name, "when": own.when, "reason": own.reason, "own": own.name == OWN}


def _run(model: str, config: ModelConfig, example: ExampleConfig, text: str) -> dict[str, Any]:
    # The orders above are printed without torch.
    from mmcompile.cli.model import load_captured
    from mmcompile.passes.base import Analysis
    from mmcompile.passes.capture_pipeline import run_on_capture
    from mmcompile.passes.selection import format_passes, parse_passes

    chosen = parse_passes(text)
    loaded = load_captured(model, config, example)
    with busy("capturing"):
        capture = loaded.capture()
    found = run_on_capture(capture, chosen)
    return {
        "passes": format_passes(chosen),
        "results": [(own.name, str(found.of(own))) for own in chosen if isinstance(own, Analysis)],
        "rewrites": list(found.capture.graph.rewrites),
    }
