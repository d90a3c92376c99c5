"""Which axes each component of published multimodal models gets, and why, simulated.

The nine frozen mixes of the Oobleck / Cornstarch / Entrain dissertation (Tables 3.1, 3.2) and the six models of DFLOP's Table 3.
The search finds the fastest layout with every axis open; then one axis of one component at a time is moved a step down and up,
and the simulator says what the step would take: that is the reason. A layout whose neighbour is faster is left for it first.

    python -P benchmarks/axes.py [--model LLaVA] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from mmcompile.costmodel.cluster import Cluster
from mmcompile.planner.plan.plan_record import Fingerprint
from mmcompile.planner.pricing.pricing import Pricing
from mmcompile.planner.search.build_problem import with_chains
from mmcompile.planner.search.candidate import Candidate
from mmcompile.planner.search.problem import ChainPrices, Problem
from mmcompile.planner.search.settings import SearchSpace
from mmcompile.planner.strategies.search import searched

sys.path.insert(0, str(Path(__file__).parent))  # for the modules beside this one

from axes_layouts import Spent  # noqa: E402
from axes_models import MODELS, Captured, Model  # noqa: E402
from axes_reasons import Surroundings, Tried, worded  # noqa: E402

ASSUMPTIONS = (
    "Mixes: 24 A40 in 6 nodes of 4 at 6.25 GB/s a device, 48 samples a step; encoders and language model are frozen, projectors "
    "train. Samples and widths as in frozen_aware.py; with our analytic costs.",
    "DFLOP: 4 nodes of 8 A100-80G for 7B and 8B, 8 nodes for the others, 12.5 GB/s a device (800 Gb/s a node); 512 samples a "
    "step; everything trains, in bfloat16 with two optimizer states of the same type (8 bytes a parameter in all).",
    "DFLOP's samples are alike: 215 text tokens and one image, for LLaVA-OneVision of five crops of 384 (3,645 patches), for "
    "InternVL of thirteen tiles of 448 (13,325 patches, 3,328 tokens).",
    "Seconds are analytic: half of the data sheet's peak, memory bandwidth, 4 us a kernel, collectives by NCCL's model.",
    "Blocks are captured three deep at full width; the middle one stands for all others.",
    "Tensor parallelism: what a rank computes, keeps and exchanges is counted on the graph that ranks run; values between blocks "
    "are whole on each.",
    "Context parallelism shares the tokens of the language model's chain only.",
    "'apart': every component on devices of its own, as in the publications. 'free': all in one line as well, which then has no "
    "context parallelism, or FSDP; listed where that is one line.",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One chain of one layout."""

    components: tuple[str, ...]
    tp: int
    cp: int
    pp: int
    dp: int
    fsdp: bool
    whole: tuple[str, ...]
    """Components that this tp does not divide."""
    reasons: tuple[str, ...]
    tried: tuple[Tried, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The fastest layout of a model."""

    model: str
    view: str
    """`"apart"` or `"free"`."""
    cluster: str
    step_s: float
    searched_s: float
    """Step of the search's own best, before its neighbours were tried."""
    strategy: str
    """Who proposed that."""
    microbatches: int
    schedule: str
    recompute: str
    spent: Spent
    devices: int
    """Used."""
    colocated: bool
    rows: tuple[Row, ...]


def found(model: Model) -> Iterator[Found]:
    """Layouts of a model: apart, and free where that is one line."""
    captured = Captured.of(model)
    everything = SearchSpace.everything(Cluster.parse(model.cluster), context_parallel=not captured.no_cp)
    yield layout(model, captured, "apart", replace(everything, placements=("disjoint",)))
    # The tokens of the language model alone can be shared, and a stage of one line may hold encoders as well.
    free = layout(model, captured, "free", replace(everything, cp=(1,)))
    if free.colocated:
        yield free


def layout(model: Model, captured: Captured, view: str, space: SearchSpace) -> Found:
    pricing = Pricing(
        table=captured.table,
        cluster=Cluster.parse(model.cluster),
        dtype="bfloat16",
        merging=frozenset(consumer for _, consumer, _ in captured.graph.edges),
        token_sharing=frozenset((captured.graph.loss_component,)),
        tensor_degrees={name: own.degrees for name, own in captured.tensor.items()},
        tensor_shares={name: own.layers for name, own in captured.tensor.items()},
    )
    problem = with_chains(
        Problem(
            prices=ChainPrices(graph=captured.graph, pricing=pricing),
            fingerprint=Fingerprint(model=model.name, parameters="", torch=torch.__version__, transformers=""),
            space=space,
            global_batch=model.global_batch,
        )
    )
    _, best = searched(problem)
    assert best is not None, f"{model.name} fits no plan on {model.cluster}"
    around = Surroundings(problem=problem, tensor=captured.tensor, no_cp=captured.no_cp)
    candidate, step_s, tried = around.climb(best, best.iteration_s)
    spent = Spent.of(candidate, step_s)
    rows = tuple(
        _row(captured, candidate, index, own, [worded(each, step_s, spent, problem.memory_bytes(1)) for each in own])
        for index, own in enumerate(tried)
    )
    return Found(
        model=model.name,
        view=view,
        cluster=model.cluster,
        step_s=step_s,
        searched_s=best.iteration_s,
        strategy=best.strategy,
        microbatches=candidate.setting.num_microbatches,
        schedule=candidate.setting.schedule,
        recompute=candidate.setting.recompute,
        spent=spent,
        devices=candidate.num_ranks,
        colocated=candidate.chains.colocated,
        rows=rows,
    )


def _row(captured: Captured, candidate: Candidate, chain: int, tried: Sequence[Tried], reasons: Sequence[str]) -> Row:
    degrees, components = candidate.degrees[chain], candidate.chains.chains[chain].components
    return Row(
        components=tuple(dict.fromkeys(components)),
        tp=degrees.tp,
        cp=degrees.cp,
        pp=candidate.counts[chain],
        dp=degrees.dp,
        fsdp=degrees.fsdp,
        whole=tuple(name for name in components if degrees.tp not in captured.tensor[name].degrees),
        reasons=tuple(reasons),
        tried=tuple(tried),
    )


def table_of(layouts: Sequence[Found]) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("model, step", no_wrap=True)
    table.add_column("components")
    for axis in ("tp", "cp", "pp", "dp"):
        table.add_column(axis, justify="right")
    table.add_column("fsdp")
    table.add_column("why: with one axis changed")
    for each in layouts:
        for index, row in enumerate(each.rows):
            head = _heads(each)[index] if index < len(_heads(each)) else ""
            if index == len(each.rows) - 1:
                head = "\n".join(_heads(each)[index:])
            names = ", ".join(
                f"{name} (whole)" if name in row.whole and row.tp > 1 else name for name in row.components
            )
            numbers = (str(row.tp), str(row.cp), str(row.pp), str(row.dp), "yes" if row.fsdp else "")
            table.add_row(head, names, *numbers, "\n".join(row.reasons))
        table.add_section()
    return table


def _heads(each: Found) -> list[str]:
    """What stands at the left of a layout's rows."""
    spent = each.spent
    parts = (spent.compute_s, spent.exchange_s, spent.update_s, spent.idle_s)
    shares = " ".join(f"{seconds / each.step_s:.0%}" for seconds in parts)
    again = "" if each.recompute == "none" else f", recompute {each.recompute}"
    lines = [f"{each.model}, {each.view}", f"{each.cluster}: {each.step_s:.2f} s"]
    count = f"{each.microbatches} microbatch{'es' if each.microbatches > 1 else ''}"
    lines += [f"{count}, {each.schedule}{again}", f"compute, exchange, update, idle: {shares}"]
    if each.step_s < each.searched_s:
        lines.append(f"search alone: {each.searched_s:.2f} s ({each.strategy})")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", action="append", help="only models whose name contains this; repeatable")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args()
    wanted = [model for model in MODELS if any(text in model.name for text in arguments.model or [""])]
    if not wanted:
        parser.error(f"no model contains {arguments.model}; models are {', '.join(model.name for model in MODELS)}")
    start = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    layouts: list[Found] = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(wanted))
        for model in wanted:
            progress.update(task, description=model.name)
            layouts += found(model)
            progress.advance(task)
    if arguments.json:
        print(json.dumps({"assumptions": ASSUMPTIONS, "layouts": [asdict(each) for each in layouts]}))
        return 0
    console = Console(width=200)
    console.print(table_of(layouts))
    console.print("Assumptions")
    for line in ASSUMPTIONS:
        console.print(f"  - {line}", highlight=False)
    console.print(f"{time.perf_counter() - start:.0f} s", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
