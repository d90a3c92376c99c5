"""Functions that differ in names only have one text; the text does what the function does; any other difference shows in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from support.graphs.layer_run import layer_patterns, llama, run_layers
from torch import Tensor
from zoo import ALL
from zoo.family import Family

from mmcompile.codegen.canonical import CanonicalLayer, canonical_layers
from mmcompile.codegen.compiled import compiled_layer
from mmcompile.codegen.load import load_stage
from mmcompile.codegen.program import StageProgram
from mmcompile.codegen.stage_module import Layer
from mmcompile.config import Recompute
from mmcompile.errors import VerifyError

SOURCE = '''"""A stage."""

import torch

aten = torch.ops.aten


def layer_of_mine(
    device: "device",
    weight: "float32 [3, 4], trained",
    bias: "float32 [3]",
    scale: "float32 [3]",
    size_0: "size s5",
    add_1: "float32 [s5, 4], gradient",
):
    # layers.0
    linear = aten.linear.default(add_1, weight, bias)
    view = aten.view.default(linear, [size_0, -1])
    del linear
    arange = aten.arange.default(size_0, device=device)
    mul = aten.mul.Tensor(view, scale)
    add_2 = aten.add.Tensor(mul, 0.5)
    return (add_2, arange, )


class Stage(StageModule):
    def forward(self, size_0, add_1):
        return self.run(layer_of_mine, self.device, self.t["a"], self.t["b"], self.c["c"], size_0, add_1)
'''

OTHER_NAMES = '''
def language_model_layer(
    where: "device",
    layers_9_weight: "float32 [3, 4], trained",
    layers_9_bias: "float32 [3]",
    c: "float32 [3]",
    size_3: "size s88",
    hidden: "float32 [s88, 4], gradient",
):
    """The same."""
    linear_7 = aten.linear.default(hidden, layers_9_weight, layers_9_bias)
    v3 = aten.view.default(linear_7, [size_3, -1])
    arange_1 = aten.arange.default(size_3, device=where)
    add_2 = aten.mul.Tensor(v3, c)
    del v3
    mul = aten.add.Tensor(add_2, 0.5)
    del add_2
    return (mul, arange_1)
'''

TEXT = """def layer(a0: 'device', a1: 'float32 [3, 4], trained', a2: 'float32 [3]', a3: 'float32 [3]', a4: 'size n0', \
a5: 'float32 [n0, 4], gradient'):
    a4 = a4.shape[0]
    torch._check(a5.shape[0] == a4)
    v6 = aten.linear.default(a5, a1, a2)
    v7 = aten.view.default(v6, [a4, -1])
    v8 = aten.arange.default(a4, device=a0)
    v9 = aten.mul.Tensor(v7, a3)
    v10 = aten.add.Tensor(v9, 0.5)
    return (v10, v8)
"""


def canonical(source: str) -> CanonicalLayer:
    (layer,) = canonical_layers(source, "language_model.0").values()
    return layer


def test_the_text() -> None:
    found = canonical(SOURCE)
    assert found.text == TEXT
    assert [argument.varying for argument in found.arguments] == [(), (), (), (), (0,), (0,)]


def test_other_names_have_the_same_text() -> None:
    assert canonical(OTHER_NAMES).text == TEXT


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("0.5", "0.25"),
        ("mul.Tensor", "div.Tensor"),
        ("(view, scale", "(linear, scale"),
        ("(add_2, arange, )", "(arange, add_2, )"),
        ("[size_0, -1]", "[3, -1]"),
        ("[s5, 4], gradient", "[7, 4], gradient"),
        ("[s5, 4], gradient", "[s6, 4], gradient"),
        ("[s5, 4], gradient", "[s5, 4]"),
        ("float32 [s5, 4]", "float64 [s5, 4]"),
        ("[3, 4], trained", "[3, 4]"),
        ('scale: "float32 [3]"', 'scale: "float32 [1]"'),
    ],
)
def test_any_other_difference_shows(before: str, after: str) -> None:
    assert before in SOURCE
    assert canonical(SOURCE.replace(before, after)).text != TEXT


def test_sizes_of_several_terms_and_commas() -> None:
    source = 'def f(x: "float32 [Max(1, s0), s0*s1, 4]", n: "size s0*s1"):\n    return (x, n)\n'
    found = canonical(source)
    assert found.arguments[0].sizes == ("Max(1, s0)", "s0*s1", "4")
    assert found.arguments[0].varying == (0, 1)
    assert "a0: 'float32 [Max(1, n0), n0*n1, 4]', a1: 'size n0*n1'" in found.text


def test_loading_again_takes_no_work() -> None:
    assert canonical(SOURCE) is canonical(SOURCE)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            "mul.Tensor(view",
            "mul.Tensor(hidden",
            "line 21: function layer_of_mine of stage language_model.0 reads hidden",
        ),
        ("view, scale", "view, self", "reads self, which is neither an argument nor a value of its own"),
        ('device: "device"', "device", 'says nothing of its argument device; wanted "device"'),
        ('"float32 [3]"', '"three numbers"', "says 'three numbers' of its argument bias"),
        ('device: "device"', '*device: "device"', "takes arguments by name or with defaults"),
        ("class Stage", "class", "the source of stage language_model.0 does not compile"),
    ],
)
def test_sources_of_another_form_are_refused(before: str, after: str, message: str) -> None:
    assert before in SOURCE
    with pytest.raises(VerifyError, match=message):
        canonical(SOURCE.replace(before, after))


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
        layers = canonical_layers(part.source, name)
        assert any(argument.varying for layer in layers.values() for argument in layer.arguments) == varying
        found.setdefault("".join(layer.text for layer in layers.values()), []).append(name)
    assert list(found.values()) == kinds
    got, wanted = run_layers(model, microbatch, _by_text), run_layers(model, microbatch, load_stage)
    assert got.loss == wanted.loss
    assert got.gradients.keys() == wanted.gradients.keys() != set()
    assert all(torch.equal(got.gradients[name], wanted.gradients[name]) for name in wanted.gradients)


def _by_text(part: StageProgram, held: Mapping[str, Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """The stage, its functions replaced by the canonical ones, without compiling them."""
    layers = canonical_layers(part.source, part.stage)

    def run(layer: Layer, recompute: Recompute, arguments: tuple[object, ...]) -> tuple[Tensor, ...]:
        given = (torch.empty(x, 0) if isinstance(x, int) else x for x in arguments)
        return compiled_layer(layers[layer.__name__].text, recompute, backend=None)(*given)

    return load_stage(part, held, runner=run)
