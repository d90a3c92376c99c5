"""`mmcompile diff`: what differs between two plans?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from mmcompile.cli.console import print_json, print_text
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
    if json:
        print_json(msgspec.to_builtins(difference))
    else:
        print_text(str(difference))
