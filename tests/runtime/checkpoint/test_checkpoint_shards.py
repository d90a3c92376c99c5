"""Parts of a parameter that ranks hold are stored as one tensor, and read again in any other parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as torch_load

from mmcompile.errors import CheckpointError
from mmcompile.ir.tensor_shard import TensorShard
from mmcompile.runtime.checkpoint import dcp
from mmcompile.runtime.checkpoint.index import CheckpointIndex
from mmcompile.runtime.checkpoint.pieces import CheckpointPiece, Holding, state_piece, wanted_by, weight_piece
from mmcompile.runtime.checkpoint.rank_checkpoints import balanced

BLOCKS = ((12,), (24, 12, 12), (12, 36))
WHOLE: Mapping[str, Tensor] = {
    "a.weight": torch.randn(12, 5, generator=torch.Generator().manual_seed(0)),
    "b.weight": torch.randn(7, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
    "b.bias": torch.randn(48, generator=torch.Generator().manual_seed(2)).bfloat16(),
    "norm": torch.randn(9, generator=torch.Generator().manual_seed(3)),
}
STATE = {name: {"exp_avg": tensor.float() * 2, "step": torch.tensor(3.0)} for name, tensor in WHOLE.items()}


def holdings(count: int) -> dict[str, tuple[TensorShard | None, ...]]:
    """Parameter -> how it is divided, for each of some ranks; one that is whole is on the last alone."""
    shards = {"a.weight": (0, BLOCKS[0]), "b.weight": (1, BLOCKS[1]), "b.bias": (0, BLOCKS[2])}
    return {name: (TensorShard(dim=dim, blocks=blocks, count=count),) * count for name, (dim, blocks) in shards.items()}


def written_by(rank: int, count: int) -> list[CheckpointPiece]:
    """What a rank of some writes."""
    pieces: list[CheckpointPiece | None] = []
    for name, shards in holdings(count).items():
        shard = shards[rank]
        assert shard is not None
        holding = Holding(whole=name, shard=shard, index=rank)
        part = shard.part(WHOLE[name], rank)
        pieces.append(weight_piece(holding, part))
        for key, tensor in STATE[name].items():
            own = shard.part(tensor, rank) if tensor.dim() else tensor
            pieces.append(state_piece(holding, key, own, tuple(part.shape)))
    if rank == count - 1:
        pieces.append(weight_piece(Holding(whole="norm"), WHOLE["norm"]))
        pieces += [state_piece(Holding(whole="norm"), key, t, (9,)) for key, t in STATE["norm"].items()]
    return [piece for piece in pieces if piece is not None]


def write(folder: Path, count: int) -> CheckpointIndex:
    index = CheckpointIndex.joined([dcp.write_part(folder, rank, written_by(rank, count)) for rank in range(count)], {})
    dcp.write_metadata(folder, index)
    return index


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_any_parts_are_read_from_any_others(tmp_path: Path, count: int) -> None:
    index = write(tmp_path, count)
    assert index.weights["a.weight"].shape == (12, 5)
    assert len(index.weights["b.weight"].chunks) == 3 * count, "one chunk for each block of each part"
    for wanted in (1, 2, 3, 6, 12):
        for rank in range(wanted):
            mine = {
                f"{name}@{rank}": Holding(whole=name, shard=shards[rank], index=rank)
                for name, shards in holdings(wanted).items()
            }
            found = wanted_by(mine, index, weights=mine, states=mine)
            for piece in found.values():
                dcp.read_piece(tmp_path, index, piece)
            for name, holding in mine.items():
                shard = holding.shard
                assert shard is not None
                expected = {f"value/{name}": shard.part(WHOLE[holding.whole], rank)}
                expected[f"state/exp_avg/{name}"] = shard.part(STATE[holding.whole]["exp_avg"], rank)
                expected[f"state/step/{name}"] = STATE[holding.whole]["step"]
                for path, tensor in expected.items():
                    got = found[path].tensor()
                    assert got.dtype == tensor.dtype and torch.equal(got, tensor), path


@pytest.mark.parametrize("count", [2, 3])
def test_torch_reads_the_whole(tmp_path: Path, count: int) -> None:
    write(tmp_path, count)
    weights = {name: torch.zeros_like(tensor) for name, tensor in WHOLE.items()}
    state = {name: {key: torch.zeros_like(tensor) for key, tensor in of.items()} for name, of in STATE.items()}
    whole = {"model": weights, "optimizer": {"state": state}}
    with pytest.warns(UserWarning, match="single process"):
        torch_load(whole, checkpoint_id=tmp_path)
    for name, tensor in WHOLE.items():
        assert torch.equal(weights[name], tensor)
        for key, value in STATE[name].items():
            assert torch.equal(state[name][key], value)


def test_a_part_that_is_missing_is_refused(tmp_path: Path) -> None:
    parts = [dcp.write_part(tmp_path, rank, written_by(rank, 3)) for rank in range(3)]
    with pytest.raises(CheckpointError, match="model.a.weight has 60 elements, and ranks wrote 40 of it"):
        CheckpointIndex.joined([parts[0], parts[2]], {})


def test_state_of_another_shape_cannot_be_divided() -> None:
    shard = TensorShard(dim=0, blocks=(4,), count=2)
    with pytest.raises(CheckpointError, match=r"keeps row_var of w with shape \(2, 1\).* parts of \(2, 3\)"):
        state_piece(Holding(whole="w", shard=shard, index=1), "row_var", torch.zeros(2, 1), (2, 3))


@pytest.mark.parametrize("seed", range(5))
def test_every_name_is_written_once_and_bytes_are_balanced(seed: int) -> None:
    """Never more than twice the best: a list schedule's bound, for names that any rank has."""
    generator = torch.Generator().manual_seed(seed)
    names = [f"p{index}" for index in range(40)]
    num_bytes = {name: int(torch.randint(1, 1000, (1,), generator=generator)) for name in names}
    chosen = balanced(dict.fromkeys(names, range(4)), num_bytes)
    assert sorted(name for of_rank in chosen.values() for name in of_rank) == sorted(names)
    loads = [sum(num_bytes[name] for name in of_rank) for of_rank in chosen.values()]
    assert max(loads) <= sum(num_bytes.values()) / 4 + max(num_bytes.values())
    holders: dict[str, Sequence[int]] = {name: (2,) if index % 2 else (0, 2) for index, name in enumerate(names)}
    chosen = balanced(holders, num_bytes)
    assert all(rank in holders[name] for rank, of_rank in chosen.items() for name in of_rank)
