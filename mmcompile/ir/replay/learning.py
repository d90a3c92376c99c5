"""`Learner`: one capture for all batches that call the same steps; its holes are learned from what batches differ in."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from mmcompile.errors import CaptureError
from mmcompile.ir.capture_errors import Mismatch
from mmcompile.ir.inputs import FlatBatch
from mmcompile.ir.replay.filling_cache import FillingCache, digest_of
from mmcompile.ir.replay.gathers import Layout
from mmcompile.ir.replay.hole_sites import HoleSites
from mmcompile.ir.replay.loops import LoopSites, Site, num_calls, packed, row_modules, varying_sites
from mmcompile.ir.replay.program import OFFSET, NumberSource, Program, ResultShapes, Sources
from mmcompile.ir.replay.recorder import ModuleRule
from mmcompile.ir.replay.replayer import Replayer
from mmcompile.ir.replay.script import Script, differing_modules, open_modules, outermost
from mmcompile.ir.replay.script_template import (
    Filling,
    Position,
    ScriptTemplate,
    forced_holes,
    needed_calls,
    same_plain,
)
from mmcompile.ir.replay.values import Call, Value, calls_in, modules_in

HOLE_PREFIX = "given_"
"""Start of the names of inputs that stand for holes."""
_EXAMPLES = 4
"""Number of batches kept from which holes are learned."""
_AUDITED = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A batch and its script, with all modules run."""

    batch: FlatBatch = field(repr=False)
    script: Script = field(repr=False)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LearnedTemplate:
    """A template with the inputs that fill its holes, ready to be captured."""

    template: ScriptTemplate = field(repr=False)
    sources: Sources = field(repr=False)
    example: Example = field(repr=False)
    given: Mapping[str, Tensor] = field(repr=False)
    """Name of a hole's input -> its value for the example."""
    varying: Mapping[str, frozenset[int]]
    """Name of an input -> dims in which examples differ."""

    def sites_with(self, known: HoleSites) -> HoleSites:
        """Return known places where batches differ, and those of the holes."""
        return known.with_holes(self.template, self.sources, self.varying, self.example.batch)

    def inputs(self, batch: FlatBatch, script: Script) -> dict[str, Tensor]:
        """Return the values of the holes' inputs for a batch.

        Raises:
            Mismatch: the batch differs where the template has no hole.
        """
        filling = self.template.fill(script, _shapes_of(batch))
        if filling.missing:
            raise Mismatch(filling.missing[0])
        given: dict[str, Tensor] = {name: filling.tensors[value] for value, name in self.sources.tensors.items()}
        for value, (name, _) in self.sources.gathers.items():
            given[name] = filling.gathers[value][0]
        for position, source in self.sources.numbers.items():
            number = source.sign * filling.numbers[position]
            if number < 0:
                raise Mismatch("a number has another sign")
            if not source.offset:
                if batch[source.name].shape[source.dim] != number:
                    raise Mismatch(f"{number} is not the size of {source.name} in dim {source.dim}")
                continue
            known = given.setdefault(source.name, _as_length(number))
            if known.shape[0] != number + source.offset:
                raise Mismatch("numbers that were equal differ")
        return given


class Learner:
    """Scripts of the batches of one model with the same input names, and what can be learned from them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._replayer = Replayer(model)
        self._examples: list[Example] = []
        self._counts: list[dict[Site, int]] = []
        self._loops = LoopSites()
        self._paths: set[str] = set()
        self._open: set[str] = set()
        self._count = 0
        self.wholes: frozenset[str] = frozenset()
        """Paths of the modules each of whose calls is one step."""
        self.rules: dict[str, ModuleRule] = {}
        self.shapes: dict[str, ResultShapes] = {}
        """Path of a module that is one step -> how its results' sizes follow from its arguments'."""
        self._last: tuple[FlatBatch, Script] | None = None
        """The last batch with its script: several captures may be tried on it."""

    def see(self, batch: FlatBatch) -> Example:
        """Run all of the model's Python on a batch, and keep its script as an example; one that is kept is returned."""
        for example in self._examples:
            if example.batch is batch:
                return example
        script = self._replayer.run(batch)
        self._paths |= {module.path for module in modules_in(script.entries)}
        # A hook inside, such as one that collects hidden states, must run.
        self.keep_open({*open_modules(script), *(path.rpartition(".")[0] for path in self._replayer.hooked())})
        self._counts = [*self._counts[-(_EXAMPLES - 1) :], num_calls(script.entries, self.wholes)]
        loops = LoopSites(
            sites=self._loops.sites | varying_sites(self._counts),
            row_modules=self._loops.row_modules | row_modules(script.entries, self.wholes),
        )
        if loops != self._loops:
            self._loops, self._last = loops, None
            self._examples = [Example(batch=e.batch, script=self._run(e.batch)) for e in self._examples]
        example = Example(batch=batch, script=self._run(batch) if loops.sites else script)
        self._examples = [*self._examples[-(_EXAMPLES - 1) :], example]
        return example

    def _run(self, batch: FlatBatch, rules: Mapping[str, ModuleRule] | None = None) -> Script:
        script = self._replayer.run(batch, rules, lines=bool(self._loops.sites))
        return replace(script, entries=packed(script.entries, self._loops, self.wholes))

    @property
    def examples(self) -> tuple[Example, ...]:
        """Batches that are learned from, oldest first."""
        return tuple(self._examples)

    @property
    def opened(self) -> frozenset[str]:
        """Paths of the modules whose calls are never one step."""
        return frozenset(self._open)

    @property
    def paths(self) -> frozenset[str]:
        """Paths of all modules that any batch called."""
        return frozenset(self._paths)

    @property
    def loops(self) -> LoopSites:
        """Places where batches were found to call another number of times."""
        return self._loops

    def know(self, paths: Collection[str], opened: Collection[str], loops: LoopSites) -> None:
        """Record what another learner of the same model found on batches of which it keeps no example."""
        self._paths |= set(paths)
        self._loops = LoopSites(
            sites=self._loops.sites | loops.sites, row_modules=self._loops.row_modules | loops.row_modules
        )
        self.keep_open(opened)

    def keep_open(self, paths: Collection[str]) -> None:
        """Record modules whose calls, and those of the modules around them, are never one step."""
        self._open |= {path[:end] for path in paths for end, mark in enumerate(f"{path}.") if mark == "."}
        wholes = outermost(self._paths - self._open - {""})
        if wholes != self.wholes:
            self.wholes, self.rules, self.shapes, self._last = wholes, {}, {}, None

    def script(self, batch: FlatBatch) -> Script:
        """Return the script of a batch, in which whole modules did not run where their results follow from their arguments.

        Once in `_AUDITED` batches all modules run, so that what they call can be compared.
        """
        if self._last is None or self._last[0] is not batch:
            self._count += 1
            rules = {path: self.rules.get(path, _run) for path in self.wholes}
            try:
                self._last = batch, self._run(batch, None if self._count % _AUDITED == 0 else rules)
            except Exception as error:  # whatever the model's Python raises; a capture of this batch tells why
                raise Mismatch(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from error
        return self._last[1]

    def calls_the_same(self, batch: FlatBatch, learned: LearnedTemplate) -> bool:
        """Run all modules on a batch, and return whether those that are one step call the same as in the captured example."""
        return not self._differing(self._run(batch), learned)

    def audit(self, script: Script, learned: LearnedTemplate) -> None:
        """Compare a script of all modules with the captured one. Raises Mismatch; what differs is one step no longer."""
        if differing := self._differing(script, learned):
            self.keep_open(differing)
            raise Mismatch(f"{min(differing)} calls something else than in the captured batch")

    def _differing(self, script: Script, learned: LearnedTemplate) -> set[str]:
        return differing_modules(learned.template.script, script, learned.template.wholes)

    def learned(
        self, example: Example, sites: HoleSites | None = None, *, keep_example: bool = False
    ) -> LearnedTemplate:
        """Return a template that holds for `example`, and for all kept examples that call the same steps.

        Args:
            example: an example.
            sites: places where batches were found to differ before; there they may differ here too.
            keep_example: capture `example` even where another has fewer sizes of 0 and 1, which export fixes.
        """
        sites = sites or HoleSites()
        script, wholes = example.script, self.wholes
        template = ScriptTemplate(
            script=script,
            shapes=_shapes_of(example.batch),
            wholes=wholes,
            tensors=forced_holes(script, wholes) | sites.host_tensors(script, wholes),
            numbers=frozenset(sites.number_positions(script, wholes)),
            gathers=sites.gathered(script, wholes),
        )
        fillings: list[tuple[Example, Filling]] = []
        while True:
            fillings.clear()
            for other in self._examples:
                try:
                    fillings.append((other, template.fill(other.script, _shapes_of(other.batch))))
                except Mismatch:
                    continue
            tensors = template.tensors.union(*(filling.tensors for _, filling in fillings))
            gathers = dict(template.gathers)
            for _, filling in fillings:
                for value, (_, layout) in filling.gathers.items():
                    gathers.setdefault(value, layout)
            numbers = template.numbers.union(*(filling.numbers for _, filling in fillings))
            larger = replace(template, tensors=tensors, gathers=gathers, numbers=numbers)
            if not any(filling.missing for _, filling in fillings):
                best = min(fillings, key=lambda pair: (_num_small(*pair), pair[0] is not example))[0]
                if best is example or keep_example:
                    return self._with_sources(larger, example, fillings, sites)
                return self.learned(best, sites, keep_example=True)
            template = larger

    def _with_sources(
        self,
        template: ScriptTemplate,
        example: Example,
        fillings: Sequence[tuple[Example, Filling]],
        sites: HoleSites,
    ) -> LearnedTemplate:
        needed = needed_calls(template)
        leaves = [leaf for call in needed.values() for leaf in call.leaves if isinstance(leaf, Value)]
        used = {leaf: place for place, leaf in reversed(list(enumerate(leaves)))}
        own = next(filling for other, filling in fillings if other is example)
        varying = {name: set(dims) for name, dims in sites.dims_of_inputs(example.batch).items()}
        names = (f"{HOLE_PREFIX}{index}" for index in itertools.count())
        given: dict[str, Tensor] = {}
        tensors: dict[Value, str] = {}
        gathers: dict[Value, tuple[str, Layout]] = {}
        numbers: dict[Position, NumberSource] = {}
        for other, _ in fillings:
            for name, value in other.batch.items():
                if isinstance(value, Tensor):
                    _vary(varying, name, value, example.batch[name])
        for value in sorted(template.tensors & used.keys(), key=lambda value: used[value]):
            tensors[value] = name = next(names)
            given[name] = own.tensors[value].detach().clone()
            varying[name] = {*range(min(value.tensor.dim(), 1 if value.origins else 2)), *sites.dims_of(value)}
            for _, filling in fillings:
                _vary(varying, name, filling.tensors[value], given[name])
        for value in sorted(template.gathers.keys() & used.keys(), key=lambda value: used[value]):
            index, layout = own.gathers[value]
            name = next(names)
            gathers[value] = name, layout
            given[name], varying[name] = index, set(range(index.dim()))
        sizes = {
            tuple(other.batch[name].shape[dim] for other, _ in fillings): NumberSource(name=name, dim=dim)
            for name, dims in varying.items()
            if name in example.batch
            for dim in sorted(dims)
        }
        known = sites.number_positions(template.script, template.wholes)
        lengths: dict[object, NumberSource] = {}
        places = {call: place for place, call in enumerate(needed)}
        for position in sorted((p for p in template.numbers if p[0] in places), key=lambda p: (places[p[0]], p[1])):
            values = tuple(filling.numbers[position] for _, filling in fillings)
            if min(values) < 0 < max(values):
                raise CaptureError(f"{needed[position[0]].where}: a number is negative in some batches only")
            name, dim = known.get(position, ("", -1))
            size = example.batch.get(name) if dim >= 0 else None
            if isinstance(size, Tensor) and {size.shape[dim]} == set(values):
                numbers[position] = NumberSource(name=name, dim=dim)
            elif not name and values in sizes:
                numbers[position] = sizes[values]
            else:
                # Of one example, equal numbers may be equal by chance: those of one name are equal in others too.
                if (key := (values, name)) not in lengths:
                    hole, sign = next(names), -1 if min(values) < 0 else 1
                    lengths[key] = NumberSource(name=hole, offset=OFFSET, sign=sign)
                    given[hole], varying[hole] = _as_length(sign * own.numbers[position]), {0}
                numbers[position] = lengths[key]
        kept = replace(
            template,
            tensors=frozenset(tensors),
            gathers={value: layout for value, (_, layout) in gathers.items()},
            numbers=frozenset(numbers),
        )
        return LearnedTemplate(
            template=kept,
            sources=Sources(tensors=tensors, numbers=numbers, gathers=gathers),
            example=example,
            given=given,
            varying={name: frozenset(dims) for name, dims in varying.items() if dims},
        )

    def check(self, learned: LearnedTemplate, captured: Program) -> None:
        """Check that a captured program makes the calls that the model makes, and learn the shapes of its modules' results.

        Another batch runs before, so that what a forward leaves in its modules for the next is not taken for an argument.

        Raises:
            CaptureError: the program calls something else inside a module, or trains other parameters.
        """
        self._note_shapes(captured)
        for other in self._examples:
            if other is not learned.example:
                self._replayer.run(other.batch)
        wanted = learned.example.script
        program = replace(captured, model=self._replayer.model)
        found = self._replayer.run_program(program, learned.example.batch, learned.given)
        ours, theirs = (script.steps(frozenset()) for script in (found, wanted))
        rows = {
            id(c) for m in modules_in(wanted.entries) if m.path in self._loops.packed_modules for c in calls_in([m])
        }
        for one, two in zip(ours, theirs, strict=False):
            if not _same_step(one, two, sizes=id(two) not in rows):
                raise CaptureError(f"outside of its model, {two.where} calls {one.name} otherwise than the model does")
        if len(ours) != len(theirs):
            raise CaptureError(f"{len(ours)} steps outside of the model, {len(theirs)} inside")
        if found.paths is None or wanted.paths is None or found.paths.trained != wanted.paths.trained:
            raise CaptureError("the captured steps do not train what the model trains")

    def program(self, learned: LearnedTemplate) -> Program:
        """Return the program to capture."""
        return Program(model=self._model, template=learned.template, sources=learned.sources)

    def _note_shapes(self, program: Program) -> None:
        """Learn from a captured program how the results of whole modules follow from their arguments."""
        found = {path: ResultShapes.of(calls) for path, calls in program.shapes.items()}
        self.use({path: shapes for path, shapes in found.items() if shapes is not None})

    def use(self, shapes: Mapping[str, ResultShapes]) -> None:
        """Make modules one step whose results' sizes follow from their arguments' as `shapes` describe, by path."""
        self._last = None
        self.shapes |= shapes
        self.rules |= {path: self._replayer.results_by(found) for path, found in shapes.items()}


@dataclass(slots=True)
class RemoteReplays:
    """Replays that another process makes."""

    fill: Callable[[FlatBatch], dict[str, Tensor] | None] | None = None
    """Function: batch -> values of the holes, or None if the process is not ready; raises Mismatch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedHoles:
    """Fills the inputs that stand for what batches differ in, by a replay of the model's Python."""

    learner: Learner
    learned: LearnedTemplate
    allowed: dict[frozenset[str], bool] = field(default_factory=dict)
    """Names of sizes that were 0 or 1 in a batch -> whether the graph holds for such batches."""
    known: FillingCache = field(default_factory=FillingCache, repr=False)
    """Values of the holes for batches whose integers are those of an earlier one."""
    elsewhere: RemoteReplays = field(default_factory=RemoteReplays, repr=False)

    def fill(self, batch: FlatBatch) -> dict[str, Tensor]:
        """Return the holes' values for a batch. Raises Mismatch if the model's Python calls something else for it."""
        digest = digest_of(batch)
        if (known := self.known.get(digest)) is not None:
            return dict(known)
        if self.elsewhere.fill is not None and (given := self.elsewhere.fill(batch)) is not None:
            self.known.put(digest, given)
            return given
        script = self.learner.script(batch)
        given = self.learned.inputs(batch, script)
        if script.paths is not None:
            try:
                self.learner.audit(script, self.learned)
            except Mismatch:
                self.known.clear()
                raise
        if not script.reads_floats:
            self.known.put(digest, given)
        return given

    def allow(self, batch: FlatBatch, small: Collection[str]) -> bool:
        """Return whether the graph holds though some sizes are 0 or 1, which mean something else to many functions.

        It holds if the modules call the same functions as for the captured batch, whose sizes were larger.

        Args:
            batch: a batch for which all else holds.
            small: names of these sizes.
        """
        key = frozenset(small)
        if key not in self.allowed:
            self.allowed[key] = self.learner.calls_the_same(batch, self.learned)
        return self.allowed[key]


def without_floats(batch: FlatBatch) -> FlatBatch:
    """Return a batch with zeros in place of its floats, which are one number each in memory."""
    made = FlatBatch({})
    made.nested = batch.nested
    made.update((name, _zeros(value) if isinstance(value, Tensor) else value) for name, value in batch.items())
    return made


def _zeros(value: Tensor) -> Tensor:
    floats = value.is_floating_point() or value.is_complex()
    return torch.zeros((), dtype=value.dtype).expand(value.shape) if floats else value


def _same_step(one: Call, two: Call, *, sizes: bool) -> bool:
    """Return whether two calls are the same; `sizes`: also in the shapes of their tensors."""

    def same(a: object, b: object) -> bool:
        if not isinstance(a, Value) or not isinstance(b, Value):
            return type(a) is type(b) and same_plain(a, b)
        return a.tensor.dtype == b.tensor.dtype and (not sizes or a.tensor.shape == b.tensor.shape)

    return (
        (one.key, one.structure, one.grad) == (two.key, two.structure, two.grad)
        and len(one.results) == len(two.results)
        and all(map(same, (*one.leaves, *one.results), (*two.leaves, *two.results)))
    )


def _run(leaves: list[Any]) -> None:
    """Rule of a module whose results follow from its arguments in no simple way: it runs."""


def _shapes_of(batch: FlatBatch) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in a batch."""
    return {name: tuple(value.shape) for name, value in batch.items() if isinstance(value, Tensor)}


def _num_small(example: Example, filling: Filling) -> int:
    """Return how many sizes of inputs and holes, and numbers, are 0 or 1, which export fixes."""
    tensors = [*example.batch.values(), *filling.tensors.values(), *(index for index, _ in filling.gathers.values())]
    sizes = (size for tensor in tensors if isinstance(tensor, Tensor) for size in tensor.shape)
    return sum(size in (0, 1) for size in itertools.chain(sizes, filling.numbers.values()))


def _as_length(number: int) -> Tensor:
    return torch.empty(number + OFFSET)


def _vary(varying: dict[str, set[int]], name: str, value: Tensor, other: Tensor) -> None:
    dims = {dim for dim, (a, b) in enumerate(zip(value.shape, other.shape, strict=True)) if a != b}
    if dims:
        varying.setdefault(name, set()).update(dims)
