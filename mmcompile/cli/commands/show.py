"""`mmcompile show`: content of a plan file."""

from __future__ import annotations

from mmcompile.cli.console import print_json, print_text
from mmcompile.cli.options import JsonOption, PlanArgument
from mmcompile.planner.plan.plan import Plan
from mmcompile.report.pictures.stage_graph import stage_graph_text
from mmcompile.report.summary import plan_summary

_MAX_DRAWN = 12
"""Largest number of stages whose graph `mmcompile show` prints; larger graphs are too wide for a terminal."""


def show(plan: PlanArgument, json: JsonOption = False) -> None:
    """Print a plan: its table, and the graph of its stages."""
    loaded = Plan.load(plan)
    if json:
        print_json(plan_summary(loaded))
    else:
        print_text(str(loaded))
        if len(loaded.stages) <= _MAX_DRAWN:
            print_text(f"\n{stage_graph_text(loaded)}")
