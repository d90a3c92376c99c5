"""`mmcompile step`: one step of a plan, its samples balanced."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from mmcompile.batching.balance.auto import Auto
from mmcompile.batching.balance.registry import BALANCERS, balancer
from mmcompile.cli.console import busy, print_result
from mmcompile.cli.options import STATS_HELP, JsonOption, PlanOption
from mmcompile.cli.planning import read_dataset
from mmcompile.errors import ConfigError
from mmcompile.planner.plan.plan import Plan
from mmcompile.report.step.step_balance import balanced_step
from mmcompile.report.step.step_picture import draw_step
from mmcompile.report.step.step_text import MAX_ROWS, step_text


def step(
    plan: PlanOption,
    stats: Annotated[
        str, typer.Option(metavar="SOURCE", help=f"What samples are drawn from. {STATS_HELP}", show_default=False)
    ],
    samples: Annotated[
        int | None, typer.Option(min=1, help="Samples of the step.", show_default="the plan's, or one a microbatch")
    ] = None,
    number: Annotated[int, typer.Option("--step", min=0, help="Which step: each draws other samples.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of the samples drawn.")] = 0,
    balance: Annotated[str, typer.Option(metavar="NAME", help=f"{', '.join(BALANCERS)}.")] = Auto.name,
    every: Annotated[bool, typer.Option("--all", help="Compare all balancers, in place of the bars.")] = False,
    rows: Annotated[
        int | None,
        typer.Option(min=1, help="Microbatches shown of a component: the heaviest.", show_default=str(MAX_ROWS)),
    ] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the step as a picture too.", show_default=False)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Balance one step of a plan: what each microbatch of each replica costs before and after, and what that saves."""
    if rows is not None and (every or json):
        raise ConfigError(f"--rows has no effect together with {'--all' if every else '--json'}: no bars are printed")
    balancer(balance)  # a wrong name is told before anything is read
    loaded, dataset = Plan.load(plan), read_dataset(stats)
    with busy("balancing"):
        found = balanced_step(
            loaded, dataset, source=str(plan), samples=samples, seed=seed, step=number, balance=balance, every=every
        )
    if png is not None:
        draw_step(png, found)
    text = step_text(found, width=shutil.get_terminal_size((100, 24)).columns, max_rows=rows or MAX_ROWS)
    print_result(json, found.to_json() | ({} if png is None else {"output": str(png)}), text, png)
