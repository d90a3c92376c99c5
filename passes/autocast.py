"""`Autocast`: pass that writes the casts of `torch.autocast` into the graph, for components that compute in bfloat16.

Parameters stay as they are. Products (linear, matmul, convolutions, attention) take their inputs in the half type; ops
that lose most precision in it (exponentials, norms, sums, losses) take their inputs in float32; ops whose operands must
have one dtype take the wider one; all other ops compute in the dtype of their inputs. Components that are not named
read values of the original dtype: a value that became narrower is cast back in front of their nodes.

Source: the op lists of torch.amp for CUDA, which are used on every device (torch/aten/src/ATen/autocast_mode.h).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx
from torch.utils import _pytree as pytree

from mmcompile.errors import ConfigError
from mmcompile.ir.copy import copied, rewritten
from mmcompile.ir.graph import ModelGraph, describe, info
from mmcompile.passes.base import Rewrite
from mmcompile.passes.values import aten_ops, computed, op_name

HALF = torch.bfloat16
"""Half type of the casts. bfloat16 rather than float16, which would need scaled losses to keep small gradients."""

_HALF = aten_ops(
    "linear matmul mm bmm mv addmm addmv addbmm baddbmm chain_matmul einsum conv1d conv2d conv3d conv_transpose1d "
    "conv_transpose2d conv_transpose3d convolution _convolution prelu scaled_dot_product_attention"
) | {"mmcompile.bitfield_attention", "mmcompile.packed_attention", "mmcompile.context_parallel_attention"}
_FULL = aten_ops(
    "acos asin cosh erfinv exp expm1 log log10 log1p log2 pow reciprocal rsqrt sinh tan softplus layer_norm "
    "native_layer_norm group_norm native_group_norm rms_norm norm linalg_vector_norm nll_loss cosine_similarity "
    "cosine_embedding_loss mse_loss l1_loss smooth_l1_loss cross_entropy_loss softmax _softmax log_softmax _log_softmax "
    "sum prod cumsum cumprod dist cdist renorm logsumexp"
)
_WIDEST = aten_ops(
    "addcdiv addcmul atan2 bilinear cat stack index_put index_add scatter_add masked_scatter where dot vdot "
    "grid_sampler tensordot"
) | {"merge_features"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Autocast(Rewrite):
    """Pass that runs components in a half type, where torch.autocast would.

    Raises (in `run`):
        ConfigError: an unknown component, or one in which nothing would be cast.
    """

    name: ClassVar[str] = "autocast"

    components: tuple[str, ...]

    def run(self, graph: ModelGraph) -> ModelGraph:
        """Return the graph with casts where torch.autocast would insert them in the given components."""
        graph.check_components(self.components, "to autocast")
        made = copied(graph)
        casts = _Casts(graph=made.module.graph)
        products = dict.fromkeys(self.components, 0)
        for node in made.calls:
            component = info(node).component
            if component in products:
                products[component] += casts.follow_rule(node)
            elif component is not None:
                casts.restore(node)
        for name, count in products.items():
            if not count:
                raise ConfigError(
                    f"autocast of {name} has no effect: it has no product of float32 tensors; leave it out"
                )
        lines = (f"{self.name}: {name} computes {count} products in bfloat16" for name, count in products.items())
        return rewritten(made, lines)


@dataclass(kw_only=True)
class _Casts:
    """Inserts dtype casts in front of the nodes of a graph, called for one node after another in graph order."""

    graph: fx.Graph

    def __post_init__(self) -> None:
        self._before: dict[fx.Node, torch.dtype] = {}
        """Original dtypes of the values whose dtype casts have changed."""
        self._stale: set[fx.Node] = set()
        """Nodes whose result dtype may differ from the recorded one, because they read a cast or a changed result."""
        self._made: dict[tuple[fx.Node, torch.dtype, str | None, int], fx.Node] = {}

    def follow_rule(self, node: fx.Node) -> bool:
        inputs = [source for source in node.all_input_nodes if _dtype(source) in (torch.float32, HALF)]
        op = op_name(node)
        wanted: torch.dtype | None = None
        if op in _HALF:
            wanted = HALF
        elif op in _FULL or op in _WIDEST and any(_dtype(source) == torch.float32 for source in inputs):
            wanted = torch.float32
        if wanted is not None:
            self._cast(node, inputs, wanted)
        self._settle(node)
        return wanted == HALF and bool(inputs)

    def restore(self, node: fx.Node) -> None:
        """Cast inputs back to the dtypes that they had before autocast, for a node of a component that runs without autocast."""
        for source in node.all_input_nodes:
            if source in self._before:
                self._cast(node, [source], self._before[source])

    def _cast(self, node: fx.Node, inputs: Iterable[fx.Node], dtype: torch.dtype) -> None:
        for source in inputs:
            if _dtype(source) == dtype:
                continue
            key = (source, dtype, info(node).component, info(node).layer)
            if key not in self._made:
                with self.graph.inserting_before(node):
                    cast = self.graph.call_function(torch.ops.aten.to.dtype, (source, dtype))
                value, symbolic = source.meta["val"].to(dtype), source.meta.get("symbolic_shape")
                self._made[key] = describe(cast, info(node).at_same_place(), value, symbolic)
            node.replace_input_with(source, self._made[key])
            self._stale.add(node)

    def _settle(self, node: fx.Node) -> None:
        if node not in self._stale:
            return
        old, tree = pytree.tree_flatten(node.meta["val"])
        new = pytree.tree_leaves(computed(node))
        changed = [
            before.to(after.dtype) if isinstance(before, torch.Tensor) else before
            for before, after in zip(old, new, strict=True)
        ]
        if any(isinstance(a, torch.Tensor) and a.dtype != b.dtype for a, b in zip(old, changed, strict=True)):
            self._stale.update(node.users)
            if isinstance(node.meta["val"], torch.Tensor):
                self._before[node] = old[0].dtype
        node.meta["val"] = pytree.tree_unflatten(changed, tree)


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None
