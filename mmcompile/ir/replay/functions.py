"""Functions of torch by name: those that ask about a tensor, read its values, move its elements, or write in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


QUESTIONS = _names(
    "size dim numel nelement is_floating_point is_complex is_signed stride is_contiguous element_size data_ptr "
    "ndimension __len__ get_device storage_offset has_names is_same_size _is_view is_inference requires_grad_ "
    "register_hook is_grad_enabled set_grad_enabled _set_grad_enabled is_autocast_enabled finfo iinfo "
    "get_default_dtype promote_types broadcast_shapes is_tensor can_cast result_type __hash__ __repr__ __format__ "
    "__set__ untyped_storage is_shared is_pinned retain_grad __dir__ __deepcopy__ __reduce_ex__ is_conj is_neg "
    "_is_zerotensor is_coalesced is_nonzero_static get_rng_state manual_seed"
)
"""Functions that make no tensor and read no values."""
READS = _names(
    "tolist item numpy __array__ __bool__ __int__ __float__ __index__ __contains__ equal allclose is_nonzero"
)
"""Functions that turn values of tensors into numbers of Python."""
MOVING_PROPERTIES = _names("T mT H mH data real imag")
_MOVES = _names(
    "view reshape permute transpose flatten unsqueeze squeeze __getitem__ split split_with_sizes chunk unbind cat "
    "concat concatenate stack expand contiguous narrow select t movedim moveaxis unflatten repeat index_select "
    "unfold expand_as view_as reshape_as hstack vstack dstack swapaxes swapdims clone tile flip roll tensor_split "
    "hsplit vsplit ravel take_along_dim broadcast_to atleast_2d"
)
"""Functions that only rearrange elements of float tensors, except `to`, which also changes types."""
_CAST_TO = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}
SPLITS = _names("split split_with_sizes tensor_split")
"""Moves into pieces of given sizes."""
INDEXES = _names("__getitem__ index_select take_along_dim")
"""Moves that read the values of their further tensors."""
_PAD_VALUES = {"pad": (3, "value"), "pad_sequence": (2, "padding_value")}
"""Function that pads -> place and name of the argument with the number."""
PADS = frozenset(_PAD_VALUES)
"""Moves that add zeros."""
LIKE = _names("to type_as expand_as view_as reshape_as")
"""Functions that read only dtype, device or shape of their second tensor."""
TAKES_NUMBERS = _names(
    "view reshape expand repeat narrow split split_with_sizes chunk pad unflatten tile roll arange linspace zeros "
    "ones full empty rand randn randint new_zeros new_ones new_full new_empty interpolate unfold fold eye tril "
    "triu tril_indices triu_indices"
)
"""Functions that read the value of a tensor of one element where they take a number."""
FROM_DATA = _names("tensor as_tensor asarray new_tensor scalar_tensor")
"""Functions that make a tensor from numbers of Python."""
ELEMENTWISE = _names(
    "relu gelu silu sigmoid tanh softplus elu leaky_relu hardswish mish relu6 abs neg sqrt rsqrt exp log pow square clamp "
    "float half bfloat16 double to type add sub mul div truediv rsub radd rmul"
)
"""Functions, without underlines around their names, that compute every element from those at its place alone."""
_FACTORIES = _names("new_zeros new_ones new_full new_empty zeros_like ones_like full_like empty_like new_tensor")
_DYNAMIC = _names("nonzero argwhere unique unique_consecutive masked_select bincount")
_DRAWS = _names("rand randn randint randperm bernoulli multinomial normal rand_like randn_like randint_like dropout")


def writes_in_place(name: str, kwargs: dict[str, Any]) -> bool:
    """Return True for a function that writes to its first argument."""
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or kwargs.get("out") is not None


def is_move(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True for a function that only rearranges elements, without a change of type."""
    if name in PADS:
        return _pads_with_zeros(name, args, kwargs)
    if name in _CAST_TO:
        return args[0].dtype == _CAST_TO[name]
    return name in _MOVES or (name in ("to", "type_as") and not _changes_type(args, kwargs))


def padded_with(
    name: str, number: float, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a function in `PADS`, with `number` as what it pads with."""
    place, key = _PAD_VALUES[name]
    if len(args) > place:
        return (*args[:place], number, *args[place + 1 :]), kwargs
    return args, {**kwargs, key: number}


def _pads_with_zeros(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    place, key = _PAD_VALUES[name]
    mode = args[2] if len(args) > 2 else kwargs.get("mode", "constant")
    value = args[place] if len(args) > place else kwargs.get(key)
    return not value and (name != "pad" or mode == "constant")


def _changes_type(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, (torch.dtype, Tensor))]
    return any((value if isinstance(value, torch.dtype) else value.dtype) != args[0].dtype for value in given)


def is_mask(value: object) -> bool:
    """Return True for a tensor that indexes as a mask."""
    return isinstance(value, Tensor) and value.dtype in (torch.bool, torch.uint8)


def draws(name: str) -> bool:
    """Return True for a function that draws random numbers."""
    return name.rstrip("_") in _DRAWS


def has_dynamic_shape(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True for a call whose result's shape depends on values of its tensors."""
    if name == "where":
        return len(args) == 1 and not kwargs
    if name == "one_hot":
        return (args[1] if len(args) > 1 else kwargs.get("num_classes", -1)) == -1
    if name == "repeat_interleave":
        repeats = args[1] if len(args) > 1 else kwargs.get("repeats", next(iter(args), None))
        return isinstance(repeats, Tensor)
    if name == "__getitem__":
        index = args[1]
        return any(map(is_mask, index if isinstance(index, (tuple, list)) else (index,)))
    return name in _DYNAMIC


def fills(name: str) -> bool:
    """Return True for a factory like a float tensor whose result has values that follow from its other arguments."""
    return name in _FACTORIES and "empty" not in name


def makes_host_tensor(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True for a factory like a float tensor whose result is no float tensor, so that it needs none of its values."""
    dtype = kwargs.get("dtype")
    return name in _FACTORIES and isinstance(dtype, torch.dtype) and not dtype.is_floating_point
