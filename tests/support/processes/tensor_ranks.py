"""Two ranks that run a small language model with the ops of tensor parallelism, and the same model written without them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mmcompile.ir.nodes import token_loss
from mmcompile.ir.tensor_shard import TensorShard
from mmcompile.kernels.tensor_parallel.boundary_ops import tp_copy, tp_enter, tp_exit, tp_heads, tp_slice, tp_sum
from mmcompile.kernels.tensor_parallel.vocabulary import tp_embedding, tp_token_loss
from support.processes.spawn_ranks import RankContext, spawn_ranks

RANKS = 2
GROUP = "ranks"
VOCABULARY, HIDDEN, INNER, IGNORE, PADDING = 12, 6, 8, -100, 3
CALL = GROUP, RANKS
CHECKS = ("test_schema", "test_faketensor")
ROWS = TensorShard(dim=0, blocks=(VOCABULARY,), count=RANKS)
SHARDS = {
    "table": ROWS,
    "head": ROWS,
    "up": TensorShard(dim=0, blocks=(4, 4), count=RANKS),
    "down": TensorShard(dim=1, blocks=(4, 4), count=RANKS),
}
"""The inner dim is two blocks, as where two projections are one weight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Dtype and shape of a run."""

    dtype: torch.dtype = torch.float64
    batched: bool = False
    """Logits are [batch, classes, tokens]."""
    compiled: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    loss: Tensor
    num_tokens: Tensor
    gradients: Mapping[str, Tensor]


def tensors_of(case: Case) -> dict[str, Tensor]:
    """Whole parameters, and features that another component made."""
    torch.manual_seed(7)
    shapes = {
        "table": (VOCABULARY, HIDDEN),
        "head": (VOCABULARY, HIDDEN),
        "up": (INNER, HIDDEN),
        "down": (HIDDEN, INNER),
    }
    shapes |= {"gate": (INNER,), "keys": (5, 3), "features": (2, 4, HIDDEN)}
    return {name: torch.randn(shape, dtype=torch.float64).to(case.dtype) for name, shape in shapes.items()}


def ids_of() -> tuple[Tensor, Tensor]:
    """Token ids [2, 4], the padding id among them, and labels, one ignored."""
    return torch.tensor([[0, 5, 6, PADDING], [11, PADDING, 5, 7]]), torch.tensor([[1, 11, IGNORE, 5], [6, 0, 3, 3]])


def whole(case: Case) -> Result:
    """The model in one process."""
    t = {name: value.requires_grad_() for name, value in tensors_of(case).items()}
    ids, labels = ids_of()
    x = F.embedding(ids, t["table"], padding_idx=PADDING) + t["features"]
    keys = t["keys"].repeat_interleave(torch.tensor([2, 2, 1, 1, 2]), 0).sum()
    x = x + F.linear(F.silu(F.linear(x, t["up"])) * t["gate"] * keys, t["down"])
    return _result(t, *token_loss(*_flat(case, F.linear(x, t["head"]), labels), IGNORE))


def _model(case: Case, t: Mapping[str, Tensor], ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The same on one rank: `whole` with `tp_*` where sharded and whole values meet."""
    features = tp_enter(tp_exit(t["features"], *CALL), *CALL)
    x = tp_sum(tp_embedding(t["table"], ids, PADDING, *CALL), *CALL) + features
    # Heads 0 0 1 1 for rank 0, 2 3 4 4 for rank 1: each rank has a part of the sum.
    keys = tp_sum(tp_heads(tp_copy(t["keys"], *CALL), 0, [0, 0, 1, 1, 2, 3, 4, 4], *CALL).sum(), *CALL)
    gate = tp_slice(tp_copy(t["gate"], *CALL), 0, [4, 4], *CALL)
    inner = F.silu(F.linear(tp_copy(x, *CALL), t["up"])) * gate * tp_copy(keys, *CALL)
    x = x + tp_sum(F.linear(inner, t["down"]), *CALL)
    loss, num_tokens, _ = tp_token_loss(*_flat(case, F.linear(tp_copy(x, *CALL), t["head"]), labels), IGNORE, *CALL)
    return loss, num_tokens


def _flat(case: Case, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return (logits.transpose(1, 2), labels) if case.batched else (logits.flatten(0, 1), labels.flatten())


def on_ranks(cases: list[Case]) -> list[list[Result]]:
    """Run all cases in one set of processes; per case, return the results of the ranks, each with gradients of its parts."""
    return spawn_ranks(_on_rank, [(case, case is cases[0]) for case in cases], RANKS)


def _on_rank(context: RankContext, job: tuple[Case, bool]) -> Result:
    """Run one rank's part of a case; with the first, check the ops too."""
    case, is_first = job
    context.register(GROUP)
    if is_first:
        _check_ops()
    return _share(case, context.rank)


def _share(case: Case, rank: int) -> Result:
    parts = {n: SHARDS[n].part(x, rank).clone() if n in SHARDS else x for n, x in tensors_of(case).items()}
    leaves = {name: value.requires_grad_() for name, value in parts.items()}
    model: Callable[..., tuple[Tensor, Tensor]] = _model
    if case.compiled:
        model = torch.compile(_model, fullgraph=True, backend="aot_eager")
    return _result(leaves, *model(case, leaves, *ids_of()))


def _result(leaves: Mapping[str, Tensor], loss: Tensor, num_tokens: Tensor) -> Result:
    loss.backward()
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return Result(loss=loss.detach(), num_tokens=num_tokens, gradients=gradients)


def _check_ops() -> None:
    """torch's own checks of schemas and fakes; and that an id outside the vocabulary is an error."""
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    for op in (tp_copy, tp_exit, tp_enter, tp_sum):
        torch.library.opcheck(op, (x, *CALL), test_utils=CHECKS)
    torch.library.opcheck(tp_slice, (x, 1, [2, 2], *CALL), test_utils=CHECKS)
    torch.library.opcheck(tp_heads, (x, 0, [0, 0, 3, 1], *CALL), test_utils=CHECKS)
    ids = torch.tensor([0, 5, 7])
    torch.library.opcheck(tp_embedding, (x, ids, -1, *CALL), test_utils=CHECKS)
    torch.library.opcheck(tp_token_loss, (x[:3].detach().requires_grad_(), ids, IGNORE, *CALL), test_utils=CHECKS)
    for call in (lambda: tp_embedding(x, ids + 1, -1, *CALL), lambda: tp_token_loss(x[:3], ids + 1, IGNORE, *CALL)):
        try:
            call()
        except RuntimeError as error:
            assert "outside the vocabulary" in str(error)
        else:
            raise AssertionError("an id outside the vocabulary went through")
