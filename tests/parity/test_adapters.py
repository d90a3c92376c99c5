"""LoRA adapters inside encoder and language model, each with a learning rate of its own, train as in one process."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from support.oracles.one_process import OneProcess
from torch import nn
from zoo import ALL, samples

import mmcompile as mm
from mmcompile.data.collate import collate

LORA_RATE, REST_RATE = 1e-2, 1e-3
MICROBATCHES = 2


def _model() -> nn.Module:
    """LLaVA whose adapters and projector train."""
    peft = pytest.importorskip("peft")
    model = ALL["llava"].build(torch.float64)
    model.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "up_proj", "fc1"], init_lora_weights=False)
        peft.inject_adapter_in_model(config, model)
    model.double()
    mm.freeze(model, ["projector", "*.lora_*"])
    return model


@pytest.mark.parametrize("tensor_parallel", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_adapters_train_as_in_one_process(tensor_parallel: int) -> None:
    steps = [samples(ALL["llava"], 4, seed=seed, dtype=torch.float64) for seed in (1, 2)]
    alone = _model()
    named = {name: parameter for name, parameter in alone.named_parameters() if parameter.requires_grad}
    assert {"vision_tower" in name for name in named if "lora_" in name} == {True, False}
    adamw = torch.optim.AdamW(
        [
            {"params": [p for name, p in named.items() if "lora_" in name], "lr": LORA_RATE, "weight_decay": 0.0},
            {"params": [p for name, p in named.items() if "lora_" not in name]},
        ],
        lr=REST_RATE,
    )
    plain = OneProcess(model=alone, optimizer=adamw)
    losses = [plain.step(step, MICROBATCHES).loss for step in steps]
    with mm.parallelize(
        _model(),
        collate(steps[0][:2]),
        num_microbatches=MICROBATCHES,
        tensor_parallel={"language_model": tensor_parallel},
        allow_unused=True,
        stages={"language_model": 3 - tensor_parallel},
        optimizer=functools.partial(torch.optim.AdamW, lr=REST_RATE),
        groups=[mm.ParameterGroup(match="*.lora_*", lr=LORA_RATE, weight_decay=0.0)],
    ) as engine:
        assert [engine.step(step).loss for step in steps] == pytest.approx(losses, rel=1e-9)
        got = engine.state_dict()
    for name, parameter in alone.state_dict().items():
        torch.testing.assert_close(got[name], parameter, rtol=0, atol=1e-6)
    fresh = _model().state_dict()
    moved = {name for name in got if not torch.equal(got[name], fresh[name])}
    # The tower's last layer feeds nothing.
    assert moved == {name for name in named if not torch.equal(named[name], fresh[name])}
    assert any("vision_tower" in name for name in moved) and any("language_model" in name for name in moved)
