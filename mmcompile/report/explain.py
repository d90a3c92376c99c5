"""Everything in a plan about one stage or layer, in words and numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mmcompile.planner.plan.bottlenecks import CAUSE_WORDS, causes, chain_of_stage, memory_bytes, rank_loads
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.plan.plan_record import Chain, Link, Stage
from mmcompile.planner.plan.stage_rows import frozen_text, rank_ranges, recompute_text
from mmcompile.planner.pricing.chains import ChainLayer
from mmcompile.planner.search.layer_names import find
from mmcompile.report.layer_work import LayerWork
from mmcompile.report.moves import Move, Shares, boundary_moves, equal_shares, move_layers
from mmcompile.report.step_replay import replay
from mmcompile.units import format_bytes, format_seconds, labelled


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Explanation of a plan's stage, or of a layer and its stage: place, times [s] of a microbatch, bytes, idle shares."""

    stage: str
    layer: str | None
    """Module path of the requested layer; None if a stage was requested."""
    chain: str
    layers: tuple[str, ...]
    """Module paths of the stage's layers, in order."""
    ranks: tuple[int, ...]
    tp: int
    cp: int
    dp: int
    begins: str
    """Reason why the stage begins at its first layer."""
    ends: str
    costs: str
    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    pace: float
    """Time of the stage's rank relative to the slowest rank, 0..1."""
    memory_bytes: Mapping[str, int]
    limit_bytes: int
    """Memory limit of one rank, which all stages on the rank share."""
    rank_bytes: int
    """Sum of the peak bytes of all stages on the rank that runs the explained stage."""
    in_flight: int
    saved_bytes: int
    """Bytes of one microbatch's activations."""
    recompute: str
    """Recomputation mode of the stage's layers."""
    frozen: str
    idle: float
    """Idle share of the time of the stage's ranks, by simulation, 0..1."""
    waits: Mapping[str, float]
    """Cause of waiting -> share of the time of the chain's ranks, 0..1."""
    links: tuple[str, ...]
    moves: tuple[Move, ...]
    exact: bool
    """True if step times after moving stage boundaries use each layer's cost; False if a stage's layers count as equally long."""
    work: tuple[LayerWork, ...]
    """Work of the stage's layers, or only of the requested layer; empty without a model."""

    def __str__(self) -> str:
        return "\n".join(line.rstrip() for line in _text(self))


def explain(
    plan: Plan, what: str, shares: Shares | None = None, work: Mapping[str, LayerWork] | None = None
) -> Explanation:
    """Explain a stage (`language_model.1`) or a layer (its module path, `component.index`, or a glob matching one).

    Args:
        shares: stage -> fraction of its times and bytes that each layer has; by default equal for all layers of a stage.
        work: module path -> FLOPs and bytes of a layer, if there is a model.

    Raises:
        ConfigError: there is no such stage or layer; the message lists what there is.
    """
    stage, position = _located(plan, what)
    chain = chain_of_stage(plan, stage.name)
    step = replay(plan)
    group = next(index for index, group in enumerate(step.groups) if stage in group.stages)
    loads = rank_loads(plan)
    own = max((load for load in loads if stage in load.stages), key=lambda load: load.num_bytes)
    predicted = stage.prediction
    layer = None if position is None else stage.layer_names[position]
    bubble = next((share for share in plan.predicted.bubbles if share.chain == chain.name), None)
    return Explanation(
        stage=stage.name,
        layer=layer,
        chain=chain.name,
        layers=stage.layer_names,
        ranks=stage.ranks,
        tp=chain.tp,
        cp=chain.cp,
        dp=chain.dp,
        begins=_begins(plan, chain, stage),
        ends=_ends(plan, chain, stage),
        costs=plan.costs,
        forward_s=predicted.forward_s,
        input_grad_s=predicted.input_grad_s,
        weight_grad_s=predicted.weight_grad_s,
        pace=own.seconds / max(load.seconds for load in loads) if own.seconds else 0.0,
        memory_bytes=predicted.memory_bytes,
        limit_bytes=memory_bytes(plan),
        rank_bytes=own.num_bytes,
        in_flight=predicted.in_flight,
        saved_bytes=predicted.saved_bytes,
        recompute=recompute_text([stage]),
        frozen=frozen_text([stage]),
        idle=step.idle(group),
        waits={} if bubble is None else {CAUSE_WORDS[cause]: share for cause, share in causes(bubble).items() if share},
        links=tuple(_links(plan, stage)),
        moves=_moves(plan, stage, position, shares or equal_shares(plan)),
        exact=shares is not None,
        work=tuple((work or {})[name] for name in ((layer,) if layer else stage.layer_names) if name in (work or {})),
    )


def _located(plan: Plan, what: str) -> tuple[Stage, int | None]:
    """Return the stage called `what` and None; or, if `what` is a layer, its stage and its position in that stage."""
    for stage in plan.stages:
        if stage.name == what:
            return stage, None
    names = [
        chain.stages[0].name + (f"..{len(chain.stages) - 1}" if len(chain.stages) > 1 else "") for chain in plan.chains
    ]
    place = find(
        what,
        {
            chain.name: tuple(
                ChainLayer(component=component, index=layer, name=name)
                for stage in chain.stages
                for (component, layer), name in zip(stage.layers, stage.layer_names, strict=True)
            )
            for chain in plan.chains
        },
        where=f"nothing to explain among the stages {', '.join(names)}",
    )
    first, chain = 0, plan.chains[place.chain]
    for stage in chain.stages:
        if place.first < first + len(stage.layers):
            return stage, place.first - first if place.last - place.first == 1 else None
        first += len(stage.layers)
    raise AssertionError(f"no layer {place.first} in {chain.name}")


def _begins(plan: Plan, chain: Chain, stage: Stage) -> str:
    if stage is chain.stages[0]:
        return "the chain begins here"
    before = chain.stages[chain.stages.index(stage) - 1]
    return f"{before.name} ends before it: {_reason(plan, before)}"


def _ends(plan: Plan, chain: Chain, stage: Stage) -> str:
    if stage is chain.stages[-1]:
        return "the loss is here" if chain is plan.chains[-1] else "the chain ends here"
    return _reason(plan, stage)


def _reason(plan: Plan, stage: Stage) -> str:
    return next((cut.reason for cut in plan.cuts if cut.stage == stage.name), "the search found no better cut")


def _links(plan: Plan, stage: Stage) -> Iterator[str]:
    yield from (f"from {link.source}: {_carries(link)}" for link in plan.links if link.target == stage.name)
    yield from (f"to {link.target}: {_carries(link)}" for link in plan.links if link.source == stage.name)


def _carries(link: Link) -> str:
    names = ", ".join(tensor.name for tensor in link.tensors)
    return f"{names}, {format_bytes(link.num_bytes)} a microbatch, {'gradient returns' if link.gradient else 'no gradient'}"


def _moves(plan: Plan, stage: Stage, position: int | None, shares: Shares) -> tuple[Move, ...]:
    if position is None:
        return boundary_moves(plan, stage, shares)
    both = (move_layers(plan, stage, position, step, shares) for step in (-1, 1))
    return tuple(move for move in both if move is not None)


def _text(one: Explanation) -> Iterator[str]:
    title = f"layer {one.layer} is in stage {one.stage}" if one.layer else f"stage {one.stage}"
    degrees = f"tp {one.tp}, cp {one.cp}, dp {one.dp}"
    yield f"{title}, on rank{'s' if len(one.ranks) > 1 else ''} {rank_ranges(one.ranks)} ({degrees})"
    count = len(one.layers)
    layers = one.layers[0] if count == 1 else f"{count} from {one.layers[0]} to {one.layers[-1]}"
    waits = ", ".join(f"{cause} {share:.1%}" for cause, share in one.waits.items())
    rough = ["taking the layers of a stage to be alike; with MODEL, each layer has its own cost"]
    sections: Mapping[str, Sequence[object]] = {
        "layers": [f"{layers}; {one.frozen} frozen"],
        "begins": [one.begins],
        "ends": [one.ends],
        "time": [_time(one)],
        "memory": _memory(one),
        "idle": [f"{one.idle:.1%} of the step" + (f"; in its chain: {waits}" if waits else "")],
        "links": one.links,
        "work": [line for work in one.work for line in str(work).splitlines()],
        "what if": [*one.moves, *(rough if one.moves and not one.exact else [])],
    }
    for label, lines in sections.items():
        yield from labelled(label, lines, 12)


def _time(one: Explanation) -> str:
    gradients = {"input gradient": one.input_grad_s, "weight gradient": one.weight_grad_s}
    backward = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in gradients.items())
    times = f"forward {format_seconds(one.forward_s)}, {backward if any(gradients.values()) else 'no backward'}"
    origin = one.costs.split()[0].rstrip(":;,")
    return f"{times} a microbatch ({origin}); {one.pace:.0%} of the slowest rank's"


def _memory(one: Explanation) -> list[str]:
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in one.memory_bytes.items() if name != "total")
    again = "" if one.recompute == "none" else f", recompute {one.recompute}"
    flying = (
        f" (activations: {one.in_flight} in flight x {format_bytes(one.saved_bytes)}{again})" if one.in_flight else ""
    )
    total = one.memory_bytes["total"]
    others = f", {format_bytes(one.rank_bytes)} with the stages beside it" if one.rank_bytes > total else ""
    share = one.rank_bytes / one.limit_bytes
    return [
        f"{parts}{flying}",
        f"{format_bytes(total)} together{others}: {share:.0%} of {format_bytes(one.limit_bytes)}",
    ]
