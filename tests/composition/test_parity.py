"""Random composed models train as stages as they do whole: same loss, same gradients, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.graphs.split import root_values, run_split
from support.models.compose_models import Composition, compositions
from support.oracles.eager import Outcome, difference
from torch import Tensor

import mmcompile as mm
from mmcompile.captured_model import captured_step, fingerprint_of
from mmcompile.codegen.stage_programs import lower
from mmcompile.config import PlanRequest
from mmcompile.costmodel.cluster import Cluster
from mmcompile.ir.graph import Component, ComponentKind
from mmcompile.planning import PlanInputs, make_plan

TOLERANCE = 1e-9
ALL = compositions(60, seed=7)
CORE = (5, 12, 26, 28)
CASES = [
    pytest.param(case, id=f"{index}-{case}", marks=() if index in CORE else pytest.mark.slow)
    for index, case in enumerate(ALL)
]


@pytest.mark.parametrize("case", CASES)
def test_stages_give_the_models_own_loss_and_gradients(case: Composition) -> None:
    model = case.build()
    batch = case.batch(model)
    wanted = _whole(model, batch)
    captured = captured_step(model, batch)
    _check_components(case, model, captured.graph.components)
    plan = make_plan(
        captured,
        batch,
        PlanRequest(stages={"language_model": 2}),
        PlanInputs(cluster=Cluster.local(4)),
        fingerprint_of(captured.graph),
    )
    assert len(plan.stages) >= 2
    run = run_split(model, lower(captured, plan), root_values(captured, batch))
    found = difference(run.outcome, wanted)
    assert found.within(TOLERANCE), str(found)


def _whole(model: mm.ComposedModel, batch: dict[str, Tensor]) -> Outcome:
    """Of the model's own logits; features before the text have no labels."""
    model.zero_grad()
    logits = model(**{**batch, "labels": None}).logits
    labels = F.pad(batch["labels"], (logits.shape[1] - batch["labels"].shape[1], 0), value=-100)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert gradients, "nothing trains"
    own = model(**batch).loss  # transformers rounds logits to float32 for it
    assert torch.allclose(own.double(), loss, rtol=1e-5)
    return Outcome(loss=float(loss.detach()), gradients=gradients)


def _check_components(case: Composition, model: mm.ComposedModel, found: tuple[Component, ...]) -> None:
    kinds = {component.name: component.kind for component in found}
    encoders = dict.fromkeys(case.encoders, ComponentKind.ENCODER)
    projectors = dict.fromkeys((f"{name}_projector" for name in case.encoders), ComponentKind.PROJECTOR)
    assert kinds == {**encoders, **projectors, "language_model": ComponentKind.LANGUAGE_MODEL}
    for component in found:
        owned = [name for layer in component.layers for name in layer.parameters]
        assert owned and all(name.startswith(f"{component.name}.") for name in owned)
        trained = any(p.requires_grad for p in model.get_submodule(component.name).parameters())
        assert trained == (component.name not in case.frozen)
