"""One capture of a Hugging Face model prices a batch of other sizes."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import sympy
import torch
from zoo import FAMILIES, Size

from mmcompile.costmodel.compute import LayerCost
from mmcompile.costmodel.load import NO_LOAD, Load
from mmcompile.ir.capture import capture
from mmcompile.passes.cost.cost import Cost
from mmcompile.passes.cost.cost_table import CostTable
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.report.layer_work import polynomial_text

EXACT = (
    "forward_flops",
    "input_grad_flops",
    "weight_grad_flops",
    "attention_flops",
    "attention_backward_flops",
    "kv_bytes",
)
TOKENS, SQUARES = sympy.symbols("t q")
PERMANENT = ("parameter_bytes", "trainable_bytes")
NEAR = ("forward_bytes", "backward_bytes", "activation_bytes", "selective_bytes", "full_bytes", "output_bytes")


def table_of(model: torch.nn.Module, batch: dict) -> CostTable:
    graph = capture(model, batch).graph
    GradientFlow().run(graph)
    return Cost().run(graph)


@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "qwen2_audio"])
def test_flops_at_another_load_are_those_of_a_second_capture(name: str) -> None:
    check(name, [FAMILIES[name].second])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "qwen2_audio"])
def test_flops_with_more_samples_only_or_longer_text_only(name: str) -> None:
    first = FAMILIES[name].first
    check(name, [replace(first, samples=first.samples + 2), replace(first, length=first.length + 30)])


def check(name: str, sizes: list[Size]) -> None:
    family = FAMILIES[name]
    model = family.build()
    table = table_of(model, family.batch())
    for size in sizes:
        other = table_of(model, family.draw(size, seed=3))
        predicted = table.at(other.loads)
        for component, costs in other.layers.items():
            for layer, (cost, guess) in enumerate(zip(costs, predicted[component], strict=True)):
                for field in (*EXACT, *PERMANENT):
                    assert getattr(guess, field) == getattr(cost, field), (size, component, layer, field)
            for field in NEAR:
                total = sum(getattr(cost, field) for cost in costs)
                guessed = sum(getattr(cost, field) for cost in predicted[component])
                assert guessed == pytest.approx(total, rel=0.025), (size, component, field)


@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")
def test_loads_polynomials_and_the_table_agree() -> None:
    family = FAMILIES["qwen2_5_vl"]
    table = table_of(family.build(), family.batch())
    assert table.loads == {
        "visual": Load(tokens=2 * 64, squares=2 * 64**2),
        "language_model": Load(tokens=2 * 40, squares=2 * 40**2),
    }
    assert table.at(table.loads) == table == table.at({})
    more = {"visual": Load(tokens=200, squares=9000), "language_model": Load(tokens=300, squares=17000)}
    priced = table.at(more)
    assert priced.at(table.loads) == table
    for component, polynomials in table.polynomials.items():
        load = more[component]
        for cost, row in zip(priced[component], polynomials, strict=True):
            for field, polynomial in row.items():
                assert getattr(cost, field) == pytest.approx(polynomial.at(load), abs=1), field
                exact = polynomial.fixed + polynomial.per_token * TOKENS + polynomial.per_square * SQUARES
                at = [(TOKENS, load.tokens), (SQUARES, load.squares)]
                assert float(exact.subs(at)) == pytest.approx(polynomial.at(load))
                # The text rounds the coefficients to four digits.
                text = sympy.Poly(polynomial_text(polynomial), TOKENS, SQUARES)
                assert [float(text.coeff_monomial(term)) for term in (1, TOKENS, SQUARES)] == pytest.approx(
                    [polynomial.fixed, polynomial.per_token, polynomial.per_square], rel=5e-4
                )


@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")
def test_a_component_without_load_costs_its_parameters_only() -> None:
    family = FAMILIES["llava"]
    table = table_of(family.build(), family.batch())
    without = table.at({"vision_tower": NO_LOAD})
    for cost, full in zip(without["vision_tower"], table["vision_tower"], strict=True):
        kept = {field.name for field in fields(LayerCost) if getattr(cost, field.name)}
        assert kept <= set(PERMANENT)
        assert cost.parameter_bytes == full.parameter_bytes
    assert without["language_model"] == table["language_model"]
    with pytest.raises(KeyError, match="no component 'visual' in the cost table; it has vision_tower"):
        table.at({"visual": NO_LOAD})
