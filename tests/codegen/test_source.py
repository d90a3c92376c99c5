"""The text of a stage: names, comments, memory freed early, constants in a form Python reads; and no name gets in its way."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.graphs.split import even_plan, root_values, run_split, with_present_flags
from support.oracles.eager import difference, eager_outcome
from torch import Tensor, fx, nn

from mmcompile.codegen.cut import StageCut
from mmcompile.codegen.program import StageProgram
from mmcompile.codegen.program_cache import Patterns
from mmcompile.codegen.source import stage_source
from mmcompile.codegen.stage_programs import lower
from mmcompile.ir.capture import Capture, capture
from mmcompile.ir.graph import META_KEY, NodeInfo

aten = torch.ops.aten

FIRST = '''"""Stage language_model.0 of Tiny.

Trains 48 parameters, keeps 0 frozen. Layers:
    embed
    layers.0
"""

import math
import operator

import torch

import mmcompile.ir.nodes as mm
from mmcompile.codegen.stage_module import StageModule

aten = torch.ops.aten


def shared_values(
    device: "device",
):
    """shared values, computed in every stage that reads them"""
    # shared value (from forward)
    arange = aten.arange.default(3, device=device, pin_memory=False)
    detach = aten.detach.default(arange)
    del arange
    return (detach,)


def language_model_embed(
    weight: "float64 [7, 4], trained",
    scale: "float64 []",
    input_ids: "int64 [2, 3]",
):
    """embed"""
    # the layer itself
    embedding = aten.embedding.default(weight, input_ids)
    # the model's own forward
    mul = aten.mul.Tensor(embedding, scale)
    del embedding
    return (mul,)


def language_model_layer(
    mix_weight: "float64 [4, 4], trained",
    mix_bias: "float64 [4], trained",
    detach: "int64 [3]",
    mul: "float64 [2, 3, 4], gradient",
):
    """layers.0"""
    # shared value (from forward)
    unsqueeze = aten.unsqueeze.default(detach, 1)
    lt = aten.lt.Tensor(unsqueeze, detach)
    del unsqueeze
    # the layer itself
    transpose = aten.transpose.int(mul, 1, 2)
    matmul = aten.matmul.default(mul, transpose)
    masked_fill = aten.masked_fill.Scalar(matmul, lt, float("-inf"))
    softmax = aten.softmax.int(masked_fill, -1, torch.float64)
    matmul_1 = aten.matmul.default(softmax, mul)
    del transpose, matmul, lt, masked_fill, softmax
    # mix
    linear = aten.linear.default(matmul_1, mix_weight, mix_bias)
    del matmul_1
    # the layer itself
    add = aten.add.Tensor(mul, linear)
    del linear
    return (add,)


class Stage(StageModule):
    def forward(self, input_ids):
        # shared values, computed in every stage that reads them
        (detach,) = self.run(shared_values, self.device)
        # embed
        (mul,) = self.run(language_model_embed, self.t["embed.weight"], self.t["scale"], input_ids)
        # layers.0
        (add,) = self.run(
            language_model_layer,
            self.t["layers.0.mix.weight"],
            self.t["layers.0.mix.bias"],
            detach, mul,
        )
        return (add, )
'''

LAST_BODY = '''def language_model_layer(
    mix_weight: "float64 [4, 4], trained",
    mix_bias: "float64 [4], trained",
    detach: "int64 [3]",
    add: "float64 [2, 3, 4], gradient",
):
    """layers.1"""
    # shared value (from forward)
    unsqueeze_1 = aten.unsqueeze.default(detach, 1)
    lt_1 = aten.lt.Tensor(unsqueeze_1, detach)
    del unsqueeze_1
    # the layer itself
    transpose_1 = aten.transpose.int(add, 1, 2)
    matmul_2 = aten.matmul.default(add, transpose_1)
    masked_fill_1 = aten.masked_fill.Scalar(matmul_2, lt_1, float("-inf"))
    softmax_1 = aten.softmax.int(masked_fill_1, -1, torch.float64)
    matmul_3 = aten.matmul.default(softmax_1, add)
    del transpose_1, matmul_2, lt_1, masked_fill_1, softmax_1
    # mix
    linear_1 = aten.linear.default(matmul_3, mix_weight, mix_bias)
    del matmul_3
    # the layer itself
    add_1 = aten.add.Tensor(add, linear_1)
    del linear_1
    return (add_1,)


def language_model_head(
    weight: "float64 [7, 4], trained",
    add_1: "float64 [2, 3, 4], gradient",
    labels: "int64 [2, 3]",
):
    """head"""
    # the layer itself
    linear_2 = aten.linear.default(add_1, weight)
    # the model's own forward
    flatten = aten.flatten.using_ints(linear_2, 0, 1)
    del linear_2
    # shared value (from forward)
    flatten_1 = aten.flatten.using_ints(labels)
    # the model's own forward
    token_loss = mm.token_loss(flatten, flatten_1, -100)
    getitem = token_loss[0]
    getitem_1 = token_loss[1]
    del flatten, flatten_1, token_loss
    return (getitem, getitem_1,)


class Stage(StageModule):
    def forward(self, labels, add):
        # shared values, computed in every stage that reads them
        (detach,) = self.run(shared_values, self.device)
        # layers.1
        (add_1,) = self.run(
            language_model_layer,
            self.t["layers.1.mix.weight"],
            self.t["layers.1.mix.bias"],
            detach, add,
        )
        del detach
        # head
        getitem, getitem_1 = self.run(language_model_head, self.t["head.weight"], add_1, labels)
        return (getitem, getitem_1, )
'''


class Block(nn.Module):
    """Mixes tokens it may see."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4, bias=bias)

    def forward(self, hidden: Tensor, unseen: Tensor) -> Tensor:
        scores = (hidden @ hidden.transpose(1, 2)).masked_fill(unseen, -math.inf)
        return hidden + self.mix(torch.softmax(scores, -1, dtype=torch.float64) @ hidden)


class Tiny(nn.Module):
    """Two blocks, a buffer and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.register_buffer("scale", torch.tensor(2.0))
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 7, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embed(input_ids) * self.get_buffer("scale")
        position = torch.arange(input_ids.shape[1], device=input_ids.device)
        for layer in self.layers:
            hidden = layer(hidden, position[:, None] < position)
        return {"loss": F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}


class Clashing(nn.Module):
    """Inputs, modules and ops called as the source calls its own things, and as Python calls its own."""

    def __init__(self) -> None:
        super().__init__()
        self.t = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.device = nn.Linear(4, 7)

    def forward(
        self, t: Tensor, labels: Tensor, aten: Tensor, mm: Tensor, id: Tensor, input: Tensor, operator: Tensor
    ) -> dict[str, Tensor]:
        hidden = self.t(t) + aten * id + mm * input + operator
        unseen = torch.zeros(3, 3, dtype=torch.bool)
        hidden = self.layers[0](hidden, unseen)
        hidden = torch.mm(hidden.flatten(0, 1), hidden[0].mT @ hidden[0]).view_as(hidden)
        hidden = self.layers[1](hidden, unseen)
        logits = torch.mm(hidden.flatten(0, 1), torch.mm(hidden[0].mT, hidden[0]))
        return {"loss": F.cross_entropy(self.device(logits), labels.flatten())}


def _batch(*floats: str) -> dict[str, Tensor]:
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    batch = {"input_ids": ids, "labels": ids.masked_fill(ids == 3, -100)}
    return batch | {name: torch.randn(2, 3, 4, dtype=torch.float64) for name in floats}


def _lowered(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Capture, dict[str, StageProgram]]:
    found = with_present_flags(model, capture(model, batch))
    return found, dict(lower(found, even_plan(found.graph, {"language_model": 2})).programs)


def test_text_of_a_first_and_of_a_last_stage() -> None:
    _, programs = _lowered(Tiny().double(), _batch())
    first, last = programs.values()
    assert first.source == FIRST
    assert last.source[last.source.index("def language_model_layer") :] == LAST_BODY


def test_layers_that_do_the_same_have_one_function() -> None:
    found = with_present_flags(model := Tiny().double(), capture(model, _batch()))
    (program,) = lower(found, even_plan(found.graph, {})).programs.values()
    assert program.source.count("def language_model_layer(") == 1
    assert '"""layers.0, layers.1"""' in program.source
    assert program.source.count("self.run(\n            language_model_layer,") == 2
    model.layers[1] = Block(bias=False).double()
    found = with_present_flags(model, capture(model, _batch()))
    (program,) = lower(found, even_plan(found.graph, {})).programs.values()
    assert '"""layers.0"""' in program.source
    assert '"""layers.1"""' in program.source
    assert "def language_model_layer_2(" in program.source


def test_same_model_same_text() -> None:
    texts = [[p.source for p in _lowered(Tiny().double(), _batch())[1].values()] for _ in range(2)]
    assert texts[0] == texts[1]


def test_names_of_the_model_never_hide_those_of_the_source() -> None:
    model = Clashing().double()
    batch = _batch("aten", "mm", "id", "input", "operator")
    batch["t"] = batch.pop("input_ids")
    found = with_present_flags(model, capture(model, batch))
    plan = even_plan(found.graph, {"language_model": 2})
    prepared = Patterns(model, plan, found, batch).prepare(batch)
    assert {"t", "aten", "mm", "id", "input", "operator", "labels"} <= prepared.values.keys()
    run = run_split(model, prepared.programs, prepared.values)
    assert run.crossings
    assert (outcome := difference(run.outcome, eager_outcome(model, batch))).within(1e-12), str(outcome)


def test_stages_of_the_golden_are_the_model() -> None:
    model, batch = Tiny().double(), _batch()
    found = with_present_flags(model, capture(model, batch))
    programs = lower(found, even_plan(found.graph, {"language_model": 2}))
    run = run_split(model, programs, root_values(found, batch))
    assert (outcome := difference(run.outcome, eager_outcome(model, batch))).within(1e-12), str(outcome)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.inf, 'float("inf")'),
        (-math.inf, 'float("-inf")'),
        (math.nan, 'float("nan")'),
        (1e-05, "1e-05"),
        (-3, "-3"),
        (True, "True"),
        (None, "None"),
        ("trunc", "'trunc'"),
        (torch.bfloat16, "torch.bfloat16"),
        (torch.strided, "torch.strided"),
        (torch.preserve_format, "torch.preserve_format"),
        (torch.device("cpu"), "device"),
        (torch.device("meta"), "device"),
        ([1, [None, -math.inf]], '[1, [None, float("-inf")]]'),
        ((1,), "(1, )"),
        (slice(None, -1, None), "slice(None, -1, None)"),
    ],
)
def test_arguments_are_written_as_python_reads_them(value: object, text: str) -> None:
    assert f"y = aten.mul.Tensor(x, {text})\n" in _source_of_one_call(value)


def test_what_has_no_text_is_refused() -> None:
    with pytest.raises(TypeError, match=r"cannot write 1j of type complex into a stage source"):
        _source_of_one_call(1j)


def _source_of_one_call(argument: Any) -> str:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3)
    y = graph.create_node("call_function", aten.mul.Tensor, (x, argument), name="y")
    y.meta[META_KEY] = NodeInfo(component="language_model", layer=0, module_path="layers.0")
    y.meta["val"] = torch.empty(3)
    part = StageCut(stage="s", nodes=(y,), roots=(x,), received=(), sent=(), tensors=())
    return stage_source(part, {}, {}, [y], "Title.", "Notes.")
