"""Table of every pass by name, and the orders in which planning and the compiler of stages run passes.

This module holds data only and does not import torch, so that `mmcompile passes` starts fast.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Literal

from mmcompile.errors import ConfigError
from mmcompile.passes.base import AnyPass, Fact, Pass

Kind = Literal["analysis", "rewrite"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PassEntry:
    """Name, module and facts of a pass, equal to those of its class but readable without importing it."""

    name: str
    """Name of the pass for users: its class name in kebab case."""
    module: str
    """Module of the pass's class, relative to `mmcompile.passes`."""
    kind: Kind
    summary: str
    """One-line description of the pass."""
    requires: tuple[Fact, ...] = (Fact.ANNOTATED,)
    ensures: tuple[Fact, ...] = ()

    @property
    def class_name(self) -> str:
        """Name of the pass's class, in camel case."""
        return "".join(part.capitalize() for part in self.name.split("-"))

    def load(self) -> type[Pass]:
        """Import the module of the pass, and return the pass's class."""
        found = getattr(importlib.import_module(f"mmcompile.passes.{self.module}"), self.class_name)
        assert issubclass(found, Pass)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderedPass:
    """One line of the orders `PLANNING` and `STAGES`: a pass, when it runs, and why it runs at this position."""

    name: str
    when: str
    """Condition under which the pass runs at this position."""
    reason: str
    """Reason for the position of the pass in the order."""


OWN = "(own passes)"
"""Name, in an order, of the passes that a user gives: `mmcompile.plan(..., passes=[...])`."""
_WITH_GRADIENTS = (Fact.ANNOTATED, Fact.GRADIENT_FLOW)

_analysis = functools.partial(PassEntry, kind="analysis")
_rewrite = functools.partial(PassEntry, kind="rewrite", ensures=(Fact.ANNOTATED,))

PASSES: tuple[PassEntry, ...] = (
    _analysis(
        name="verify",
        module="verify",
        summary="checks the rules that every graph keeps; the pipeline runs it by itself",
        requires=(),
        ensures=(Fact.ANNOTATED, Fact.VERIFIED),
    ),
    _analysis(
        name="modality-dag",
        module="modality_dag",
        summary="finds components that do not depend on each other, and where they meet",
    ),
    _analysis(
        name="gradient-flow",
        module="gradient_flow",
        summary="finds the nodes through which gradient passes, and the parameters that receive one",
        ensures=(Fact.GRADIENT_FLOW,),
    ),
    _rewrite(
        name="autocast",
        module="autocast",
        summary="writes the casts of torch.autocast into the graph",
    ),
    _rewrite(
        name="bitfield-attention",
        module="masks.bitfield_attention",
        summary="turns attention under a mask into attention under one word of 64 bits a token",
    ),
    _rewrite(
        name="context-parallel",
        module="context_parallel.context_parallel",
        summary="splits the tokens of a language model over ranks",
    ),
    _rewrite(
        name="tensor-parallel",
        module="tensor_parallel.tensor_parallel",
        summary="splits the large weights of components over ranks",
        requires=_WITH_GRADIENTS,
    ),
    _rewrite(
        name="sharded-parameters",
        module="tensor_parallel.sharded_parameters",
        summary="splits the parameters of components over their replicas (FSDP)",
        requires=_WITH_GRADIENTS,
    ),
    _analysis(
        name="op-costs",
        module="cost.op_costs",
        summary="gives nodes of some ops the FLOPs that rules of your own count",
    ),
    _analysis(
        name="cost",
        module="cost.cost",
        summary="counts FLOPs, bytes, kernels and saved memory of every layer, forward and backward",
        requires=_WITH_GRADIENTS,
        ensures=(Fact.COST,),
    ),
    _analysis(
        name="recomputed",
        module="cost.recompute",
        summary="finds the layers that compute their activations again in the backward",
        requires=_WITH_GRADIENTS,
    ),
    _analysis(
        name="deferred-weights",
        module="cost.deferred_weights",
        summary="finds the products whose weight gradient can be computed after the backward (zb-h1)",
        requires=_WITH_GRADIENTS,
    ),
)

_COMMON = (
    OrderedPass(
        name="gradient-flow",
        when="always; again after every rewrite",
        reason="first: capture states what trains, every later pass reads where gradient passes, and a rewrite makes nodes "
        "without that annotation",
    ),
    OrderedPass(
        name="autocast",
        when="autocast is asked for",
        reason="first rewrite: types of values decide their bytes, and attention under words computes in the type it is given",
    ),
    OrderedPass(
        name="bitfield-attention",
        when="attention is 'bitfield'",
        reason="after autocast, which knows the model's own attention; before all that reads words of masks: costs of visible "
        "pairs, and tokens split over ranks",
    ),
    OrderedPass(
        name=OWN,
        when="passes=[...] is given",
        reason="on the whole model as one device would compute it: what they rewrite is priced, and then split over ranks like "
        "the rest",
    ),
)

PLANNING: tuple[OrderedPass, ...] = (
    *_COMMON,
    OrderedPass(
        name="modality-dag",
        when="always",
        reason="components must form a DAG before chains of stages are made of it; needs no other pass",
    ),
    OrderedPass(
        name="cost",
        when="always; once more for each split that the search considers",
        reason="last: it prices the graph that stages compute",
    ),
)
"""Passes that `mmcompile.plan` runs on a capture, in order.

The search then tries context-parallel and tensor-parallel, each with gradient-flow and cost, on copies of the graph.
"""

STAGES: tuple[OrderedPass, ...] = (
    *_COMMON,
    OrderedPass(
        name="context-parallel",
        when="ranks share tokens",
        reason="before tensor-parallel: it follows the token dim through whole layers, and its attention is then split by heads",
    ),
    OrderedPass(
        name="tensor-parallel",
        when="ranks share tensors",
        reason="before sharded-parameters: what a rank computes with is the part of a parameter that replicas share",
    ),
    OrderedPass(
        name="sharded-parameters",
        when="replicas share parameters",
        reason="last rewrite: it gathers parameters where layers read them, so all readers must be known",
    ),
    OrderedPass(
        name="recomputed",
        when="a layer is asked to recompute",
        reason="on the final graph: layers are recomputed with the collectives that they hold",
    ),
    OrderedPass(
        name="deferred-weights",
        when="the schedule is 'zb-h1'",
        reason="on the final graph: it names the products of which stages are written",
    ),
)
"""Passes that turn a captured graph into the graph from which stage programs are made, in order."""


def pass_entry(name: str) -> PassEntry:
    """Return the entry of a pass by name. Raises ConfigError that lists the existing names."""
    known = {entry.name: entry for entry in PASSES}
    if name not in known:
        raise ConfigError(f"no pass {name!r}; choose of {', '.join(known)}")
    return known[name]


def in_order(order: tuple[OrderedPass, ...], passes: dict[str, tuple[AnyPass, ...]]) -> tuple[AnyPass, ...]:
    """Return passes, given by name, in the order of a table such as `PLANNING`; names without passes are skipped."""
    names = [own.name for own in order]
    assert set(passes) <= set(names), f"{set(passes) - set(names)} have no place in the order {names}"
    return tuple(pass_ for name in names for pass_ in passes.get(name, ()))
