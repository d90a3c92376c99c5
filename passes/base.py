"""Base classes of passes: frozen dataclasses whose fields are their options, with one method `run`.

An analysis annotates nodes or returns a value; a rewrite returns another `ModelGraph`. Neither measures time, prints,
reads the environment or verifies: `Pipeline` does that between passes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

if TYPE_CHECKING:  # `mmcompile passes` reads facts without torch
    from mmcompile.ir.graph import ModelGraph

ResultT_co = TypeVar("ResultT_co", covariant=True)


class Fact(StrEnum):
    """A fact about a graph that a pass can ensure and a later pass can require."""

    ANNOTATED = "annotated"
    """Every `call_function` node has a `NodeInfo`; capture ensures it."""
    VERIFIED = "verified"
    """The graph keeps all rules of `Verify`."""
    GRADIENT_FLOW = "gradient-flow"
    """`NodeInfo.carries_gradient` is set on every node."""
    COST = "cost"
    """`NodeInfo.*_flops` and `bytes_moved` are set on every node."""


class Pass(ABC):
    """Base class of `Analysis` and `Rewrite`: a name, and the facts about a graph that it requires and ensures."""

    name: ClassVar[str]
    """Name for users: the class name in kebab case."""
    requires: ClassVar[tuple[Fact, ...]] = (Fact.ANNOTATED,)
    """Facts about the graph that must hold before the pass runs."""
    ensures: ClassVar[tuple[Fact, ...]] = ()
    """Facts about the graph that hold after the pass has run."""


class Analysis(Pass, Generic[ResultT_co]):
    """A pass that reads a graph: returns a value, and may set fields of `NodeInfo` through `annotate`."""

    @abstractmethod
    def run(self, graph: ModelGraph) -> ResultT_co:
        """Analyse `graph` and return the result; nodes and edges stay unchanged."""


class Rewrite(Pass):
    """A pass that makes another graph. Afterwards only the facts in its `ensures` hold; all others must be derived again."""

    ensures: ClassVar[tuple[Fact, ...]] = (Fact.ANNOTATED,)

    @abstractmethod
    def run(self, graph: ModelGraph) -> ModelGraph:
        """Return the rewritten graph; `graph` itself is left unchanged."""


AnyPass = Analysis[object] | Rewrite
