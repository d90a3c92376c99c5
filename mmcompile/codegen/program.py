"""`StageProgram`: one stage as Python source, with everything needed to run it and nothing else.

A program belongs to one *pattern*: the capture it was cut from. A stage that has no work in a pattern (an image
encoder, in a microbatch without images) has no program there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, runtime_checkable

import sympy
import torch
from torch import Tensor, nn

from mmcompile.data.collate import Value
from mmcompile.ir.graph import ParameterSpec
from mmcompile.ir.sizes import evaluate, solved


@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    """One argument or result of a stage program.

    kind "root": an input of the batch, by its own name. "host": computed from the batch by the planner on CPU and
    handed to the stage like a root input. "link": a tensor from (or to) other stages. "size": a Python int.
    """

    name: str
    kind: Literal["root", "host", "link", "size"]
    shape: tuple[int | str, ...]
    """Size of each dim: an int, or an expression of the graph's size symbols as text (`"2*s0"`); () if the value is an int."""
    dtype: str
    gradient: bool = False
    """True for a link on which a gradient is sent back."""
    peers: tuple[str, ...] = ()
    """Stages at the other end of a link. Link input: the one stage that computes the value.

    Link output: all stages that read the value, in plan order. () for the loss, and for a value that another rank of this stage
    sends for all ranks: the value is then returned only because its backward runs on every rank.
    """
    expression: str = ""
    """Value of a port of kind "size", as text over size symbols."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageProgram:
    """Source whose class `Stage(nn.Module)` runs one stage; `load_stage` turns it into a module."""

    stage: str
    pattern: str
    source: str = field(repr=False)
    inputs: tuple[Port, ...]
    """Arguments of `forward`, in order."""
    outputs: tuple[Port, ...]
    """Results of `forward`, in order. The loss stage returns `loss_sum` last, or `loss_sum` and `num_tokens`, without peers."""
    parameters: tuple[ParameterSpec, ...]
    buffers: tuple[str, ...]
    """Original names of the model buffers that the stage reads."""
    changed: tuple[str, ...] = ()
    """Original names of the buffers that a forward changes (running statistics, counters)."""
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict, compare=False)
    """Values known at capture, by attribute name."""
    is_loss: bool = False
    has_backward: bool = False
    """True if the stage holds a parameter that trains or receives a gradient in this pattern."""
    gathered: tuple[str, ...] = ()
    """Original names of the parameters that the stage gathers from replicas that share them, in gathering order."""

    @property
    def batch_inputs(self) -> frozenset[str]:
        """Names of the batch inputs that the stage reads, given ("root") or computed on the host ("host")."""
        return frozenset(port.name for port in self.inputs if port.kind in ("root", "host"))

    def of_replica(self, index: int) -> StageProgram:
        """Return the program of replica `index`, which reads its own parts of sharded parameters; `self` is that of replica 0."""
        source, parameters = self.source, []
        for spec in self.parameters:
            part = spec.of_replica(index)
            source = source.replace(f'self.t["{spec.name}"]', f'self.t["{part.name}"]')
            parameters.append(part)
        return replace(self, source=source, parameters=tuple(parameters))


@dataclass(frozen=True, kw_only=True, slots=True)
class PatternPrograms:
    """Programs of all stages for one captured graph, in which a value's name and the stage that reads it identify a transfer."""

    pattern: str
    programs: Mapping[str, StageProgram]
    """Stage name -> program; stages without work are absent."""
    per_token: bool
    """True if the loss stage returns a sum over valid tokens and their number; else it returns a mean over samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCount:
    """Rows (the size of dim 0) of a value sent between stages, as a function of the rows of batch inputs.

    Collating joins the inputs of samples on dim 0. A sample's rows in the inputs therefore determine its rows in the value, if
    the value's rows are the sum over samples.
    """

    expression: sympy.Expr
    inputs: Mapping[sympy.Symbol, tuple[str, sympy.Expr]]
    """Symbol -> (name of a batch input, size of its dim 0 as an expression in this symbol alone)."""
    sizes: Mapping[sympy.Symbol, int]
    """Symbol -> size, for sizes that all samples of the microbatch share."""

    def of(self, rows: Mapping[str, int]) -> int | None:
        """Return how many rows of the value a sample has; `rows`: input name -> rows of the sample in it. None if unknown."""
        leading = {symbol: solved(size, rows.get(name, 0)) for symbol, (name, size) in self.inputs.items()}
        known = {symbol: value for symbol, value in leading.items() if value is not None}
        return evaluate(self.expression, {**self.sizes, **known}) if len(known) == len(leading) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedMicrobatch:
    """A batch with the stage programs that fit it, and the input values that rank 0 sends to the stages."""

    programs: PatternPrograms
    sizes: Mapping[str, int]
    """Name -> value of each stage input that is an int, such as a sequence length."""
    values: Mapping[str, torch.Tensor]
    """Name -> CPU tensor of each stage input that is taken or computed from the batch."""
    link_shapes: Mapping[str, tuple[int, ...]]
    """Name -> shape, for this batch, of each value sent between stages."""
    num_tokens: int | None = None
    """Number of valid tokens, as the loss stage will count them. Required if `programs.per_token`."""
    row_counts: Mapping[str, RowCount] = field(default_factory=dict)
    """Name of a value sent between stages -> its size in dim 0 as a function of input sizes, if it varies with them."""


class ProgramSource(Protocol):
    """Source of the programs of a model's pipeline stages, one set for each captured graph (pattern); only rank 0 has one."""

    def prepare(self, batch: Mapping[str, Value]) -> PreparedMicrobatch:
        """Match a collated microbatch with the programs that run it, capturing a new pattern where none fits.

        Equal pattern names must have equal programs. The result must have `num_tokens` if its programs have a loss per token.

        Raises:
            BatchError: the batch does not fit the model. No message was sent yet, so the engine stays usable.
        """
        ...

    def parameters(self) -> Mapping[str, Tensor]:
        """Return all parameters and buffers of the model by original name, tied aliases included; they are not copies."""
        ...


OnWarmUp = Callable[[int, int, str], None]
"""Function called before a capture of a warm-up: (number of the capture, about how many there will be, reason)."""


@runtime_checkable
class LearningSource(ProgramSource, Protocol):
    """Source that captures a model for batches that no earlier capture holds for."""

    reasons: list[str]
    """Reason for each later capture, with the line of Python that decided."""

    @property
    def model(self) -> nn.Module:
        """Model that is captured."""
        ...

    @property
    def learns(self) -> bool:
        """True once a capture was learned, whose microbatches are replayed."""
        ...

    def replay_elsewhere(self, fill: Callable[..., dict[str, Tensor] | None]) -> None:
        """Fill what a replay gives by `fill` (`mmcompile.codegen.program_cache.FillElsewhere`) where it can."""
        ...

    def warm_up(self, batches: Sequence[Mapping[str, Value]], on_capture: OnWarmUp | None = None) -> None:
        """Capture what collated microbatches need, where what holds for all of them is learned at once."""
        ...
