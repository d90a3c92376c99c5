"""`mmcompile diff`: what differs between two plans?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmcompile.cli.console import print_result
from mmcompile.cli.options import JsonOption
from mmcompile.planner.plan.plan import Plan
from mmcompile.report.diff import diff_plans


def diff(
    before: Annotated[Path, typer.Argument(metavar="A", help="A plan file.", show_default=False)],
    after: Annotated[Path, typer.Argument(metavar="B", help="Another one.", show_default=False)],
    json: JsonOption = False,
) -> None:
    """Show the differences from plan A to plan B: settings, layout, figures, layers that moved, stages."""
    difference = diff_plans(Plan.load(before), Plan.load(after))
    print_result(json, difference, str(difference))
