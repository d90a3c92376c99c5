"""Every check of one family: graph against eager on four batches, with parts frozen, its components, and a step of the engine."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from support.graphs.split import even_plan, run_split
from support.oracles.eager import Outcome, difference, eager_outcome, errors, graph_outcome, misfit

import mmcompile as mm
from mmcompile.codegen.program_cache import Patterns
from mmcompile.errors import MMCompileError
from mmcompile.ir.capture import Capture, capture
from mmcompile.ir.graph import ModelGraph
from mmcompile.passes.capture_pipeline import annotated
from mmcompile.runtime.executor import executor
from zoo import Batch, Family
from zoo.expected import PATHS, edges_of, kinds_of
from zoo.free_sizes import free_batches
from zoo.refused import REFUSED

TOLERANCE = 1e-5
UNSTABLE = 1e-4
"""Where eager's own gradient of a parameter changes by more than `TOLERANCE` when the weights change in the last bit, as sums of
a recurrence in float32 do that cancel, the graph's may differ by as much as that, but not by more than this."""
LONGER_TEXT = 9
"""Tokens added for the check of longer text."""
FREE, WARM_UP, COMPARED = 20, 8, 3
"""Batches of free sizes: how many, how many of them are given to `warm_up`, and how many of the last are compared with eager."""
MOST_CAPTURES = 6
"""Captures after which no more are counted."""
COLUMNS = {
    "captured batch": "captured_batch",
    "other values": "other_values",
    "longer text": "longer_text",
    "other size": "other_size",
    "captures for 20 free batches": "free",
    "parts frozen": "frozen",
    "engine step": "engine",
}
"""Column of the matrix -> field of a `Row` with its check."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A batch that was run through a captured graph and through the eager model."""

    ok: bool
    misfit: str
    """Why the batch needed a new graph (another bucket): other `sizes` or `values read`; empty if it did not."""
    text: str
    """`identical`, or the differences."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the matrix: a family that was captured, or was refused, or failed."""

    family: str
    mode: str = ""
    nodes: int = 0
    capture_s: float = 0.0
    components: tuple[tuple[str, int], ...] = ()
    """Name and number of layers."""
    unexpected: str = ""
    """How components and edges differ from those in `zoo.expected`; empty if they do not."""
    dynamic: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Input and its dims that may vary without a new capture."""
    captured_batch: Check | None = None
    other_values: Check | None = None
    """The captured sizes with other tokens, pixels and sounds."""
    longer_text: Check | None = None
    """The captured samples and media, with more tokens."""
    other_size: Check | None = None
    """More samples, longer text and, where the model takes it, more media a sample."""
    free: Check | None = None
    """Twenty batches of free sizes: how many captures they need, and the last ones against eager."""
    why_captures: tuple[str, ...] = ()
    """Reason for each of these captures after the first, with the line of Python that decided."""
    frozen: Check | None = None
    """The captured batch, captured anew with parts of the model frozen: the first of `freezings` that differs, if any."""
    engine: Check | None = None
    """A step of SGD in the engine, by a plan made for one device, against one of eager: loss and updated parameters."""
    reasons: tuple[str, ...] = ()
    """Why better modes do not hold."""
    refusal: str = ""
    """Message of the error with which capture, plan or engine refused the family; empty if none did."""
    failure: str = ""
    """What ended the process that checked the family; empty if nothing did."""

    @property
    def checks(self) -> dict[str, Check]:
        """Column -> check, of the checks that were made."""
        made = {column: getattr(self, name) for column, name in COLUMNS.items()}
        return {column: check for column, check in made.items() if check is not None}

    @property
    def passed(self) -> bool:
        """True if the family is right in every column."""
        return len(self.checks) == len(COLUMNS) and not self.wrong and not self.unexpected

    @property
    def refused(self) -> bool:
        """True if the family is refused with the message that `zoo.refused` expects."""
        expected = REFUSED.get(self.family)
        return expected is not None and re.search(expected, self.refusal) is not None

    @property
    def wrong(self) -> tuple[str, ...]:
        """What differs from eager, and refusals and failures that are not expected."""
        failed = [f"{column}: {check.text}" for column, check in self.checks.items() if not check.ok]
        if self.refusal and not self.refused:
            failed.append(f"refused, unexpectedly: {self.refusal}")
        return (*failed, *((self.failure,) if self.failure else ()))


def check_family(family: Family) -> Row:
    """Capture a family, and make all checks until one is refused."""
    model = family.build()
    batch, second = family.batch(), family.second_batch()
    longer = replace(family.first, length=family.first.length + LONGER_TEXT)
    row = Row(family=family.name)
    started = time.perf_counter()
    try:
        captured = capture(model, batch, dynamic=second)
        graph = captured.graph
        row = replace(
            row,
            capture_s=time.perf_counter() - started,
            mode=graph.mode.value,
            nodes=sum(node.op == "call_function" for node in graph.module.graph.nodes),
            components=tuple((component.name, len(component.layers)) for component in graph.components),
            unexpected=_unexpected(family.name, graph),
            dynamic=tuple((name, tuple(dims)) for name, dims in graph.dynamic.items()),
            reasons=(*graph.reasons, *((graph.loss.reason,) if graph.loss.reason else ())),
        )
        row = replace(row, captured_batch=_check(model, captured, batch, batch))
        row = replace(row, other_values=_check(model, captured, batch, family.draw(family.first, seed=7)))
        row = replace(row, longer_text=_check(model, captured, batch, family.draw(longer, seed=8)))
        row = replace(row, other_size=_check(model, captured, batch, second))
        free, reasons = _free(family, model, captured, batch)
        row = replace(row, free=free, why_captures=reasons, frozen=_frozen(model, graph, batch))
        return replace(row, engine=_engine_step(family, batch))
    except MMCompileError as error:
        return replace(row, refusal=str(error))


def _check(model: torch.nn.Module, captured: Capture, batch: Batch, other: Batch) -> Check:
    """Run `other` through the graph captured on `batch` if it holds, else through a new one."""
    why = misfit(model, captured, other)
    if why is not None:
        captured = capture(model, other, dynamic=batch, reference=captured.graph.components)
    ok, text = _verdict(model, *_both(model, captured, other), other)
    return Check(ok=ok, misfit=why or "", text=text)


def _free(family: Family, model: torch.nn.Module, captured: Capture, batch: Batch) -> tuple[Check, tuple[str, ...]]:
    """Count the captures that batches of free sizes need, and compare the last ones with eager, stage by stage."""
    batches = free_batches(family, FREE)
    first = annotated(captured)
    patterns = Patterns(model, even_plan(first.graph, {}), first, batch)
    patterns.warm_up(batches[:WARM_UP])
    ok, worst = True, "identical"
    for index, other in enumerate(batches):
        prepared = patterns.prepare(other)
        if patterns.num_captures > MOST_CAPTURES:
            return Check(ok=True, misfit="", text=f"{patterns.num_captures} for {index + 1}"), tuple(patterns.reasons)
        if index < FREE - COMPARED:
            continue
        torch.manual_seed(0)
        got = run_split(model, prepared.programs, {**prepared.values, **prepared.sizes}).outcome
        torch.manual_seed(0)
        one, text = _verdict(model, got, eager_outcome(model, other), other)
        ok, worst = ok and one, text if not one or worst == "identical" else worst
    return Check(ok=ok, misfit="", text=f"{patterns.num_captures}, {worst}"), tuple(patterns.reasons)


def _verdict(model: torch.nn.Module, got: Outcome, eager: Outcome, batch: Batch) -> tuple[bool, str]:
    """Whether a graph is as eager, and the text of the cell."""
    found = difference(got, eager)
    if found.identical:
        return True, "identical"
    if found.within(TOLERANCE) or found.loss > TOLERANCE or not found.within(UNSTABLE):
        return found.within(TOLERANCE), str(found)
    own = errors(_outcome_of_last_bits(model, batch), eager)
    ok = all(error <= max(TOLERANCE, own[name]) for name, error in errors(got, eager).items())
    return ok, f"{found}; eager's own by {own[found.worst]:.1e} when weights change in the last bit"


def _outcome_of_last_bits(model: torch.nn.Module, batch: Batch) -> Outcome:
    """Eager's outcome with each weight moved up or down by its last bit, or not moved; the weights are restored."""
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + torch.randint_like(parameter, -1, 2) * torch.finfo(parameter.dtype).eps)
    torch.manual_seed(0)
    outcome = eager_outcome(model, batch)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), kept, strict=True):
            parameter.copy_(value)
    return outcome


def _both(model: torch.nn.Module, captured: Capture, batch: Batch) -> tuple[Outcome, Outcome]:
    """The graph's outcome and eager's, from the same random numbers."""
    torch.manual_seed(0)
    got = graph_outcome(model, captured, batch)
    torch.manual_seed(0)
    return got, eager_outcome(model, batch)


def _unexpected(name: str, graph: ModelGraph) -> str:
    """How the components of a family differ from the expected ones; empty if they do not."""
    paths = PATHS.get(name)
    if paths is None:
        return "zoo.expected has no line for it"
    edges, kinds = {(a, b) for a, b, _ in graph.edges}, {c.name: c.kind.value for c in graph.components}
    if (edges, kinds) == (edges_of(paths), kinds_of(paths)):
        return ""
    found = ", ".join(f"{a} > {b}" for a, b in sorted(edges)) or ", ".join(kinds)
    return f"found {found}; expected {paths}"


def freezings(graph: ModelGraph) -> Iterator[tuple[str, frozenset[str]]]:
    """(what is frozen, names of parameters that train): a model's front, its back, and all but its vectors.

    The front are the encoders and projectors, or half of the layers where there is one component.
    """
    specs, parts = graph.specs, [{p for layer in c.layers for p in layer.parameters} for c in graph.components]
    if len(parts) == 1:
        layers = [set(layer.parameters) for layer in graph.components[0].layers]
        parts = [set().union(*layers[: len(layers) // 2]), set().union(*layers[len(layers) // 2 :])]
    back = frozenset(specs[name].name for name in parts[-1])
    front = frozenset(specs[name].name for part in parts[:-1] for name in part) - back
    vectors = frozenset(spec.name for spec in graph.parameters if len(spec.shape) < 2)
    for what, trains in (("front", back), ("back", front), ("all but vectors", vectors)):
        if trains:
            yield what, trains


def _frozen(model: torch.nn.Module, graph: ModelGraph, batch: Batch) -> Check:
    worst, text_of_worst = -1.0, "identical"
    for what, trains in freezings(graph):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trains)
        if not model(**batch)["loss"].requires_grad:  # a tokenizer of pixels in front, whose codes have no gradient
            continue
        got, eager = _both(model, capture(model, batch), batch)
        ok, text = _verdict(model, got, eager, batch)
        if not ok:
            return Check(ok=False, misfit="", text=f"{what} frozen: {text}")
        if text != "identical" and (error := difference(got, eager).gradient) > worst:
            worst, text_of_worst = error, text
    model.requires_grad_(True)
    return Check(ok=True, misfit="", text=text_of_worst)


def _engine_step(family: Family, batch: Batch) -> Check:
    """Compare a planned step of the engine on `batch`, which counts as one sample, with one of eager."""
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    alone, model = family.build(), family.build()
    options = {"cluster": "1x1xcpu", "num_microbatches": 1, "allow_unused": True, "optimizer": sgd}
    torch.manual_seed(0)
    with mm.parallelize(model, batch, **options) as engine:
        got = engine.step([batch]).loss
        engine.pull()
    torch.manual_seed(executor._key(0, 1, 0, 0))  # as the first stage in step 1, for sample 0
    loss = alone(**batch)["loss"]
    loss.backward()
    sgd(alone.parameters()).step()
    wanted, trained = loss.item(), dict(model.named_parameters())
    moved = max((trained[name] - other).abs().max().item() for name, other in alone.named_parameters())
    if abs(got - wanted) > TOLERANCE * abs(wanted) or moved > TOLERANCE:
        return Check(ok=False, misfit="", text=f"loss {got} for {wanted}, parameters differ by {moved:.1e}")
    return Check(ok=True, misfit="", text="identical" if got == wanted and not moved else f"parameters {moved:.1e}")
