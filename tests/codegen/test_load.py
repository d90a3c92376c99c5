"""A program's source becomes a module that keeps names, shares parameters, shows its source, and compiles."""

from __future__ import annotations

import inspect
import traceback
from dataclasses import replace

import pytest
import torch
from torch import nn

from mmcompile.codegen.load import load_stage
from mmcompile.codegen.program import Port, StageProgram
from mmcompile.errors import VerifyError
from mmcompile.ir.graph import ParameterSpec

SOURCE = """
import torch
from torch.nn import functional
from mmcompile.codegen.stage_module import StageModule

class Stage(StageModule):
    def forward(self, x):
        # model.layers.0
        x = functional.linear(x, self.t["model.layers.0.q.weight"], self.t["t.bias"])
        return (x * self.t["model.scale"] + self.c["table"],)
"""


def program(pattern: str = "p") -> StageProgram:
    names = {"model.layers.0.q.weight": (3, 4), "t.bias": (3,)}
    return StageProgram(
        stage="language_model.0",
        pattern=pattern,
        source=SOURCE,
        inputs=(Port(name="x", kind="root", shape=(2, 4), dtype="float32"),),
        outputs=(Port(name="y", kind="link", shape=(2, 3), dtype="float32"),),
        parameters=tuple(
            ParameterSpec(name=name, shape=shape, dtype="float32", trainable=name != "t.bias")
            for name, shape in names.items()
        ),
        buffers=("model.scale",),
        constants={"table": torch.arange(3.0)},
    )


TENSORS = {"model.layers.0.q.weight": torch.ones(3, 4), "t.bias": torch.zeros(3), "model.scale": torch.tensor(2.0)}


def test_names_and_flags_are_the_models_own() -> None:
    stage = load_stage(program(), TENSORS)
    flags = {name: parameter.requires_grad for name, parameter in stage.named_parameters()}
    assert flags == {"model.layers.0.q.weight": True, "t.bias": False}
    assert dict(stage.named_buffers()).keys() == {"model.scale"}
    assert stage(torch.ones(2, 4))[0].tolist() == [[8.0, 9.0, 10.0]] * 2


def test_patterns_share_parameters_and_tensors_are_not_copied() -> None:
    parameters = {name: nn.Parameter(tensor) for name, tensor in TENSORS.items() if name != "model.scale"}
    tensors = {**TENSORS, **parameters}
    first, second = load_stage(program("a"), tensors), load_stage(program("b"), tensors)
    assert first.get_parameter("model.layers.0.q.weight") is second.get_parameter("model.layers.0.q.weight")
    plain = load_stage(program(), TENSORS).get_parameter("model.layers.0.q.weight")
    assert plain.data_ptr() == TENSORS["model.layers.0.q.weight"].data_ptr()


def test_source_is_shown_by_inspect_and_in_tracebacks() -> None:
    stage = load_stage(program(), TENSORS)
    assert "# model.layers.0" in inspect.getsource(stage.forward)
    with pytest.raises(RuntimeError) as failure:
        stage(torch.ones(2, 5))
    text = "".join(traceback.format_exception(failure.value))
    assert 'File "<stage language_model.0 of pattern p>", line 9, in forward' in text
    assert 'x = functional.linear(x, self.t["model.layers.0.q.weight"], self.t["t.bias"])' in text


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor itself calls torch.jit
def test_it_compiles_whole(backend: str) -> None:
    stage = load_stage(program(), TENSORS)
    compiled = torch.compile(stage, backend=backend, fullgraph=True)
    x = torch.randn(2, 4)
    torch.testing.assert_close(compiled(x)[0], stage(x)[0])
    compiled(x)[0].sum().backward()
    assert stage.get_parameter("model.layers.0.q.weight").grad is not None


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("class Stage(StageModule", "the source of stage language_model.0 does not compile"),
        ("class Other(StageModule): pass", "defines no class Stage"),
        ("Stage = 3", "defines no class Stage"),
    ],
)
def test_wrong_sources_are_named(source: str, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        load_stage(replace(program(), source=source), TENSORS)


def test_missing_tensors_are_named() -> None:
    with pytest.raises(VerifyError, match=r"reads \['t.bias'\], which were not given"):
        load_stage(program(), {name: tensor for name, tensor in TENSORS.items() if name != "t.bias"})
