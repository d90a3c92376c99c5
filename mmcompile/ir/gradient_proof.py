"""Proof of a capture: gradients take the paths that they take in the model itself; with weights, they are the same numbers.

While a model is traced, autograd records its forward on fake tensors as it would in training. That record is independent of the
graph: of the rewriting of in-place ops, of inlined `no_grad` regions, and of what was taken for a constant.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from mmcompile.errors import CaptureError
from mmcompile.ir.capture_errors import line_of_node
from mmcompile.ir.compat import VALUES_NEEDED, FakeTensorMode, enable_python_dispatcher, mkldnn_flags

_SHOWN = 6
_GRAPHED = ("torch._library.autograd", "mmcompile.ir.nodes")
"""Modules of autograd functions that a graph keeps as an op, with its backward: those of torch's custom ops, and our own."""
_MOVES = re.compile(
    r"(?:\w+::)*(AccumulateGrad|CopySlices|_WithValue|CopyBackwards|AsStrided|Alias|Clone|Expand|(Unsafe|Reshape)?View|ToCopy|T|Transpose"
    r"|Permute|Squeeze|Unsqueeze|(Select|Slice|Diagonal)(Scatter)?|Split\w*|Unsafe\w*|Unbind|Fill|Zero)(Backward\d*)?"
)
"""Autograd nodes that move or copy numbers. The rewriting of in-place ops adds and removes them."""
_UNHIDDEN = re.compile(
    r"(Mm|Addmm|Bmm|Baddbmm|Mv|Dot|Convolution|ScaledDotProduct\w*|Native\w*Norm|Embedding)Backward\d*"
)
"""Nodes that are not written into a view: `CopySlices` hides the node of an op that is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientPaths:
    """Paths of the gradient of a loss, as autograd recorded them: from op to op, and to parameters."""

    steps: Mapping[str, frozenset[str]]
    """Ops, numbered by kind in order of execution (`Addmm 0`), and `loss` -> what the gradient reaches from it through views and
    copies alone: ops, and names of parameters."""
    coarse: bool
    """The steps are products, norms and lookups only: the model writes into views, and autograd hides other ops behind that."""

    @property
    def trained(self) -> frozenset[str]:
        """Names of the parameters that get a gradient."""
        return frozenset[str]().union(*self.steps.values()) - self.steps.keys()


def gradient_paths(loss: Tensor, named: Mapping[str, Tensor], *, coarse: bool | None = None) -> GradientPaths:
    """Return the paths that autograd recorded for a loss.

    Args:
        loss: result of a forward that autograd recorded.
        named: name -> parameter, as the forward used them.
        coarse: whether steps are products, norms and lookups only; None: if that is necessary.

    Raises:
        CaptureError: the backward runs Python that a graph does not have: an own `torch.autograd.Function`.
    """
    names = {id(parameter): name for name, parameter in named.items()}
    recorded = list(_recorded(loss))
    if coarse is None:
        coarse = any(step.name() == "torch::autograd::CopySlices" for step in recorded)
    trained: set[Node] = set()  # what leads to a parameter: some models ask for gradients of their inputs too
    for step in recorded:
        _check_not_python(step)
        if id(getattr(step, "variable", None)) in names or any(source in trained for source, _ in step.next_functions):
            trained.add(step)
    labels: dict[Node, str] = {}
    numbers = Counter[str]()
    for step in sorted(trained, key=lambda step: step._sequence_nr()):  # pyright: ignore
        name, variable = step.name(), getattr(step, "variable", None)
        if variable is not None and id(variable) in names:
            labels[step] = names[id(variable)]
        elif _UNHIDDEN.fullmatch(name) if coarse else not _MOVES.fullmatch(name):
            kind = name.partition("Backward")[0]
            labels[step] = f"{kind} {numbers[kind]}"
            numbers[kind] += 1
    reached: dict[Node | None, frozenset[str]] = {None: frozenset()}
    for step in recorded:
        sources = [source for source, _ in step.next_functions]
        reached[step] = frozenset().union(*({labels[s]} if s in labels else reached[s] for s in sources))
    steps = {labels[step]: reached[step] for step in labels if getattr(step, "variable", None) is None}
    first = loss.grad_fn
    steps["loss"] = frozenset({labels[first]}) if first in labels else reached[first]
    return GradientPaths(steps=steps, coarse=coarse)


def _check_not_python(step: Node) -> None:
    own = type(step)._forward_cls if isinstance(step, BackwardCFunction) else None  # type: ignore[attr-defined]  # pyright: ignore
    if own is not None and own.__module__ not in _GRAPHED:
        raise CaptureError(
            f"the model uses the autograd function {own.__module__}.{own.__qualname__}, whose backward is Python that a "
            "graph does not have, so gradients would be wrong; express it with tensor ops (a straight-through estimator: "
            "`x + (hard(x) - x).detach()`)"
        )


def _recorded(loss: Tensor) -> Generator[Node]:
    """Each step of the backward of a loss, after all that it leads to."""
    waiting = [(loss.grad_fn, False)] if loss.grad_fn is not None else []
    seen: set[Node] = set()
    while waiting:
        node, expanded = waiting.pop()
        if expanded:
            yield node
        elif node not in seen:
            seen.add(node)
            waiting.append((node, True))
            waiting += [(source, False) for source, _ in node.next_functions if source is not None]


def check_gradients(module: fx.GraphModule, wanted: GradientPaths) -> None:
    """Run a captured graph on fake tensors, and compare the paths of its gradient with those of the model.

    Args:
        module: captured graph; parameters are attributes under their original names.
        wanted: paths recorded in the model's own forward; for tied parameters, under any of the names.

    Raises:
        CaptureError: parameters get a gradient on one side only, or by other paths.
    """
    loss, named = _fake_loss(module)
    got = gradient_paths(loss, named, coarse=wanted.coarse)
    if got == wanted:
        return
    parts: list[str] = []
    for what, names in (
        ("none in the graph", wanted.trained - got.trained),
        ("one in the graph only", got.trained - wanted.trained),
    ):
        if names:
            paths = sorted({_path(module, name) for name in names})
            parts.append(f"{what}: {_some(names)} (read by {', '.join(paths[:3])})")
    if parts:
        difference = f"parameters that get a gradient in the model and {'; '.join(parts)}"
    else:
        difference = f"all parameters get a gradient, but by other paths: {_other_paths(got, wanted)}"
    raise CaptureError(
        f"the captured graph does not train what the model trains; {difference}; nothing was planned or trained. Please report "
        "the model and the batch"
    )


def _other_paths(got: GradientPaths, wanted: GradientPaths) -> str:
    """The first steps from which, or to which, the gradient goes in the model only or in the graph only."""
    for where, ours, theirs in (("the model", wanted, got), ("the graph", got, wanted)):
        for step, reached in ours.steps.items():
            if lost := reached - theirs.steps.get(step, frozenset()):
                return f"from {step} to {_some(lost)} (before: {_some(_parameters_before(lost, ours))}) in {where} only"
    return "none"


def _parameters_before(steps: Collection[str], paths: GradientPaths) -> frozenset[str]:
    """The parameters that the gradient reaches first from some steps."""
    seen, here = set(steps), frozenset(steps)
    while here and here <= paths.steps.keys():
        here = frozenset[str]().union(*(paths.steps[step] for step in here)) - seen
        seen |= here
    return here - paths.steps.keys()


def _some(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _path(module: fx.GraphModule, parameter: str) -> str:
    users = (user for node in module.graph.nodes if node.target == parameter for user in node.users)
    return next((str(user.meta.get("module_path")) for user in users), "") or "the model's own forward"


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientCheck:
    """Difference between loss and gradients of a graph and of its model in eager mode, on one batch."""

    loss: float
    """|graph - eager| / |eager|."""
    gradient: float
    """Largest over parameters of max|graph - eager| / max|eager|; max|eager| counts as at least 1% of the model's largest."""
    worst: str
    """Name of the parameter with the largest difference."""
    num_parameters: int
    """Number of parameters compared."""

    def __str__(self) -> str:
        worst = f" ({self.worst})" if self.worst else ""
        return (
            f"loss differs from eager by {self.loss:.1e}, gradients of {self.num_parameters} parameters by at most "
            f"{self.gradient:.1e}{worst}"
        )

    def check(self, dtype: torch.dtype) -> None:
        """Raise CaptureError if the difference is beyond the rounding of a dtype."""
        tolerance = max(math.sqrt(torch.finfo(dtype).eps) / 10, 1e-9)
        if not (self.loss <= tolerance and self.gradient <= tolerance):
            raise CaptureError(
                f"the captured graph does not compute what the model computes: {self}; wanted at most {tolerance:.0e}. Please "
                "report the model and the batch"
            )


def gradient_difference(
    model: nn.Module, eager: Callable[[], Tensor], graph: Callable[[], Sequence[Tensor]]
) -> GradientCheck:
    """Run a model and its graph forward and backward, from the same seed, and compare; gradients and buffers stay as they were.

    Args:
        model: real weights.
        eager: runs the model on the batch and returns its loss.
        graph: runs the graph on the batch and returns (loss,) or (loss sum, number of tokens).
    """
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def run(forward: Callable[[], Sequence[Tensor]]) -> tuple[float, dict[str, Tensor]]:
        torch.manual_seed(0)
        results = forward()
        loss = results[0] if len(results) == 1 else results[0] / results[1]
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True, materialize_grads=True)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        return float(loss.detach()), dict(zip(named, gradients, strict=True))

    with torch.random.fork_rng(), torch.enable_grad():
        (wanted, theirs), (loss, ours) = run(lambda: (eager(),)), run(graph)
    largest = max((float(tensor.abs().max()) for tensor in theirs.values()), default=0.0)
    errors = {
        name: float((ours[name] - tensor).abs().max()) / max(float(tensor.abs().max()), largest / 100, 1e-30)
        for name, tensor in theirs.items()
    }
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name], default="")
    return GradientCheck(
        loss=abs(loss - wanted) / max(abs(wanted), 1e-30),
        gradient=errors.get(worst, 0.0),
        worst=worst,
        num_parameters=len(named),
    )


class _OnFakes(fx.Interpreter):
    """Interpreter of a graph whose parameters, buffers and constants are fake tensors of the same shapes."""

    def __init__(self, module: fx.GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.extra_traceback = False
        self.mode = mode
        self.fakes: dict[str, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        try:
            result, traced = super().run_node(n), n.meta.get("val")
        except VALUES_NEEDED as error:
            raise CaptureError(
                f"the size of {n.target} ({line_of_node(n)}) depends on values that are not "
                "known during capture; compute the mask or the count from inputs alone, or mask by multiplication"
            ) from error
        if n.op != "call_function" or not isinstance(result, Tensor) or not isinstance(traced, Tensor):
            return result
        # What replaced an in-place op may have other strides than the written tensor, and `linear` is other ops for them.
        shape, strides = traced.shape, traced.stride()
        if result.stride() == strides or 0 in strides:
            return result
        return torch.empty_strided(shape, strides, dtype=result.dtype, device=result.device).copy_(result)

    def fetch_attr(self, target: str) -> Any:
        if target not in self.fakes:
            value: object = super().fetch_attr(target)
            if not isinstance(value, Tensor):
                return value
            self.fakes[target] = self.fake(value)
        return self.fakes[target]

    def fake(self, value: Tensor) -> Tensor:
        device = "cpu" if value.device.type == "meta" else value.device
        with self.mode:
            made = torch.empty(tuple(value.shape), dtype=value.dtype, device=device)
        return made.requires_grad_(isinstance(value, nn.Parameter) and value.requires_grad)


def _fake_loss(module: fx.GraphModule) -> tuple[Tensor, dict[str, Tensor]]:
    runner = _OnFakes(module, FakeTensorMode())
    values = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    inputs = [runner.fake(value) if isinstance(value, Tensor) else value for value in values]
    with runner.mode, enable_python_dispatcher(), mkldnn_flags(allow_tf32=None), torch.enable_grad():
        results = runner.run(*inputs)
    return results[0], runner.fakes
