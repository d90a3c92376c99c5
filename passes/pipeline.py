"""`Pipeline`: runs passes in order, and verifies and prints between them."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, cast

from mmcompile.errors import ConfigError
from mmcompile.ir.graph import ModelGraph
from mmcompile.passes.base import Analysis, AnyPass, Fact, Pass, Rewrite
from mmcompile.passes.debug import DebugLevel, debug_level
from mmcompile.passes.text import graph_text, place_text
from mmcompile.passes.values import op_name
from mmcompile.passes.verify import Verify

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineResult:
    """Result of `Pipeline.run`: the graph after the last pass, the results of the analyses, and the run time of each pass."""

    graph: ModelGraph
    results: tuple[tuple[Pass, object], ...] = field(repr=False)
    """Results of the analyses, in the order in which they ran: (analysis, its result)."""
    seconds: tuple[tuple[str, float], ...]
    """Run time of each pass, in order: (name of the pass, seconds)."""

    def of(self, analysis: Analysis[ResultT]) -> ResultT:
        """Return the last result of `analysis`. Raises KeyError if it was not in the pipeline."""
        for pass_, result in reversed(self.results):
            if pass_ == analysis:
                return cast(ResultT, result)
        raise KeyError(analysis.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """Passes in the order in which they run.

    Raises:
        ConfigError: a pass requires a fact that neither `given` nor an earlier pass ensures.
    """

    passes: tuple[AnyPass, ...]
    given: tuple[Fact, ...] = (Fact.ANNOTATED,)
    """Facts that hold of the graph before the first pass runs."""
    verify: bool = True
    """True to verify the graph before the first pass and after each rewrite."""
    debug: DebugLevel = field(default_factory=debug_level)

    def __post_init__(self) -> None:
        facts = set(self.given)
        for pass_ in self.passes:
            if not isinstance(cast(object, pass_), Analysis | Rewrite):  # passes may be a user's
                raise ConfigError(
                    f"passes are instances of mmcompile.passes.base.Analysis or Rewrite, got {pass_!r}; derive from one of them"
                )
            missing = [fact for fact in pass_.requires if fact not in facts]
            if missing:
                raise ConfigError(
                    f"pass {pass_.name} requires {', '.join(missing)}, which nothing before it ensures; "
                    "put a pass that ensures it in front"
                )
            facts = set(pass_.ensures) if isinstance(pass_, Rewrite) else facts | set(pass_.ensures)

    def run(
        self, graph: ModelGraph, finish: Callable[[Rewrite, ModelGraph], ModelGraph] = lambda rewrite, made: made
    ) -> PipelineResult:
        """Run all passes over `graph`.

        Args:
            graph: the graph of the first pass; it is not changed.
            finish: called with each rewrite and the graph that it made; returns the graph of the next pass.

        Raises:
            VerifyError: the graph, or one that a rewrite made, breaks a rule.
        """
        hook = _Hook(debug=self.debug, verify=self.verify)
        hook.start(graph)
        results: list[tuple[Pass, object]] = []
        seconds = []
        for pass_ in self.passes:
            began = time.perf_counter()
            if isinstance(pass_, Rewrite):
                after = finish(pass_, pass_.run(graph))
            else:
                after = graph
                results.append((pass_, pass_.run(graph)))
            seconds.append((pass_.name, time.perf_counter() - began))
            hook.between(pass_, graph, after, seconds[-1][1])
            graph = after
        return PipelineResult(graph=graph, results=tuple(results), seconds=tuple(seconds))


def analyse(analysis: Analysis[ResultT], graph: ModelGraph) -> ResultT:
    """Return the result of one analysis, run on a graph that fulfils all its requirements.

    The graph is not verified, because the pipeline that made it has verified it.
    """
    return (
        Pipeline(passes=(analysis,), given=(Fact.ANNOTATED, *analysis.requires), verify=False).run(graph).of(analysis)
    )


class _Hook:
    """Verifies the graph between passes, and prints to stderr as much about it as `MMCOMPILE_DEBUG` asks for."""

    def __init__(self, *, debug: DebugLevel, verify: bool) -> None:
        self._debug = debug
        self._verify = verify
        self._made_by: dict[str, str] = {}

    def start(self, graph: ModelGraph) -> None:
        self._made_by = {node.name: "capture" for node in graph.module.graph.nodes}
        self._check(graph)

    def between(self, pass_: Pass, before: ModelGraph, after: ModelGraph, seconds: float) -> None:
        self._tell(DebugLevel.TIME, f"pass {pass_.name}: {seconds * 1e3:.1f} ms")
        self._tell(DebugLevel.DIFF, f"  {_op_diff(before, after)}")
        if after is not before:
            self._made_by = {n.name: self._made_by.get(n.name, pass_.name) for n in after.module.graph.nodes}
            self._check(after)
        if self._debug >= DebugLevel.GRAPH:
            self._tell(DebugLevel.GRAPH, graph_text(after))
        for node in after.calls if self._debug >= DebugLevel.PROVENANCE else ():
            self._tell(DebugLevel.PROVENANCE, f"  {node.name}: made by {self._made_by[node.name]}; {place_text(node)}")

    def _check(self, graph: ModelGraph) -> None:
        if self._verify:
            self._tell(DebugLevel.VERIFY, f"  verify: {Verify().run(graph)}")

    def _tell(self, level: DebugLevel, text: str) -> None:
        if self._debug >= level:
            print(text, file=sys.stderr)


def _op_diff(before: ModelGraph, after: ModelGraph) -> str:
    # `aten.linear 8 -> 6, aten.mul 0 -> 2`
    was, now = (Counter(map(op_name, graph.calls)) for graph in (before, after))
    changed = [f"{name} {was[name]} -> {now[name]}" for name in sorted(was | now) if was[name] != now[name]]
    return ", ".join(changed) or "no op changed"
