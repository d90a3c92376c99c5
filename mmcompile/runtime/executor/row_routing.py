"""Rows on their way from the microbatch of one balance group that computes them to the microbatches of another that read them.

An exchange maps ranges of dim 0 of the computed value to ranges of dim 0 of the value read. In the forward, a reader assembles
its value from all its exchanges. The gradient takes the transposed way: the producer adds up, from zeros and in the order of the
exchanges, the gradient rows that each returns. An exchange that is the whole value in order passes it on without a copy.
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
"""Offset from the tag of a message with rows to the tag of the message with their sample numbers."""


@dataclass(frozen=True, slots=True)
class RowSlice:
    """Ranges of rows (dim 0) of a tensor, in the order in which they travel."""

    tensor: Tensor
    ranges: tuple[Range, ...]

    def gathered(self) -> Tensor:
        """Return the rows as one tensor [rows, ...]: a view if they are contiguous, else a copy."""
        runs = _runs(self.ranges, self.ranges)
        if len(runs) == 1:
            first, _, count = runs[0]
            return self.tensor if count == len(self.tensor) else self.tensor[first : first + count]
        return torch.cat([self.tensor[first : first + count] for first, _, count in runs] or [self.tensor[:0]])


@dataclass(frozen=True, slots=True)
class Edge:
    """Path of tensors in a step: indices of the source microbatch, producer stage, target microbatch and consumer stage."""

    source: int
    producer: int
    target: int
    consumer: int


class RowRouting:
    """Finds the exchanges of a step that begin or end on one rank, and computes message tags.

    An exchange moves rows (dim 0) of a value from one microbatch to another; its number is its index in `StepPlan.exchanges`.

    **Tags** are numbers that tell apart all messages of a step between two ranks. Both ranks compute a tag from the number of the
    microbatch that makes the value, the stages that make and read it (numbered within their ranks), the position of the value
    among those between these stages, and the direction (forward or backward). The reading microbatch is determined by these.
    NCCL needs no tags: both ranks process the messages of two stages in the same order.
    """

    def __init__(self, plan: StepPlan, stages: Sequence[PlacedStage], rank: int) -> None:
        """Compute the messages that `rank` sends and receives in a step.

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
        """Per microbatch, the shapes of the values that its stages compute or read, by name."""
        placed = enumerate(stages) if plan.exchanges else ()
        place = {(stage.tower, stage.replica, stage.program_name): at for at, stage in placed}
        self.edges: dict[Edge, list[int]] = {}
        self.edge: dict[int, Edge] = {}
        self.made: dict[tuple[int, int, str], list[int]] = {}
        """Positions of the exchanges that send a value, by (microbatch, producer stage, name of the value computed)."""
        self.read: dict[tuple[int, int, str], list[int]] = {}
        """Positions of the exchanges that fill a value, by (microbatch, consumer stage, name of the value read)."""
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
        """Return the tag of a value on an edge; the tag after it is left free for the message with the rows' samples.

        Args:
            number: number of the microbatch that computes the value.
            place: position of the value among the values of its edge.
            backward: the message carries the gradient of the value.
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
        """Upper bound (exclusive) of all tags."""
        if self.end_tag + len(plan.microbatches) > FIRST_GRADIENT_TAG:
            raise EngineError(
                f"step {plan.step} has too many messages to number below {FIRST_GRADIENT_TAG}: {numbers} microbatches and lags x "
                f"{self._num_values} values x {self._num_stages} stages of a rank squared; use fewer microbatches a step"
            )

    def check(self, loaded: Sequence[Stages]) -> None:
        """Check that every row of every value read from another balance group arrives exactly once. Raises VerifyError.

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
    """Return the total number of rows in ranges of dim 0."""
    return sum(last - first for first, last in ranges)


def packed(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return ranges of the same lengths, one after the other from row 0: (4, 6), (9, 10) -> (0, 2), (2, 3)."""
    found: list[Range] = []
    end = 0
    for first, last in ranges:
        found.append((end, end + last - first))
        end = found[-1][1]
    return tuple(found)


def row_samples(exchange: RowExchange) -> Tensor:
    """Return the sample of each row of an exchange, in the order in which the rows travel (int64 [rows])."""
    counts = torch.tensor([last - first for first, last in exchange.rows], dtype=torch.int64)
    return torch.repeat_interleave(torch.tensor(exchange.samples, dtype=torch.int64), counts)


def assembled(parts: Sequence[tuple[RowSlice, tuple[Range, ...]]], shape: ValueShape, device: torch.device) -> Tensor:
    """Return the value that a stage reads, assembled from received rows.

    Args:
        parts: (received rows, target ranges of dim 0) of each exchange. Together they cover every row once.
        shape: shape and dtype of the value.
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
    """Return the gradient of a value, summed in the order of `parts`; rows that no stage read get zero.

    Args:
        parts: (returned rows of gradient, target ranges of dim 0) of each exchange.
        shape: shape and dtype of the value.
        start: gradient from other readers, to which the rows are added; it is not modified. None: zeros.
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
    """Check that ranges cover every row of a value of `size` rows exactly once.

    Args:
        where: description of the value, for the error.

    Raises:
        VerifyError: names the first row that is missing, read twice, or outside.
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
    """Check the sample numbers received with rows. Raises VerifyError, which names the first row of another sample."""
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
    runs = _runs(rows.ranges, into)
    if len(runs) != 1 or runs[0][2] != shape.shape[0]:
        return None
    return rows.gathered()


def _runs(there: Sequence[Range], here: Sequence[Range]) -> list[tuple[int, int, int]]:
    """Pair equally long row ranges of two tensors, adjoining pairs merged: (first row there, first row here, number of rows)."""
    runs: list[tuple[int, int, int]] = []
    for (first, last), (into, _) in zip(there, here, strict=True):
        if first == last:
            continue
        if runs and (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (first, into):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + last - first)
        else:
            runs.append((first, into, last - first))
    return runs
