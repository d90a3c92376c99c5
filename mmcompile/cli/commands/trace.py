"""`mmcompile trace`: the traced step of a run, for Perfetto and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmcompile.cli.console import print_json, print_text
from mmcompile.cli.options import JsonOption
from mmcompile.report.pictures.perfetto import write_chrome_trace
from mmcompile.report.pictures.timeline import computing, draw_timeline, idle_share, length_s
from mmcompile.report.predict import predict
from mmcompile.report.run_folder import read_run


def trace(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A folder that `mmcompile train --out` wrote.", show_default=False)
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for the files.", show_default="the run's")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write a run's traced step as trace.json (Chrome, Perfetto) and timeline.png, beside what the plan predicted."""
    plan, measured = read_run(run)
    predicted = predict(plan).events
    folder = run if output is None else output
    picture = draw_timeline(folder / "timeline.png", measured, predicted)
    events = write_chrome_trace(folder / "trace.json", measured, predicted)
    spans = {"measured": computing(measured), "predicted": computing(predicted)}
    if json:
        figures = {name: {"step_s": length_s(span), "idle": idle_share(span)} for name, span in spans.items()}
        print_json(figures | {"trace": str(events), "timeline": str(picture)})
        return
    for name, span in spans.items():
        print_text(f"{name:<9} {length_s(span) * 1e3:.4g} ms, {idle_share(span):.0%} idle")
    print_text(f"written to {events} and {picture}")
