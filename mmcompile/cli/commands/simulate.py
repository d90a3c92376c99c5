"""`mmcompile simulate`: a step of a plan, played by the simulator; or a run with its templates over a trace of nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from mmcompile.captured_model import fingerprint_of
from mmcompile.cli.config_options import refuse_typed, typed_options, with_config
from mmcompile.cli.console import busy, print_json, print_result, print_text
from mmcompile.cli.model import load_captured
from mmcompile.cli.options import MODEL_HELP, STATS_HELP, JsonOption, PlanOption
from mmcompile.cli.planning import read_dataset
from mmcompile.config import ExampleConfig, ModelConfig, ScheduleKind
from mmcompile.errors import ConfigError, PlanError
from mmcompile.planner.plan.plan import Plan, check_fingerprint
from mmcompile.planner.resilience.replay.spot_trace import TimeUnit
from mmcompile.report.pictures.perfetto import write_chrome_trace
from mmcompile.report.pictures.timeline import draw_timeline
from mmcompile.report.sample_loads import chain_loads
from mmcompile.report.simulation import compare, summarize, timeline_text
from mmcompile.report.step_replay import Replay, replay
from mmcompile.report.study import study
from mmcompile.report.trace_replay import draw_trace, remarks, replay_resilience, trace_text

Emission = Literal["text", "png", "chrome"]
_OF_A_RUN = ("plan", "trace", "trace_unit", "seed", "emit", "output", "json")
"""Names of the parameters of `mmcompile simulate` that have an effect together with --trace."""


@with_config
def simulate(
    context: typer.Context,
    plan: PlanOption,
    example: ExampleConfig,
    config: Annotated[ModelConfig, ("train", "dtype")],
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help=f"For --stats: captured for its costs. {MODEL_HELP}", show_default=False),
    ] = None,
    schedule: Annotated[
        Literal["gpipe", "1f1b", "eager-1f1b", "zb-h1", "all"] | None,
        typer.Option(help="Another order; 'all' compares them.", show_default="the plan's"),
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option(min=1, help="Microbatches of one replica.", show_default="the plan's")
    ] = None,
    stats: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help=f"Microbatches that differ, drawn from a dataset; needs MODEL. {STATS_HELP}",
            show_default="equal microbatches",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Play training over a trace of nodes that come and go, in place of a step; the plan needs templates (plan "
            "--fault-tolerance). Lines are MILLISECONDS, add|remove, NODE or YYYY-MM-DD, HH:MM:SS, COUNT or TIME, COUNT.",
            show_default=False,
        ),
    ] = None,
    trace_unit: Annotated[
        TimeUnit | None, typer.Option(help="Of TIME, which only traces of TIME, COUNT need.", show_default=False)
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Of the samples drawn; of the nodes lost where a trace has counts only.")
    ] = 0,
    emit: Annotated[
        Emission,
        typer.Option(
            help="Figures and a timeline in characters; a picture (of a trace: throughput over time); or a trace for Chrome and "
            "Perfetto."
        ),
    ] = "text",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for the picture or trace.", show_default=False)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Simulate a step of a plan: iteration, idle time by cause, memory of each rank.

    With --trace: how much of the time is useful over a trace of spot instances, with the plan's templates, with checkpoints and
    restarts, and with redundant computation; and the constants that this rests on.
    """
    _check(model, stats, emit, output, schedule)
    _check_trace(context, trace, trace_unit, emit)
    loaded = Plan.load(plan)
    if trace is not None:
        _replay_trace(loaded, plan, trace, trace_unit, seed, output, json)
        return
    count = microbatches or loaded.num_microbatches
    loads: Mapping[str, Sequence[float]] | None = None
    if model is not None and stats is not None:
        subject = load_captured(model, config, example)
        dataset = read_dataset(stats)
        with busy("capturing"):
            studied = study(subject.model, subject.batch, dataset)
        check_fingerprint(loaded, fingerprint_of(studied.graph))
        loads = chain_loads(loaded, studied, count, seed)
    kinds: tuple[ScheduleKind, ...] = get_args(ScheduleKind) if schedule == "all" else (schedule or loaded.schedule,)
    steps = [replay(loaded, schedule=kind, num_microbatches=count, loads=loads) for kind in kinds]
    _show(steps, emit, output, json)


def _check(model: str | None, stats: str | None, emit: Emission, output: Path | None, schedule: str | None) -> None:
    if (model is None) != (stats is None):
        raise ConfigError("MODEL and --stats go together: the model says what the samples cost; give both or neither")
    if (emit == "text") != (output is None):
        what = "--output is for --emit png or chrome" if emit == "text" else f"--emit {emit} needs --output FILE"
        raise ConfigError(f"{what}; text goes to standard output")
    if schedule == "all" and emit != "text":
        raise ConfigError(f"--schedule all compares figures; name one schedule for --emit {emit}")


def _check_trace(context: typer.Context, trace: Path | None, unit: TimeUnit | None, emit: Emission) -> None:
    if trace is None:
        if unit is not None:
            raise ConfigError("--trace-unit has no effect without --trace; drop it, or give the trace")
        return
    step = {name for name in typed_options(context) if name not in _OF_A_RUN}
    refuse_typed(context, step, "together with --trace: steps take what the plan's templates predict")
    if emit == "chrome":
        raise ConfigError("--emit chrome shows a step, and --trace plays a whole run; use --emit png or text")


def _replay_trace(
    plan: Plan, source: Path, trace: Path, unit: TimeUnit | None, seed: int, output: Path | None, json: bool
) -> None:
    resilience = plan.resilience
    if resilience is None:
        raise PlanError(
            f"{source} has no templates, so nothing runs when nodes are lost; make it anew with "
            "`mmcompile plan --fault-tolerance F`"
        )
    with busy(f"playing {trace}"):
        found = replay_resilience(resilience, trace, unit=unit, seed=seed)
    notes = remarks(found, resilience)
    if output is not None:
        draw_trace(output, found)
    text = "\n".join([trace_text(found), *(f"note: {note}" for note in notes)])
    print_result(json, found.to_json() | {"notes": notes} | _written(output), text, output)


def _show(steps: Sequence[Replay], emit: Emission, output: Path | None, json: bool) -> None:
    figures = [summarize(step) for step in steps]
    if output is not None:
        write = draw_timeline if emit == "png" else write_chrome_trace
        write(output, (), steps[0].timeline.events)
    if json:
        found = [one.to_json() for one in figures]
        print_json({"schedules": found} if len(found) > 1 else found[0] | _written(output))
    elif len(figures) > 1:
        print_text(compare(figures))
    elif output is not None:
        print_text(f"{figures[0]}\n\nwritten to {output}")
    else:
        print_text(f"{figures[0]}\n\n{timeline_text(steps[0])}")


def _written(output: Path | None) -> dict[str, str]:
    return {} if output is None else {"output": str(output)}
