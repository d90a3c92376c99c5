"""Which rows every microbatch of the language model needs of what a tower makes: the `RowExchange`s of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from mmcompile.errors import BatchError, PlanError
from mmcompile.lower.program import PatternPrograms, Port, PreparedMicrobatch
from mmcompile.step.collate import Sample
from mmcompile.step.step_plan import Range, RowExchange

_WITHOUT = "plan this model with replicas=1 and train it with balance='arrival'"

Place = tuple[str, str, int]
"""A value by the stage that makes it, the stage that reads it, and its number between the two: the same in all patterns, which
need not agree on names."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Side:
    """A microbatch of one tower, as far as its rows matter."""

    index: int
    """In the step plan."""
    samples: tuple[int, ...]
    """As collated."""
    prepared: PreparedMicrobatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossings:
    """Plans what one tower hands to another.

    Args:
        samples: of the step.
        alone: matches one sample with a pattern of its own; asked only where the rows of a sample do not follow from the sizes of
            its inputs.
    """

    samples: Sequence[Sample]
    alone: Callable[[int], PreparedMicrobatch]

    def exchanges(
        self, sources: Sequence[Side], targets: Sequence[Side], makers: Sequence[str], readers: Sequence[str]
    ) -> list[RowExchange]:
        """All exchanges, by source, producer, target, consumer, and the producer's order of values.

        Args:
            sources: microbatches of a tower.
            targets: microbatches of the tower that reads; each sample of a source is in one of them.
            makers: stages of the first tower, as programs name them, in plan order.
            readers: of the second.

        Raises:
            BatchError: a value is not made of one sample's rows after the other's.
            PlanError: patterns do not agree on what crosses.
        """
        made = {source.index: _made(source.prepared.programs, makers, readers) for source in sources}
        rows: dict[tuple[Place, int], int] = {}
        for source in sources:
            for place, port in made[source.index].items():
                counts = self._counts(source, place, port)
                rows |= {(place, sample): count for sample, count in zip(source.samples, counts, strict=True)}
        source_of = {sample: source for source in sources for sample in source.samples}
        found = [
            exchange for target in targets for exchange in self._into(target, source_of, made, rows, (makers, readers))
        ]
        order = {name: position for position, name in enumerate((*makers, *readers))}
        return sorted(found, key=lambda e: (e.source, order[e.producer], e.target, order[e.consumer]))

    def _into(
        self,
        target: Side,
        source_of: Mapping[int, Side],
        made: Mapping[int, Mapping[Place, Port]],
        rows: Mapping[tuple[Place, int], int],
        stages: tuple[Sequence[str], Sequence[str]],
    ) -> Iterator[RowExchange]:
        present = [sample for sample in target.samples if sample in source_of]
        read = _read(target.prepared.programs, *stages)
        sources = {source_of[sample].index: source_of[sample] for sample in present}
        for source in sources.values():
            _check_same(made[source.index], read)
        if not sources and read:
            makers = ", ".join(sorted({place[0] for place in read}))
            raise PlanError(f"{makers} must run for samples {target.samples}, of which none takes part")
        for place, port in read.items():
            into = _ranges(present, [rows[place, sample] for sample in present], target, port.name)
            for source in sources.values():
                port_made = made[source.index][place]
                out = _ranges(source.samples, [rows[place, s] for s in source.samples], source, port_made.name)
                _check_shapes(source, port_made, target, port)
                both = tuple(sample for sample in source.samples if sample in into)
                yield RowExchange(
                    source=source.index,
                    target=target.index,
                    producer=place[0],
                    consumer=place[1],
                    name=port_made.name,
                    target_name=port.name,
                    rows=tuple(out[sample] for sample in both),
                    into=tuple(into[sample] for sample in both),
                    samples=both,
                    gradient=port_made.gradient,
                )

    def _counts(self, source: Side, place: Place, port: Port) -> list[int]:
        """Rows of each sample of a microbatch in one value it makes."""
        total = source.prepared.link_shapes[port.name][0]
        if len(source.samples) == 1:
            return [total]
        return [self._count(source, sample, place, port) for sample in source.samples]

    def _count(self, source: Side, sample: int, place: Place, port: Port) -> int:
        count = source.prepared.row_counts.get(port.name)
        if count is not None:
            rows = count.of({name: _rows(self.samples[sample].get(name)) for name in count.inputs.values()})
            if rows is not None:
                return rows
        alone = self.alone(sample)
        return alone.link_shapes[_made(alone.programs, (place[0],), (place[1],))[place].name][0]


def _rows(value: object) -> int:
    return len(value) if isinstance(value, Tensor) and value.dim() else 0


def _made(programs: PatternPrograms, makers: Sequence[str], readers: Sequence[str]) -> dict[Place, Port]:
    """Values that stages of one tower make for stages of another."""
    return {
        (maker, reader, number): port
        for maker in makers
        if maker in programs.programs
        for reader in readers
        for number, port in enumerate(p for p in programs.programs[maker].outputs if reader in p.peers)
    }


def _read(programs: PatternPrograms, makers: Sequence[str], readers: Sequence[str]) -> dict[Place, Port]:
    """Values that stages of one tower read from stages of another."""
    return {
        (maker, reader, number): port
        for maker in makers
        for reader in readers
        if reader in programs.programs
        for number, port in enumerate(p for p in programs.programs[reader].inputs if p.peers == (maker,))
    }


def _ranges(samples: Sequence[int], counts: Sequence[int], side: Side, name: str) -> dict[int, Range]:
    """Rows of each sample in a value of a microbatch, one sample's after the other's."""
    total = side.prepared.link_shapes[name][0]
    if sum(counts) != total:
        raise BatchError(
            f"{name} has {total} rows for samples {', '.join(map(str, samples))}, which have {', '.join(map(str, counts))} each: "
            "it is not made of one sample's rows after the other's, so an encoder cannot compute other samples than the language "
            f"model does; {_WITHOUT}"
        )
    ends = list(accumulate(counts))
    return dict(zip(samples, zip([0, *ends[:-1]], ends, strict=True), strict=True))


def _check_same(made: Mapping[Place, Port], read: Mapping[Place, Port]) -> None:
    if made.keys() != read.keys() or any(made[place].dtype != read[place].dtype for place in made):
        sides = (
            ", ".join(f"{p.name} ({a} > {b})" for (a, b, _), p in ports.items()) or "nothing" for ports in (made, read)
        )
        raise PlanError(
            "an encoder's microbatch makes {}, a microbatch of the language model reads {}: an encoder cannot compute other "
            "samples than the language model does here; {}".format(*sides, _WITHOUT)
        )


def _check_shapes(source: Side, made: Port, target: Side, read: Port) -> None:
    shapes = source.prepared.link_shapes[made.name], target.prepared.link_shapes[read.name]
    if shapes[0][1:] != shapes[1][1:]:
        raise BatchError(
            f"{made.name} is {tuple(shapes[0])} where it is made and {tuple(shapes[1])} where it is read: samples are padded to "
            f"the longest of their microbatch there, and microbatches differ; {_WITHOUT}"
        )
