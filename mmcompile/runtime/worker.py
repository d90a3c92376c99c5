"""A worker process: `python -P -m mmcompile.runtime.worker ORDER`, started by rank 0 of a plain script."""

# pyright: reportPrivateImportUsage=false
# torch.distributed re-exports its C++ classes without saying so.

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import traceback
from typing import NoReturn

import msgspec
import torch
import torch.distributed as dist

from mmcompile.runtime.follower import Follower
from mmcompile.runtime.groups import Groups, PeerLost
from mmcompile.runtime.launch import Report, WorkerOrder
from mmcompile.runtime.status import StatusBoard

_POLL_S = 0.5
_TRACEBACK_LINES = 30


def main(text: str) -> NoReturn:
    """Serve rank 0 until it closes the engine, or dies."""
    order = msgspec.json.decode(text, type=WorkerOrder)
    lifeline = socket.socket(fileno=order.lifeline)
    threading.Thread(target=_exit_with_rank_0, args=(lifeline, os.getppid()), daemon=True).start()
    try:
        _serve(order)
    except BaseException as error:
        lifeline.sendall(msgspec.json.encode(_report(order.rank, error)))
        _end(1)
    _end(0)


def _serve(order: WorkerOrder) -> None:
    store = dist.TCPStore("127.0.0.1", order.port, is_master=False)
    store.set(f"ready/{order.rank}", "1")
    groups = Groups.connect(store, order.rank, order.world_size, torch.device(order.device), local=True)
    Follower(groups, StatusBoard(order.board, order.world_size)).serve()


def _exit_with_rank_0(lifeline: socket.socket, parent: int) -> None:
    """End this process and its children once rank 0 is gone.

    The socket says so at once, unless a child that rank 0 forked still holds the other end; then our parent has changed.
    """
    while os.getppid() == parent:
        if select.select([lifeline], [], [], _POLL_S)[0] and not lifeline.recv(1):
            break
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _report(rank: int, error: BaseException) -> Report:
    lines = "".join(traceback.format_exception(error)).splitlines()[-_TRACEBACK_LINES:]
    return Report(
        rank=rank,
        error=f"{type(error).__name__}: {error}",
        traceback="\n".join(lines),
        peer_lost=isinstance(error, PeerLost),
    )


def _end(code: int) -> NoReturn:
    """Exit without tearing down gloo, which may wait for ranks that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1])
