"""The ops of tensor parallelism on two ranks: together they compute what the model written without them does."""

from __future__ import annotations

import pytest
import torch
from support.processes.tensor_ranks import RANKS, SHARDS, Case, Result, on_ranks, whole

from mmcompile.errors import ConfigError
from mmcompile.kernels.tensor_parallel.boundary_ops import tp_sum

CASES = {
    "float64": Case(),
    "logits [batch, classes, tokens]": Case(batched=True),
    "compiled": Case(compiled=True),
    "float32": Case(dtype=torch.float32),
}
REPLICATED = ("gate", "keys")


@pytest.fixture(scope="module")
def results() -> dict[str, list[Result]]:
    """Every case, in one set of processes."""
    return dict(zip(CASES, on_ranks(list(CASES.values())), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_what_one_does(results: dict[str, list[Result]], name: str) -> None:
    wanted, found = whole(CASES[name]), results[name]
    within = 1e-12 if CASES[name].dtype == torch.float64 else 1e-4
    for result in found:
        torch.testing.assert_close(result.loss, wanted.loss, rtol=within, atol=within)
        assert result.num_tokens == wanted.num_tokens == 7
        assert result.gradients.keys() == wanted.gradients.keys()
        for replicated in REPLICATED:
            torch.testing.assert_close(
                result.gradients[replicated], wanted.gradients[replicated], rtol=within, atol=within
            )
    for parameter, shard in SHARDS.items():
        joined = shard.joined([result.gradients[parameter] for result in found])
        torch.testing.assert_close(joined, wanted.gradients[parameter], rtol=within, atol=within)


def test_what_enters_from_another_component_gets_its_gradient_once(results: dict[str, list[Result]]) -> None:
    """The sum of what ranks send back is the whole; `tp_exit` then gives it to each."""
    for result in results["float64"]:
        torch.testing.assert_close(result.gradients["features"], whole(Case()).gradients["features"])


def test_an_unknown_group_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no process group is registered as 'nobody'.*call register_group first"):
        tp_sum(torch.ones(2), "nobody", RANKS)
