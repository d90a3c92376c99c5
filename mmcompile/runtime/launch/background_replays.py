"""`BackgroundReplays`: replays of a model's Python in a process of its own.

A replay is 50 to 150 ms of Python. In the thread that plans the next step it would hold Python's lock, which the thread that runs
the current step needs. The process has a copy of the model without weights, and learns templates again from their examples.
It ends when its socket is closed, at the latest with the process that started it.
"""

from __future__ import annotations

import io
import pickle
import socket
import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from mmcompile.ir.capture_errors import Mismatch
from mmcompile.ir.compat import FakeTensorMode
from mmcompile.ir.inputs import FlatBatch
from mmcompile.ir.replay.learning import Learner, ReplayedHoles, without_floats
from mmcompile.ir.stored.capture_store import LearnedRecord
from mmcompile.runtime.comm.framing import receive_frame
from mmcompile.runtime.launch.background_process import BackgroundProcess, send_bytes

_MODULE = "mmcompile.runtime.launch.background_replays"
"""Name of this module. It is run as a process, with the file descriptor of a socket as its argument."""


_Replayed: TypeAlias = tuple[Mapping[str, Tensor] | None, str, frozenset[str]]
"""(Values of the holes, or None; text of the mismatch; paths of the modules that are never one step, after the replay)."""


class BackgroundReplays(BackgroundProcess):
    """Fills holes in another process once that is ready; `fill` returns None until then, and after the process ended.

    Args:
        model: model whose Python is replayed.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(_MODULE, "the process of replays ended; this process replays from now on")
        self._model = model
        self._known: dict[int, LearnedRecord] = {}
        """Identity of a record that the process has -> the record."""
        self.num_filled = 0
        """Number of batches whose holes the process filled."""

    def start(self) -> None:
        """Start the process without waiting for it; a second call has no effect."""
        if self._process is not None:
            return
        try:
            data = _without_weights(self._model)
        except Exception as error:  # whatever a user's object raises when it is pickled
            warnings.warn(
                f"the model's Python is replayed in this process, as the model cannot be sent: {error}", stacklevel=2
            )
            return
        self._start(data)

    def fill(self, learner: Learner, record: LearnedRecord, batch: FlatBatch) -> dict[str, Tensor] | None:
        """Return the holes' values of a batch; None if this process must replay: the other is not ready, or found that it cannot.

        Raises:
            Mismatch: modules that were taken to be one step call something else for the batch.
        """
        if not self.is_up:
            return None
        if id(record) not in self._known:
            self._known[id(record)] = record
            self._tell(pickle.dumps((id(learner), id(record), replace(record, capture=None))))
        self._tell(pickle.dumps((id(record), without_floats(batch))))
        data = self._heard()
        if data is None:
            return None
        answer: _Replayed = pickle.loads(data)  # noqa: S301 (of the process that was started here)
        given, reason, opened = answer
        if opened - learner.opened:
            learner.keep_open(opened)
            raise Mismatch(reason)
        if given is None:
            return None
        self.num_filled += 1
        return dict(given)


def serve(line: socket.socket) -> None:
    """Replay the model's Python for each batch received, until the socket is closed."""
    torch.set_num_threads(1)
    data = receive_frame(line)
    if data is None:
        return
    model: nn.Module = _ModelUnpickler(io.BytesIO(data)).load()
    learners: dict[int, Learner] = {}
    holes: dict[int, ReplayedHoles] = {}
    send_bytes(line, pickle.dumps((None, "", frozenset())))
    while (data := receive_frame(line)) is not None:
        match pickle.loads(data):  # noqa: S301 (of the process that started this one)
            case (int(family), int(number), LearnedRecord() as record):
                learner = learners.setdefault(family, Learner(model))
                holes[number] = ReplayedHoles(learner=learner, learned=record.learned(learner))
            case (int(number), FlatBatch() as batch):
                found = holes[number]
                given, reason = None, ""
                try:
                    if not found.learner.script(batch).reads_floats:  # they are zeros here
                        given = found.fill(batch)
                except (
                    Exception
                ) as error:  # whatever the model's Python raises; the other process replays and tells why
                    reason = str(error)
                send_bytes(line, pickle.dumps((given, reason, found.learner.opened)))


def _without_weights(model: nn.Module) -> bytes:
    stream = io.BytesIO()
    _ModelPickler(stream, protocol=5).dump(model)
    return stream.getvalue()


class _ModelPickler(pickle.Pickler):
    """Pickles a model whose parameters are shapes; parameters that are tied stay tied."""

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, nn.Parameter):
            return None
        return id(obj), tuple(obj.shape), obj.dtype, obj.requires_grad


class _ModelUnpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._made: dict[int, nn.Parameter] = {}

    def persistent_load(self, pid: Any) -> nn.Parameter:
        identity, shape, dtype, requires_grad = pid
        if identity not in self._made:
            with self._mode:
                self._made[identity] = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=requires_grad)
        return self._made[identity]


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as own_line:
        serve(own_line)
