"""Passes as text: both ways, and one row per error."""

from __future__ import annotations

import pytest

from mmcompile.errors import ConfigError
from mmcompile.passes.autocast import Autocast
from mmcompile.passes.base import AnyPass
from mmcompile.passes.context_parallel.context_parallel import ContextParallel
from mmcompile.passes.cost.cost import Cost
from mmcompile.passes.cost.recompute import Recomputed
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.passes.masks.bitfield_attention import BitfieldAttention
from mmcompile.passes.selection import format_passes, parse_passes
from mmcompile.passes.tensor_parallel.tensor_parallel import TensorParallel

TEXTS: list[tuple[str, tuple[AnyPass, ...]]] = [
    ("gradient-flow,cost", (GradientFlow(), Cost())),
    ("autocast{components=vision+language_model}", (Autocast(components=("vision", "language_model")),)),
    (
        "tensor-parallel{degrees=vision:2+language_model:4},gradient-flow",
        (TensorParallel(degrees=(("vision", 2), ("language_model", 4))), GradientFlow()),
    ),
    (
        "bitfield-attention{impl=eager},context-parallel{component=language_model num-ranks=2 head-stride=1}",
        (
            BitfieldAttention(impl="eager"),
            ContextParallel(component="language_model", num_ranks=2, head_stride=1),
        ),
    ),
    ("recomputed", (Recomputed(),)),
]


@pytest.mark.parametrize(("text", "passes"), TEXTS, ids=lambda value: value if isinstance(value, str) else "")
def test_text_and_passes_round_trip(text: str, passes: tuple[AnyPass, ...]) -> None:
    assert parse_passes(text) == passes
    assert format_passes(passes) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no pass is named; write for example 'gradient-flow,cost'"),
        ("cost;verify", "cannot read passes at 'cost;verify'"),
        ("costs", "no pass 'costs'; choose of verify,"),
        ("cost{depth=2}", "pass cost has no field 'depth'; its fields are none"),
        ("autocast", r"pass autocast needs components; write autocast\{components=a\+b\}"),
        ("tensor-parallel{degrees=2}", "field degrees of pass tensor-parallel is '2'; write it as degrees=a:2"),
        ("op-costs", "pass op-costs has a field rules that text cannot give; make the pass in Python"),
        ("recomputed{modes=full}", "pass recomputed has a field modes that text cannot give"),
    ],
)
def test_errors_say_what_to_write(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_passes(text)
