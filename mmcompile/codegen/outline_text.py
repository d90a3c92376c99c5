"""The text of one layer function, and of a call of it."""

from __future__ import annotations

import textwrap
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from mmcompile.codegen.expressions import TAKEN, Expressions, comment, identifier, variable
from mmcompile.codegen.outline import NodeRun, module_paths
from mmcompile.codegen.weight_grad_inputs import Product, Tap
from mmcompile.config import Recompute
from mmcompile.ir.graph import dtype_name, info
from mmcompile.ir.sizes import shape_of

_WIDTH = 108
"""Maximum number of characters of a generated line inside a method."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTensors:
    """Tensors of a stage, and the Python expressions that read them."""

    names: Mapping[fx.Node, str]
    """Parameter or buffer node -> original name, read as `self.t[name]`."""
    constants: Mapping[fx.Node, str]
    """Constant node -> its name, read as `self.c[name]`."""
    trained: Container[str]
    """Names of the trainable parameters."""

    def expression(self, node: fx.Node) -> str:
        """Return the expression with which the stage reads a tensor, such as `self.t["name"]`."""
        return f'self.t["{self.names[node]}"]' if node in self.names else f'self.c["{self.constants[node]}"]'

    def name(self, node: fx.Node) -> str:
        """Return the name of a parameter, buffer or constant."""
        return self.names[node] if node in self.names else self.constants[node]

    def described(self, node: fx.Node) -> str:
        """Return the annotation of a tensor argument: dtype, shape, and ", trained" for a trainable parameter."""
        trains = node in self.names and self.names[node] in self.trained
        return f"{_described(node)}{', trained' if trains else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerText:
    """Writer of one run of nodes as a layer function, and of calls of that function."""

    run: NodeRun
    tensors: StageTensors
    products: tuple[Product, ...]
    """Products whose weight gradient is computed later."""

    @property
    def returned(self) -> tuple[fx.Node, ...]:
        """Values that the layer function returns: those read outside it, and those that deferred weight gradients need."""
        kept = (product.x for product in self.products if product.x_tap is None)
        return (
            *self.run.outputs,
            *dict.fromkeys(x for x in kept if x not in self.run.inputs and x not in self.run.outputs),
        )

    def function(self, name: str, prefix: str, serves: Sequence[str]) -> str:
        """Return the source code of the layer function.

        Args:
            name: name of the function.
            prefix: module path of the layer, left out of parameter names: `layers.3.q.weight` is named after `q.weight`.
            serves: paths of all layers that the function computes, listed in its docstring; they have the same structure.
        """
        own, arguments = self._arguments(prefix)
        lines = [f"def {name}(", *(f"    {argument}," for argument in arguments), "):"]
        listed = textwrap.fill(", ".join(serves), 110)
        lines.append(textwrap.indent(f'"""{listed}"""', "    "))
        lines += (f"    {line}" for line in self._body(own, prefix))
        lines.append(f"    return ({', '.join(map(variable, self.returned))},)")
        return "\n".join(lines) + "\n"

    def call(self, function: str, recompute: Recompute) -> Iterator[str]:
        """Yield the lines that call the layer function named `function` on this layer's values.

        The function may have been written for another layer with equal code. `recompute` selects the activations that its
        backward computes again.
        """
        for tap in self._taps:
            yield f"{tap.name} = self.tap([{', '.join(tap.sizes)}], {tap.node.meta['val'].dtype})"
        first = [function] if recompute == "none" else [f'"{recompute}"', function]
        lines = [*first, *(["self.device"] if self.run.needs_device else []), *map(self.tensors.expression, self._held)]
        given = [variable(node) for node in self.run.inputs] + [tap.name for tap in self._taps]
        names = ", ".join(map(variable, self.returned))
        target = f"({names},)" if len(self.returned) == 1 else names
        start = f"{target} = self.{'run' if recompute == 'none' else 'recompute'}("
        one = f"{start}{', '.join([*lines, *given])})"
        if len(one) <= _WIDTH:
            yield one
        else:
            yield start
            yield from (f"    {line}," for line in lines)
            if given:
                yield from textwrap.wrap(
                    f"{', '.join(given)},", _WIDTH, initial_indent="    ", subsequent_indent="    "
                )
            yield ")"
        for product in self.products:
            tensors = (product.weight, product.bias)
            weight, bias = ("None" if node is None else self.tensors.expression(node) for node in tensors)
            x = product.x_tap.name if product.x_tap is not None else variable(product.x)
            again = ", recomputed=True" if product.x_tap is not None else ""
            yield f"self.defer({product.tap.name}, {x}, {weight}, {bias}{again})"

    @property
    def _taps(self) -> tuple[Tap, ...]:
        found = (tap for product in self.products for tap in (product.tap, product.x_tap))
        return tuple(dict.fromkeys(tap for tap in found if tap is not None))

    @property
    def _held(self) -> tuple[fx.Node, ...]:
        return tuple({self.tensors.expression(node): node for node in reversed(self.run.tensors)}.values())[::-1]

    def _arguments(self, prefix: str) -> tuple[dict[str, str], list[str]]:
        """Return (expression of a tensor in the stage -> its name in the layer function, all arguments with annotations)."""
        taken = {*TAKEN, *map(variable, self.run.nodes), *map(variable, self.run.inputs)}
        arguments = ['device: "device"'] if self.run.needs_device else []
        own: dict[str, str] = {}
        for node in self._held:
            # A part of a parameter is called like the whole: which one it is does not matter inside.
            name = identifier(self.tensors.name(node).partition("@")[0].removeprefix(f"{prefix}."))
            while name in taken:
                name += "_"
            taken.add(name)
            own[self.tensors.expression(node)] = name
            arguments.append(f'{name}: "{self.tensors.described(node)}"')
        arguments += (f'{variable(node)}: "{_value_described(node)}"' for node in self.run.inputs)
        arguments += (f'{tap.name}: "{_described(tap.node)}, tap"' for tap in self._taps)
        return own, arguments

    def _body(self, own: Mapping[str, str], prefix: str) -> Iterator[str]:
        def name(node: fx.Node) -> str:
            return own[self.tensors.expression(node)] if node.op == "get_attr" else variable(node)

        def cut(node: fx.Node) -> str:
            return f"{name(node)}.detach()" if node.op == "get_attr" else variable(node)

        plain, detached = Expressions(name=name, device="device"), Expressions(name=cut, device="device")
        taps = {product.tap.node: product.tap for product in self.products}
        x_taps = {product.x: product.x_tap for product in self.products if product.x_tap is not None}
        last_use = {source: node for node in self.run.nodes for source in node.all_input_nodes}
        freed = set(self.run.nodes) - set(self.returned)
        for _, nodes in module_paths(self.run.nodes):
            yield f"# {comment(nodes[0], prefix)}"
            dead: list[str] = []
            for node in nodes:
                made = f"tapped({detached.call(node)}, {taps[node].name})" if node in taps else plain.call(node)
                yield f"{variable(node)} = {f'handed({made}, {x_taps[node].name})' if node in x_taps else made}"
                read = dict.fromkeys([*node.all_input_nodes, node])
                dead += [variable(value) for value in read if value in freed and last_use.get(value, node) is node]
            if dead:
                yield f"del {', '.join(dead)}"


def _described(node: fx.Node) -> str:
    return f"{dtype_name(node.meta['val'].dtype)} [{', '.join(map(str, shape_of(node)))}]"


def _value_described(node: fx.Node) -> str:
    if "size" in node.meta:
        return f"size {node.meta['size']}"
    gradient = node.op == "call_function" and info(node).carries_gradient
    return f"{_described(node)}{', gradient' if gradient else ''}"
