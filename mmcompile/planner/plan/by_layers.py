"""`by_layers`: a plan in which every layer is a stage of its own.

Programs cut along it do not depend on the layers that share a device, so templates can be exchanged without lowering or compiling
anything, and a layer computes the same bits in all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from mmcompile.errors import PlanError
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.plan.plan_record import Chain, Segment, Stage
from mmcompile.planner.resilience.job import LayerId


def by_layers(plan: Plan) -> Plan:
    """Return the plan with one stage for each layer, of one replica, all on rank 0.

    Stages are named like `language_model.7`. A stage's depth is the number of layers behind it up to the loss, as if each chain
    were read by the first layer of its reader. Predictions are copied from the layer's former stage and must not be used.

    Raises:
        PlanError: layers share tensors or tokens between ranks, or replicas share parameters.
    """
    shared = [chain.name for chain in plan.chains if chain.tp * chain.cp > 1]
    if shared:
        raise PlanError(
            f"layers of {', '.join(shared)} are shared by several ranks, and a template's layer is on one: plan with "
            "tensor_parallel=1 and context_parallel=1"
        )
    spread = [chain.name for chain in plan.chains if chain.fsdp]
    if spread:
        raise PlanError(
            f"replicas of {', '.join(spread)} share parameters (fsdp), and a template's replica holds them all: plan without "
            "fsdp"
        )
    depths = _depths(plan)
    chains = tuple(replace(chain, dp=1, stages=tuple(_stages(chain, depths[chain.name]))) for chain in plan.chains)
    return replace(plan, chains=chains, links=(), shared_values=(), resilience=None)


def layer_name(layer: LayerId) -> str:
    """Return the name of a layer as a stage of its own: `language_model.7` for layer 7 of the language model."""
    return f"{layer.chain}.{layer.index}"


def layer_of(stage: str) -> LayerId:
    """Return the layer that a stage name stands for, the inverse of `layer_name`."""
    chain, _, index = stage.rpartition(".")
    return LayerId(chain=chain, index=int(index))


def _stages(chain: Chain, last_depth: int) -> Iterator[Stage]:
    layers = [
        (stage, component, layer, name)
        for stage in chain.stages
        for (component, layer), name in zip(stage.layers, stage.layer_names, strict=True)
    ]
    for index, (stage, component, layer, name) in enumerate(layers):
        yield replace(
            stage,
            name=layer_name(LayerId(chain=chain.name, index=index)),
            segments=(Segment(component=component, first=layer, last=layer + 1),),
            layer_names=(name,),
            recompute=(stage.modes.get((component, layer)),),
            ranks=(0,),
            depth=last_depth + len(layers) - 1 - index,
        )


def _depths(plan: Plan) -> Mapping[str, int]:
    """Return chain name -> number of layers behind the chain's last layer, on the longest path to the loss."""
    length = {chain.name: sum(len(stage.layers) for stage in chain.stages) for chain in plan.chains}
    found = {plan.chains[-1].name: 0}
    # Chains stand in topological order.
    for chain in reversed(plan.chains[:-1]):
        fed = [target for source, target in plan.chain_edges if source == chain.name]
        found[chain.name] = 1 + max((found[name] + length[name] - 1 for name in fed), default=0)
    return found
