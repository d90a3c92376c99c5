"""`SampleRate`s: at the mean load they are the plan's predictions, and many samples cost what their load costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sized_plan import mixed_samples, vision_language_72b, workload
from toy_plan import FINGERPRINT

from mmcompile.costmodel.calibration import Calibration, KindCosts, Measurement
from mmcompile.costmodel.cluster import Cluster
from mmcompile.costmodel.compute import Recompute
from mmcompile.costmodel.load import Load, Polynomial
from mmcompile.plan.search.candidate import Candidate, assemble
from mmcompile.plan.search.problem import Problem
from mmcompile.plan.search.rates import sample_rates
from mmcompile.plan.search.search import problem_of
from mmcompile.plan.search.settings import Degrees, SearchSpace, Setting

CLUSTER = Cluster.parse("8x8xH100")


def problem(*, calibration: Calibration | None = None) -> Problem:
    graph, table = vision_language_72b(train="projector")
    return problem_of(
        graph,
        table,
        CLUSTER,
        dtype="bfloat16",
        fingerprint=FINGERPRINT,
        global_batch=64,
        space=SearchSpace.everything(CLUSTER),
        workload=workload(table, mixed_samples(300)),
        calibration=calibration,
        kinds={name: tuple(name for _ in layers) for name, layers in table.layers.items()},
    )


def candidate(own: Problem, placement: str, encoder: Degrees, language: Degrees, recompute: Recompute) -> Candidate:
    chains = next(chains for chains in own.sets if chains.placement == placement)
    degrees = [*[encoder] * (len(chains.chains) - 1), language]
    setting = Setting(num_microbatches=4, samples=64 / language.dp / 4, dp=language.dp, recompute=recompute)
    parts = [
        ((0, len(chain.layers) // 2), (len(chain.layers) // 2, len(chain.layers)))
        if len(chain.layers) > 1
        else ((0, 1),)
        for chain in chains.chains
    ]
    return assemble(own, chains, setting, degrees, parts)


def measured() -> Calibration:
    """Vision takes ten times a nominal second a token, the rest is not measured."""
    at = Load(tokens=1000.0, squares=1000.0**2)
    times = Polynomial(per_token=1e-6)
    return Calibration(
        device=CLUSTER.device.name,
        dtype="bfloat16",
        processor="",
        kinds=(),
    ) if times is None else _calibration(at)


def _calibration(at: Load) -> Calibration:
    raise NotImplementedError
