"""`run_copies`: copies layers from worker to worker, in planned rounds, each checked before it is stored.

A layer is sent as a header, which lists its tensors, and then as the bytes of all tensors, cut into chunks. Beside its store, a
worker needs memory for the layer that it receives and for a few chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmcompile.errors import EngineError, VerifyError
from mmcompile.planner.resilience.copies import LayerCopy
from mmcompile.planner.resilience.job import WorkerId
from mmcompile.runtime.comm.groups import Groups, Work, wait
from mmcompile.runtime.elastic.layer_message import (
    FRAME_BYTES,
    DamagedLayer,
    Entry,
    Header,
    chunks,
    entries_of,
    header_length,
    open_header,
    seal,
)
from mmcompile.runtime.elastic.layer_store import LayerStore, digest_of
from mmcompile.runtime.monitoring.fail_points import fail_point

CHUNK_BYTES = 16 * 2**20
_WINDOW = 2
"""Maximum number of chunks being sent at once: one is sent while the next is filled."""
_TAG = 2**31 - 4
"""Tag of messages that copy layers, between the smaller tags of values and the larger tags of broadcasts."""
_ADVICE = "it was not used; if this comes again, test the memory and the network of both nodes"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Side:
    """Settings of all layer copies that a worker sends or receives. `ranks`: worker -> rank; `check`: called before waits."""

    groups: Groups
    ranks: Mapping[WorkerId, int]
    check: Callable[[], None]
    chunk_bytes: int


def run_copies(
    groups: Groups,
    copies: Sequence[LayerCopy[WorkerId]],
    ranks: Mapping[WorkerId, int],
    store: LayerStore,
    check: Callable[[], None],
    *,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Run this worker's part of all copies, round by round; within a round it sends and receives at the same time.

    A layer is put into the store once it has arrived completely and its digest is right. No layer is dropped from the store.

    Args:
        groups: groups of the generation. All its ranks call this with the same copies, and send no other messages meanwhile.
        ranks: ranks of all workers that copies name.
        check: called before every wait; an exception it raises ends the copies, after which the groups cannot be used.
        chunk_bytes: bytes of a chunk, the same on all ranks.

    Raises:
        EngineError: a layer arrived damaged. It is not in the store; layers of earlier rounds are.
        VerifyError: a worker sends or receives twice in a round, or to itself; or a source does not hold the layer.
        PeerLost: another worker is gone.
    """
    side = _Side(groups=groups, ranks=ranks, check=check, chunk_bytes=chunk_bytes)
    for send, receive in _rounds(copies, ranks, groups.rank):
        _run(side, send, receive, store)


def _rounds(
    copies: Sequence[LayerCopy[WorkerId]], ranks: Mapping[WorkerId, int], rank: int
) -> list[tuple[LayerCopy[WorkerId] | None, LayerCopy[WorkerId] | None]]:
    """Return this rank's copies by round, in order: (copy it sends, copy it receives); None for no copy."""
    sends: dict[int, LayerCopy[WorkerId]] = {}
    receives: dict[int, LayerCopy[WorkerId]] = {}
    for copy in copies:
        if ranks[copy.source] == ranks[copy.destination]:
            raise VerifyError(f"{_words(copy)}: wanted another worker")
        for end, mine in ((copy.source, sends), (copy.destination, receives)):
            if ranks[end] == rank and mine.setdefault(copy.round, copy) is not copy:
                raise VerifyError(
                    f"{_words(copy)}: a worker sends or receives twice in round {copy.round}; wanted once"
                )
    return [(sends.get(number), receives.get(number)) for number in sorted(sends.keys() | receives.keys())]


def _run(side: _Side, send: LayerCopy[WorkerId] | None, receive: LayerCopy[WorkerId] | None, store: LayerStore) -> None:
    """Run one round of copies: send one layer, receive one, or both at once (None: no copy).

    A worker sends its header before it waits for bytes, and is ready to receive before it waits for its own bytes to be sent.
    So workers may send to each other in rings of any length without a deadlock.
    """
    arrival = None if receive is None else _Arrival(side, receive)
    departure = None if send is None else _Departure(side, send, store)
    if arrival is not None:
        arrival.accept()
        fail_point("receiving", rank=side.groups.rank)
    if departure is not None:
        fail_point("sending", rank=side.groups.rank)
        departure.finish()
    if arrival is not None:
        store.put(arrival.layer, arrival.finish())


class _Messages:
    """Queue of messages in transfer between this worker and another, oldest first."""

    def __init__(self, side: _Side, rank: int) -> None:
        self._side, self._rank = side, rank
        self._works: deque[tuple[Work, Tensor]] = deque()

    def __len__(self) -> int:
        return len(self._works)

    def send(self, data: Tensor) -> None:
        self._works.append((self._side.groups.send_control(data, self._rank, _TAG), data))

    def receive(self, data: Tensor) -> None:
        self._works.append((self._side.groups.receive_control(data, self._rank, _TAG), data))

    def wait(self) -> Tensor:
        self._side.check()
        work, data = self._works.popleft()
        wait(work)
        return data


class _Departure:
    """A layer that this worker sends. The constructor starts to send the header, which describes the layer's tensors."""

    def __init__(self, side: _Side, copy: LayerCopy[WorkerId], store: LayerStore) -> None:
        self._messages, self._chunk_bytes = _Messages(side, side.ranks[copy.destination]), side.chunk_bytes
        bundle = store.bundle(copy.layer)
        entries = entries_of(bundle)
        self._tensors = [bundle[entry.name] for entry in entries]
        for data in seal(Header(layer=copy.layer, digest=store.digest(copy.layer), entries=entries)):
            self._messages.send(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def finish(self) -> None:
        for chunk in chunks(self._tensors, self._chunk_bytes):
            while len(self._messages) >= _WINDOW:
                self._messages.wait()
            self._messages.send(chunk)
        while len(self._messages):
            self._messages.wait()


class _Arrival:
    """A layer that this worker receives. The constructor starts to receive the length and hash of the header."""

    def __init__(self, side: _Side, copy: LayerCopy[WorkerId]) -> None:
        self.layer = copy.layer
        self._copy, self._chunk_bytes = copy, side.chunk_bytes
        self._messages = _Messages(side, side.ranks[copy.source])
        self._messages.receive(torch.empty(FRAME_BYTES, dtype=torch.uint8))
        self._digest = ""
        self._parts: list[tuple[Entry, Tensor]] = []

    def accept(self) -> None:
        """Wait for the header, and start to receive the layer's tensors. Raises EngineError if the header is damaged."""
        try:
            frame = _bytes(self._messages.wait())
            self._messages.receive(torch.empty(header_length(frame), dtype=torch.uint8))
            header = open_header(frame, _bytes(self._messages.wait()))
        except DamagedLayer as error:
            raise EngineError(f"{_words(self._copy)}: {error}; {_ADVICE}") from error
        if header.layer != self.layer:
            raise VerifyError(f"{_words(self._copy)}: layer {header.layer} came instead")
        self._digest = header.digest
        sizes = [entry.num_bytes for entry in header.entries]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        self._parts = list(zip(header.entries, flat.split(sizes), strict=True)) if sizes else []
        for chunk in flat.split(self._chunk_bytes) if len(flat) else ():
            self._messages.receive(chunk)

    def finish(self) -> dict[str, Tensor]:
        while len(self._messages):
            self._messages.wait()
        tensors = {entry.name: entry.read(part) for entry, part in self._parts}
        if (digest := digest_of(tensors)) != self._digest:
            raise EngineError(
                f"{_words(self._copy)}: what came has digest {digest}, what was sent {self._digest}; {_ADVICE}"
            )
        return tensors


def _words(copy: LayerCopy[WorkerId]) -> str:
    return f"copy of layer {copy.layer} from {copy.source} to {copy.destination}"


def _bytes(data: Tensor) -> bytes:
    return data.numpy().tobytes()
