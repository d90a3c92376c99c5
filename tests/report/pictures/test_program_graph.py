"""The graph inside a stage, read from its source."""

from __future__ import annotations

from collections.abc import Callable
from xml.etree import ElementTree

from mmcompile.report.pictures.program_graph import program_dot, program_groups, program_svg, program_text

SOURCE = """
import torch

aten = torch.ops.aten


class Stage(StageModule):
    def forward(self, input_ids, features):
        # model.embed
        embedding = aten.embedding.default(self.t["model.embed.weight"], input_ids)
        # model
        merged = aten.add.Tensor(embedding, features)
        del embedding
        # shared value, computed in every stage that reads it (from model)
        positions = aten.arange.default(4, device=self.device)
        # model.layers.0
        split = aten.split.Tensor(merged, 2)
        left = split[0]
        hidden = aten.mul.Tensor(left, positions)
        del split, left, merged
        return hidden, positions
"""


def test_text(golden: Callable[[str, str], None]) -> None:
    golden("program.txt", program_text(SOURCE))


def test_groups_hand_on_only_what_others_read() -> None:
    groups = {group.title: group for group in program_groups(SOURCE)}
    assert groups["model.layers.0"].reads == ("merged", "positions")
    assert groups["model.layers.0"].writes == ("hidden",)
    assert groups["output"].reads == ("hidden", "positions")
    assert groups["input"].writes == ("input_ids", "features")


def test_dot() -> None:
    lines = program_dot(SOURCE, "language_model.0").splitlines()
    assert lines[0] == 'digraph "language_model.0" {'
    assert '  n0 -> n1 [label="input_ids"];' in lines
    assert any(line.startswith('  n3 [label="shared: model\\n1 ops"') for line in lines)
    assert '  n3 -> n4 [label="positions"];' in lines
    assert sum(" -> " in line for line in lines) == 7


def test_svg_has_a_line_for_each_edge() -> None:
    root = ElementTree.fromstring(program_svg(SOURCE))
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 7


LAYERS = """
import torch

aten = torch.ops.aten


def shared_values(device: "device"):
    return (aten.arange.default(4, device=device),)


def language_model_layer(weight: "float32 [4, 4], trained", x: "float32 [4, 4], gradient", positions: "int64 [4]"):
    # mlp
    y = aten.linear.default(x, weight)
    return (aten.mul.Tensor(y, positions),)


class Stage(StageModule):
    def forward(self, x):
        # shared values, computed in every stage that reads them
        (positions,) = self.run(shared_values, self.device)
        # model.layers.0
        (y,) = self.run(language_model_layer, self.t["model.layers.0.weight"], x, positions)
        # model.layers.1
        (z,) = self.recompute("full", language_model_layer, self.t["model.layers.1.weight"], y, positions)
        return (z,)
"""


def test_layers_are_groups_that_run_what_their_function_runs() -> None:
    groups = {group.title: group for group in program_groups(LAYERS)}
    assert groups["model.layers.1"].ops == ("aten.linear.default", "aten.mul.Tensor")
    assert groups["model.layers.1"].reads == ("y", "positions")
    assert groups["model.layers.0"].writes == ("y",)
    lines = program_dot(LAYERS, "language_model.0").splitlines()
    assert any('label="shared values\\n1 ops"' in line for line in lines)
    assert sum(" -> " in line for line in lines) == 5
