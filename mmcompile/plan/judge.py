"""Two quick looks at a candidate: a bound below its makespan, and the simulator's makespan without its events."""

from __future__ import annotations

import numpy as np

from mmcompile.costmodel.cluster import Cluster
from mmcompile.plan.candidate import Candidate


def lower_bound_s(candidate: Candidate) -> float:
    """Seconds that a 1F1B step of the candidate takes at least.

    Let F, B be a stage's own times, w its depth (its warm-up), M the number of microbatches, `before` the forward path
    into it, `after` the backward path from it upstream, and `round` the path to the loss and back. The step takes

        before + M (F + B) + after + max(0, round - w F) + max(0, round - w B)

    at least: from the stage's first forward to its first backward it has only w more forwards to do, and from its
    last forward to its last backward only w backwards (both gaps count if M > w + 1, else the larger). Equality for a
    chain of equal stages.
    """
    count, microbatches = len(candidate.ranges), candidate.num_microbatches
    forward, backward = candidate.forward_s, candidate.backward_s
    before, after, down, back = [0.0] * count, [0.0] * count, [0.0] * count, [0.0] * count
    for source, target in sorted(candidate.edges):
        before[target] = max(before[target], before[source] + forward[source])
        after[target] = max(after[target], after[source] + backward[source])
    for source, target in sorted(candidate.edges, reverse=True):
        down[source] = max(down[source], down[target] + forward[target])
        back[source] = max(back[source], back[target] + backward[target])
    bound = 0.0
    for stage in range(count):
        busy = before[stage] + microbatches * (forward[stage] + backward[stage])
        if not candidate.backward[stage]:
            # Its last forward still has to reach the loss and come back as far as any gradient goes.
            bound = max(bound, busy + down[stage] + after[-1] + backward[-1])
            continue
        round_s, warm_up = down[stage] + back[stage], candidate.depths[stage]
        gaps = (max(0.0, round_s - warm_up * forward[stage]), max(0.0, round_s - warm_up * backward[stage]))
        bound = max(bound, busy + after[stage] + (sum(gaps) if microbatches > warm_up + 1 else max(gaps)))
    return bound


def fast_makespan_s(candidate: Candidate, cluster: Cluster) -> float:
    """Makespan that `Candidate.simulate` gives, for candidates with one stage a rank, many stages at a time.

    By the keys of `mmcompile.plan.schedule`, at tick t a stage of depth r runs the forward of microbatch (t + r) / 2,
    or the backward of microbatch (t - r - 1) / 2, whichever is whole. Nothing in a tick depends on anything else in
    it.
    """
    forward, backward = np.array(candidate.forward_s), np.array(candidate.backward_s)
    depth, has_backward = np.array(candidate.depths), np.array(candidate.backward)
    pairs = sorted(candidate.edges)
    link_s = candidate.link_s(cluster)
    link = np.array([link_s[pair] for pair in pairs])
    source = np.array([pair[0] for pair in pairs], dtype=np.int64)
    target = np.array([pair[1] for pair in pairs], dtype=np.int64)
    gradient = has_backward[source]
    clock = np.zeros(len(forward))
    # [edges, microbatches]: when a message has arrived; the column before the first is the channel's start.
    there = np.zeros((len(pairs), candidate.num_microbatches + 1))
    back = np.zeros((len(pairs), candidate.num_microbatches + 1))
    for tick in range(-int(depth.max()), 2 * candidate.num_microbatches + int(depth.max())):
        is_forward = (tick + depth) % 2 == 0
        microbatch = np.where(is_forward, tick + depth, tick - depth - 1) // 2
        active = (microbatch >= 0) & (microbatch < candidate.num_microbatches) & (is_forward | has_backward)
        receives = active[target] & is_forward[target]
        np.maximum.at(clock, target[receives], there[receives, microbatch[target[receives]] + 1])
        returns = active[source] & ~is_forward[source] & gradient
        np.maximum.at(clock, source[returns], back[returns, microbatch[source[returns]] + 1])
        clock += np.where(active, np.where(is_forward, forward, backward), 0.0)
        for channel, sends, ends in (
            (there, active[source] & is_forward[source], source),
            (back, active[target] & ~is_forward[target] & gradient, target),
        ):
            column = microbatch[ends[sends]]
            channel[sends, column + 1] = np.maximum(clock[ends[sends]], channel[sends, column]) + link[sends]
    return float(clock.max())
