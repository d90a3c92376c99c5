"""The store where workers of a generation meet: served by a process of its own, used under the generation's prefix."""

# pyright: reportPrivateImportUsage=false
# torch.distributed re-exports its C++ classes without saying so.

from __future__ import annotations

import os
import signal
from datetime import timedelta

import torch.distributed as dist

from mmcompile.runtime.control.membership import Generation


def serve_store(host: str, port: int, report: int | None) -> int:
    """Main function of the store's process: serve until killed.

    Args:
        port: 0 for one that is free.
        report: file the port is written to once it can be used.
    """
    store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False)
    if report is not None:
        os.write(report, f"{store.port}\n".encode())
        os.close(report)
    while True:
        signal.pause()


class StoreLink:
    """A worker's connection to the store. It is kept over generations, so groups left behind cost no further ones."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: longest wait for a key, and for the store itself."""
        self._timeout = timedelta(seconds=timeout_s)
        self._client: dist.TCPStore | None = None

    def of(self, generation: Generation) -> dist.Store:
        """The store as this generation sees it.

        Raises:
            dist.DistError: the store cannot be reached.
        """
        if self._client is None or not _answers(self._client):
            host, port = generation.store.rsplit(":", 1)
            self._client = dist.TCPStore(host, int(port), is_master=False, timeout=self._timeout)
        return dist.PrefixStore(generation.prefix, self._client)

    def forget(self, before: int) -> None:
        """Delete the keys of generations below `before`. One worker does this once a generation is active."""
        assert self._client is not None
        for key in self._client.list_keys():
            number = key.removeprefix("/").removeprefix("generation/").partition("/")[0]
            if number.isdigit() and int(number) < before:
                self._client.delete_key(key)


def _answers(client: dist.TCPStore) -> bool:
    """False if the store was restarted since."""
    try:
        client.check(["generation"])
    except dist.DistError:
        return False
    return True
