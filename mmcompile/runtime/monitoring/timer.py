"""`Timer`: time of work on a device; and the name of the device."""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TypeVar

import torch

ResultT = TypeVar("ResultT")


class Timer:
    """Times work on one device.

    On a CPU: processor seconds of this thread, in which other processes of the machine do not count. On CUDA: between two
    events of the current stream, so that launching ahead does not count.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def run(self, work: Callable[[], ResultT]) -> tuple[float, ResultT]:
        """Run the function `work`, and return (seconds, its result)."""
        if not self._cuda:
            start = time.thread_time()
            result = work()
            return time.thread_time() - start, result
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        first.record()
        result = work()
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last) / 1e3, result


@contextlib.contextmanager
def one_thread() -> Generator[None]:
    """Run the block with one torch thread, as a rank does on a CPU, and restore the number of threads afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def processor_name(device: torch.device) -> str:
    """Return the model name of a device: `Intel(R) Xeon(R) Processor`, `NVIDIA H100 80GB HBM3`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
