"""Worker processes of a plain script: `python -P -m mmcompile.runtime.worker_main ORDERS`, started by rank 0.

The process loads torch once, forks a worker for each order, and reports to rank 0 how each one ended. So eight workers start in
the time of one, and share the memory of loaded modules. When rank 0 ends, or closes its end of the socket, all workers are
killed.
"""

# pyright: reportPrivateImportUsage=false
# torch.distributed re-exports its C++ classes without saying so.

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
from functools import partial
from typing import NoReturn

import msgspec
import torch
import torch._dynamo  # noqa: F401 # pyright: ignore[reportUnusedImport]  (the first optimizer of a process loads it, in a second)
import torch.distributed as dist

from mmcompile.runtime.comm.groups import Groups, PeerLost
from mmcompile.runtime.control.processes import fork_process, kill_group, last_lines
from mmcompile.runtime.launch.local_workers import Exit, Failure, WorkerOrder, WorkerOrders
from mmcompile.runtime.monitoring.status import StatusBoard
from mmcompile.runtime.worker import Worker

_POLL_S = 0.5


def main(text: str) -> NoReturn:
    """Start the workers that `text` orders (`WorkerOrders` as JSON), and exit once the last one has ended."""
    orders = msgspec.json.decode(text, type=WorkerOrders)
    rank_0 = os.getppid()
    ranks = {
        fork_process(partial(_work, order), keep=(order.report, order.board)): order.rank for order in orders.workers
    }
    for order in orders.workers:
        os.close(order.report)
    with socket.socket(fileno=orders.exits) as exits:
        _watch(ranks, exits, rank_0)
    os._exit(0)  # To unload torch takes a second, and rank 0 waits.


def _watch(ranks: dict[int, int], exits: socket.socket, rank_0: int) -> None:
    """Write an `Exit` to `exits` for each worker that ends, and kill the remaining workers once `exits` is closed.

    Args:
        ranks: ranks of the workers, by process id.
    """
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    wanted = True
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in ranks:
            how = Exit(rank=ranks.pop(pid), code=os.waitstatus_to_exitcode(status))
            with contextlib.suppress(OSError):
                exits.sendall(msgspec.json.encode(how) + b"\n")
        elif not pid:
            readable = select.select([ended, *([exits] if wanted else [])], [], [], _POLL_S)[0]
            if ended in readable:
                os.read(ended, 4096)
            # A child that rank 0 forked may hold the other end of the socket open; then our parent has changed.
            if wanted and (exits in readable or os.getppid() != rank_0):
                wanted = False
                for other in ranks:
                    kill_group(other)


def _work(order: WorkerOrder) -> int:
    """Run a worker: execute rank 0's commands until rank 0 closes the engine. Return the process's exit code."""
    try:
        store = dist.TCPStore("127.0.0.1", order.port, is_master=False)
        store.set(f"ready/{order.rank}", "1")
        groups = Groups.connect(store, order.rank, order.world_size, torch.device(order.device), local=True)
        Worker.join(groups, StatusBoard(order.board, order.world_size)).serve()
    except BaseException as error:
        failure = Failure(
            rank=order.rank,
            cause=f"failed: {type(error).__name__}: {error}",
            traceback=last_lines(error),
            peer_lost=isinstance(error, PeerLost),
        )
        with socket.socket(fileno=order.report) as report:
            report.sendall(msgspec.json.encode(failure))
        return 1
    return 0


if __name__ == "__main__":
    main(sys.argv[1])
