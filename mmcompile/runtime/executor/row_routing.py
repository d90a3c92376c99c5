"""Rows on their way from the microbatch of one tower that makes them to the microbatches of another that read them.

An exchange takes ranges of dim 0 of the value made to ranges of dim 0 of the value read. Forward, a reader puts its value
together from all its exchanges; the gradient takes the transposed way: the maker adds up, from zeros and in the order of the
exchanges, what each brings back. Where one exchange is the whole value in order, it is passed on as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmcompile.batching.step_plan import Range, RowExchange, StepPlan, ValueShape
from mmcompile.errors import EngineError, VerifyError
from mmcompile.ir.graph import torch_dtype
from mmcompile.planner.plan.placement import PlacedStage
from mmcompile.runtime.comm.groups import FIRST_GRADIENT_TAG
from mmcompile.runtime.executor.loaded_stage import Stages

IDS = 1
"""Added to the tag of rows for the message with the samples they are of."""


@dataclass(frozen=True, slots=True)
class RowSlice:
    """Some rows of a tensor, in order."""

    tensor: Tensor
    ranges: tuple[Range, ...]

    def gathered(self) -> Tensor:
        """[rows, ...]: a copy, unless they follow each other."""
        runs = _runs(self.ranges, self.ranges)
        if len(runs) == 1:
            first, _, count = runs[0]
            return self.tensor if count == len(self.tensor) else self.tensor[first : first + count]
        return torch.cat([self.tensor[first : first + count] for first, _, count in runs] or [self.tensor[:0]])


@dataclass(frozen=True, slots=True)
class Edge:
    """One way that tensors go in a step, by indices of microbatches and of placed stages."""

    source: int
    producer: int
    target: int
    consumer: int


class RowRouting:
    """The exchanges of a step that begin or end on one rank, by their positions in `StepPlan.exchanges`, ascending; and tags.

    **Tags** are numbers that tell apart all messages of a step between two ranks, the same on both sides. The number of the
    microbatch that makes a value, and the stages that make and read it, leave no choice of the microbatch that reads it; so with
    the place of the value among those of its edge, and the direction, they are enough. Stages count among those of their rank.
    NCCL needs no tags: both sides of a schedule have the messages of two stages in the same order.
    """

    def __init__(self, plan: StepPlan, stages: Sequence[PlacedStage], rank: int) -> None:
        """Derive the messages of `rank`.

        Raises:
            EngineError: the step has more messages than there are tags.
            VerifyError: an exchange does not fit the step.
        """
        self._stages = stages
        self._plan = plan
        self._rank = rank
        self._number_messages()
        self.shapes: list[Mapping[str, ValueShape]] = [
            {shape.name: shape for shape in microbatch.links} for microbatch in plan.microbatches
        ]
        """Per microbatch, the values that its stages make or read."""
        placed = enumerate(stages) if plan.exchanges else ()
        place = {(stage.tower, stage.replica, stage.program_name): at for at, stage in placed}
        self.edges: dict[Edge, list[int]] = {}
        self.edge: dict[int, Edge] = {}
        self.made: dict[tuple[int, int, str], list[int]] = {}
        """Positions by microbatch, stage and name of the value made."""
        self.read: dict[tuple[int, int, str], list[int]] = {}
        """Positions by microbatch, stage and name of the value read."""
        targets: dict[tuple[int, int, int], int] = {}
        for position, exchange in enumerate(plan.exchanges):
            source, target = plan.microbatches[exchange.source], plan.microbatches[exchange.target]
            producer = place[source.tower, source.replica, exchange.producer]
            consumer = place[target.tower, target.replica, exchange.consumer]
            if rank not in (stages[producer].ranks[0], stages[consumer].ranks[0]):
                continue
            edge = Edge(exchange.source, producer, exchange.target, consumer)
            if targets.setdefault((exchange.source, producer, consumer), exchange.target) != exchange.target:
                raise VerifyError(
                    f"microbatch {source.number} of {stages[producer].name} goes to two microbatches of "
                    f"{stages[consumer].name}; all its samples must be computed in the same slot there"
                )
            _check_exchange(exchange, self.shapes[exchange.source], self.shapes[exchange.target])
            self.edges.setdefault(edge, []).append(position)
            self.edge[position] = edge
            self.made.setdefault((edge.source, producer, exchange.name), []).append(position)
            self.read.setdefault((edge.target, consumer, exchange.target_name), []).append(position)

    def tag(self, number: int, edge: Edge, place: int, backward: bool) -> int:
        """Return the tag of a value on an edge; the one after it is free.

        Args:
            number: of the microbatch that makes the value.
            place: of the value among those of its edge.
        """
        stages = self._place[edge.producer] * self._num_stages + self._place[edge.consumer]
        return (((number * self._num_values + place) * self._num_stages**2 + stages) * 2 + int(backward)) * 2

    def _number_messages(self) -> None:
        plan = self._plan
        on_rank: Counter[int] = Counter()
        self._place: list[int] = []
        for stage in self._stages:
            self._place.append(on_rank[stage.ranks[0]])
            on_rank[stage.ranks[0]] += 1
        edges = Counter((e.source, e.producer, e.target, e.consumer) for e in plan.exchanges)
        self._num_values = max([1, *(len(m.links) for m in plan.microbatches), *edges.values()])
        self._num_stages = max(on_rank.values())
        numbers = 1 + max((m.number for m in plan.microbatches), default=0)
        self.end_tag = numbers * self._num_values * self._num_stages**2 * 4
        """Number past the last tag."""
        if self.end_tag + len(plan.microbatches) > FIRST_GRADIENT_TAG:
            raise EngineError(
                f"step {plan.step} has too many messages to number below {FIRST_GRADIENT_TAG}: {numbers} microbatches and lags x "
                f"{self._num_values} values x {self._num_stages} stages of a rank squared; use fewer microbatches a step"
            )

    def check(self, loaded: Sequence[Stages]) -> None:
        """Check that every row of every value read from another balance group arrives once. Raises VerifyError.

        Args:
            loaded: per microbatch of the step, this rank's stages.
        """
        wanted = {
            (microbatch, stage.index, slot.name): stage
            for microbatch, stages in enumerate(loaded)
            for stage in stages.values()
            for slot in stage.inputs
            if slot.crossing
        }
        for (microbatch, _, name), stage in wanted.items():
            positions = self.read.get((microbatch, stage.index, name), ())
            where = f"{name}, read by {self._stages[stage.index].name} in microbatch {microbatch} of the step plan,"
            into = [span for position in positions for span in self._plan.exchanges[position].into]
            check_covered(into, self.shapes[microbatch][name].shape[0], where)
        for microbatch, stage, name in self.read:
            if self._stages[stage].ranks[0] == self._rank and (microbatch, stage, name) not in wanted:
                raise VerifyError(
                    f"rows of {name} go to {self._stages[stage].name}, which does not read it from another tower"
                )


def num_rows(ranges: Iterable[Range]) -> int:
    """Return the number of rows in ranges."""
    return sum(last - first for first, last in ranges)


def packed(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return the ranges of the same rows once they are gathered."""
    found: list[Range] = []
    end = 0
    for first, last in ranges:
        found.append((end, end + last - first))
        end = found[-1][1]
    return tuple(found)


def row_samples(exchange: RowExchange) -> Tensor:
    """int64 [rows]: whose row each is, as they travel."""
    counts = torch.tensor([last - first for first, last in exchange.rows], dtype=torch.int64)
    return torch.repeat_interleave(torch.tensor(exchange.samples, dtype=torch.int64), counts)


def assembled(parts: Sequence[tuple[RowSlice, tuple[Range, ...]]], shape: ValueShape, device: torch.device) -> Tensor:
    """The value that a reader reads.

    Args:
        parts: rows that arrived, and where they go. Together they are every row once.
        shape: of the value.
    """
    if len(parts) == 1 and (whole := _as_it_is(*parts[0], shape)) is not None:
        return whole
    value = torch.empty(shape.shape, dtype=torch_dtype(shape.dtype), device=device)
    for rows, into in parts:
        for first, there, count in _runs(rows.ranges, into):
            value[there : there + count] = rows.tensor[first : first + count]
    return value


def added(
    parts: Sequence[tuple[RowSlice, tuple[Range, ...]]],
    shape: ValueShape,
    device: torch.device,
    start: Tensor | None = None,
) -> Tensor:
    """The gradient of a value made, summed in the order of `parts`; rows that no stage read get zero.

    Args:
        parts: rows of gradient that came back, and where they go.
        shape: of the value.
        start: gradient from elsewhere to add them to; it is left alone.
    """
    if start is None and len(parts) == 1 and (whole := _as_it_is(*parts[0], shape)) is not None:
        return whole
    zeros = torch.zeros(shape.shape, dtype=torch_dtype(shape.dtype), device=device)
    total = zeros if start is None else start.clone()
    for rows, into in parts:
        for first, there, count in _runs(rows.ranges, into):
            total[there : there + count] += rows.tensor[first : first + count]
    return total


def check_covered(into: Iterable[Range], size: int, where: str) -> None:
    """Check that ranges are every row of a value of `size` rows exactly once.

    Args:
        where: the value, in words.

    Raises:
        VerifyError: naming the first row that is missing, read twice, or outside.
    """
    end = 0
    for first, last in sorted(span for span in into if span[0] != span[1]):
        if first > end:
            break
        if first < end or last > size:
            problem = f"row {first} arrives twice" if first < end else f"row {max(first, size)} does not exist"
            raise VerifyError(f"{where} has {size} rows, but {problem}")
        end = last
    if end != size:
        raise VerifyError(f"{where} has {size} rows, but row {end} never arrives")


def check_samples(got: Tensor, exchange: RowExchange, where: str) -> None:
    """Check the ids that came with rows. Raises VerifyError naming the first row that is of another sample."""
    wanted = row_samples(exchange)
    wrong = (got.cpu() != wanted).nonzero().flatten().tolist()
    if wrong:
        row = wrong[0]
        raise VerifyError(
            f"{where}: row {row} of {len(wanted)} is of sample {int(got[row])}, wanted sample {int(wanted[row])}"
        )


def _check_exchange(exchange: RowExchange, source: Mapping[str, ValueShape], target: Mapping[str, ValueShape]) -> None:
    where = f"exchange of {exchange.name} from {exchange.producer} to {exchange.consumer}"
    made, read = source.get(exchange.name), target.get(exchange.target_name)
    for shape, name in ((made, exchange.name), (read, exchange.target_name)):
        if shape is None or not shape.shape:
            raise VerifyError(f"{where}: {name} has no rows: the step plan says {shape}")
    assert made is not None and read is not None
    if made.shape[1:] != read.shape[1:] or made.dtype != read.dtype:
        raise VerifyError(
            f"{where}: rows made are {made.dtype} {made.shape[1:]}, rows read are {read.dtype} {read.shape[1:]}"
        )
    if not len(exchange.samples) == len(exchange.rows) == len(exchange.into):
        raise VerifyError(
            f"{where} has {len(exchange.rows)} ranges made, {len(exchange.into)} read, {len(exchange.samples)} samples; "
            "wanted one of each a sample"
        )
    for sample, there, here in zip(exchange.samples, exchange.rows, exchange.into, strict=True):
        if there[1] - there[0] != here[1] - here[0]:
            raise VerifyError(f"{where}: rows {there} of sample {sample} are not as many as rows {here}")
        if not 0 <= there[0] <= there[1] <= made.shape[0]:
            raise VerifyError(f"{where}: rows {there} of sample {sample} lie outside a value of {made.shape[0]} rows")


def _as_it_is(rows: RowSlice, into: tuple[Range, ...], shape: ValueShape) -> Tensor | None:
    """The rows without a copy, if they are in order and every one of the value's."""
    runs = _runs(rows.ranges, into)
    if len(runs) != 1 or runs[0][2] != shape.shape[0]:
        return None
    return rows.gathered()


def _runs(there: Sequence[Range], here: Sequence[Range]) -> list[tuple[int, int, int]]:
    """(first row there, first row here, rows) of pairs of ranges, those joined that continue each other on both sides."""
    runs: list[tuple[int, int, int]] = []
    for (first, last), (into, _) in zip(there, here, strict=True):
        if first == last:
            continue
        if runs and (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (first, into):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + last - first)
        else:
            runs.append((first, into, last - first))
    return runs
