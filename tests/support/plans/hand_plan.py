"""Plans made by hand, of any size, for tests of what is printed: no search, so no number changes with the costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from mmcompile.costmodel.cluster import Cluster
from mmcompile.ir.tensor_spec import TensorSpec
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.plan.plan_record import (
    BubbleShare,
    Chain,
    Cut,
    Fingerprint,
    Link,
    Prediction,
    Rejected,
    Segment,
    SharedValue,
    Stage,
    StagePrediction,
)

FINGERPRINT = Fingerprint(model="HandMade", parameters="0" * 64, torch="2.13.0", transformers="5.24.0")
GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A chain to make: one component, its layers dealt evenly to its stages, the first getting the rest."""

    name: str
    layers: int
    stages: int
    layer_s: float = 0.004
    """Forward seconds of a layer; each gradient takes as long."""
    layer_bytes: int = GIB // 4
    trains: bool = True
    tp: int = 1
    dp: int = 1


def hand_plan(parts: Sequence[Part], *, cluster: str = "8x8xA100-80G", num_microbatches: int = 16) -> Plan:
    """Chains side by side, the last of them the language model that all others feed."""
    last = parts[-1]
    ranks = [0, *accumulate(part.stages * part.tp * part.dp for part in parts)]
    chains = tuple(
        _chain(part, first, part.stages - 1 + (last.stages if part is not last else 0), num_microbatches)
        for part, first in zip(parts, ranks, strict=False)
    )
    return Plan(
        fingerprint=FINGERPRINT,
        cluster=Cluster.parse(cluster),
        chains=chains,
        links=tuple(_links(chains)),
        num_microbatches=num_microbatches,
        shared_values=(_shared(chains[-1]),) if last.stages > 1 else (),
        predicted=Prediction(
            iteration_s=1.25,
            bubble=0.21,
            lower_bound_s=1.0,
            gap=0.25,
            bubbles=tuple(
                BubbleShare(chain=chain.name, warm_up=0.12, stages=0.05 + 0.01 * index, microbatches=0.02, links=0.0)
                for index, chain in enumerate(chains)
            ),
        ),
        rejected=(Rejected(what="one stage fewer", reason="takes 1.31 s, 5% more"),),
        cuts=tuple(
            Cut(stage=stage.name, reason=f"a layer more would make it {stage.prediction.forward_s * 1e3:.1f} ms")
            for chain in chains
            for stage in chain.stages[:-1]
        ),
    )


def _chain(part: Part, first_rank: int, first_depth: int, num_microbatches: int) -> Chain:
    share, rest = divmod(part.layers, part.stages)
    bounds = [0, *accumulate(share + (index < rest) for index in range(part.stages))]
    width = part.tp * part.dp
    return Chain(
        name=part.name,
        components=(part.name,),
        stages=tuple(
            _stage(
                part,
                index,
                (bounds[index], bounds[index + 1]),
                tuple(range(first_rank + index * width, first_rank + (index + 1) * width)),
                first_depth - index,
                num_microbatches,
            )
            for index in range(part.stages)
        ),
        tp=part.tp,
        dp=part.dp,
    )


def _stage(
    part: Part, index: int, layers: tuple[int, int], ranks: tuple[int, ...], depth: int, num_microbatches: int
) -> Stage:
    count = layers[1] - layers[0]
    in_flight = min(depth + 1, num_microbatches) if part.trains else 0
    size = count * part.layer_bytes
    return Stage(
        name=f"{part.name}.{index}",
        segments=(Segment(component=part.name, first=layers[0], last=layers[1]),),
        layer_names=tuple(f"model.{part.name}.layers.{layer}" for layer in range(*layers)),
        ranks=ranks,
        has_backward=part.trains,
        depth=depth,
        prediction=StagePrediction(
            forward_s=count * part.layer_s,
            input_grad_s=count * part.layer_s * part.trains,
            weight_grad_s=count * part.layer_s * part.trains,
            parameter_bytes=size,
            gradient_bytes=size * part.trains,
            optimizer_bytes=2 * size * part.trains,
            activation_bytes=in_flight * size // 2,
            in_flight=in_flight,
        ),
    )


def _links(chains: Sequence[Chain]) -> list[Link]:
    pairs = [(one, two) for chain in chains for one, two in zip(chain.stages, chain.stages[1:], strict=False)]
    pairs += [(chain.stages[-1], chains[-1].stages[0]) for chain in chains[:-1]]
    hidden = TensorSpec(name="hidden", shape=("s0", 4096), dtype="bfloat16")
    return [
        Link(
            source=source.name,
            target=target.name,
            tensors=(hidden,),
            gradient=("hidden",) if source.has_backward else (),
            num_bytes=16 << 20,
        )
        for source, target in pairs
    ]


def _shared(chain: Chain) -> SharedValue:
    names = tuple(stage.name for stage in chain.stages)
    return SharedValue(name="causal_mask", stages=names, choice="recompute", recompute_s=2e-6, send_s=1.2e-5)
