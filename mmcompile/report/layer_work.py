"""FLOPs, bytes and seconds of single layers, and FLOPs and bytes as polynomials in a microbatch's rows and squared lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import sympy

from mmcompile.costmodel.cluster import Cluster
from mmcompile.costmodel.compute import layer_times
from mmcompile.costmodel.load import Polynomial
from mmcompile.ir.graph import ModelGraph
from mmcompile.passes.cost.cost_table import CostTable
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.plan.plan_record import Stage
from mmcompile.report.moves import LayerShare, Shares
from mmcompile.units import format_bytes, format_seconds

_FIELDS: Mapping[str, str] = {
    "forward_flops": "forward FLOP",
    "input_grad_flops": "input-gradient FLOP",
    "weight_grad_flops": "weight-gradient FLOP",
    "forward_bytes": "forward bytes moved",
    "backward_bytes": "backward bytes moved",
    "activation_bytes": "bytes saved",
    "output_bytes": "bytes handed on",
}
"""Field of `LayerCost` whose formula is shown -> its label."""
_DIGITS = 4
_TOKENS, _SQUARES = sympy.symbols("t q", nonnegative=True)
"""Symbols of the tokens of a microbatch, and of the sum of its squared sequence lengths."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWork:
    """FLOPs, bytes and seconds of one unsharded layer, for one microbatch of the captured sizes."""

    name: str
    tokens: float
    """Number of rows (patches, frames, tokens) of the captured microbatch in the layer's component: t in `polynomials`."""
    squares: float
    """Sum of the squared sequence lengths of the captured microbatch: q in `polynomials`."""
    forward_flops: int
    input_grad_flops: int
    weight_grad_flops: int
    forward_bytes: int
    backward_bytes: int
    parameter_bytes: int
    activation_bytes: int
    forward_s: float
    """Forward seconds by the roofline model, like the two backward times."""
    input_grad_s: float
    weight_grad_s: float
    polynomials: Mapping[str, str]
    """Label of a cost -> its polynomial in rows t and squared sequence lengths q: `forward FLOP` -> `1.23e+9*t + 4096*q`."""

    def __str__(self) -> str:
        lines = [
            f"{self.name} (t = {self.tokens:g} rows, q = {self.squares:g}; whole, analytic)",
            f"  forward {_gflop(self.forward_flops)}, {format_bytes(self.forward_bytes)} moved, {format_seconds(self.forward_s)}",
            f"  input gradient {_gflop(self.input_grad_flops)}, {format_seconds(self.input_grad_s)}; "
            f"weight gradient {_gflop(self.weight_grad_flops)}, {format_seconds(self.weight_grad_s)}; "
            f"{format_bytes(self.backward_bytes)} moved",
            f"  parameters {format_bytes(self.parameter_bytes)}, saved for backward {format_bytes(self.activation_bytes)}",
        ]
        width = max(map(len, self.polynomials), default=0)
        lines += [f"  {name:<{width}}  {text}" for name, text in self.polynomials.items()]
        return "\n".join(lines)


def layer_work(graph: ModelGraph, table: CostTable, cluster: Cluster, dtype: str) -> dict[str, LayerWork]:
    """Return module path -> work of every layer of a captured model."""
    return {
        layer.name: _work(layer.name, table, component.name, layer.index, cluster, dtype)
        for component in graph.components
        for layer in component.layers
    }


def layer_shares(plan: Plan, table: CostTable, dtype: str) -> Shares:
    """Return stage name -> each layer's fraction of the stage's times and bytes, by the roofline model at the captured sizes."""
    return {stage.name: _shares(plan, stage, table, dtype) for stage in plan.stages}


def _work(name: str, table: CostTable, component: str, index: int, cluster: Cluster, dtype: str) -> LayerWork:
    cost = table[component][index]
    load = table.loads[component]
    texts = {words: polynomial_text(table.polynomial(component, index, field)) for field, words in _FIELDS.items()}
    return LayerWork(
        name=name,
        tokens=load.tokens,
        squares=load.squares,
        forward_flops=cost.forward_flops,
        input_grad_flops=cost.input_grad_flops,
        weight_grad_flops=cost.weight_grad_flops,
        forward_bytes=cost.forward_bytes,
        backward_bytes=cost.backward_bytes,
        parameter_bytes=cost.parameter_bytes,
        activation_bytes=cost.activation_bytes,
        **asdict(layer_times(cost, cluster.device, dtype)),
        polynomials={words: text for words, text in texts.items() if text != "0"},
    )


def _gflop(flops: int) -> str:
    return f"{flops / 1e9:.4g} GFLOP"


def polynomial_text(polynomial: Polynomial) -> str:
    """Return a polynomial as text, such as `1.23e+9*t + 4096*q`; whole numbers in full, others with four digits."""
    expression = polynomial.fixed + polynomial.per_token * _TOKENS + polynomial.per_square * _SQUARES
    rounded = {
        number: sympy.Integer(int(number))
        if float(number).is_integer() and abs(number) < 10**6
        else sympy.Float(float(number), _DIGITS)
        for number in sympy.sympify(expression).atoms(sympy.Float)
    }
    return str(sympy.sympify(expression).xreplace(rounded))


def _shares(plan: Plan, stage: Stage, table: CostTable, dtype: str) -> list[LayerShare]:
    costs = [table[component][layer] for component, layer in stage.layers]
    times = [layer_times(cost, plan.cluster.device, dtype) for cost in costs]
    amounts = {
        "forward": [own.forward_s for own in times],
        "input_grad": [own.input_grad_s for own in times],
        "weight_grad": [own.weight_grad_s for own in times],
        "parameters": [cost.parameter_bytes for cost in costs],
        "gradients": [cost.trainable_bytes for cost in costs],
        "activations": [cost.activation_bytes for cost in costs],
    }
    shares = {name: [own / (sum(each) or 1) for own in each] for name, each in amounts.items()}
    return [LayerShare(**{name: own[index] for name, own in shares.items()}) for index in range(len(costs))]
