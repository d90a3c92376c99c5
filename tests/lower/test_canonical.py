"""Programs that differ in names only have one text; the text does what the program does; any other difference shows in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from layer_run import layer_patterns, llama, run_layers
from torch import Tensor
from zoo import ALL
from zoo.family import Family

from mmcompile.errors import VerifyError
from mmcompile.ir.graph import ParameterSpec
from mmcompile.lower.canonical import canonical
from mmcompile.lower.load import execute, load_stage
from mmcompile.lower.program import Port, StageProgram

SOURCE = '''"""A stage."""

import torch

aten = torch.ops.aten


class Stage(StageModule):
    def forward(self, size_0, add_1):
        # layers.0
        linear = aten.linear.default(add_1, self.t["layers.0.weight"], self.t["layers.0.bias"])
        view = aten.view.default(linear, [size_0, -1])
        del linear
        arange = aten.arange.default(size_0, device=self.device)
        mul = aten.mul.Tensor(view, self.c["scale"])
        add_2 = aten.add.Tensor(mul, 0.5)
        return (add_2, arange, )
'''

OTHER_NAMES = '''
import torch

aten = torch.ops.aten


class Stage(StageModule):
    def forward(self, size_3, hidden):
        """The same."""
        t = self.t
        linear_7 = aten.linear.default(hidden, t["layers.9.weight"], t["layers.9.bias"])
        v3 = aten.view.default(linear_7, [size_3, -1])
        arange_1 = aten.arange.default(size_3, device=self.device)
        add_2 = aten.mul.Tensor(v3, self.c["_scale_1"])
        del v3
        mul = aten.add.Tensor(add_2, 0.5)
        del add_2
        return (mul, arange_1, )
'''

TEXT = """import torch
aten = torch.ops.aten
# t0: float32 [3, 4], trained
# t1: float32 [3]
# t2: float32 [3]
# x0: size n0
# x1: float32 [n0, 4], gradient
def layer(tensors, x0, x1):
    t0, t1, t2, = tensors
    x0 = x0.shape[0]
    torch._check(x1.shape[0] == x0)
    v2 = aten.linear.default(x1, t0, t1)
    v3 = aten.view.default(v2, [x0, -1])
    v4 = aten.arange.default(x0, device=device)
    v5 = aten.mul.Tensor(v3, t2)
    v6 = aten.add.Tensor(v5, 0.5)
    return (v6, v4)
"""


def program(
    source: str = SOURCE, layer: int = 0, size: str = "size_0", hidden: str = "add_1", scale: str = "scale"
) -> StageProgram:
    return StageProgram(
        stage=f"language_model.{layer}",
        pattern="p",
        source=source,
        inputs=(
            Port(name=size, kind="size", shape=(), dtype="int64", expression="s5"),
            Port(name=hidden, kind="link", shape=("s5", 4), dtype="float32", gradient=True, peers=("before",)),
        ),
        outputs=(
            Port(name="out", kind="link", shape=("s5", 3), dtype="float32", gradient=True, peers=("after",)),
            Port(name="places", kind="link", shape=("s5",), dtype="int64", peers=("after",)),
        ),
        parameters=(
            ParameterSpec(name=f"layers.{layer}.weight", shape=(3, 4), dtype="float32", trainable=True),
            ParameterSpec(name=f"layers.{layer}.bias", shape=(3,), dtype="float32", trainable=False),
        ),
        buffers=(),
        constants={scale: torch.full((3,), float(layer + 1))},
        has_backward=True,
    )


def tensors(layer: int = 0, width: int = 3) -> dict[str, Tensor]:
    return {f"layers.{layer}.weight": torch.ones(width, 4), f"layers.{layer}.bias": torch.zeros(width)}


def test_the_text() -> None:
    found = canonical(program(), tensors())
    assert found.text == TEXT
    assert found.tensors == (("t", "layers.0.weight"), ("t", "layers.0.bias"), ("c", "scale"))
    assert found.varying == ((0,), (0,))


def test_other_names_and_values_have_the_same_text() -> None:
    other = program(OTHER_NAMES, layer=9, size="size_3", hidden="hidden", scale="_scale_1")
    other = replace(other, inputs=tuple(renamed_size(port) for port in other.inputs))
    found = canonical(other, tensors(9))
    assert found.text == TEXT
    assert found.tensors == (("t", "layers.9.weight"), ("t", "layers.9.bias"), ("c", "_scale_1"))


def renamed_size(port: Port) -> Port:
    shape = tuple("s88" if size == "s5" else size for size in port.shape)
    return replace(port, shape=shape, expression="s88" if port.expression else "")


def changed_input(**fields: object) -> Callable[[StageProgram], StageProgram]:
    return lambda found: replace(found, inputs=(found.inputs[0], replace(found.inputs[1], **fields)))


def changed_source(before: str, after: str) -> Callable[[StageProgram], StageProgram]:
    assert before in SOURCE
    return lambda found: replace(found, source=found.source.replace(before, after))


@pytest.mark.parametrize(
    "change",
    [
        changed_source("0.5", "0.25"),
        changed_source("mul.Tensor", "div.Tensor"),
        changed_source("(view, self.c", "(linear, self.c"),
        changed_source("(add_2, arange, )", "(arange, add_2, )"),
        changed_source("[size_0, -1]", "[3, -1]"),
        changed_input(shape=(7, 4)),
        changed_input(shape=("s6", 4)),
        changed_input(dtype="float64"),
        changed_input(gradient=False),
        lambda found: replace(found, parameters=tuple(replace(spec, trainable=False) for spec in found.parameters)),
        lambda found: replace(found, constants={"scale": torch.ones(1)}),
        lambda found: replace(found, constants={"scale": torch.ones(3, dtype=torch.float64)}),
    ],
)
def test_any_other_difference_shows(change: Callable[[StageProgram], StageProgram]) -> None:
    assert canonical(change(program()), tensors()).text != TEXT


def test_loading_again_takes_no_work() -> None:
    assert canonical(program(), tensors()) is canonical(program(), tensors())


def test_other_shapes_of_parameters_show() -> None:
    assert canonical(program(), tensors(width=5)).text != TEXT


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            'self.c["scale"]',
            "self.training",
            "line 15 of the source of stage language_model.0 reads self.training; wanted",
        ),
        ('self.c["scale"]', "self.c[size_0]", r"reads self.c\[size_0\]; wanted self.t\[\"name\"\]"),
        ('self.c["scale"]', 'self.c["bias"]', r"reads self.c\['bias'\], which its program lists neither as"),
        ("self.device", "self.t", "reads self.t; wanted"),
        ("def forward", "def backward", "has no function forward in a class Stage"),
        ("class Stage", "class Other", "has no function forward in a class Stage"),
        ("size_0, add_1", "add_1", r"takes 1 inputs \(add_1\), its program has 2 \(size_0, add_1\)"),
        ("class Stage", "class", "the source of stage language_model.0 does not compile"),
    ],
)
def test_sources_of_another_form_are_refused(before: str, after: str, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        canonical(replace(program(), source=SOURCE.replace(before, after)), tensors())


LLAMA_KINDS = [["language_model.0"], [f"language_model.{layer}" for layer in range(1, 5)], ["language_model.5"]]
"""Embedding; decoder layers; norm, head and loss."""
LLAVA_KINDS = [
    ["vision_tower.0"],  # patches and positions
    ["vision_tower.1", "vision_tower.2", "vision_tower.3"],  # the fourth layer's output is not used
    ["vision_tower.4"],  # drops the class token
    ["multi_modal_projector.0"],
    ["language_model.0"],  # embedding and merge
    [f"language_model.{layer}" for layer in range(1, 5)],
    ["language_model.5"],
]


@pytest.mark.parametrize(
    ("family", "kinds", "varying"),
    [(llama(4), LLAMA_KINDS, False), (llama(4), LLAMA_KINDS, True), (ALL["llava"], LLAVA_KINDS, False)],
    ids=["llama", "llama of any size", "llava"],
)
def test_repeated_layers_have_one_text_that_computes_what_they_do(
    family: Family, kinds: list[list[str]], varying: bool
) -> None:
    model = family.build()
    patterns = layer_patterns(model, family.batch())
    microbatch = patterns.prepare(family.second_batch() if varying else family.batch())
    found: dict[str, list[str]] = {}
    for name, part in microbatch.programs.programs.items():
        same = canonical(part, patterns.parameters())
        assert any(same.varying) == varying
        found.setdefault(same.text, []).append(name)
    assert list(found.values()) == kinds
    got, wanted = run_layers(model, microbatch, _by_text), run_layers(model, microbatch, load_stage)
    assert got.loss == wanted.loss
    assert got.gradients.keys() == wanted.gradients.keys() != set()
    assert all(torch.equal(got.gradients[name], wanted.gradients[name]) for name in wanted.gradients)


def _by_text(part: StageProgram, held: Mapping[str, Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """The canonical function, called without compiling it."""
    found = canonical(part, held)
    layer = execute(found.text, "<layer>", device=torch.device("cpu"))["layer"]
    assert callable(layer)
    given = tuple(part.constants[name] if kind == "c" else held[name] for kind, name in found.tensors)

    def run(*inputs: Tensor | int) -> tuple[Tensor, ...]:
        result = layer(given, *(torch.empty(x, 0) if isinstance(x, int) else x for x in inputs))
        assert isinstance(result, tuple)
        return result

    return run
