"""The table of passes agrees with their classes, and both orders with the table."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import pytest

import mmcompile.passes
from mmcompile.errors import ConfigError
from mmcompile.passes.base import Analysis, Pass, Rewrite
from mmcompile.passes.catalog import OWN, PASSES, PLANNING, STAGES, OrderedPass, PassEntry, in_order, pass_entry
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.passes.verify import Verify


def classes(root: type[Pass]) -> Iterator[type[Pass]]:
    for made in root.__subclasses__():
        if made.__module__.startswith("mmcompile."):
            yield made
        yield from classes(made)


@pytest.mark.parametrize("entry", PASSES, ids=lambda entry: entry.name)
def test_an_entry_is_what_its_class_says(entry: PassEntry) -> None:
    made = entry.load()
    assert (made.name, made.requires, made.ensures) == (entry.name, entry.requires, entry.ensures)
    assert issubclass(made, Analysis if entry.kind == "analysis" else Rewrite)


def test_every_pass_of_the_product_is_in_the_table() -> None:
    for module in pkgutil.walk_packages(mmcompile.passes.__path__, "mmcompile.passes."):
        importlib.import_module(module.name)
    found = {made.name for made in classes(Pass) if made not in (Analysis, Rewrite)}
    assert found == {entry.name for entry in PASSES}


@pytest.mark.parametrize("order", [PLANNING, STAGES], ids=["planning", "stages"])
def test_orders_name_passes_that_exist_and_need_nothing_that_comes_later(order: tuple[OrderedPass, ...]) -> None:
    facts = set(pass_entry("verify").ensures)
    for own in order:
        if own.name != OWN:
            entry = pass_entry(own.name)
            assert facts.issuperset(entry.requires), own
            facts |= set(entry.ensures)
        assert own.when and own.reason


def test_passes_come_in_the_order_of_the_table() -> None:
    flow = GradientFlow()
    verify = Verify()
    assert in_order(PLANNING, {"cost": (flow,), OWN: (verify,), "autocast": ()}) == (verify, flow)


def test_a_wrong_name_lists_all() -> None:
    with pytest.raises(ConfigError, match="no pass 'costs'; choose of verify, modality-dag, gradient-flow"):
        pass_entry("costs")
