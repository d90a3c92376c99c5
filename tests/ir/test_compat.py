"""Every private API that capture needs exists, does what we use it for, and is put back as it was, also after an error."""

from __future__ import annotations

import sys

import pytest
import sympy
import torch
import transformers.masking_utils as masking
import transformers.pytorch_utils as pytorch_utils
from torch import Tensor, nn
from torch.export import Dim
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import ALL

from mmcompile.ir import compat
from mmcompile.ir.inputs import completed


class _Broken(Exception):
    """Raised inside a block, to see what is left behind."""


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(
        self, func: object, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        self.ops += 1
        return func(*args, **(kwargs or {}))  # type: ignore[operator]


@pytest.mark.parametrize("name", compat.__all__)
def test_everything_offered_exists(name: str) -> None:
    assert getattr(compat, name) is not None


def test_real_execution_leaves_fake_tensors_modes_autocast_and_autograd() -> None:
    weight = torch.ones(3, 3, requires_grad=True)
    with compat.FakeTensorMode(), _Counting() as counting, torch.autocast("cpu", dtype=torch.bfloat16):
        with compat.real_execution():
            result = weight @ weight
        inside = counting.ops
        assert isinstance(torch.ones(2), compat.FakeTensor)
    assert inside == 0
    assert type(result) is Tensor and not result.requires_grad
    assert result.dtype == torch.float32 and result.tolist() == [[3.0] * 3] * 3


def test_real_execution_puts_modes_back_after_an_error() -> None:
    with compat.FakeTensorMode():
        with pytest.raises(_Broken), compat.real_execution():
            raise _Broken
        assert isinstance(torch.ones(2), compat.FakeTensor)
        assert torch.is_grad_enabled()


def test_fake_copy_has_shape_dtype_and_device_but_no_values() -> None:
    mode = compat.FakeTensorMode()
    fake = compat.fake_copy(mode, torch.arange(6).view(2, 3), torch.device("cpu"))
    assert isinstance(fake, compat.FakeTensor) and fake.fake_mode is mode
    assert (tuple(fake.shape), fake.dtype, fake.device) == ((2, 3), torch.int64, torch.device("cpu"))
    assert compat.fake_copy(mode, torch.ones(2), torch.device("meta")).device.type == "meta"


def test_fake_mode_of_tells_fake_modules_from_real_ones() -> None:
    assert compat.fake_mode_of(nn.Linear(2, 2)) is None
    assert compat.fake_mode_of(nn.ReLU()) is None
    with compat.FakeTensorMode() as mode:
        assert compat.fake_mode_of(nn.Linear(2, 2)) is mode


class _Symbolic(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x]).sum(1) if x.shape[0] < 10 else x.sum(1)


def test_symbolic_sizes_have_hints_expressions_and_guards() -> None:
    exported = torch.export.export(_Symbolic(), (torch.ones(4, 3),), dynamic_shapes=({0: Dim.AUTO},), strict=False)
    values = {node.name: node.meta["val"] for node in exported.graph.nodes if isinstance(node.meta.get("val"), Tensor)}
    x, doubled = values["x"], values["cat"]
    assert isinstance(x.shape[0], torch.SymInt)
    assert compat.shape_hint(x) == (4, 3)
    assert compat.shape_hint(doubled) == (8, 3)
    assert [compat.size_hint(size) for size in (5, x.shape[0])] == [5, 4]
    symbol = compat.size_expression(x.shape[0])
    assert isinstance(symbol, sympy.Symbol)
    assert sympy.simplify(compat.size_expression(doubled.shape[0]) - 2 * symbol) == 0
    held = {size: [guard.subs({symbol: size}) for guard in compat.shape_guards(x)] for size in (4, 9, 10)}
    assert all(answer == True for size in (4, 9) for answer in held[size])  # noqa: E712 (sympy truth)
    assert any(answer == False for answer in held[10])  # noqa: E712


def test_patched_tolist_asks_first_and_is_undone_after_an_error() -> None:
    original = compat.FakeTensor.tolist
    with compat.FakeTensorMode():
        known, unknown = torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
    with pytest.raises(_Broken), compat.patched_tolist(lambda tensor: [7, 8] if tensor is known else None):
        assert known.tolist() == [7, 8]
        with pytest.raises(Exception, match="data-dependent|DataDependent|aten._local_scalar_dense"):
            unknown.tolist()
        raise _Broken
    assert compat.FakeTensor.tolist is original


def _predicates() -> dict[tuple[str, str], object]:
    names = ("is_tracing", "is_torchdynamo_exporting", "is_torchdynamo_compiling")
    return {
        (module_name, name): module.__dict__[name]
        for module_name, module in list(sys.modules.items())
        if module_name.startswith("transformers.")
        for name in names
        if callable(module.__dict__.get(name))
    }


def test_transformers_predicates_answer_no_but_for_caches_inside_and_are_restored_after_an_error() -> None:
    before = _predicates()
    assert ("transformers.masking_utils", "is_tracing") in before
    patched = ("_vmap_expansion_sdpa", "TransformGetItemToIndex")
    originals = [masking.__dict__[name] for name in patched]
    with pytest.raises(_Broken), compat.transformers_eager_paths():
        inside = _predicates()
        assert inside.keys() == before.keys()
        yes = {module for (module, _), predicate in inside.items() if predicate(torch.ones(1))}  # type: ignore[operator]
        assert yes == {"transformers.pytorch_utils"}
        assert all(masking.__dict__[name] is not old for name, old in zip(patched, originals, strict=True))
        raise _Broken
    assert _predicates() == before
    assert [masking.__dict__[name] for name in patched] == originals


def test_a_tensor_made_while_tracing_is_in_no_cache_of_transformers_afterwards() -> None:
    @pytorch_utils.compile_compatible_method_lru_cache(maxsize=2)
    def table(size: int) -> torch.Tensor:
        return torch.arange(size)

    with compat.transformers_eager_paths():
        inside = table(3)
    assert table(3) is not inside
    assert table(3) is table(3)


@pytest.mark.parametrize("kind", ["causal", "sliding"])
def test_masks_by_broadcasting_are_those_by_vmap(kind: str) -> None:
    function = masking.causal_mask_function if kind == "causal" else masking.sliding_window_causal_mask_function(3)
    indices = torch.arange(2), torch.arange(1), torch.arange(5), torch.arange(7)
    with masking.__dict__["TransformGetItemToIndex"]():
        wanted = masking._vmap_expansion_sdpa(function)(*indices)
    with compat.transformers_eager_paths():
        got = masking._vmap_expansion_sdpa(function)(*indices)
    assert tuple(got.shape) == (2, 1, 5, 7)
    assert torch.equal(got, wanted.expand_as(got))


def test_positions_of_text_are_those_of_generation_and_leave_the_model_as_it_was() -> None:
    batch, model = ALL["qwen2_5_vl"].batch(), ALL["qwen2_5_vl"].build()
    states = [dict(module.__dict__) for module in model.modules()]
    positions = compat.positions_of_text(model, batch["input_ids"], batch)
    assert positions is not None and positions.shape == (4, *batch["input_ids"].shape)
    assert torch.equal(positions[0], torch.arange(positions.shape[-1]).expand_as(positions[0]))
    assert torch.equal(positions[1:], completed(model, batch)["position_ids"])
    assert [module.__dict__ for module in model.modules()] == states
    assert compat.positions_of_text(nn.Linear(1, 1), batch["input_ids"], batch) is None
