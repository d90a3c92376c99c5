"""Seconds of single layers at one load: the roofline or the calibration, without the arrays over many loads."""

from __future__ import annotations

from mmcompile.costmodel.compute import LayerCost, LayerTimes, layer_times
from mmcompile.costmodel.load import Load
from mmcompile.planner.pricing.pricing import WHOLE, LayerSharding, Pricing


def layer_prices(
    pricing: Pricing, component: str, load: Load | None = None, sharding: LayerSharding = WHOLE
) -> tuple[tuple[LayerCost, LayerTimes], ...]:
    """Return cost and seconds of each layer, for tensor-parallel degrees that the component allows."""
    kinds = pricing.kinds.get(component, ("",) * len(pricing.table[component]))
    costs = pricing.costs(component, load, sharding)
    return tuple(
        (cost, _seconds(pricing, component, index, cost, kind, load, sharding.tp))
        for index, (cost, kind) in enumerate(zip(costs, kinds, strict=True))
    )


def _seconds(
    pricing: Pricing, component: str, index: int, cost: LayerCost, kind: str, load: Load | None, tp: int
) -> LayerTimes:
    analytic = layer_times(cost, pricing.cluster.device, pricing.dtype)
    if pricing.calibration is None or load is None or load.tokens <= 0:
        return analytic
    measured, known = pricing.calibration.times(kind, load, tp), LayerSharding(tp=tp)
    if measured is None and tp > 1:
        measured, known = pricing.calibration.times(kind, load, 1), WHOLE
    if measured is None:
        return analytic
    base = layer_times(pricing.costs(component, load, known)[index], pricing.cluster.device, pricing.dtype)
    return LayerTimes(
        forward_s=_scaled(measured.forward_s, analytic.forward_s, base.forward_s),
        input_grad_s=_scaled(measured.input_grad_s, analytic.input_grad_s, base.input_grad_s),
        weight_grad_s=_scaled(measured.weight_grad_s, analytic.weight_grad_s, base.weight_grad_s),
    )


def _scaled(measured_s: float, analytic_s: float, base_s: float) -> float:
    """Return measured seconds of one layout, carried to another by the ratio of the roofline's."""
    return measured_s * analytic_s / base_s if base_s else analytic_s
