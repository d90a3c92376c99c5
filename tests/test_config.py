"""`mmcompile.config`: options are declared once; the Python API has the same names and defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, get_args

import pytest

import mmcompile as mm
from mmcompile import config, elastic_run
from mmcompile.batching.balance.registry import BALANCERS
from mmcompile.cli.config_file import SECTIONS
from mmcompile.cli.config_options import field_docs
from mmcompile.config import ElasticConfig, ExampleConfig, PlanRequest, TrainConfig
from mmcompile.errors import ConfigError
from mmcompile.planner.strategies.search import AUTO, STRATEGIES
from mmcompile.runtime.control.times import Times


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {own.name: own.default for own in parameters if own.default is not inspect.Parameter.empty}


def test_plan_takes_every_option_of_a_request_with_its_default() -> None:
    given = defaults_of(mm.plan)
    assert {own.name: given.get(own.name, MISSING) for own in fields(PlanRequest)} == {
        own.name: own.default for own in fields(PlanRequest)
    }
    assert given.keys() - {own.name for own in fields(PlanRequest)} >= {"batch", "packing", "on_phase"}


@pytest.mark.parametrize(
    ("function", "kind", "apart"),
    [
        (mm.parallelize, PlanRequest, set()),
        (mm.parallelize, TrainConfig, {"balance"}),
        (mm.Engine, TrainConfig, set()),
        (elastic_run.elastic, ElasticConfig, set()),
        (elastic_run.elastic_job, TrainConfig, {"balance"}),
        (elastic_run.elastic_job, ElasticConfig, set()),
        (mm.example_batch, ExampleConfig, set()),
        (Times, ElasticConfig, set()),
    ],
)
def test_options_of_one_name_have_one_default(function: Callable[..., Any], kind: type[Any], apart: set[str]) -> None:
    """Apart: a name here, where the function takes a balancer too."""
    given = defaults_of(function)
    shared = {own.name: own.default for own in fields(kind) if own.name in given and own.name not in apart}
    assert shared, "nothing in common"
    assert {name: given[name] for name in shared} == shared


@pytest.mark.parametrize("kind", SECTIONS.values())
def test_every_field_has_a_docstring(kind: type[Any]) -> None:
    assert field_docs()[kind.__name__].keys() == {own.name for own in fields(kind)}


def test_names_of_strategies_and_balancers_are_those_there_are() -> None:
    assert get_args(config.Strategy) == (AUTO, *STRATEGIES)
    listed = field_docs()["TrainConfig"]["balance"].partition("\n\n")[0].replace("\n", " ").partition(": ")[2]
    assert listed.rstrip(".").split(", ") == list(BALANCERS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "random"}, "schedule is 'random'; choose one of gpipe, 1f1b, eager-1f1b, zb-h1"),
        ({"recompute": "some"}, "recompute is 'some'; choose one of none, selective, full, auto"),
        ({"attention": "words"}, "attention is 'words'; choose one of model, bitfield"),
        ({"num_microbatches": 0}, "num_microbatches is 0; give 1 or more"),
        ({"replicas": {"language_model": 0}}, "replicas of language_model are 0; give 1 or more"),
        ({"stats": "synthetic:cocoqa"}, "`stats` has no effect without `global_batch`"),
        ({"strategy": "dflop"}, "strategy 'dflop' needs global_batch"),
    ],
)
def test_requests_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PlanRequest(**options)
