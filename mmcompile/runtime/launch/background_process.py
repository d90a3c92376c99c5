"""`BackgroundProcess`: a process that does work for this one, on a socket that both share, and whose loss stops nothing."""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import sys
import threading
import warnings

from mmcompile.runtime.comm.framing import frame, receive_frame
from mmcompile.runtime.launch.local_workers import worker_environment

_END_S = 1.0


class BackgroundProcess:
    """Base of what runs in a process of its own, at the latest until the process that started it ends.

    The process is a module that is run with the file descriptor of a socket as its argument. It reads one message, answers when
    it is ready, and from then on answers each message.

    Args:
        module: name of the module.
        ended: warning for the case that the process ends by itself.
    """

    def __init__(self, module: str, ended: str) -> None:
        self._module = module
        self._ended = ended
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._up = False

    @property
    def is_up(self) -> bool:
        """True once the process is ready."""
        if not self._up and self._line is not None and select.select([self._line], [], [], 0)[0]:
            self._up = self._heard() is not None
        return self._up

    def close(self) -> None:
        """End the process. Safe to call twice."""
        if self._line is not None:
            self._line.close()
        self._line, self._up = None, False
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
            self._process.kill()
            self._process.wait()

    def _start(self, first: bytes) -> None:
        """Start the process without waiting for it, and send it its first message."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", self._module, str(theirs.fileno())],
                env=worker_environment(),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # A session of its own: Ctrl-C in the terminal is not for it.
                start_new_session=True,
            )
        self._line = ours
        # The process reads only once it has imported what it needs.
        threading.Thread(target=send_bytes, args=(ours, first), daemon=True).start()

    def _tell(self, message: bytes) -> None:
        assert self._line is not None, "the process was not started"
        send_bytes(self._line, message)

    def _heard(self) -> bytes | None:
        """Wait for an answer; None, with a warning, if the process ended."""
        assert self._line is not None, "the process was not started"
        answer = None
        with contextlib.suppress(OSError):
            answer = receive_frame(self._line)
        if answer is None:
            self._line.close()
            self._line, self._up = None, False
            warnings.warn(self._ended, stacklevel=2)
        return answer


def send_bytes(line: socket.socket, data: bytes) -> None:
    """Send one message; the loss of the other process is noticed by what is read next."""
    with contextlib.suppress(OSError):
        line.sendall(frame(data))
