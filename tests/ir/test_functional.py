"""In-place ops become functional ones with the same results, also through views and for views taken before the write."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from mmcompile.errors import CaptureError
from mmcompile.ir.functional import functionalize
from mmcompile.ir.trace import inline_regions

aten = torch.ops.aten
Function = Callable[[Tensor, Tensor], Tensor]


def set_item(x: Tensor, y: Tensor) -> Tensor:
    out = x.clone()
    out[1:, ::2] = y[1:, :2] * 2
    return out


def set_item_scalar(x: Tensor, y: Tensor) -> Tensor:
    out = x * y
    out[0] = 7.0
    return out


def set_item_of_another_dtype(x: Tensor, y: Tensor) -> Tensor:
    out = torch.zeros(3, 4, dtype=torch.float64)
    out[:, 0] = x[:, 0] + y[0, 0]
    return out.float()


def set_item_by_integers(x: Tensor, y: Tensor) -> Tensor:
    out = x.clone()
    out[torch.tensor([0, 2])] = y[:2]
    return out


def accumulate_by_integers(x: Tensor, y: Tensor) -> Tensor:
    return x.clone().index_put_((torch.tensor([0, 0]),), y[:2], accumulate=True)


def set_item_broadcast(x: Tensor, y: Tensor) -> Tensor:
    out = x.clone()
    out[:, 1:3] = y[0, 0]
    return out


def add(x: Tensor, y: Tensor) -> Tensor:
    out = x * 2
    out += y
    out.mul_(3).sub_(y, alpha=2)
    return out


def add_to_a_row(x: Tensor, y: Tensor) -> Tensor:
    out = x.sin()
    out[1].add_(y[0])
    return out


def add_to_a_diagonal(x: Tensor, y: Tensor) -> Tensor:
    out = x @ y.T
    out.diagonal().add_(1.0)
    return out


def masked_fill(x: Tensor, y: Tensor) -> Tensor:
    return (x * 2).masked_fill_(y > 0, -1.0)


def masked_fill_of_a_slice(x: Tensor, y: Tensor) -> Tensor:
    out = x * 2
    out[:, :2].masked_fill_(y[:, :2] > 0, -1.0)
    return out


def copy_through_view_and_transpose(x: Tensor, y: Tensor) -> Tensor:
    out = x.clone()
    out.view(2, 6).transpose(0, 1).copy_(y.view(6, 2))
    return out


def copy_through_unsqueeze(x: Tensor, y: Tensor) -> Tensor:
    out = x.clone()
    out.unsqueeze(0)[0, 1].copy_(y[2])
    return out


def fill_and_zero(x: Tensor, y: Tensor) -> Tensor:
    out = x + y
    out[0].fill_(2.0)
    out[:, 1].zero_()
    return out


def zero(x: Tensor, y: Tensor) -> Tensor:
    out = x + y
    out.zero_()
    return out + x


def or_of_masks(x: Tensor, y: Tensor) -> Tensor:
    mask = x > 0
    mask |= y > 0
    mask[0] &= y[1] > 0
    mask ^= x > 1
    return torch.where(mask, x, y)


def view_before_and_after(x: Tensor, y: Tensor) -> Tensor:
    out = x.clone()
    row = out[0]
    before = row * 10
    out[0] = y[0]
    after = row * 100
    out.add_(1)
    return before + after + row


def chained_views(x: Tensor, y: Tensor) -> Tensor:
    out = x.clone()
    block = out[:2]
    corner = block[:, :2]
    seen = corner.sum()
    corner.mul_(y[0, 0])
    block[1] = seen
    return out * corner.sum() + block.sum()


def write_to_the_base_seen_through_a_view(x: Tensor, y: Tensor) -> Tensor:
    out = x.clone()
    flat = out.view(-1)
    out[2] = y[2]
    return flat


def write_through_one_view_seen_through_another(x: Tensor, y: Tensor) -> Tensor:
    out = x.clone()
    top, left = out[0], out[:, 0]
    top.add_(y[0])
    left.mul_(2)
    return torch.cat([top, left])


def value_of_an_expression(x: Tensor, y: Tensor) -> Tensor:
    out = x.clone()
    return out.add_(y) + out.mul_(2)


def loop(x: Tensor, y: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for index in range(3):
        out[index] = x[index] * y[index] + out[index - 1]
    return out


def clamp(x: Tensor, y: Tensor) -> Tensor:
    return (x * 3).clamp_(-0.5, 0.5).relu_() + y


def copy_through_permute(x: Tensor, y: Tensor) -> Tensor:
    out = x.clone()
    out.permute(1, 0)[0] = y[:, 0]
    return out


def copy_through_chunks(x: Tensor, y: Tensor) -> Tensor:
    out = torch.zeros(3, 4)
    left, right = out.chunk(2, 1)
    left.add_(2.0)
    right.copy_(torch.ones(3, 2))
    return out * x + left.sum() * y


def copy_through_unbound_rows(x: Tensor, y: Tensor) -> Tensor:
    out = torch.zeros(3, 4)
    for row in out.unbind():
        row.add_(1.0)
    return out * x + y


def copy_through_as_strided(x: Tensor, y: Tensor) -> Tensor:
    out = x.clone()
    out.as_strided((2, 2), (4, 1), 1).copy_(y[:2, :2])
    return out


def copy_through_unfold(x: Tensor, y: Tensor) -> Tensor:
    out = x.clone()
    out.unfold(1, 2, 2).mul_(y[0, 0])
    return out


def copy_through_expand(x: Tensor, y: Tensor) -> Tensor:
    out = x.clone()
    out[0].expand(4).copy_(y[0])
    return out


def copy_through_reshape_that_copies(x: Tensor, y: Tensor) -> Tensor:
    out = x.clone()
    out.t().reshape(3, 4).copy_(y)  # a copy is written, not `out`
    return out.add_(1)


def copy_through_transposed(x: Tensor, y: Tensor) -> Tensor:
    out = x.clone()
    out.t().mul_(2)
    out.movedim(0, 1)[1].add_(y[:, 1])
    return out


def copy_through_detach(x: Tensor, y: Tensor) -> Tensor:
    out = x.clone()
    seen = out.detach()
    seen.mul_(3)
    seen[0] = 1.0
    return out + seen * y


def copy_into_a_detached_constant(x: Tensor, y: Tensor) -> Tensor:
    out = torch.tensor([[0.0] * 4] * 3).detach()
    out += x
    out[:, 1] *= y[:, 1]
    return out


def write_under_no_grad(x: Tensor, y: Tensor) -> Tensor:
    out = x * 2
    with torch.no_grad():
        out.mul_(3)
        out[:, 0] = y[:, 0]
    return out + out.detach()


def write_of_a_new_value_under_no_grad(x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        out = x * 2
        out.mul_(3)
    out = out + y
    row = out[0]
    with torch.no_grad():
        row += x[0]
    return out * row


def write_into_a_view_made_under_no_grad(x: Tensor, y: Tensor) -> Tensor:
    out = torch.zeros(3, 4)
    with torch.no_grad():
        block = out[:, :2]
    block += 1.0
    return out * x + y


def transpose_in_place(x: Tensor, y: Tensor) -> Tensor:
    out = x.clone()
    turned = out.transpose(0, 1)
    turned.unsqueeze_(0).squeeze_(0)
    turned.t_()
    turned[0] = y[0]
    return out + turned


def sum_into_a_half(x: Tensor, y: Tensor) -> Tensor:
    out = torch.zeros(3, 4, dtype=torch.bfloat16)
    out += x.bfloat16()
    out.add_(y.double())
    return out.double()


def detach_in_place(x: Tensor, y: Tensor) -> Tensor:
    out = x * 2
    out.detach_()
    out.add_(y)
    return out


def shift_bits(x: Tensor, y: Tensor) -> Tensor:
    count = (x > 0).long() + 1
    count <<= 2
    count >>= 1
    return count * y


def overlapping_reads_between_writes(x: Tensor, y: Tensor) -> Tensor:
    out = x.clone()
    first = out[0]
    total = first.sum()
    for index in range(3):
        out[index].add_(y[index] * total)
        total = total + first.mean() + out.view(-1)[index]
    return out * total


def write_into_one_of_several_new_tensors(x: Tensor, y: Tensor) -> Tensor:
    found = (x * y).topk(2)
    values, places = found
    values /= values.sum(-1, keepdim=True)
    found[0].mul_(2.0)
    values[:, :1].add_(values[:, 1:])
    return values * y[:, :2] + places


FUNCTIONS: tuple[Function, ...] = (
    write_into_one_of_several_new_tensors,
    copy_into_a_detached_constant,
    copy_through_as_strided,
    copy_through_chunks,
    copy_through_detach,
    copy_through_expand,
    copy_through_permute,
    copy_through_reshape_that_copies,
    copy_through_transposed,
    copy_through_unbound_rows,
    copy_through_unfold,
    detach_in_place,
    overlapping_reads_between_writes,
    shift_bits,
    sum_into_a_half,
    transpose_in_place,
    write_into_a_view_made_under_no_grad,
    write_of_a_new_value_under_no_grad,
    write_under_no_grad,
    set_item,
    set_item_scalar,
    set_item_of_another_dtype,
    set_item_by_integers,
    accumulate_by_integers,
    set_item_broadcast,
    add,
    add_to_a_row,
    add_to_a_diagonal,
    masked_fill,
    masked_fill_of_a_slice,
    copy_through_view_and_transpose,
    copy_through_unsqueeze,
    fill_and_zero,
    zero,
    or_of_masks,
    view_before_and_after,
    chained_views,
    write_to_the_base_seen_through_a_view,
    write_through_one_view_seen_through_another,
    value_of_an_expression,
    loop,
    clamp,
)


class _Module(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(x, y)


def _exported(module: nn.Module, *inputs: Tensor) -> fx.GraphModule:
    """The graph as export leaves it, in-place ops included, without regions."""
    exported = torch.export.export(module, inputs, strict=False).module(check_guards=False)
    inline_regions(exported.graph, exported)
    return exported


def _mutable(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_results_and_gradients_are_those_of_eager(function: Function) -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    module = _exported(_Module(function), x, y)
    assert _mutable(module.graph), "export left nothing in place: the case tests nothing"
    functionalize(module.graph)
    module.graph.lint()
    assert not _mutable(module.graph)
    module.recompile()
    outcomes = []
    for run in (function, module):
        inputs = [x.clone().requires_grad_(), y.clone().requires_grad_()]
        result = run(*inputs)
        gradients = torch.autograd.grad(result.square().sum(), inputs, allow_unused=True, materialize_grads=True)
        outcomes.append((result, *gradients))
    for got, wanted in zip(outcomes[1], outcomes[0], strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_new_nodes_tell_shape_and_dtype(function: Function) -> None:
    """Costs and links are computed from these."""
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    module = _exported(_Module(function), x, y)
    functionalize(module.graph)
    module.recompile()
    said = {n.name: n.meta["val"] for n in module.graph.nodes if isinstance(n.meta.get("val"), Tensor)}

    class Compare(fx.Interpreter):
        def run_node(self, n: fx.Node) -> object:
            value = super().run_node(n)
            if isinstance(value, Tensor):
                assert (tuple(said[n.name].shape), said[n.name].dtype) == (tuple(value.shape), value.dtype), (
                    n.format_node()
                )
            return value

    Compare(module).run(x, y)


def test_a_functional_graph_stays_as_it_is() -> None:
    module = _exported(_Module(lambda x, y: (x @ y.T).softmax(-1)), torch.randn(3, 4), torch.randn(3, 4))
    before = str(module.graph)
    functionalize(module.graph)
    assert str(module.graph) == before


def test_updates_of_buffers_stay() -> None:
    """Running statistics are state of the model, not a value of the graph."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train()
    x = torch.randn(3, 4)
    module = _exported(copy.deepcopy(model), x)
    functionalize(module.graph)
    module.recompile()
    assert [node.target for node in _mutable(module.graph)] == [aten.add_.Tensor]
    torch.testing.assert_close(module(x), model(x))
    statistics = dict(module.named_buffers())
    for name, value in model.named_buffers():
        torch.testing.assert_close(statistics[name], value)
    assert statistics["1.num_batches_tracked"] == 1


def test_a_write_through_a_view_of_another_dtype_is_refused() -> None:
    def through_bits(x: Tensor, y: Tensor) -> Tensor:
        out = x.clone()
        out.view(torch.int32).bitwise_and_(1)
        return out + y

    module = _exported(_Module(through_bits), torch.randn(3, 4), torch.randn(3, 4))
    with pytest.raises(CaptureError, match=r"writes through aten.view.dtype.* make the update out of place"):
        functionalize(module.graph)
