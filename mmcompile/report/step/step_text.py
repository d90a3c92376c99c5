"""Text of a balanced step: two bars for every microbatch, its seconds in arrival order and balanced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mmcompile.report.step.balanced_step import BalancedStep, Comparison, ComponentLoads, Traffic, TriedBalancer
from mmcompile.units import columns, counted, format_count, format_seconds

MAX_ROWS = 32
"""Default of the largest number of microbatches shown per component."""
MIN_WIDTH, MAX_WIDTH = 72, 140
_EIGHTHS = " ▏▎▍▌▋▊▉"
_PLACE = "replica.microbatch"
_SECONDS = 10
"""Width in characters of a printed time."""


def step_text(step: BalancedStep, *, width: int = 100, max_rows: int = MAX_ROWS) -> str:
    """Return a step as text: headline, totals and the microbatches of each component; or a table of all balancers, if tried.

    Args:
        width: characters of lines with bars, kept between `MIN_WIDTH` and `MAX_WIDTH`.
        max_rows: largest number of microbatches shown per component; if there are more, the heaviest are shown.
    """
    blocks = ["\n".join(_headline(step)), "\n".join(_figures(step))]
    if step.balancers:
        blocks.append("\n".join(_table(step.balancers)))
    else:
        width = min(max(width, MIN_WIDTH), MAX_WIDTH)
        length = _bar_length(step, width - 2)
        blocks += ["\n".join(_component(each, step, length, max_rows)) for each in step.components]
    return "\n\n".join(blocks)


def bar(value: float, largest: float, width: int) -> str:
    """Return `width` characters of which `value / largest` are filled, to an eighth; anything above 0 shows."""
    eighths = round(value / largest * width * 8) if largest else 0
    eighths = min(max(eighths, int(value > 0)), width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)


def _headline(step: BalancedStep) -> Iterator[str]:
    yield f"step {step.step} of {step.plan}, seed {step.seed}: {counted(step.assignment.num_samples, 'sample')} of {step.data}"
    replicas = ", ".join(f"{each.name} {counted(each.replicas, 'replica')}" for each in step.components)
    yield f"{replicas}; {counted(step.num_microbatches, 'microbatch')} each"
    chosen = step.balancer if step.balancer == step.asked else f"{step.asked} chose {step.balancer}"
    yield f"{chosen}: {step.reason}"


def _figures(step: BalancedStep) -> Iterator[str]:
    simulated, straggler = step.simulated_s, step.straggler_s
    rows = [
        ("", "arrival", "balanced", ""),
        ("simulated step", *_seconds(simulated), _percent(simulated.after, simulated.before)),
        ("straggler seconds", *_seconds(straggler), _saved(straggler)),
    ]
    yield from columns(rows, left=(0, 3))
    yield "times are of samples alone; what a microbatch costs whatever is in it is left out"
    if max(component.replicas for component in step.components) > 1:
        yield "straggler seconds: at each microbatch, a component's slowest replica less the mean of its replicas; summed"
    else:
        yield "straggler seconds: what replicas wait for the slowest of them; every component has one"


def _component(component: ComponentLoads, step: BalancedStep, length: int, max_rows: int) -> Iterator[str]:
    slowest, imbalance = component.slowest_s, component.imbalance
    yield f"{component.name}: {component.samples} of {counted(step.assignment.num_samples, 'sample')}"
    if component.traffic is not None:
        yield f"  tokens encoded for {step.components[-1].name}: {_traffic(component.traffic)}"
    yield (
        f"  slowest microbatch {format_seconds(slowest.before)} -> {format_seconds(slowest.after)}, imbalance "
        f"{imbalance.before:.2f} -> {imbalance.after:.2f} (slowest over mean)"
    )
    yield from (f"  {line}".rstrip() for line in _bars(component, length, max_rows))


def _traffic(traffic: Traffic) -> str:
    parts = [format_count(traffic.tokens)]
    for change, where in ((traffic.other_rank, "rank"), (traffic.other_node, "node")):
        if change.before == change.after:
            parts.append(f"{format_count(change.after) if change.after else 'none'} to another {where}")
        else:
            parts.append(f"{format_count(change.before)} -> {format_count(change.after)} to another {where}")
    return ", ".join(parts)


def _bar_length(step: BalancedStep, width: int) -> int:
    # Deferred samples are listed after the bars.
    notes = (_note(samples) for each in step.components for replica in each.deferred for samples in replica)
    return (width - len(_PLACE) - 2 * (_SECONDS + 1) - 5 - max(map(len, notes))) // 2


def _bars(component: ComponentLoads, length: int, max_rows: int) -> Iterator[str]:
    before, after = np.array(component.loads_before), np.array(component.loads_after)
    largest = float(max(before.max(), after.max()))
    places = _shown(np.maximum(before, after), max_rows)
    yield f"{_PLACE}  {'arrival':<{length + _SECONDS + 3}} balanced"
    for replica, microbatch in places:
        sides = (
            f"{bar(loads[replica, microbatch], largest, length)} {_time(loads[replica, microbatch])}"
            for loads in (before, after)
        )
        note = _note(component.deferred[replica][microbatch])
        yield f"{f'{replica}.{microbatch}':>{len(_PLACE)}}  {'   '.join(sides)}{note}"
    left = before.size - len(places)
    if left:
        lightest = float(np.sort(np.maximum(before, after), axis=None)[left - 1])
        yield f"and {left} more, none above {format_seconds(lightest)} (--rows {before.size} shows all)"


def _shown(weights: np.ndarray, max_rows: int) -> list[tuple[int, int]]:
    """Return the (replica, microbatch) of the `max_rows` largest of `weights` [replicas, microbatches], ordered by replica."""
    heaviest = np.sort(np.argsort(-weights, axis=None, kind="stable")[:max_rows])
    return [(index // weights.shape[1], index % weights.shape[1]) for index in heaviest.tolist()]


def _note(deferred: int) -> str:
    return f"  {deferred} deferred" if deferred else ""


def _table(balancers: Sequence[TriedBalancer]) -> Iterator[str]:
    done = sorted(
        (each for each in balancers if each.simulated_s is not None), key=lambda each: each.simulated_s or 0.0
    )
    arrival_s = next((each.simulated_s for each in done if each.name == "arrival"), None)
    rows = [("balancer", "simulated step", "", "straggler seconds", "deferred", "")]
    rows += [_table_row(each, arrival_s or 0.0) for each in done]
    yield from columns(rows, left=(0, 5))
    for each in balancers:
        if each.simulated_s is None:
            yield f"{each.name} not here: {each.reason}"


def _table_row(each: TriedBalancer, arrival_s: float) -> tuple[str, ...]:
    step_s = each.simulated_s or 0.0
    return (
        each.name,
        format_seconds(step_s),
        _percent(step_s, arrival_s),
        _time(each.straggler_s or 0.0).strip(),
        str(each.deferred),
        each.reason,
    )


def _seconds(change: Comparison) -> tuple[str, str]:
    return _time(change.before).strip(), _time(change.after).strip()


def _time(seconds: float) -> str:
    return (format_seconds(seconds) if seconds > 0 else "0").rjust(_SECONDS)


def _percent(after: float, before: float) -> str:
    return f"{after / before - 1:+.1%}" if before and after != before else "="


def _saved(change: Comparison) -> str:
    if change.saved == 0:
        return "="
    return f"{format_seconds(abs(change.saved))} {'saved' if change.saved > 0 else 'lost'}"
