"""The process of an `AsideBalancer`: `python -m mmcompile.runtime.launch.balance_worker SOCKET`."""

from __future__ import annotations

import socket
import sys

from mmcompile.runtime.launch.background_balancer import serve


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as line:
        serve(line)


if __name__ == "__main__":
    main()
