"""`mmcompile passes`: the order of the compiler, and what its passes find in a model."""

from __future__ import annotations

import textwrap
from typing import Annotated, Any

import typer

from mmcompile.cli.console import busy, print_json, print_text
from mmcompile.cli.options import MODEL_HELP, JsonOption
from mmcompile.passes.catalog import OWN, PASSES, PLANNING, STAGES, OrderedPass, PassEntry

WIDTH = 100
DEFAULT = "modality-dag,gradient-flow,cost"
ORDERS = {"planning": PLANNING, "stages": STAGES}


def passes(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help=f"Captured, and passes run over it. {MODEL_HELP}", show_default=False),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            metavar="PASSES",
            help="What runs over MODEL: names joined by commas, with fields in braces: "
            "'tensor-parallel{degrees=language_model:2},gradient-flow,cost'.",
            show_default=DEFAULT,
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Print the passes of planning and of stages in order, with the reason of each place; or what passes find in a model."""
    if model is None:
        if run is not None:
            # Torch and its models are loaded for the sake of a message otherwise.
            from mmcompile.errors import ConfigError

            raise ConfigError("--run has no effect without MODEL, over which the passes run")
        _print_orders(json)
        return
    found = _run(model, run or DEFAULT)
    if json:
        print_json(found)
        return
    for name, text in found["results"]:
        print_text(f"{name}\n{textwrap.indent(text, '  ')}\n")
    for line in found["rewrites"]:
        print_text(line)


def _print_orders(json: bool) -> None:
    if json:
        print_json(
            {
                "passes": [_entry(entry) for entry in PASSES],
                **{name: [_place(own) for own in order] for name, order in ORDERS.items()},
            }
        )
        return
    known = {entry.name: entry for entry in PASSES}
    for name, order in ORDERS.items():
        print_text(f"{name}, in order\n")
        for number, own in enumerate(order, start=1):
            print_text(_text(number, own, known.get(own.name)))
    ordered = {own.name for order in ORDERS.values() for own in order}
    print_text("others\n")
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
    lines += textwrap.wrap(f"place: {own.reason}", WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines) + "\n"


def _entry(entry: PassEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "class": f"mmcompile.passes.{entry.module}.{entry.class_name}",
        "kind": entry.kind,
        "summary": entry.summary,
        "requires": [*entry.requires],
        "ensures": [*entry.ensures],
        "used in": [name for name, order in ORDERS.items() if entry.name in {own.name for own in order}],
    }


def _place(own: OrderedPass) -> dict[str, Any]:
    return {"name": own.name, "when": own.when, "reason": own.reason, "own": own.name == OWN}


def _run(model: str, text: str) -> dict[str, Any]:
    """Return the results of passes over a captured model, as text."""
    # The orders above are printed without torch.
    from mmcompile.captured_model import built, captured_step
    from mmcompile.cli.model import Weights, load_model
    from mmcompile.passes.base import Analysis
    from mmcompile.passes.capture_pipeline import run_on_capture
    from mmcompile.passes.selection import format_passes, parse_passes

    chosen = parse_passes(text)
    with busy("capturing"):
        loaded = load_model(model, Weights.NONE)
        capture = captured_step(*built(loaded.model, loaded.batch))
    found = run_on_capture(capture, chosen)
    return {
        "passes": format_passes(chosen),
        "results": [(own.name, str(found.of(own))) for own in chosen if isinstance(own, Analysis)],
        "rewrites": list(found.capture.graph.rewrites),
    }
