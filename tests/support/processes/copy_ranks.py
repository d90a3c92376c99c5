"""Layers copied between real processes, one a rank, and what each then holds."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmcompile.planner.resilience.copies import LayerCopy
from mmcompile.planner.resilience.job import LayerId, WorkerId
from mmcompile.runtime.comm.groups import Backend, Groups, Work
from mmcompile.runtime.elastic.layer_copies import CHUNK_BYTES, run_copies
from mmcompile.runtime.elastic.layer_store import LayerStore, digest_of
from support.models.layer_models import layer, layers, trained_store
from support.processes.spawn_ranks import RankContext, spawn_ranks

NUM_RANKS = 4
RANK_OF = (2, 0, 3, 1)
"""Node -> rank."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Copies between nodes of one device each."""

    copies: tuple[LayerCopy[WorkerId], ...]
    holdings: tuple[tuple[int, ...], ...]
    """Node -> layers."""
    optimizer: str = "adamw"
    steps: tuple[int, ...] = (3,) * NUM_RANKS
    """Node -> steps its layers were trained for."""
    chunk_bytes: int = CHUNK_BYTES
    scale: int = 1
    flips: tuple[tuple[int, int, int], ...] = ()
    """(node, message, byte): of what the node sends, counted from 0, a byte changes on the way."""
    liars: tuple[int, ...] = ()
    """Nodes whose bundles are not what their digests say."""
    leaves: tuple[int, ...] = ()
    """Nodes that are told at the second wait that the generation is over."""


@dataclass(kw_only=True)
class Outcome:
    """Of one rank."""

    held: frozenset[LayerId] = frozenset()
    bundles: dict[LayerId, dict[str, Tensor]] = field(default_factory=dict)
    error: str = ""
    """Type and message."""
    messages: list[int] = field(default_factory=list)
    """Bytes of each that was sent."""


class Left(Exception):
    """The generation is over."""


@dataclass(slots=True)
class Wire:
    """Real messages, counted, with bytes that change on their way."""

    inner: Backend
    flips: dict[int, int]
    sizes: list[int] = field(default_factory=list)

    def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> Work:
        place = self.flips.get(len(self.sizes))
        self.sizes.append(tensors[0].nbytes)
        if place is not None:
            tensors = [tensors[0].clone()]
            tensors[0][place % len(tensors[0])] ^= 4
        return self.inner.send(tensors, rank, tag)

    def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> Work:
        return self.inner.recv(tensors, rank, tag)


class Liar(LayerStore):
    """Its memory changes between the digest and the sending."""

    def bundle(self, layer: LayerId) -> dict[str, Tensor]:
        tensors = {name: tensor.clone() for name, tensor in super().bundle(layer).items()}
        first = tensors[sorted(tensors)[-1]]
        first.view(-1).view(torch.uint8)[-1] ^= 1
        return tensors

    def digest(self, layer: LayerId) -> str:
        return digest_of(super().bundle(layer))


def device(node: int) -> WorkerId:
    return WorkerId(node=f"node{node}", index=0)


def copied(cases: Sequence[Case]) -> list[list[Outcome]]:
    """Run all cases in one set of processes; per case, return the outcome of each node. Each case has groups of its own."""
    numbered = list(enumerate(cases))
    return [[by_rank[rank] for rank in RANK_OF] for by_rank in spawn_ranks(_on_rank, numbered, NUM_RANKS)]


def _on_rank(context: RankContext, job: tuple[int, Case]) -> Outcome:
    number, case = job
    return _run(context.connect(str(number)), case)


def _run(groups: Groups, case: Case) -> Outcome:
    node = RANK_OF.index(groups.rank)
    kind = Liar if node in case.liars else LayerStore
    store = trained_store(case.optimizer, case.steps[node], scale=case.scale, kind=kind)
    store.keep(layers(*case.holdings[node]))
    wire = Wire(groups.control, {message: place for one, message, place in case.flips if one == node})
    groups.control = wire
    outcome = Outcome()
    waits = 0

    def check() -> None:
        nonlocal waits
        waits += 1
        if node in case.leaves and waits > 1:
            raise Left("the generation is over")

    ranks = {device(one): rank for one, rank in enumerate(RANK_OF)}
    try:
        run_copies(groups, case.copies, ranks, store, check, chunk_bytes=case.chunk_bytes)
        outcome.messages = list(wire.sizes)
        # Nobody leaves while others need it.
        groups.all_reduce(torch.zeros(1))
    except Exception as error:
        outcome.error = f"{type(error).__name__}: {error}"
        # Frames hold messages on their way, and these hold the sockets that others wait for.
        traceback.clear_frames(error.__traceback__)
    outcome.held = store.held
    outcome.bundles = {
        one: {name: tensor.clone() for name, tensor in store.bundle(one).items()}
        for one in store.held
        if store.trains(one)
    }
    return outcome


def copy(source: int, destination: int, index: int, round: int = 0) -> LayerCopy[WorkerId]:
    return LayerCopy(
        layer=layer(index), source=device(source), destination=device(destination), num_bytes=1, round=round
    )
