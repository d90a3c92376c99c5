"""`row_exchanges`: the rows of an encoder's values that every microbatch of the language model reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from mmcompile.batching.step_plan import Range, RowExchange
from mmcompile.codegen.program import PatternPrograms, Port, PreparedMicrobatch
from mmcompile.data.collate import Sample
from mmcompile.errors import BatchError, PlanError

_WITHOUT = "plan this model with replicas=1 and train it with balance='arrival'"

Block = tuple[int, ...]
"""Sample indices whose rows move together: one sample, or all samples of a microbatch."""
Place = tuple[str, str, int]
"""Identity of a value between stages: (stage that makes it, stage that reads it, number of the value between these stages).

A value may have a different name in each captured graph (pattern) of the model; this tuple is the same in all of them.
"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExchangeSide:
    """A microbatch that makes an encoder's rows, or reads them in the language model: one side of a `RowExchange`."""

    index: int
    """Index of the microbatch in `StepPlan.microbatches`."""
    samples: tuple[int, ...]
    """Positions of the microbatch's samples in the step, in the order in which they were collated."""
    prepared: PreparedMicrobatch


def row_exchanges(
    sources: Sequence[ExchangeSide],
    targets: Sequence[ExchangeSide],
    makers: Sequence[str],
    readers: Sequence[str],
    *,
    samples: Sequence[Sample],
    alone: Callable[[int], PreparedMicrobatch],
) -> list[RowExchange]:
    """Return the moves of an encoder's output rows to the language-model microbatches with the same samples.

    They are sorted by source, producer, target and consumer, then in the order of the producer's outputs.

    Args:
        sources: microbatches of the encoder's stages.
        targets: microbatches of the language model's stages; each sample of a source is in one of them.
        makers, readers: program names of the encoder's and of the language model's stages, in plan order.
        samples: all samples of the step.
        alone: function that prepares one sample (by index) as a microbatch; called only to count the rows that the sample has in
            an output, if this count cannot be computed from the sizes of its inputs.

    Raises:
        BatchError: the rows of an output are not those of one sample after those of another.
        PlanError: the values that the encoder makes are not those that the language model reads.
    """
    made = {source.index: _made(source.prepared.programs, makers, readers) for source in sources}
    whole = _whole(sources, targets)
    rows: dict[tuple[Place, Block], int] = {}
    for source in sources:
        for place, port in made[source.index].items():
            for block in _blocks(source, whole):
                rows[place, block] = _count(source, block, place, port, samples, alone)
    source_of = {sample: source for source in sources for sample in source.samples}
    found = [
        exchange for target in targets for exchange in _into(target, source_of, whole, made, rows, (makers, readers))
    ]
    order = {name: position for position, name in enumerate((*makers, *readers))}
    return sorted(found, key=lambda e: (e.source, order[e.producer], e.target, order[e.consumer]))


def _count(
    source: ExchangeSide,
    block: Block,
    place: Place,
    port: Port,
    samples: Sequence[Sample],
    alone: Callable[[int], PreparedMicrobatch],
) -> int:
    """Return how many rows of output `port` (identity: `place`) are of samples `block`; `alone` prepares one to count its rows.

    Raises:
        BatchError: the number cannot be found.
    """
    if len(block) == len(source.samples):
        return source.prepared.link_shapes[port.name][0]
    (sample,) = block
    count = source.prepared.row_counts.get(port.name)
    if count is not None:
        rows = count.of({name: _rows(samples[sample].get(name)) for name, _ in count.inputs.values()})
        if rows is not None:
            return rows
    matched = alone(sample)
    made = _made(matched.programs, (place[0],), (place[1],))
    if place not in made:
        raise BatchError(
            f"how many rows of {port.name} are of sample {sample} is not known: alone it makes none for {place[1]}; {_WITHOUT}"
        )
    return matched.link_shapes[made[place].name][0]


def _whole(sources: Sequence[ExchangeSide], targets: Sequence[ExchangeSide]) -> frozenset[int]:
    """Return the indices of source microbatches whose samples are together in one target microbatch, in the same order."""
    of = {source.samples[0]: source for source in sources}
    members = {sample for source in sources for sample in source.samples}
    found: set[int] = set()
    for target in targets:
        present = [sample for sample in target.samples if sample in members]
        for position, sample in enumerate(present):
            source = of.get(sample)
            if source is not None and tuple(present[position : position + len(source.samples)]) == source.samples:
                found.add(source.index)
    return frozenset(found)


def _blocks(source: ExchangeSide, whole: frozenset[int]) -> list[Block]:
    return [source.samples] if source.index in whole else [(sample,) for sample in source.samples]


def _into(
    target: ExchangeSide,
    source_of: Mapping[int, ExchangeSide],
    whole: frozenset[int],
    made: Mapping[int, Mapping[Place, Port]],
    rows: Mapping[tuple[Place, Block], int],
    stages: tuple[Sequence[str], Sequence[str]],
) -> Iterator[RowExchange]:
    sources = {source_of[s].index: source_of[s] for s in target.samples if s in source_of}
    wanted = {sample: block for source in sources.values() for block in _blocks(source, whole) for sample in block[:1]}
    blocks = [wanted[sample] for sample in target.samples if sample in wanted]
    read = _read(target.prepared.programs, *stages)
    for source in sources.values():
        _check_same(made[source.index], read)
    if not sources and read:
        makers = ", ".join(sorted({place[0] for place in read}))
        raise PlanError(f"{makers} must run for samples {target.samples}, of which none takes part")
    for place, port in read.items():
        into = _ranges(blocks, [rows[place, block] for block in blocks], target, port.name)
        for source in sources.values():
            port_made = made[source.index][place]
            own = _blocks(source, whole)
            out = _ranges(own, [rows[place, block] for block in own], source, port_made.name)
            _check_shapes(source, port_made, target, port)
            both = [block for block in own if block in into]
            yield RowExchange(
                source=source.index,
                target=target.index,
                producer=place[0],
                consumer=place[1],
                name=port_made.name,
                target_name=port.name,
                rows=tuple(out[block] for block in both),
                into=tuple(into[block] for block in both),
                samples=tuple(block[0] for block in both),
                gradient=port_made.gradient,
            )


def _rows(value: object) -> int:
    return len(value) if isinstance(value, Tensor) and value.dim() else 0


def _made(programs: PatternPrograms, makers: Sequence[str], readers: Sequence[str]) -> dict[Place, Port]:
    return {
        (maker, reader, number): port
        for maker in makers
        if maker in programs.programs
        for reader in readers
        for number, port in enumerate(p for p in programs.programs[maker].outputs if reader in p.peers)
    }


def _read(programs: PatternPrograms, makers: Sequence[str], readers: Sequence[str]) -> dict[Place, Port]:
    return {
        (maker, reader, number): port
        for maker in makers
        for reader in readers
        if reader in programs.programs
        for number, port in enumerate(p for p in programs.programs[reader].inputs if p.peers == (maker,))
    }


def _ranges(blocks: Sequence[Block], counts: Sequence[int], side: ExchangeSide, name: str) -> dict[Block, Range]:
    """Return the range of rows of each block of samples in value `name` of a microbatch; blocks follow each other.

    Args:
        counts: number of rows of each block.

    Raises:
        BatchError: the blocks have more or fewer rows than the value.
    """
    total = side.prepared.link_shapes[name][0]
    if sum(counts) != total:
        raise BatchError(
            f"{name} has {total} rows for samples {', '.join(str(s) for b in blocks for s in b)}, which have "
            f"{', '.join(map(str, counts))} each: "
            "it is not made of one sample's rows after the other's, so an encoder cannot compute other samples than the language "
            f"model does; {_WITHOUT}"
        )
    ends = list(accumulate(counts))
    return dict(zip(blocks, zip([0, *ends[:-1]], ends, strict=True), strict=True))


def _check_same(made: Mapping[Place, Port], read: Mapping[Place, Port]) -> None:
    if made.keys() != read.keys() or any(made[place].dtype != read[place].dtype for place in made):
        sides = (
            ", ".join(f"{p.name} ({a} > {b})" for (a, b, _), p in ports.items()) or "nothing" for ports in (made, read)
        )
        raise PlanError(
            "an encoder's microbatch makes {}, a microbatch of the language model reads {}: an encoder cannot compute other "
            "samples than the language model does here; {}".format(*sides, _WITHOUT)
        )


def _check_shapes(source: ExchangeSide, made: Port, target: ExchangeSide, read: Port) -> None:
    shapes = source.prepared.link_shapes[made.name], target.prepared.link_shapes[read.name]
    if shapes[0][1:] != shapes[1][1:]:
        raise BatchError(
            f"{made.name} is {tuple(shapes[0])} where it is made and {tuple(shapes[1])} where it is read: samples are padded to "
            f"the longest of their microbatch there, and microbatches differ; {_WITHOUT}"
        )
