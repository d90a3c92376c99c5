"""`Patterns`: finds, for every batch, the stage programs that hold for it, and captures new ones when none does.

A pattern holds for a batch with the same inputs if its shapes fit (sizes may vary where the capture is symbolic) and
the host program reads the same values from it (image grids, whether the mask is all true). Everything else of the batch
is free: token ids, pixels, where placeholders stand.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import sympy
import torch
from torch import nn

from mmcompile.codegen.pipeline import with_stage_passes
from mmcompile.codegen.program import OnWarmUp, PatternPrograms, PreparedMicrobatch, RowCount
from mmcompile.codegen.stage_programs import lower
from mmcompile.codegen.token_shards import local_tokens, shard_inputs
from mmcompile.errors import BatchError, CaptureError
from mmcompile.ir.capture import Capture, capture, differing_dims
from mmcompile.ir.capture_errors import Mismatch
from mmcompile.ir.graph import dtype_name
from mmcompile.ir.inputs import FlatBatch, completed
from mmcompile.ir.replay.hole_sites import HoleSites
from mmcompile.ir.replay.learned_capture import capture_learned
from mmcompile.ir.replay.learning import HOLE_PREFIX, Example, Learner, ReplayedHoles
from mmcompile.ir.sizes import Shape, evaluate
from mmcompile.ir.stored.capture_store import CaptureStore, LearnedRecord
from mmcompile.ir.tensor_shard import TensorShard
from mmcompile.passes.base import AnyPass
from mmcompile.passes.capture_pipeline import WORDS, annotated
from mmcompile.passes.context_parallel.token_axis import LOCAL_TOKENS
from mmcompile.passes.values import sizes as sizes_of
from mmcompile.planner.plan.plan import Plan

Key = tuple[object, ...]
OnCapture = Callable[[int, str], None]
"""Function called before a capture: (captures so far, reason for which none of them holds, with the line of Python)."""
FillElsewhere = Callable[[Learner, LearnedRecord, FlatBatch], dict[str, torch.Tensor] | None]
"""Function (learner, record, batch) -> values of the holes of the record's capture; None if the batch must be replayed here."""
_EXAMPLES = 3
"""Number of batches of a family that a warm-up learns from, beside those that were captured."""
_BEFORE_LEARNING = 2
"""Captures of single batches before one is learned: the second has symbolic sizes, which hold for many data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pattern:
    capture: Capture = field(repr=False)
    programs: PatternPrograms
    link_shapes: Mapping[str, Shape]
    context_parallel: int
    words: Mapping[str, str]
    """Input with one rank's mask words, int64, one a token (`cp_words`) -> input with those of all tokens (`attention_words`)."""

    def match(self, batch: FlatBatch) -> PreparedMicrobatch:
        """Return the batch prepared for the programs. Raises Mismatch if its sizes, or what Python computes from it, differ."""
        tensors = self.capture.filled(batch)
        bound = self.capture.bound(batch, tensors)
        if bound is None:
            raise Mismatch(self.capture.sizes.misfit(tensors))
        sizes = self.capture.sizes.size_inputs(bound)
        host = self.capture.host_result({**tensors, **sizes})
        if host is None:
            raise Mismatch("the model's Python reads other values from it")
        ports = [port for program in self.programs.programs.values() for port in program.inputs]
        values = {**tensors, **host.values}
        if self.context_parallel > 1:
            words = {name: host.values[name] for name in self.words.values()}
            values |= shard_inputs(words, self.words, self.context_parallel)
            bound[LOCAL_TOKENS] = local_tokens(host.values[WORDS].shape[1], self.context_parallel)
        return PreparedMicrobatch(
            programs=self.programs,
            sizes={port.name: sizes[port.name] for port in ports if port.kind == "size"},
            values={port.name: values[port.name] for port in ports if port.kind in ("root", "host")},
            link_shapes={
                name: tuple(_number(size, bound) for size in shape) for name, shape in self.link_shapes.items()
            },
            num_tokens=host.num_tokens,
            row_counts=self._row_counts(bound),
        )

    def _row_counts(self, bound: Mapping[sympy.Symbol, int]) -> dict[str, RowCount]:
        """Return those values between stages whose rows follow from the rows of batch inputs, and from sizes samples share."""
        inputs, shared = self._leading_symbols()
        found: dict[str, RowCount] = {}
        for name, shape in self.link_shapes.items():
            free: set[Any] = shape[0].free_symbols if shape and isinstance(shape[0], sympy.Expr) else set()
            if free and free <= inputs.keys() | shared:
                own = {symbol: given for symbol, given in inputs.items() if symbol in free}
                others = {symbol: bound[symbol] for symbol in free - own.keys()}
                found[name] = RowCount(expression=cast("sympy.Expr", shape[0]), inputs=own, sizes=others)
        return found

    def _leading_symbols(self) -> tuple[dict[sympy.Symbol, tuple[str, sympy.Expr]], set[sympy.Symbol]]:
        """Return the symbols that follow from the rows of a batch input (`RowCount.inputs`), and those of all its other dims."""
        inputs: dict[sympy.Symbol, tuple[str, sympy.Expr]] = {}
        shared: set[Any] = set()
        for name, shape in self.capture.sizes.inputs.items():
            if name.startswith(HOLE_PREFIX):  # its rows are not those of samples
                continue
            for dim, size in enumerate(shape):
                if isinstance(size, sympy.Expr) and dim:
                    shared |= size.free_symbols
                elif isinstance(size, sympy.Expr) and len(size.free_symbols) == 1:
                    (symbol,) = cast("set[sympy.Symbol]", size.free_symbols)
                    inputs[symbol] = name, size
        return inputs, shared - inputs.keys()


@dataclass(slots=True)
class _Family:
    """Patterns (captures with their programs) of batches with the same input names, dtypes, and values that are no tensors."""

    patterns: list[_Pattern] = field(default_factory=list)
    examples: list[FlatBatch] = field(default_factory=list)
    """Batches that were captured. Dims in which later ones differ from the first are made symbolic, if possible."""
    learner: Learner | None = None
    """Learns one capture for all batches, once captures of single batches do not hold for the next; None before."""
    records: list[LearnedRecord] = field(default_factory=list)
    """Records of the learned captures, for the store."""
    seen: set[str] = field(default_factory=set)
    """Digests of records that were made here, or found in the store."""
    varying: dict[str, set[int]] = field(default_factory=dict)
    """Input name -> dims in which any later batch differed from the first: candidates for symbolic sizes."""

    def note(self, batch: FlatBatch) -> None:
        self.examples.append(batch)
        for name, dims in differing_dims(batch, self.examples[0]).items():
            self.varying.setdefault(name, set()).update(dims)


class Patterns:
    """Stage programs of one model under one plan, by pattern; a new pattern is captured when a batch fits no earlier one.

    Args:
        model: model to capture; its parameters' values are not read.
        plan: assignment of layers to stages.
        first: the capture the plan was made from; its layer order holds for all later ones.
        batch: batch on which `first` was captured.
        on_capture: called before each later capture; by default a line is logged.
        passes: passes of the user, run on each capture (`mmcompile.passes.catalog.STAGES`).
        store: captures of earlier runs, taken in place of new ones; None for none.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        first: Capture,
        batch: Mapping[str, Any],
        on_capture: OnCapture | None = None,
        passes: Sequence[AnyPass] = (),
        store: CaptureStore | None = None,
    ) -> None:
        self._model = model
        self._plan = plan
        self._components = first.graph.components
        self._families: dict[Key, _Family] = {}
        self._on_capture = on_capture or _logged
        self._passes = passes
        self._store = store
        self._learned: list[tuple[_Pattern, LearnedRecord, Learner]] = []
        self._sites = HoleSites()
        """Places where batches of any family were found to differ."""
        self._elsewhere: FillElsewhere | None = None
        self._validated: set[str] = set()
        """Kinds of sharded layers that a check found equal to the unsharded layer."""
        self._shards: Mapping[str, TensorShard] | None = None
        """Shardings of parameters in the first capture."""
        self.num_captures = 1
        self.reasons: list[str] = []
        """Reason for each later capture, with the line of Python that decided."""
        batch = completed(model, batch)
        self._families[_key(batch)] = _Family(patterns=[self._lowered(first, batch)], examples=[batch])

    @property
    def model(self) -> nn.Module:
        """Model that is captured."""
        return self._model

    @property
    def learns(self) -> bool:
        """True once a capture was learned, whose microbatches are replayed."""
        return bool(self._learned)

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Return every parameter and buffer of the model under every name it has."""
        named = dict(self._model.named_parameters(remove_duplicate=False))
        return {**named, **dict(self._model.named_buffers(remove_duplicate=False))}

    def captured(self) -> tuple[PatternPrograms, ...]:
        """Return the stage programs of every graph captured so far, one item a graph."""
        return tuple(pattern.programs for family in self._families.values() for pattern in family.patterns)

    def prepare(self, batch: Mapping[str, Any]) -> PreparedMicrobatch:
        """Match a batch with a pattern, capturing a new one if no pattern holds.

        Raises:
            BatchError: the model refuses the batch.
            CaptureError: the model cannot be captured on it.
        """
        batch = completed(self._model, batch)
        family = self._family(batch)
        try:
            return self._matched(batch, family)
        except Mismatch as error:
            reason = str(error)
        learns = self._sites or family.learner is not None or len(family.patterns) >= _BEFORE_LEARNING
        if learns and (learned := self._learn(batch, family, reason)) is not None:
            return learned
        pattern = self._capture(batch, family, reason)
        try:
            prepared = pattern.match(batch)
        except Mismatch as error:
            raise CaptureError(
                f"a graph does not hold for the batch it was captured on ({error}); please report the model and the batch"
            ) from error
        family.patterns.append(pattern)
        return prepared

    def warm_up(self, batches: Sequence[Mapping[str, Any]], on_capture: OnWarmUp | None = None) -> None:
        """Capture what batches need that no pattern holds for; what holds for all of a family is learned at once.

        A batch that the model refuses is left out; `prepare` raises the error.
        """
        known = self._on_capture
        waiting: dict[Key, list[FlatBatch]] = {}
        for given in batches:
            with contextlib.suppress(BatchError):
                batch = completed(self._model, given)
                try:
                    self._matched(batch, self._family(batch))
                except Mismatch:
                    waiting.setdefault(_key(batch), []).append(batch)
        total = self.num_captures + len(waiting)
        if on_capture is not None:
            self._on_capture = lambda count, reason: on_capture(count + 1, max(total, count + 1), reason)
        try:
            # Families with most batches first: what differs there may differ in the others, of which there are few.
            for key, found in sorted(waiting.items(), key=lambda item: -len(item[1])):
                family = self._families[key]
                if self._sites or len(found) + len(family.examples) >= _BEFORE_LEARNING:
                    self._see(family, found[:_EXAMPLES])
                for batch in found:
                    with contextlib.suppress(BatchError, CaptureError):
                        self.prepare(batch)
        finally:
            self._on_capture = known

    def _family(self, batch: FlatBatch) -> _Family:
        """Return the family of a batch; a new one has symbolic sizes where other families' batches differ."""
        if (found := self._families.get(_key(batch))) is None:
            self._families[_key(batch)] = found = _Family()
            for other in (family for family in self._families.values() if family is not found):
                for name in other.varying.keys() & batch.keys():
                    found.varying.setdefault(name, set()).update(other.varying[name])
        return found

    def _matched(self, batch: FlatBatch, family: _Family) -> PreparedMicrobatch:
        """Return the batch prepared for the first pattern that holds. Raises Mismatch with the last one's reason."""
        try:
            return self._first_match(batch, family)
        except Mismatch:
            if not self._restored(batch, family):
                raise
        return self._first_match(batch, family)

    def _first_match(self, batch: FlatBatch, family: _Family) -> PreparedMicrobatch:
        reasons: list[str] = []
        for pattern in family.patterns:
            try:
                return pattern.match(batch)
            except Mismatch as error:
                reasons.append(str(error))
        if not reasons:
            names = ", ".join(name for name, value in batch.items() if isinstance(value, torch.Tensor))
            raise Mismatch(f"no earlier batch had these inputs: {names}")
        raise Mismatch(reasons[-1])

    def _restored(self, batch: FlatBatch, family: _Family) -> bool:
        """Add patterns of a family that earlier runs or an earlier rank 0 learned; return whether there are new ones."""
        stored = () if self._store is None else self._store.learned(_key(batch), self._components)
        if self._store is None or not (new := [record for record in stored if record.digest not in family.seen]):
            return False
        family.seen |= {record.digest for record in new}
        known, learner = len(family.records), Learner(self._model)
        try:
            for record in new:
                captured, example = record.restored(learner)
                self._note_learned(family, self._lowered(captured, example), record, learner)
                if isinstance(captured.holes, ReplayedHoles):
                    self._sites = captured.holes.learned.sites_with(self._sites)
        except Exception as error:  # whatever the model's Python raises on an example; a new capture tells why
            self._store.forget(error, _key(batch), self._components)
        if len(family.records) > known:
            family.learner = learner
        return len(family.records) > known

    def replay_elsewhere(self, fill: FillElsewhere) -> None:
        """Fill the holes of learned captures, later ones too, by `fill` where it can, and by replays here where it cannot."""
        self._elsewhere = fill
        for pattern, record, learner in self._learned:
            self._connect(pattern, record, learner)

    def _connect(self, pattern: _Pattern, record: LearnedRecord, learner: Learner) -> None:
        holes = pattern.capture.holes
        if self._elsewhere is not None and isinstance(holes, ReplayedHoles):
            holes.elsewhere.fill = functools.partial(self._elsewhere, learner, record)

    def _note_learned(self, family: _Family, pattern: _Pattern, record: LearnedRecord, learner: Learner) -> None:
        family.patterns.append(pattern)  # last: a batch that an earlier one fits runs the same programs as before
        family.records.append(record)
        family.seen.add(record.digest)
        self._learned.append((pattern, record, learner))
        self._connect(pattern, record, learner)

    def _see(self, family: _Family, batches: Sequence[FlatBatch]) -> None:
        """Give the learner of a family examples to learn from, the family's own first."""
        with contextlib.suppress(Exception):  # whatever the model's Python raises; a later capture tells why
            if family.learner is None:
                family.learner = Learner(self._model)
                batches = (*family.examples, *batches)
            for batch in batches:
                family.learner.see(batch)

    def _learn(self, batch: FlatBatch, family: _Family, reason: str) -> PreparedMicrobatch | None:
        """Capture what holds for this batch and others that call the same; None if it cannot be learned, with a warning."""
        self._see(family, ())
        assert family.learner is not None
        try:
            asked = self._example(family.learner, batch)
            return self._learned_of(asked, family, family.learner, reason)
        except (CaptureError, Mismatch) as error:
            warnings.warn(f"batches of this kind are captured one by one: {error}", stacklevel=4)
            return None

    def _learned_of(self, asked: Example, family: _Family, learner: Learner, reason: str) -> PreparedMicrobatch:
        """Learn a capture that holds for an example. Raises Mismatch or CaptureError if there is none."""
        for kept in (False, True):  # the graph of another example may hold for none of this one's sizes
            self._on_capture(self.num_captures, reason)
            learned = learner.learned(asked, self._sites, keep_example=kept)
            captured = annotated(capture_learned(learner, learned, self._components))
            pattern = self._lowered(captured, learned.example.batch)
            self._count(reason)
            record = LearnedRecord.of(learner, learned, asked, captured, self._sites, kept=kept)
            self._note_learned(family, pattern, record, learner)
            self._sites = learned.sites_with(self._sites)
            if self._store is not None:
                self._store.keep(family.records, _key(asked.batch), self._components)
            try:
                return pattern.match(asked.batch)
            except Mismatch as error:
                if learned.example is asked:
                    raise
                reason = str(error)
        raise AssertionError("a capture of the example itself was made")

    def _example(self, learner: Learner, batch: FlatBatch) -> Example:
        try:
            return learner.see(batch)
        except Exception as error:  # whatever the model's Python raises; the capture of this batch tells why
            raise Mismatch(f"{type(error).__name__}: {error}") from error

    def _capture(self, batch: FlatBatch, family: _Family, reason: str) -> _Pattern:
        family.note(batch)

        def make() -> Capture:
            self._on_capture(self.num_captures, reason)
            made = annotated(capture(self._model, batch, varying=family.varying, reference=self._components))
            self._count(reason)
            return made

        varying = sorted((name, sorted(dims)) for name, dims in family.varying.items())
        captured = make() if self._store is None else self._store.captured(batch, make, varying, self._components)
        return self._lowered(captured, batch)

    def _count(self, reason: str) -> None:
        self.num_captures += 1
        self.reasons.append(reason)

    def _lowered(self, captured: Capture, batch: FlatBatch) -> _Pattern:
        captured = with_stage_passes(
            captured, self._plan, batch, validated=self._validated, own=self._passes, shards=self._shards
        )
        if self._shards is None:
            self._shards = captured.graph.shards
        programs = lower(captured, self._plan)
        links = {p.name for program in programs.programs.values() for p in program.inputs if p.kind == "link"}
        nodes = captured.graph.module.graph.nodes
        return _Pattern(
            capture=captured,
            programs=programs,
            context_parallel=self._plan.context_parallel,
            words={str(n.target): n.meta["words"] for n in nodes if "words" in n.meta and "shard" in n.meta},
            link_shapes={node.name: sizes_of(node) for node in nodes if node.name in links},
        )


def _key(batch: Mapping[str, Any]) -> Key:
    return tuple(
        (name, value.dim(), dtype_name(value.dtype)) if isinstance(value, torch.Tensor) else (name, repr(value))
        for name, value in sorted(batch.items())
    )


def _logged(count: int, reason: str) -> None:
    logging.getLogger("mmcompile").warning("capture %d of the model: %s", count + 1, reason)


def _number(size: object, bound: Mapping[Any, int]) -> int:
    number = evaluate(size, bound)  # type: ignore[arg-type]
    assert number is not None
    return number
