"""Checkpoints and digests of a whole model whose layers are distributed over workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec
from torch import Tensor

from mmcompile.errors import VerifyError
from mmcompile.files import write_atomic
from mmcompile.planner.resilience.job import LayerId
from mmcompile.runtime.checkpoint import whole_checkpoint as checkpoint
from mmcompile.runtime.checkpoint.whole_checkpoint import Checkpoint, TrainerState
from mmcompile.runtime.comm import wire
from mmcompile.runtime.comm.groups import Groups
from mmcompile.runtime.elastic.elastic_job import ElasticJob
from mmcompile.runtime.elastic.generation_layout import GenerationLayout, layers_in
from mmcompile.runtime.elastic.layer_store import LayerStore
from mmcompile.runtime.monitoring.fail_points import fail_point


def owners(layout: GenerationLayout, *, former: bool) -> dict[LayerId, int]:
    """Return the first rank that holds each layer, by layer.

    Args:
        former: also count layers that a worker held before and keeps until the first commit of the generation.
    """
    found: dict[LayerId, int] = {}
    for device, rank in layout.ranks.items():
        beside = layout.plan.former.get(device.node, ())[device.index : device.index + 1] if former else ()
        for layer in layout.layers_of(device).union(*map(layers_in, beside)):
            found.setdefault(layer, rank)
    return found


def save(
    groups: Groups,
    job: ElasticJob,
    owned: Mapping[LayerId, int],
    store: LayerStore,
    aliases: Mapping[str, str],
    trainer: TrainerState,
) -> None:
    """Collect all state on rank 0 and write it; the previous checkpoint stays intact until the new one is complete.

    Args:
        owned: rank that sends each layer, by layer.
        aliases: name under which a tied parameter is held, by each of its other names.
        trainer: step, cursor, and the optimizer's settings for the next step; fingerprints of frozen parameters are added here.

    Raises:
        CheckpointError: the checkpoint cannot be written.
    """
    fail_point("gathering", rank=groups.rank, step=trainer.step)
    mine: dict[str, Tensor] = {}
    for layer in sorted(owned):
        if owned[layer] == groups.rank and layer in store.held:
            mine |= store.bundle(layer)
    if groups.rank:
        wire.send_tensors(groups, 0, mine)
        return
    tensors = {path: tensor.detach().to("cpu", copy=True) for path, tensor in mine.items()}
    for rank in range(1, groups.world_size):
        tensors |= wire.receive_tensors(groups, rank)
    fail_point("saving", rank=groups.rank, step=trainer.step)
    weights = wire.under("value/", tensors)
    complete = job.user.complete(weights, aliases)
    content = Checkpoint(
        trainer=replace(trainer, frozen=job.user.frozen()),
        weights=job.user.trainable(complete),
        optimizer=wire.under("state/", tensors),
    )
    checkpoint.write(job.checkpoints, content, job.user.tied())


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One worker's layer digests and compilation count at the end of training, for the check of replicas."""

    digests: dict[str, str]
    """Digest of each layer's parameters and optimizer state, by layer."""
    num_compiled: int
    """Number of graphs compiled since the worker started."""


def check_replicas(groups: Groups, job: ElasticJob, mine: Outcome) -> None:
    """Compare the digests of all replicas of every layer on rank 0, and write them and compilation counts to the run's folder.

    Raises:
        VerifyError: on rank 0, if two replicas differ.
    """
    if groups.rank:
        wire.send_bytes(groups, 0, wire.encode(mine))
        return
    outcomes = [mine]
    outcomes += (wire.decode(wire.receive_bytes(groups, rank), Outcome) for rank in range(1, groups.world_size))
    found: dict[str, str] = {}
    for rank, outcome in enumerate(outcomes):
        for layer, digest in outcome.digests.items():
            if found.setdefault(layer, digest) != digest:
                raise VerifyError(
                    f"replicas of layer {layer} differ: rank {rank} holds another one than ranks before it"
                )
    write_atomic(job.folder / "digests.json", _json(dict(sorted(found.items()))))
    write_atomic(job.folder / "compiled_graphs.json", _json([outcome.num_compiled for outcome in outcomes]))


def _json(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value))
