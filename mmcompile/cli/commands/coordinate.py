"""`mmcompile coordinate`: serve a run over several machines, whose nodes are started by `mmcompile train --coordinator`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from mmcompile.cli.config_options import with_config
from mmcompile.cli.console import print_text
from mmcompile.cli.run_display import RunDisplay
from mmcompile.config import ElasticConfig
from mmcompile.errors import PlanError
from mmcompile.planner.plan.plan import Plan
from mmcompile.runtime.control.secret import Endpoint, read_secret
from mmcompile.runtime.control.times import Times
from mmcompile.runtime.elastic.node import coordinate as serve


@with_config
def coordinate(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan with templates.", show_default=False)],
    waits: Annotated[ElasticConfig, ("recovery_deadline_s",)],
    out: Annotated[
        Path,
        typer.Option(help="Folder of the run, that all machines share: log, events, checkpoints.", show_default=False),
    ],
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address that nodes reach this machine by.", show_default=False)
    ],
    secret: Annotated[
        Path, typer.Option(help="File with the secret of the run, that only its owner may read.", show_default=False)
    ],
    nodes: Annotated[
        int | None,
        typer.Option(min=1, help="Nodes that training waits for.", show_default="those of the plan's cluster"),
    ] = None,
) -> None:
    """Serve a run on several machines: membership, plans and committed steps.

    It may be killed and started again: training continues from the last committed step.
    """
    loaded = Plan.load(plan)
    if loaded.resilience is None:
        raise PlanError(f"{plan} has no templates for the day nodes die: plan with --fault-tolerance")
    times = Times(recovery_deadline_s=waits.recovery_deadline_s)
    at = replace(Endpoint.parse(listen, read_secret(secret)), times=times)
    display = RunDisplay(None)
    with display.progress:
        serve(
            loaded.resilience, out / "run", at, start_nodes=nodes or loaded.resilience.num_nodes, on_event=display.note
        )
    print_text(f"training is done; its checkpoint is in {out / 'run' / 'checkpoint'}")
