"""Taps: arguments of a layer function in which its backward leaves what deferred weight gradients are computed from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import sympy
from torch import fx

from mmcompile.codegen.expressions import variable
from mmcompile.codegen.outline import NodeRun
from mmcompile.ir.graph import info
from mmcompile.ir.sizes import shape_of
from mmcompile.passes.cost.deferred_weights import DeferredWeight
from mmcompile.passes.values import sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class Tap:
    """A zero argument of a layer function, with the shape of a value whose gradient it receives in the backward."""

    name: str
    node: fx.Node
    """Node of the value whose gradient the tap receives."""
    sizes: tuple[str, ...]
    """Sizes of the tap's dims, as Python expressions over the arguments of the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """A product y = x w^T + b whose weight gradient is computed after the backward, with its taps (zero arguments)."""

    tap: Tap
    """Tap that receives the gradient of the product's result."""
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    """Node of the bias; None if it does not train."""
    x_tap: Tap | None
    """Tap that receives the product's input in the backward; None if the input is kept from the forward."""

    @property
    def functions(self) -> tuple[str, ...]:
        """Names of the functions of `mmcompile.codegen.weight_grad_split` that the generated code of this product calls."""
        return ("tapped",) if self.x_tap is None else ("tapped", "handed")


def products_of(run: NodeRun, deferred: Mapping[fx.Node, DeferredWeight], *, recomputed: bool) -> tuple[Product, ...]:
    """Return the products of a run whose weight gradient can be deferred.

    A gradient can be deferred if the sizes of the product's result follow from the run's inputs.

    Args:
        recomputed: the run recomputes in its backward the values that it does not return. A product's input is taken from the
            backward only if it carries gradient (else no backward reaches it) and its sizes follow from the run's inputs;
            otherwise it is kept.
    """
    tap_of = partial(_tap, known=_known_sizes(run))
    found = []
    for node in run.nodes:
        tap = tap_of(node, suffix="tap") if node in deferred else None
        if tap is None:
            continue
        given = deferred[node]
        again = recomputed and given.x in run.nodes and given.x not in run.outputs and info(given.x).carries_gradient
        x_tap = tap_of(given.x, suffix="x_tap") if again else None
        found.append(Product(tap=tap, x=given.x, weight=given.weight, bias=given.bias, x_tap=x_tap))
    return tuple(found)


def _tap(node: fx.Node, *, suffix: str, known: Mapping[str, str]) -> Tap | None:
    found = [_size(size, known) for size in sizes(node)]
    return None if None in found else Tap(name=f"{node.name}_{suffix}", node=node, sizes=tuple(filter(None, found)))


def _known_sizes(run: NodeRun) -> dict[str, str]:
    """Return size symbol as text -> expression of this size in the arguments of the run's function, such as `x.shape[0]`."""
    known: dict[str, str] = {}
    for node in run.inputs:
        if "size" in node.meta:
            known.setdefault(node.meta["size"], variable(node))
        elif "val" in node.meta:
            for dim, size in enumerate(shape_of(node)):
                if isinstance(size, str):
                    known.setdefault(size, f"{variable(node)}.shape[{dim}]")
    return known


def _size(size: int | sympy.Expr, known: Mapping[str, str]) -> str | None:
    if isinstance(size, int) or str(size) in known:
        return known.get(str(size), str(size))
    computable = known.keys() >= {str(symbol) for symbol in size.free_symbols}
    if not computable or not size.is_polynomial() or not all(a.is_integer for a in size.atoms(sympy.Number)):
        return None
    return re.sub(r"[A-Za-z_]\w*", lambda match: known[match[0]], str(size))
