"""`Pipeline`: order, results, and what `MMCOMPILE_DEBUG` prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from support.graphs.hand_graph import small_graph

from mmcompile.errors import ConfigError, VerifyError
from mmcompile.ir.copy import copied
from mmcompile.ir.graph import ModelGraph
from mmcompile.passes.base import Rewrite
from mmcompile.passes.cost.cost import Cost
from mmcompile.passes.debug import DebugLevel, debug_level
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.passes.modality_dag import ModalityDag
from mmcompile.passes.pipeline import Pipeline

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaceSilu(Rewrite):
    """x * sigmoid(x) written out; or, with `annotate` off, a pass that forgets to annotate what it makes."""

    annotate: bool = True
    name: ClassVar[str] = "replace-silu"

    def run(self, graph: ModelGraph) -> ModelGraph:
        made = copied(graph)
        module = made.module
        for node in list(module.graph.nodes):
            if node.target is aten.silu.default:
                with module.graph.inserting_before(node):
                    gate = module.graph.call_function(aten.sigmoid.default, node.args)
                    product = module.graph.call_function(aten.mul.Tensor, (node.args[0], gate))
                if self.annotate:
                    gate.meta, product.meta = dict(node.meta), dict(node.meta)
                node.replace_all_uses_with(product)
                module.graph.erase_node(node)
        module.recompile()
        return made


def run(level: DebugLevel, *passes: ReplaceSilu | GradientFlow | ModalityDag) -> ModelGraph:
    return Pipeline(passes=passes, debug=level).run(small_graph()).graph


def test_results_by_pass_and_times_in_order() -> None:
    flow, cost = GradientFlow(), Cost()
    result = Pipeline(passes=(flow, cost)).run(small_graph())
    assert result.of(flow).unused == {"head.spare.weight"}
    assert result.of(cost)["audio"][0].forward_flops > 0
    assert [name for name, _ in result.seconds] == ["gradient-flow", "cost"]
    assert all(seconds >= 0 for _, seconds in result.seconds)


def test_a_missing_fact_is_an_error_before_anything_runs() -> None:
    with pytest.raises(
        ConfigError,
        match="pass cost requires gradient-flow, which nothing before it ensures; put a pass that ensures it in front",
    ):
        Pipeline(passes=(Cost(), GradientFlow()))


def test_a_rewrite_ends_facts_that_it_does_not_ensure() -> None:
    with pytest.raises(ConfigError, match="pass cost requires gradient-flow"):
        Pipeline(passes=(GradientFlow(), ReplaceSilu(), Cost()))
    Pipeline(passes=(ReplaceSilu(), GradientFlow(), Cost()))


def test_a_rewrite_is_verified() -> None:
    with pytest.raises(VerifyError, match="rule annotated: sigmoid_default has no NodeInfo"):
        run(DebugLevel.OFF, ReplaceSilu(annotate=False))
    Pipeline(passes=(ReplaceSilu(annotate=False),), verify=False).run(small_graph())


def test_nothing_is_printed_when_off(capsys: pytest.CaptureFixture[str]) -> None:
    run(DebugLevel.OFF, ReplaceSilu(), GradientFlow())
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("level", "lines"),
    [
        (DebugLevel.TIME, ["pass replace-silu:", "pass modality-dag:"]),
        (
            DebugLevel.DIFF,
            [
                "pass replace-silu:",
                "  aten.mul 0 -> 4, aten.sigmoid 0 -> 4, aten.silu 4 -> 0",
                "pass modality-dag:",
                "  no op changed",
            ],
        ),
        (
            DebugLevel.VERIFY,
            [
                "  verify: 11 rules hold over 162 nodes",
                "pass replace-silu:",
                "  aten.mul 0 -> 4, aten.sigmoid 0 -> 4, aten.silu 4 -> 0",
                "  verify: 11 rules hold over 166 nodes",
                "pass modality-dag:",
                "  no op changed",
            ],
        ),
    ],
)
def test_each_level_adds_lines(level: DebugLevel, lines: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run(level, ReplaceSilu(), ModalityDag())
    out, err = capsys.readouterr()
    assert out == ""
    shown = err.splitlines()
    assert [line if line.startswith(" ") else line[: line.index(":") + 1] for line in shown] == lines


def test_graph_and_provenance(capsys: pytest.CaptureFixture[str]) -> None:
    run(DebugLevel.GRAPH, ReplaceSilu())
    graph_level = capsys.readouterr().err
    line = "sigmoid_default: float32[2, 4, 32] = aten.sigmoid(linear_2)  # vision.1 vision.blocks.0"
    assert line in graph_level.splitlines()
    assert "made by" not in graph_level
    run(DebugLevel.PROVENANCE, ReplaceSilu())
    shown = capsys.readouterr().err.splitlines()
    assert "  sigmoid_default: made by replace-silu; vision.1 vision.blocks.0" in shown
    assert "  linear_8: made by capture; projector.0 projector" in shown


def test_debug_level_of_the_environment() -> None:
    assert debug_level({}) is DebugLevel.OFF
    assert debug_level({"MMCOMPILE_DEBUG": ""}) is DebugLevel.OFF
    assert debug_level({"MMCOMPILE_DEBUG": "4"}) is DebugLevel.GRAPH
    with pytest.raises(
        ConfigError,
        match=r"MMCOMPILE_DEBUG is 'all'; valid values are 0 \(off\), 1 \(time\), 2 \(diff\), 3 \(verify\), "
        r"4 \(graph\), 5 \(provenance\)",
    ):
        debug_level({"MMCOMPILE_DEBUG": "all"})


def test_the_pipeline_reads_the_environment_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMCOMPILE_DEBUG", "2")
    assert Pipeline(passes=()).debug is DebugLevel.DIFF
    monkeypatch.setenv("MMCOMPILE_DEBUG", "6")
    with pytest.raises(ConfigError, match="MMCOMPILE_DEBUG is '6'"):
        Pipeline(passes=())
