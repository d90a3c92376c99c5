"""`CostTable`: cost of every layer, at the captured sizes and at any other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction

from mmcompile.costmodel.compute import LayerCost
from mmcompile.costmodel.load import Load, Polynomial

SIZED = tuple(item.name for item in fields(LayerCost) if not item.name.endswith("_s"))
"""Fields of `LayerCost` that are FLOPs, bytes and kernels; the others are seconds."""
PERMANENT = ("parameter_bytes", "trainable_bytes")
NOTHING = LayerCost(**dict.fromkeys(SIZED, 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowingCost:
    """The cost of one layer for the captured batch: a fixed part, and parts proportional to tokens and to squared lengths."""

    fixed: LayerCost = NOTHING
    by_tokens: LayerCost = NOTHING
    """Part of the cost proportional to `Load.tokens`, at the captured load."""
    by_squares: LayerCost = NOTHING
    """Part of the cost proportional to `Load.squares`, at the captured load."""

    @property
    def total(self) -> LayerCost:
        """The whole cost for the captured batch: the sum of `fixed`, `by_tokens` and `by_squares`."""
        return _sum(self.fixed, self.by_tokens, self.by_squares)

    def scaled(self, tokens: Fraction, squares: Fraction) -> LayerCost:
        """Return the cost with the parts by tokens and by squares multiplied by these factors, rounded to integers."""
        if not tokens:  # nothing to do for the component, so it does not run
            return LayerCost(**{name: getattr(self.fixed, name) * (name in PERMANENT) for name in SIZED})
        return _sum(self.fixed, _times(self.by_tokens, tokens), _times(self.by_squares, squares))

    def polynomial(self, name: str, captured: Load) -> Polynomial:
        """Return the field `name` of `LayerCost` as a polynomial in the load; `captured` is the load of this cost."""
        tokens, squares = getattr(self.by_tokens, name), getattr(self.by_squares, name)
        return Polynomial(
            fixed=float(getattr(self.fixed, name)),
            per_token=tokens / captured.tokens if tokens else 0.0,
            per_square=squares / captured.squares if squares else 0.0,
        )


def _sum(*costs: LayerCost) -> LayerCost:
    return LayerCost(**{name: sum(getattr(cost, name) for cost in costs) for name in SIZED})


def _times(cost: LayerCost, factor: Fraction) -> LayerCost:
    top, bottom = factor.numerator, factor.denominator
    return LayerCost(**{name: (getattr(cost, name) * top + bottom // 2) // bottom for name in SIZED})


@dataclass(frozen=True, kw_only=True, slots=True)
class CostTable:
    """Cost of each layer of each component for one microbatch."""

    layers: Mapping[str, tuple[LayerCost, ...]]
    """Component -> one cost per layer. A shared node is counted in the first layer that needs its value."""
    loads: Mapping[str, Load] = field(default_factory=dict)
    """Component -> load of the microbatch that `layers` describes. A projector has the load of the encoder that feeds it."""
    growing: Mapping[str, tuple[GrowingCost, ...]] = field(default_factory=dict, repr=False)
    """Component -> cost of each layer for the captured batch: a fixed part and parts by tokens and by squared lengths."""
    captured_loads: Mapping[str, Load] = field(default_factory=dict, repr=False)

    def __getitem__(self, component: str) -> tuple[LayerCost, ...]:
        return self.layers[component]

    def at(self, loads: Mapping[str, Load]) -> CostTable:
        """Return the table for a microbatch of other loads; components that `loads` does not contain keep theirs.

        A component with no tokens costs nothing but its parameters. `table.at(table.loads) == table`.

        Raises:
            KeyError: `loads` names a component that the table does not contain.
        """
        for name in loads:
            if name not in self.growing:
                raise KeyError(f"no component {name!r} in the cost table; it has {', '.join(self.growing)}")
        wanted = {**self.loads, **loads}
        layers: dict[str, tuple[LayerCost, ...]] = {}
        for name, costs in self.growing.items():
            captured, load = self.captured_loads[name], wanted[name]
            ratios = _ratio(load.tokens, captured.tokens), _ratio(load.squares, captured.squares)
            known = {cost: cost.scaled(*ratios) for cost in dict.fromkeys(costs)}  # layers repeat
            layers[name] = tuple(known[cost] for cost in costs)
        return CostTable(layers=layers, loads=wanted, growing=self.growing, captured_loads=self.captured_loads)

    def polynomial(self, component: str, layer: int, name: str) -> Polynomial:
        """Return the field `name` of `LayerCost` of one layer, as a polynomial in the load of its component."""
        return self.growing[component][layer].polynomial(name, self.captured_loads[component])

    @property
    def polynomials(self) -> dict[str, tuple[dict[str, Polynomial], ...]]:
        """Return component -> for each layer, field of `LayerCost` -> its polynomial in the component's load."""
        return {
            component: tuple(
                {name: self.polynomial(component, index, name) for name in SIZED} for index in range(len(costs))
            )
            for component, costs in self.growing.items()
        }

    def total(self) -> LayerCost:
        """Return the sum over all layers, also of `output_bytes`: the bytes that links carry if every layer is a stage."""
        return _sum(*(cost for costs in self.layers.values() for cost in costs))

    def __str__(self) -> str:
        header = ("layer", "forward", "input grad", "weight grad", "[MFLOP]", "saved", "parameters", "output", "[KiB]")
        lines = ["{:<28}{:>12}{:>12}{:>13}{:>9}{:>12}{:>12}{:>12}{:>7}".format(*header)]
        for name, costs in self.layers.items():
            lines += [_row(f"{name}.{index}", cost) for index, cost in enumerate(costs)]
        lines.append(_row("total", self.total()))
        return "\n".join(lines)


def _ratio(load: float, captured: float) -> Fraction:
    return Fraction(load) / Fraction(captured) if captured else Fraction(0)


def _row(label: str, cost: LayerCost) -> str:
    flops = (cost.forward_flops, cost.input_grad_flops, cost.weight_grad_flops)
    mflops = "".join(f"{count / 1e6:>{width}.3f}" for count, width in zip(flops, (12, 12, 13), strict=True))
    kib = "".join(f"{size / 1024:>12.2f}" for size in (cost.activation_bytes, cost.parameter_bytes, cost.output_bytes))
    return f"{label:<28}{mflops}{'':9}{kib}"
