"""What is fixed, what grows with rows and what with pairs: seen in one size, true in another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sympy
import torch
import torch.nn.functional as F
from support.graphs.hand_graph import WIDTH, build_graph
from torch import fx, nn
from zoo import FAMILIES

from mmcompile.costmodel.load import Load
from mmcompile.ir.capture import capture
from mmcompile.ir.graph import CaptureMode, info
from mmcompile.kernels.packed_attention.packed_ops import packed_attention
from mmcompile.passes.cost.cost import Cost
from mmcompile.passes.cost.cost_table import CostTable
from mmcompile.passes.cost.op_load import Growth, Growths, captured_sequences
from mmcompile.passes.gradient_flow import GradientFlow

ONE_LAYER = {"layer": ("language_model", 0)}
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class _Attention(nn.Module):
    """Projections around an attention with two heads, over [samples, tokens, width]."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.attend = attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, WIDTH // 2)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2)).pow(2).sum()


def _fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(q.shape[2])
    hidden = torch.where(rows[None] > rows[:, None], -torch.inf, 0.0)
    return (q @ k.transpose(-1, -2) + hidden).softmax(-1) @ v


def _windows_then_all(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    samples, _, tokens, _ = q.shape
    q, k, v = (x.unflatten(2, (tokens // 2, 2)).transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    near = F.scaled_dot_product_attention(q, k, v)
    q, k, v = (x.unflatten(0, (samples, tokens // 2)).transpose(1, 2).flatten(2, 3) for x in (near, k, v))
    return F.scaled_dot_product_attention(q, k, v)


def _to_a_few(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention to the first two tokens: twice as many pairs as rows, beside one to all."""
    return F.scaled_dot_product_attention(q, k[:, :, :2], v[:, :, :2]) + F.scaled_dot_product_attention(q, k, v)


FLOPS = ("forward_flops", "input_grad_flops", "weight_grad_flops", "attention_flops", "attention_backward_flops")
BYTES = ("forward_bytes", "backward_bytes", "activation_bytes", "selective_bytes", "full_bytes", "kv_bytes")


def table_of(attend: Attend, samples: int, tokens: int) -> CostTable:
    graph = build_graph(_Attention(attend), {"x": torch.randn(samples, tokens, WIDTH)}, ONE_LAYER)
    GradientFlow().run(graph)
    return Cost().run(graph)


@pytest.mark.parametrize(
    ("attend", "tolerance"),
    # The loss is one number. The mask of `_written_out` is one for all samples, and the few of `_to_a_few` are as many in each.
    [(_fused, 1e-3), (_windows_then_all, 1e-3), (_written_out, 0.25), (_to_a_few, 0.15)],
)
@pytest.mark.parametrize(("samples", "tokens"), [(3, 8), (2, WIDTH), (3, 40)])
def test_one_size_prices_another(attend: Attend, tolerance: float, samples: int, tokens: int) -> None:
    small, large = table_of(attend, 2, 12), table_of(attend, samples, tokens)
    assert large.loads["language_model"] == Load(tokens=samples * tokens, squares=samples * tokens**2)
    for table, other in ((small, large), (large, small)):
        (cost,), (predicted,) = other["language_model"], table.at(other.loads)["language_model"]
        for name in FLOPS:
            assert getattr(predicted, name) == getattr(cost, name), name
        for name in BYTES:
            assert getattr(predicted, name) == pytest.approx(getattr(cost, name), rel=tolerance), name


def test_attention_written_out_counts_as_attention() -> None:
    fused, written = (table_of(attend, 2, 12)["language_model"][0] for attend in (_fused, _written_out))
    assert (written.attention_flops, written.kv_bytes) == (fused.attention_flops, fused.kv_bytes)


def test_packed_windows_grow_with_rows_and_packed_images_with_squares() -> None:
    class Packed(nn.Module):
        def __init__(self, bounds: list[int]) -> None:
            super().__init__()
            self.heads = nn.Parameter(torch.randn(1, 2, 12, 4))
            self.images = nn.Buffer(torch.tensor([0, 6, 12]))
            self.windows = nn.Buffer(torch.tensor(bounds))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = self.heads * x
            near = packed_attention(heads, heads, heads, self.windows * 1, 0.5)
            return packed_attention(near, near, near, self.images, 0.5).sum()

    graph = build_graph(Packed([0, 3, 6, 9, 12]), {"x": torch.randn(1)}, ONE_LAYER)
    GradientFlow().run(graph)
    table = Cost().run(graph)
    assert table.loads["language_model"] == Load(tokens=12.0, squares=72.0)
    product = 4 * 2 * 4  # two products of heads x dim, a pair
    polynomial = table.polynomial("language_model", 0, "forward_flops")
    assert (polynomial.per_token, polynomial.per_square) == (product * 3, product)


def test_work_on_parameters_alone_is_fixed() -> None:
    class Merged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))
            self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(4, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.weight + self.up @ self.down).sum()

    graph = build_graph(Merged(), {"x": torch.randn(2, 5, 4)}, ONE_LAYER)
    GradientFlow().run(graph)
    polynomial = Cost().run(graph).polynomial("language_model", 0, "forward_flops")
    assert (polynomial.fixed, polynomial.per_token, polynomial.per_square) == (2 * 4 * 2 * 4, 2 * 4 * 4, 0)


def test_size_symbols_decide_where_there_are_any() -> None:
    graph = build_graph(_Attention(_written_out), {"x": torch.randn(2, 12, WIDTH)}, ONE_LAYER)
    batch, length = sympy.symbols("s0 s1")
    (scores,) = [node for node in graph.module.graph.nodes if "softmax" in node.name]
    for shape, growth in (
        ((batch, 2, length, length), Growth.SQUARES),
        ((batch, 2, length, 12), Growth.TOKENS),
        ((2, 2, 12, 12), Growth.SQUARES),  # no symbol: by its size
    ):
        scores.meta["symbolic_shape"] = shape
        assert Growths((12, 12), set()).size(scores) == growth


@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen2_audio"])
def test_shapes_of_one_size_say_what_size_symbols_say(name: str) -> None:
    family = FAMILIES[name]
    graph = capture(family.build(), family.batch(), dynamic=family.second_batch()).graph
    assert graph.mode == CaptureMode.SYMBOLIC
    nodes = [node for node in graph.module.graph.nodes if node.op == "call_function" and not info(node).shared]
    by_component = {c.name: [n for n in nodes if info(n).component == c.name] for c in graph.components}
    sequences = captured_sequences(graph, by_component)
    symbolic = {name: [node for node in own if _has_symbols(node)] for name, own in by_component.items()}
    assert sum(map(len, symbolic.values())) > 100

    def said() -> dict[fx.Node, Growth]:
        growths = {name: Growths(found, set()) for name, found in sequences.items()}
        return {node: growths[name].size(node) for name, own in symbolic.items() for node in own}

    by_symbols = said()
    for node in graph.module.graph.nodes:
        node.meta.pop("symbolic_shape", None)
    assert said() == by_symbols


def _has_symbols(node: fx.Node) -> bool:
    return any(not isinstance(size, int) for size in node.meta.get("symbolic_shape", ()))
