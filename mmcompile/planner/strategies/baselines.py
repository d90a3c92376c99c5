"""Baselines: layouts of other systems for a multimodal model, as candidates that our simulator judges.

A baseline is about as strong as its structure allows: its degrees, microbatches and recomputation are searched, under 1F1B, on
all devices, with one tensor-parallel degree. The candidates with the best guesses are simulated, and the fastest is taken. Only
the structure and the rule by which layers are cut are those of the other system.

    frozen-unaware   encoders, projectors and language model on devices of their own, as ours; but stages are shared out and
                     cut by forward time, as if everything trained (backward a fixed multiple of forward)
    megatron         one line; all encoders in as few first stages as hold them, the language model behind, by forward time
    replicated       every stage of the language model, cut by forward time, runs all encoders on the whole microbatch again
    equal-layers     one line; all stages have the same number of layers
    pinned           one line; all encoders in the first stage, and in every stage the same number of language-model layers
    fsdp             no pipeline: each tensor-parallel group is a replica of the model; parameters are sharded over all replicas

Source: Oobleck / Cornstarch / Entrain dissertation §3.5 (frozen-unaware, megatron, fsdp) and Cornstarch §2.2 (replicated, as in
Llama 3); torchtitan and NeMo Automodel pin the encoder and count layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf

import numpy as np

from mmcompile.errors import PlanError
from mmcompile.planner.pricing.chains import ChainEdge, ChainLayer, ChainSet, ChainSpec
from mmcompile.planner.pricing.priced_chain import PricedChain
from mmcompile.planner.search.bounds import expected_s, lower_bound_s
from mmcompile.planner.search.candidate import Candidate, Ranges, Strategy, assemble
from mmcompile.planner.search.combinations import Combinations, even_guess_s
from mmcompile.planner.search.partition import PartitionLayer, Split, equal_ranges, partition
from mmcompile.planner.search.problem import Problem
from mmcompile.planner.search.settings import Degrees, Setting
from mmcompile.units import format_bytes

# Number of frames (setting, tp, stages) with a candidate that fits the memory, after which a baseline tries no more.
_MAX_FITTING = 8
# Number of frames (setting, tp, stages) whose layers a baseline distributes, after which it tries no more.
_MAX_FRAMES = 24
# Number of candidates simulated together.
_AT_ONCE = 32


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Chains that baselines use: components apart, all in one line, or encoders together. Each is priced only once."""

    problem: Problem

    @cached_property
    def apart(self) -> tuple[ChainSet, ...]:
        """Chain sets whose components run on devices of their own."""
        return tuple(chains for chains in self.problem.sets if not chains.colocated)

    @cached_property
    def line(self) -> ChainSet:
        """Chain set with all components in one chain, in topological order."""
        chains = self.apart[0]
        offsets = np.cumsum([0, *(len(chain.layers) for chain in chains.chains)]).tolist()
        line = ChainSpec(
            name=chains.chains[-1].name,
            components=tuple(name for chain in chains.chains for name in chain.components),
            layers=tuple(layer for chain in chains.chains for layer in chain.layers),
        )
        edges = tuple(
            ChainEdge(
                source=0,
                source_layer=offsets[edge.source] + edge.source_layer,
                target=0,
                target_layer=offsets[edge.target] + edge.target_layer,
            )
            for edge in chains.edges
        )
        return ChainSet(placement=None, chains=(line,), edges=edges, colocated=True)

    @cached_property
    def encoders(self) -> ChainSpec:
        """Chain of all components before the language model."""
        line = self.line.chains[0]
        last = line.layers[-1].component
        before = tuple(layer for layer in line.layers if layer.component != last)
        return ChainSpec(name=line.name, components=line.components[:-1], layers=before)

    @cached_property
    def language(self) -> ChainSpec:
        """Chain of the language model alone, without the encoders."""
        line = self.line.chains[0]
        return ChainSpec(
            name=line.name, components=line.components[-1:], layers=line.layers[len(self.encoders.layers) :]
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """Choices of a baseline before layers are assigned: microbatches, replicas, one tp for all chains, number of stages."""

    lines: Lines
    setting: Setting
    tp: int
    num_stages: int

    @property
    def degrees(self) -> Degrees:
        """Parallel degrees that all chains have."""
        return Degrees(tp=self.tp, dp=self.setting.dp)

    @property
    def bound_s(self) -> float:
        """Lower bound of a step in s: the work of all layers on all microbatches, spread evenly over the stages."""
        each_s = sum(float(own.total_s[-1]) for own in self._priced)
        return self.setting.num_microbatches * each_s / self.num_stages

    @property
    def guess_s(self) -> float:
        """Guess of a step in s: `bound_s`, and the idle time as the pipeline fills and drains and as microbatches are unequal."""
        stages = min(self.num_stages, sum(len(chain.layers) for chain in self.lines.apart[0].chains))
        return even_guess_s(self.lines.problem, self._priced, self.setting, stages)

    @property
    def _priced(self) -> list[PricedChain]:
        prices, chains = self.lines.problem.prices, self.lines.apart[0].chains
        return [prices.priced(chain, self.degrees, self.setting) for chain in chains]

    def assemble(self, chains: ChainSet, parts: Sequence[Ranges]) -> Candidate:
        """Return the candidate with the given layer ranges of each chain's stages."""
        return assemble(self.lines.problem, chains, self.setting, [self.degrees] * len(chains.chains), parts)

    def splits(self, chain: ChainSpec, max_stages: int) -> tuple[Split, ...]:
        """Return the best splits of a chain into 1, 2, ... stages by forward time alone, without regard to memory."""
        priced = self.lines.problem.prices.priced(chain, self.degrees, self.setting)
        most = max(1, min(max_stages, len(chain.layers)))
        layers = [PartitionLayer(seconds=seconds) for seconds in np.diff(priced.forward_s).tolist()]
        return tuple(split for split in partition(layers, most) if split is not None)


Structure = Callable[[Frame], Iterator[Candidate]]


def baseline(name: str, problem: Problem) -> Candidate:
    """Return a baseline's fastest candidate among those that fit the memory; `name` is its name in `BASELINES`.

    Raises:
        PlanError: the name is unknown, stage counts are demanded although the baseline decides them, there is no batch to share
            between replicas, or no candidate fits the devices or their memory.
    """
    if name not in _STRUCTURES:
        raise PlanError(f"no baseline {name!r}; known are {', '.join(_STRUCTURES)}")
    if problem.stages:
        raise PlanError(f"strategy {name} decides the stages itself; leave {', '.join(problem.stages)} out")
    race = _Race(structure=_STRUCTURES[name], best_s=problem.beat_s)
    race.run((_replicas if name == "fsdp" else _frames)(problem))
    if race.best is None:
        raise PlanError(_nothing_fits(name, problem, race.smallest))
    return race.best


def _propose(name: str, problem: Problem) -> Sequence[Candidate]:
    try:
        return (baseline(name, problem),)
    except PlanError:
        return ()


@dataclass(kw_only=True, slots=True)
class _Race:
    """Search for the fastest candidate of a baseline by simulation, in which lower bounds spare most simulations."""

    structure: Structure
    best: Candidate | None = None
    best_s: float = inf
    smallest: Candidate | None = None
    """Candidate with the least memory of all that were tried, which the error names if none fits."""

    def run(self, frames: Iterable[Frame]) -> None:
        waiting: list[Candidate] = []
        laid_out = fitting = 0
        for frame in sorted(frames, key=lambda frame: frame.guess_s):
            if frame.bound_s >= self.best_s:
                continue
            found = list(self.structure(frame))
            self.smallest = min(
                filter(None, (self.smallest, *found)), key=lambda each: max(each.rank_bytes), default=None
            )
            fits = [candidate for candidate in found if candidate.fits]
            waiting += [candidate for candidate in fits if lower_bound_s(candidate) < self.best_s]
            laid_out, fitting = laid_out + 1, fitting + bool(fits)
            if len(waiting) >= _AT_ONCE:
                self._judge(waiting)
                waiting = []
            if fitting == _MAX_FITTING or laid_out == _MAX_FRAMES:
                break
        self._judge(waiting)

    def _judge(self, candidates: Sequence[Candidate]) -> None:
        for candidate, seconds in zip(candidates, expected_s(candidates), strict=True):
            if seconds < self.best_s:
                self.best, self.best_s = candidate, seconds


def _frames(problem: Problem) -> Iterator[Frame]:
    lines = Lines(problem=problem)
    for setting in Combinations(problem=problem).settings:
        for tp in problem.space.tp:
            count = problem.num_devices // (tp * setting.dp)
            if count:
                own = replace(setting, schedule="1f1b")
                yield Frame(lines=lines, setting=own, tp=tp, num_stages=count)


def _replicas(problem: Problem) -> Iterator[Frame]:
    """Yield the frames (setting, tensor-parallel degree, number of stages) that the baseline `fsdp` tries.

    Each degree is tried with the most replicas that can share the batch equally, even beyond the search space. Numbers of
    microbatches are those of the search space that divide a replica's samples, or all divisors of that number if none does.
    """
    batch = problem.global_batch
    if batch is None:
        raise PlanError("strategy fsdp shares a batch between replicas; say how many samples it has (--global-batch)")
    for tp in problem.space.tp:
        most = min(batch, problem.num_devices // tp)
        dp = max((count for count in range(1, most + 1) if batch % count == 0), default=0)
        if dp:
            counts = problem.space.microbatches
            if counts is not None and not any(batch // dp % count == 0 for count in counts):
                counts = None
            yield from _frames(replace(problem, space=replace(problem.space, dp=(dp,), tp=(tp,), microbatches=counts)))


def _frozen_unaware(frame: Frame) -> Iterator[Candidate]:
    for chains in frame.lines.apart:
        spare = frame.num_stages - len(chains.chains)
        if spare < 0:
            continue
        tables = [frame.splits(chain, 1 + spare) for chain in chains.chains]
        counts = [1] * len(tables)
        for _ in range(spare):
            growing = [chain for chain, table in enumerate(tables) if counts[chain] < len(table)]
            if not growing:
                break
            counts[max(growing, key=lambda chain: tables[chain][counts[chain] - 1].bottleneck_s)] += 1
        yield frame.assemble(chains, [table[count - 1].ranges for table, count in zip(tables, counts, strict=True)])


def _megatron(frame: Frame) -> Iterator[Candidate]:
    line, encoders, language = frame.lines.line, frame.lines.encoders, frame.lines.language
    if frame.num_stages == 1 or not encoders.layers:
        yield frame.assemble(line, [frame.splits(line.chains[0], frame.num_stages)[-1].ranges])
        return
    offset = len(encoders.layers)
    rest = frame.splits(language, frame.num_stages - 1)
    for first in frame.splits(encoders, frame.num_stages - 1):
        behind = rest[min(len(rest), frame.num_stages - len(first.ranges)) - 1]
        ranges = (*first.ranges, *((a + offset, b + offset) for a, b in behind.ranges))
        candidate = frame.assemble(line, [ranges])
        if candidate.fits:
            yield candidate
            return


def _replicated(frame: Frame) -> Iterator[Candidate]:
    encoders, language = frame.lines.encoders, frame.lines.language
    split = frame.splits(language, frame.num_stages)[-1]
    layers: list[ChainLayer] = []
    ranges: list[tuple[int, int]] = []
    for first, last in split.ranges:
        start = len(layers)
        layers += [*encoders.layers, *language.layers[first:last]]
        ranges.append((start, len(layers)))
    chain = replace(language, components=(*encoders.components, *language.components), layers=tuple(layers))
    yield frame.assemble(ChainSet(placement=None, chains=(chain,), edges=(), colocated=True), [ranges])


def _equal_layers(frame: Frame) -> Iterator[Candidate]:
    line = frame.lines.line
    yield frame.assemble(line, [equal_ranges(0, len(line.chains[0].layers), frame.num_stages)])


def _pinned(frame: Frame) -> Iterator[Candidate]:
    offset = len(frame.lines.encoders.layers)
    ranges = equal_ranges(offset, offset + len(frame.lines.language.layers), frame.num_stages)
    yield frame.assemble(frame.lines.line, [((0, ranges[0][1]), *ranges[1:])])


def _fully_sharded(frame: Frame) -> Iterator[Candidate]:
    line = frame.lines.line
    degrees = replace(frame.degrees, fsdp=frame.setting.dp > 1)
    yield assemble(frame.lines.problem, line, frame.setting, [degrees], [((0, len(line.chains[0].layers)),)])


_STRUCTURES: Mapping[str, Structure] = {
    "frozen-unaware": _frozen_unaware,
    "megatron": _megatron,
    "replicated": _replicated,
    "equal-layers": _equal_layers,
    "pinned": _pinned,
    "fsdp": _fully_sharded,
}
"""Baseline name -> function that makes a baseline's candidates from a frame (setting, tp, number of stages)."""

BASELINES: Mapping[str, Strategy] = {name: partial(_propose, name) for name in _STRUCTURES}
"""Baseline name -> strategy that proposes the baseline's fastest candidate, or none where `baseline` raises."""


def _nothing_fits(name: str, problem: Problem, smallest: Candidate | None) -> str:
    if smallest is None:
        least = min(len(chains.chains) for chains in Lines(problem=problem).apart) * min(problem.space.tp)
        return f"strategy {name} finds no layout on {problem.num_devices} devices of {problem.cluster}; it needs {least} or more"
    what = smallest.combination.text(many=problem.global_batch is not None)
    return (
        f"strategy {name} fits no layout: the smallest ({what}) needs {format_bytes(max(smallest.rank_bytes))} on one "
        f"device, {problem.cluster} has {format_bytes(problem.memory_bytes(smallest.num_ranks))}; allow more recomputation or "
        "devices, or take strategy auto"
    )
