"""Layers of one kind do the same work; kinds do not depend on the sizes of the batch."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

import pytest
from torch import nn
from zoo import FAMILIES, Family, Size

from mmcompile.ir.capture import capture
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.passes.layer_kinds import layer_kinds
from mmcompile.passes.pipeline import Pipeline


def kinds_of(model: nn.Module, family: Family, size: Size) -> Mapping[str, tuple[str, ...]]:
    graph = capture(model, family.draw(size, seed=1)).graph
    Pipeline(passes=(GradientFlow(),)).run(graph)
    return layer_kinds(graph)


@functools.cache
def first_kinds_of(name: str) -> Mapping[str, tuple[str, ...]]:
    """Of the family's model on its first batch, all of which trains."""
    return kinds_of(FAMILIES[name].build(), FAMILIES[name], FAMILIES[name].first)


def test_blocks_of_a_stack_are_one_kind_and_ends_are_others() -> None:
    kinds = first_kinds_of("llava")
    text = kinds["language_model"]
    assert len(set(text[1:-1])) == 1
    assert len(set(text)) == 3
    assert text[1].startswith("language_model.layers-")
    assert kinds["vision_tower"][1].startswith("encoder.layers-")
    assert set(kinds["vision_tower"]).isdisjoint(text)


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "qwen2_audio", "gemma3"])
def test_kinds_do_not_depend_on_the_batch(name: str) -> None:
    family = FAMILIES[name]
    model = family.build()
    first = first_kinds_of(name)
    assert kinds_of(model, family, family.second) == first
    assert kinds_of(model, family, replace(family.first, samples=1)) == first


def test_windowed_and_full_attention_are_two_kinds() -> None:
    windowed, full, *_ = first_kinds_of("qwen2_5_vl")["visual"][1:]
    assert windowed != full


def test_what_trains_and_where_gradient_flows_is_part_of_the_kind() -> None:
    family = FAMILIES["llava"]
    seen = [first_kinds_of("llava")["language_model"][1]]
    for pattern in ("multi_modal_projector", "embed_tokens", "lm_head"):
        model = family.build()
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_(pattern in parameter_name)
        seen.append(kinds_of(model, family, family.first)["language_model"][1])
    trained, carrying, carrying_too, frozen = seen
    assert len({trained, carrying, frozen}) == 3
    assert carrying == carrying_too
