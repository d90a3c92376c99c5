"""Captured graphs are the model: same loss, same gradients; and what capture cannot do is said."""

from __future__ import annotations

import functools

import pytest
import torch
from support.oracles.eager import difference, eager_outcome, graph_outcome, holds_for
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from zoo import ALL, PARITY_FAMILIES, Batch, Family

from mmcompile.errors import BatchError, CaptureError
from mmcompile.ir.capture import Capture, capture
from mmcompile.ir.graph import ComponentKind, info

TOLERANCE = 1e-5
OTHERS = tuple(name for name in ALL if name not in PARITY_FAMILIES)
READS_EVERY_TOKEN = "qwen2_5_omni"
EVERY = [
    pytest.param(name, marks=pytest.mark.slow) if name in OTHERS or name == READS_EVERY_TOKEN else name for name in ALL
]
WITHOUT_MEDIA = [pytest.param(name, marks=() if name == "llava" else pytest.mark.slow) for name in PARITY_FAMILIES]
REUSED = [param for name, param in zip(ALL, EVERY, strict=True) if name != READS_EVERY_TOKEN]


@functools.cache
def _captured(name: str) -> tuple[Family, nn.Module, Capture]:
    """A family's model and the capture of its first batch; tests only read them."""
    family = ALL[name]
    model = family.build()
    return family, model, capture(model, family.batch())


def _assert_equals_eager(model: nn.Module, captured: Capture, batch: Batch) -> None:
    found = difference(graph_outcome(model, captured, batch), eager_outcome(model, batch))
    assert found.within(TOLERANCE), str(found)


@pytest.mark.parametrize("name", EVERY)
def test_loss_and_every_gradient_equal_eager(name: str) -> None:
    family, model, captured = _captured(name)
    _assert_equals_eager(model, captured, family.batch())


@pytest.mark.parametrize("name", REUSED)
def test_one_graph_serves_other_values(name: str) -> None:
    family, model, captured = _captured(name)
    batch = family.draw(family.first, seed=7)
    assert holds_for(model, captured, batch)
    _assert_equals_eager(model, captured, batch)


def test_a_model_whose_python_reads_every_token_is_captured_for_every_batch() -> None:
    """Limit: Qwen2.5-Omni walks through the token ids as a Python list, and the graph holds for equal reads only."""
    family, model, captured = _captured(READS_EVERY_TOKEN)
    batch = family.draw(family.first, seed=7)
    assert not holds_for(model, captured, batch)
    _assert_equals_eager(model, capture(model, batch, reference=captured.graph.components), batch)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_a_batch_of_other_sizes_equals_eager_in_a_new_bucket(name: str) -> None:
    family, model, captured = _captured(name)
    batch = family.second_batch()
    again = capture(model, batch, reference=captured.graph.components)
    assert again.graph.components == captured.graph.components
    _assert_equals_eager(model, again, batch)


@pytest.mark.parametrize("name", WITHOUT_MEDIA)
def test_a_batch_without_media_leaves_the_encoders_out(name: str) -> None:
    family, model, captured = _captured(name)
    batch = family.text_only_batch()
    again = capture(model, batch, reference=captured.graph.components)
    working = {info(node).component for node in again.graph.module.graph.nodes if node.op == "call_function"}
    kinds = {component.kind for component in captured.graph.components if component.name in working}
    assert kinds == {ComponentKind.LANGUAGE_MODEL}
    _assert_equals_eager(model, again, batch)


@pytest.mark.parametrize(("name", "holds"), [("llava", False), ("qwen2_5_vl", False), ("gemma3", True)])
def test_padding_is_noticed_where_the_model_skips_an_all_true_mask(name: str, holds: bool) -> None:
    """Such a graph has no mask and must not run a padded batch; Gemma 3 always builds one, and its graph serves both."""
    family, model, captured = _captured(name)
    for side in ("right", "left"):
        batch = family.padded_batch(side)
        if side == "right":
            assert holds_for(model, captured, batch) is holds
        if not holds_for(model, captured, batch):
            captured = capture(model, batch, reference=captured.graph.components)
        _assert_equals_eager(model, captured, batch)


class _Branching(nn.Module):
    """Takes one of two ways, depending on what `decide` says of an integer input or of an activation."""

    def __init__(self, *, on_activation: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16)
        self.on_activation = on_activation

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embed(input_ids)
        decided = hidden.sum() > 0 if self.on_activation else (input_ids == 3).any()
        if decided:
            hidden = torch.tanh(hidden)
        logits = self.head(hidden)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def _ids(*tokens: int) -> Batch:
    row = torch.tensor([tokens, tokens])
    return {"input_ids": row, "labels": row}


def test_a_branch_on_an_activation_is_refused_with_the_reason() -> None:
    with pytest.raises(CaptureError, match="decision in Python on a value that depends on activations"):
        capture(_Branching(on_activation=True), _ids(1, 2, 3, 4))


def test_a_branch_on_integers_is_taken_as_eager_takes_it_and_guarded() -> None:
    model = _Branching(on_activation=False)
    with_three, without, also_with = _ids(1, 2, 3, 4), _ids(1, 2, 5, 4), _ids(3, 7, 7, 7)
    captured = capture(model, with_three)
    _assert_equals_eager(model, captured, with_three)
    assert holds_for(model, captured, also_with)
    _assert_equals_eager(model, captured, also_with)
    assert not holds_for(model, captured, without)
    _assert_equals_eager(model, capture(model, without), without)


def test_frozen_parameters_stay_frozen() -> None:
    family = ALL["llava"]
    model = family.build()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("vision_tower" not in name)
    captured = capture(model, family.batch())
    frozen = {spec.name for spec in captured.graph.parameters if not spec.trainable}
    assert frozen == {name for name, p in model.named_parameters() if not p.requires_grad}
    _assert_equals_eager(model, captured, family.batch())


def test_tied_parameters_are_one_parameter_with_two_names() -> None:
    _, model, captured = _captured("gemma3")
    aliases = {spec.name: spec.aliases for spec in captured.graph.parameters if spec.aliases}
    assert aliases == {"model.language_model.embed_tokens.weight": ("lm_head.weight",)}
    assert len(captured.graph.parameters) == len(list(model.parameters()))


@pytest.mark.parametrize("name", ["llava", "qwen3_vl", "two_encoder_net"])
def test_names_are_the_models_own(name: str) -> None:
    _, model, captured = _captured(name)
    modules = {path for path, _ in model.named_modules()}
    tensors = {*dict(model.named_parameters()), *dict(model.named_buffers())}
    graph = captured.graph
    assert {info(n).module_path for n in graph.module.graph.nodes if n.op == "call_function"} <= modules
    read = {str(n.target) for n in graph.module.graph.nodes if n.op == "get_attr"}
    assert {target for target in read if not target.startswith("constant_")} <= tensors
    assert graph.buffers == tuple(name for name, _ in model.named_buffers())
    assert {spec.name for spec in graph.parameters} == {name for name, _ in model.named_parameters()}


def test_capture_leaves_the_model_as_it_was() -> None:
    family = ALL["qwen2_5_vl"]
    model = family.build()
    before = eager_outcome(model, family.batch())
    state = {name: (id(p), p.requires_grad) for name, p in model.named_parameters()}
    capture(model, family.second_batch())
    assert {name: (id(p), p.requires_grad) for name, p in model.named_parameters()} == state
    after = eager_outcome(model, family.batch())
    assert difference(after, before).identical


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_weights_without_values_give_the_same_graph(name: str) -> None:
    """Real size is planned from a configuration: parameters are fake and hold no memory."""
    family, _, captured = _captured(name)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = family.model().train()
    again = capture(fake, family.batch()).graph
    assert again.module.code == captured.graph.module.code
    assert again == captured.graph


def test_too_few_placeholders_are_refused_with_the_shapes() -> None:
    family = ALL["llava"]
    batch = family.batch()
    batch["input_ids"] = batch["input_ids"].masked_fill(batch["input_ids"] == 990, 7)
    with pytest.raises(BatchError, match=r"refused the batch.*pixel_values \(2, 3, 56, 56\)"):
        capture(family.build(), batch)


def test_missing_images_are_refused_though_the_model_would_run() -> None:
    family = ALL["llava"]
    batch = family.batch()
    del batch["pixel_values"]
    with pytest.raises(BatchError, match=r"32 image placeholders \(token 990\) but the batch has no media"):
        capture(family.build(), batch)


def test_a_batch_without_labels_is_refused() -> None:
    family = ALL["llava"]
    batch = family.batch()
    del batch["labels"]
    with pytest.raises(BatchError, match="no scalar loss"):
        capture(family.build(), batch)
