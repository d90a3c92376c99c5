"""A model by layers for tests of what workers hold: tied, frozen and odd parameters, under any optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmcompile.ir.graph import ParameterSpec, dtype_name
from mmcompile.planner.resilience.job import LayerId
from mmcompile.runtime.elastic.layer_store import LayerStore
from mmcompile.runtime.optim.optimizer import OptimizerSpec

CHAIN = "language_model"
NUM_LAYERS = 6
FROZEN_ONLY, NOTHING = 2, 4
UNUSED = "1.unused"
"""Trainable, and never given a gradient."""


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "adamw-single": functools.partial(torch.optim.AdamW, lr=1e-2, foreach=False),
    "sgd-momentum": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "sgd": functools.partial(torch.optim.SGD, lr=1e-2),
    "nadam": functools.partial(torch.optim.NAdam, lr=1e-2),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=1e-2),
}


def initial(scale: int = 1) -> dict[str, Tensor]:
    """Parameters as a run starts. Names begin with their layer; `0.tied` is in the last layer too."""
    generator = torch.Generator().manual_seed(7)
    randn = functools.partial(torch.randn, generator=generator)
    return {
        "0.tied": randn(5 * scale, 3),
        "0.norm": randn(3),
        "1.half": randn(7, 3).bfloat16(),
        UNUSED: randn(4),
        "1.frozen": randn(6, 2),
        "2.frozen": randn(3, 3),
        "3.across": randn(4 * scale, 6).t(),
        "3.scalar": randn(()),
        "3.double": randn(3).double(),
        "3.bytes": torch.arange(5, dtype=torch.uint8),
        "5.narrow": randn(5 * scale).bfloat16(),
        "5.frozen": randn(2),
        "5.none": randn(0, 3),
    }


def specs(values: Mapping[str, Tensor]) -> dict[LayerId, tuple[ParameterSpec, ...]]:
    found: dict[LayerId, list[ParameterSpec]] = {
        LayerId(chain=CHAIN, index=index): [] for index in range(NUM_LAYERS) if index != NOTHING
    }
    for name, value in values.items():
        spec = ParameterSpec(
            name=name,
            shape=tuple(value.shape),
            dtype=dtype_name(value.dtype),
            trainable="frozen" not in name and "bytes" not in name,
            aliases=("head",) if "tied" in name else (),
        )
        for index in (0, NUM_LAYERS - 1) if "tied" in name else (int(name[0]),):
            found[LayerId(chain=CHAIN, index=index)].append(spec)
    return {layer: tuple(own) for layer, own in found.items()}


def layer(index: int) -> LayerId:
    return LayerId(chain=CHAIN, index=index)


def layers(*indices: int) -> list[LayerId]:
    return [layer(index) for index in indices]


def empty_store(optimizer: str = "adamw", *, scale: int = 1, kind: type[LayerStore] = LayerStore) -> LayerStore:
    values = initial(scale)
    return kind(specs(values), values, OptimizerSpec.of(OPTIMIZERS[optimizer]))


def train(parameters: Mapping[str, nn.Parameter], step: Callable[[], Any], first: int, num_steps: int) -> None:
    """Steps whose gradients follow from the parameter's name and the step alone."""
    for number in range(first, first + num_steps):
        for name, parameter in parameters.items():
            if parameter.requires_grad and name != UNUSED and parameter.numel():
                generator = torch.Generator().manual_seed(1000 * number + sum(name.encode()))
                gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                parameter.grad = torch.empty_like(parameter).copy_(gradient)
        step()


def trained_store(
    optimizer: str = "adamw", num_steps: int = 3, *, scale: int = 1, kind: type[LayerStore] = LayerStore
) -> LayerStore:
    """Holds all layers."""
    store = empty_store(optimizer, scale=scale, kind=kind)
    store.hold(layers(*range(NUM_LAYERS)))
    train(store.state.parameters, store.state.optimizer.step, 0, num_steps)
    return store


def bits(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """All there is to say of tensors, without what is under test."""
    return {
        name: (
            str(t.dtype),
            tuple(t.shape),
            bytes(t.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).tolist()),
        )
        for name, t in tensors.items()
    }
