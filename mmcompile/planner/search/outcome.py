"""The `Plan` of a finished search: predictions, reasons for cuts, alternatives that lost, notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import mul

import numpy as np
from numpy.typing import NDArray

from mmcompile.costmodel.calibration import describe_costs
from mmcompile.costmodel.load import Load, Polynomial
from mmcompile.planner.plan.geometry import Geometry
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.plan.plan_record import BubbleShare, Cut, Prediction, Rejected, SampleRate
from mmcompile.planner.pricing.chains import ChainSpec
from mmcompile.planner.pricing.pricing import LayerSharding, Pricing
from mmcompile.planner.schedule.bubbles import attribute
from mmcompile.planner.search.branch_and_bound import TOLERANCE, BranchAndBound
from mmcompile.planner.search.candidate import Candidate, one_rank_each, stage_durations
from mmcompile.planner.search.combinations import MAX_LISTED
from mmcompile.planner.search.problem import NUM_DRAWS, Problem
from mmcompile.planner.search.splitter import Splitter
from mmcompile.units import format_bytes, format_seconds

_MAX_REJECTED = 5


def plan_of(engine: BranchAndBound, best: Candidate, *, strategy: str = "auto") -> Plan:
    """Return the plan of a judged candidate, without `links` and `shared_values`, which are known once stages are cut."""
    problem, setting = engine.problem, best.setting
    return Plan(
        fingerprint=problem.fingerprint,
        cluster=problem.cluster,
        chains=best.to_chains(),
        links=(),
        num_microbatches=setting.num_microbatches,
        shared_values=(),
        predicted=_predicted(best, engine.lower_bound_s),
        rejected=tuple(_rejected(engine, best)),
        schedule=setting.schedule,
        strategy=strategy,
        microbatch_samples=0.0 if problem.global_batch is None else setting.samples,
        data=_data(problem),
        costs=describe_costs(problem.pricing.calibration, problem.pricing.kinds),
        cuts=tuple(_cuts(best, engine.splitter)),
        notes=tuple(_notes(engine, best)),
    )


def _predicted(best: Candidate, lower_bound_s: float) -> Prediction:
    devices = min(best.num_ranks, best.problem.num_devices)
    work_s = best.step_work_s
    if lower_bound_s == float("inf"):
        lower_bound_s = max(work_s / devices, best.longest_path_s())
    lower_bound_s = min(lower_bound_s, best.iteration_s)
    bubble = 1.0 - work_s / (devices * best.iteration_s) if best.iteration_s else 0.0
    return Prediction(
        iteration_s=best.iteration_s,
        bubble=max(bubble, 0.0),
        lower_bound_s=lower_bound_s,
        gap=best.iteration_s / lower_bound_s - 1 if lower_bound_s else 0.0,
        bubbles=_bubbles(best),
        reduce_s=max(best.tail_s),
    )


def _bubbles(candidate: Candidate) -> tuple[BubbleShare, ...]:
    """Return each chain's idle share of a step, by cause: means over simulated random steps, weighted by their seconds."""
    names = candidate.names
    flow = candidate.flow()
    chains = {
        chain.name: [name for name, stage in zip(names, candidate.stages, strict=True) if stage.chain == index]
        for index, chain in enumerate(candidate.chains.chains)
    }
    drawn = [
        attribute(
            one_rank_each(candidate),
            [flow] * candidate.setting.num_microbatches,
            stage_durations(names, durations),
            candidate.link_names_s,
            chains=chains,
            kind=candidate.setting.schedule,
        )
        for durations in candidate.durations
    ]
    makespans_s = [timeline.makespan_s for timeline in candidate.timelines()]
    weights = [makespan_s / sum(makespans_s) for makespan_s in makespans_s]
    return tuple(_together(shares, weights) for shares in zip(*drawn, strict=True))


def _together(shares: Sequence[BubbleShare], weights: Sequence[float]) -> BubbleShare:
    rows = [(share.warm_up, share.stages, share.microbatches, share.links) for share in shares]
    warm_up, stages, microbatches, links = (sum(map(mul, column, weights)) for column in zip(*rows, strict=True))
    return BubbleShare(chain=shares[0].chain, warm_up=warm_up, stages=stages, microbatches=microbatches, links=links)


def _data(problem: Problem) -> str:
    if problem.workload is None or problem.workload.stats is None:
        return ""
    stats = problem.workload.stats
    return f"{stats.name}, {len(stats.samples):,} samples"


def _cuts(candidate: Candidate, splitter: Splitter) -> Iterator[Cut]:
    """Yield a reason for each cut: why a stage, other than the last of its chain, ends where it does."""
    problem, setting = candidate.problem, candidate.setting
    names = candidate.names
    limit = problem.memory_bytes(candidate.num_ranks)
    for index, stage in enumerate(candidate.stages[:-1]):
        chain = candidate.chains.chains[stage.chain]
        after = candidate.stages[index + 1]
        if after.chain != stage.chain:
            yield Cut(stage=names[index], reason=_end(candidate, stage.chain))
            continue
        own = [each for each in candidate.stages if each.chain == stage.chain]
        priced = problem.prices.priced(chain, candidate.degrees[stage.chain], setting)
        free = splitter.table(chain, setting, candidate.degrees[stage.chain], 0, None, len(own))[len(own) - 1]
        here = f"{stage.total_s * 1e3:.4g} ms before, {after.total_s * 1e3:.4g} ms after"
        if free is None or stage.last == free.boundaries[stage.position + 1]:
            yield Cut(stage=names[index], reason=f"balance: {here}")
            continue
        # What the stage on the fuller side would need with the layer on the other side of the cut.
        layer = stage.last if free.boundaries[stage.position + 1] > stage.last else stage.last - 1
        into = stage if layer == stage.last else after
        fixed = priced.state_bytes[layer + 1] - priced.state_bytes[layer]
        saved = into.in_flight * (priced.saved_bytes[layer + 1] - priced.saved_bytes[layer])
        needed = into.total_bytes + int(fixed + saved)
        if needed > limit:
            reason = (
                f"memory: with {chain.layers[layer].name}, {names[index + (into is after)]} needs "
                f"{format_bytes(needed)} of {format_bytes(limit)}; {here}"
            )
        else:
            reason = f"memory of other stages, or a cut of the same balance: {here}"
        yield Cut(stage=names[index], reason=reason)


def _end(candidate: Candidate, chain: int) -> str:
    chains = candidate.chains
    name = chains.chains[chain].name
    targets = [edge for edge in chains.edges if edge.source == chain != edge.target]
    if not targets:
        return f"{name} ends here"
    entry = targets[0]
    target = chains.chains[entry.target]
    where = "" if entry.target_layer == 0 else f" before {target.layers[entry.target_layer].name}"
    return f"{name} ends here; its output enters {target.name}{where}"


def _notes(engine: BranchAndBound, best: Candidate) -> Iterator[str]:
    problem = engine.problem
    if best.strategy != "auto":
        yield f"found by {best.strategy}"
    if best.chains.colocated:
        yield "colocated: all components in one line of stages, encoder layers before the language model's"
    if problem.workload is not None and problem.workload.stats is not None:
        yield (
            f"times are means over {NUM_DRAWS} steps of random samples, as they come: of replicas the slowest counts; memory "
            "holds the worst microbatch of the dataset beside mean ones in flight"
        )
    if engine.unseen:
        yield f"{engine.unseen:,} combinations were guessed to be slower and not split"
    if engine.combos.left_out:
        number = len(engine.combos.left_out)
        yield f"{number:,} settings (replicas, microbatches, recomputation) were guessed to be slower and not listed"
    if not engine.everything:
        yield f"over {MAX_LISTED:,} combinations: encoder options that others beat in ranks, slowest stage and path were left out"


def _rejected(engine: BranchAndBound, best: Candidate) -> Iterator[Rejected]:
    problem = engine.problem
    cores, ranks = problem.num_devices, best.num_ranks
    if best.shares_ranks:
        yield Rejected(
            what="a device for every chain",
            reason=f"{len(best.stages)} chains on {cores} devices: they share, balanced by time",
        )
    if ranks > cores:
        yield Rejected(
            what="a core for every process",
            reason=f"{ranks} processes share {cores} cores; the iteration is at least all work spread over the cores",
        )
    yield from _closest(engine, best)
    yield from _too_big(engine)


def _closest(engine: BranchAndBound, best: Candidate) -> Iterator[Rejected]:
    """Yield the fastest alternatives to `best` as rejected plans: first the fastest of every other projector placement."""
    many = engine.problem.global_batch is not None
    # (seconds, combination, whether it was simulated)
    losers = [(own.iteration_s, own.combination, True) for own in engine.judged if own is not best]
    bounded = sorted(engine.bounded, key=lambda item: item[0])[: 4 * _MAX_REJECTED]
    losers += [(bound_s, group[index], False) for bound_s, group, index in bounded]
    losers.sort(key=lambda loser: loser[0])
    seen, placements = {best.combination.text(many=many)}, {best.chains.placement}
    first: list[Rejected] = []
    others: list[Rejected] = []
    for seconds, combination, simulated in losers:
        text, placement = combination.text(many=many), combination.chains.placement
        if text in seen:
            continue
        seen.add(text)
        reason = _slower(seconds, best.iteration_s, simulated=simulated)
        (others if placement in placements else first).append(Rejected(what=text, reason=reason))
        placements.add(placement)
    yield from [*first, *others][:_MAX_REJECTED]
    if many and engine.bounded:
        yield Rejected(
            what=f"{len(engine.bounded):,} combinations in all",
            reason="cannot take less than this plan, by their bounds",
        )


def _slower(loser_s: float, best_s: float, *, simulated: bool) -> str:
    seconds, more = format_seconds(loser_s), f"{loser_s / best_s - 1:.1%} more"
    if not simulated:
        return f"cannot take less than {seconds}" + (f", {more}" if loser_s > best_s else "")
    if loser_s < best_s * (1 + TOLERANCE):
        return f"takes {seconds}, which is no faster to {TOLERANCE:.1%}"
    return f"takes {seconds}, {more}"


def _too_big(engine: BranchAndBound) -> Iterator[Rejected]:
    found = engine.all_too_big
    if not found:
        return
    more = sum(each.number for each in found) - 1
    what = f"{found[0].text} and {more:,} more" if more else found[0].text
    yield Rejected(what=what, reason=f"a stage needs more than the {format_bytes(found[0].limit_bytes)} of a device")


def sample_rates(
    candidate: Candidate, geometries: Mapping[str, Geometry], pricing: Pricing | None = None
) -> tuple[SampleRate, ...]:
    """Return for each component the seconds and bytes of samples, as polynomials that hold near its mean load in a microbatch.

    Args:
        geometries: component name -> geometry of its samples.
        pricing: prices of layers for microbatches of any size; None for the prices of the candidate's problem.
    """
    problem, setting = candidate.problem, candidate.setting
    pricing = pricing or problem.pricing
    found: list[SampleRate] = []
    for number, (chain, degrees) in enumerate(zip(candidate.chains.chains, candidate.degrees, strict=True)):
        last = problem.graph.loss_component in chain.components
        shardings = [degrees.sharding(mode) for mode in candidate.modes_of(number)]
        for component in chain.components:
            load = problem.prices.mean_load(component, setting, degrees, last=last)
            if load is None:
                load = pricing.table.loads[component] * (setting.samples_of(degrees) / problem.graph.num_samples)
            if load.tokens <= 0:
                load = pricing.table.captured_loads[component]
            seconds, activation_bytes = _values(pricing, chain, component, load, shardings)
            found.append(
                SampleRate(
                    chain=chain.name,
                    geometry=geometries[component],
                    seconds=_polynomial(seconds, load),
                    activation_bytes=_polynomial(activation_bytes, load),
                )
            )
    return tuple(found)


def _values(
    pricing: Pricing, chain: ChainSpec, component: str, at: Load, shardings: Sequence[LayerSharding]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return seconds and activation bytes, [3] each, of a component's layers in a chain at three loads.

    These are `at`, `at` with twice the tokens, and `at` with twice the squared lengths. `shardings` has one entry a layer.
    """
    tokens, squares = at.tokens * np.array([1.0, 2.0, 1.0]), at.squares * np.array([1.0, 1.0, 2.0])
    seconds, saved = np.zeros(3), np.zeros(3)
    layers = zip(chain.layers, shardings, strict=True)
    own = [(layer.index, layer.share, sharding) for layer, sharding in layers if layer.component == component]
    for share, sharding in dict.fromkeys((share, sharding) for _, share, sharding in own):
        each, sizes = pricing.bulk(component, tokens * share, squares * share, sharding)
        group = pricing.groups(component)[[index for index, *kind in own if tuple(kind) == (share, sharding)]]
        seconds += each[group].sum(axis=(0, 2))
        saved += sizes.activation[group].sum(axis=0)
    return seconds, saved


def _polynomial(values: NDArray[np.float64], at: Load) -> Polynomial:
    by_tokens, by_squares = (max(float(value - values[0]), 0.0) for value in values[1:])
    return Polynomial(
        fixed=float(values[0]) - by_tokens - by_squares,
        per_token=by_tokens / at.tokens,
        per_square=by_squares / at.squares if at.squares else 0.0,
    )
