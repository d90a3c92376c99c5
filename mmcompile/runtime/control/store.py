"""The store where workers of a generation meet: served by a process of its own, with keys under the generation's prefix."""

# pyright: reportPrivateImportUsage=false
# torch.distributed re-exports its C++ classes without saying so.

from __future__ import annotations

import os
import re
import signal
import socket
from datetime import timedelta

import torch.distributed as dist

_GENERATION = re.compile(r"\bgeneration/(\d+)/")
"""Pattern in the store's keys that gives the number of the generation that wrote the key."""


def serve_store(listener: socket.socket) -> int:
    """Serve the store until the process is killed; main function of its process.

    Args:
        listener: bound and listening socket. A store without one would listen at all addresses of the machine.
    """
    host, port = listener.getsockname()[:2]
    # It becomes the store's own.
    file = os.dup(listener.fileno())
    store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=file)
    while True:
        signal.pause()
        # Only signals come by here; the store serves from threads of its own.
        assert store.port == port


def open_client(address: str, timeout_s: float) -> dist.TCPStore:
    """Return a connection to the store at `address` (host:port).

    Args:
        timeout_s: maximum seconds to wait for a key, and for the store itself; looking up the host name may take longer.

    Raises:
        dist.DistError: the store cannot be reached.
    """
    host, port = address.rsplit(":", 1)
    return dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))


def forget_before(store: dist.Store, number: int) -> None:
    """Delete the keys of generations below `number` from the store. One worker calls this once a generation is active."""
    assert isinstance(store, dist.PrefixStore), f"{store} is no store of a generation"
    client = store.underlying_store
    for key in client.list_keys():
        found = _GENERATION.search(key)
        if found is not None and int(found[1]) < number:
            client.delete_key(key)
