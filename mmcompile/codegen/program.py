"""`StageProgram`: one stage as Python source, with everything needed to run it and nothing else.

A program belongs to one *pattern*: the capture it was cut from. A stage that has no work in a pattern (an image
encoder, in a microbatch without images) has no program there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import sympy
import torch

from mmcompile.ir.graph import ParameterSpec
from mmcompile.ir.sizes import evaluate


@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    """One argument or result of a stage program.

    kind "root": an input of the batch, by its own name. "host": computed from the batch by the planner on CPU and
    handed to the stage like a root input. "link": a tensor from (or to) other stages. "size": a Python int.
    """

    name: str
    kind: Literal["root", "host", "link", "size"]
    shape: tuple[int | str, ...]
    """Sizes of the dims: ints, or text over the pattern's size symbols; () for a size."""
    dtype: str
    gradient: bool = False
    """True for a link on which a gradient is sent back."""
    peers: tuple[str, ...] = ()
    """Stages that the link leads to or comes from. Link input: the one producing stage.

    Link output: every consuming stage, in plan order; () if another shard sends the same value and this output only serves its
    gradient.
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
        """Return the program of replica `index` of those that share parameters, which holds the parts with that number."""
        source, parameters = self.source, []
        for spec in self.parameters:
            part = spec.of_replica(index)
            source = source.replace(f'self.t["{spec.name}"]', f'self.t["{part.name}"]')
            parameters.append(part)
        return replace(self, source=source, parameters=tuple(parameters))


@dataclass(frozen=True, kw_only=True, slots=True)
class PatternPrograms:
    """Programs of all stages of one pattern. Value names are unique in a pattern, so (value, consumer) identifies a link."""

    pattern: str
    programs: Mapping[str, StageProgram]
    """Stage name -> program; stages without work are absent."""
    per_token: bool
    """True if the loss stage returns a sum over valid tokens and their number; else it returns a mean over samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCount:
    """Rows (the size of dim 0) of a link value, as a function of the rows of batch inputs.

    Collating joins the inputs of samples on dim 0. A sample's rows in the inputs therefore determine its rows in the value, if
    the value's rows are the sum over samples.
    """

    expression: sympy.Expr
    inputs: Mapping[sympy.Symbol, str]
    """Symbol -> name of the batch input whose dim 0 it is."""
    sizes: Mapping[sympy.Symbol, int]
    """Symbol -> size, for sizes that all samples of the microbatch share."""

    def of(self, rows: Mapping[str, int]) -> int | None:
        """Return the rows of a sample, given input name -> rows of the sample; None if these do not determine it."""
        leading = {symbol: rows.get(name, 0) for symbol, name in self.inputs.items()}
        return evaluate(self.expression, {**self.sizes, **leading})


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedMicrobatch:
    """A batch matched with its pattern: programs and values that rank 0 sends to the stages."""

    programs: PatternPrograms
    sizes: Mapping[str, int]
    """Value of every "size" port, by port name."""
    values: Mapping[str, torch.Tensor]
    """Value of every "root" and "host" port, by port name, on CPU."""
    link_shapes: Mapping[str, tuple[int, ...]]
    """Static shape of every "link" value, by port name."""
    num_tokens: int | None = None
    """Number of valid tokens, as the loss stage will count them. Required if `programs.per_token`."""
    row_counts: Mapping[str, RowCount] = field(default_factory=dict)
    """Port name -> rows of a "link" value whose number varies with the rows of inputs."""
