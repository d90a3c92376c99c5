"""Every configuration that ships, compiled for an H100: nothing spilled, shared memory that fits, tensor cores and TMA used.

Compilation needs a process of its own, since this one interprets kernels. Float32 is compiled with TF32 products, and its
backward may spill a little: the configurations that spill nothing fault on the GPU with three products for one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from mmcompile.kernels.bitfield_attention.impl.triton_configs import Kernel, config

SHARED_BYTES = 227 * 1024
FLOAT32_SPILL_BYTES = 192
KERNELS: tuple[Kernel, ...] = ("forward", "query_gradients", "key_gradients")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_SIDE_KERNELS = ("merge", "prepare", "add_parts")


def jobs(dims: tuple[int, ...], dtypes: tuple[str, ...], windows: tuple[bool, ...]) -> list[list[Any]]:
    """Arguments of `sm90.py`."""
    found: list[list[Any]] = []
    for dim in dims:
        for dtype in dtypes:
            if (dim, dtype) == (256, "fp32"):
                continue  # Refused.
            for kernel in KERNELS:
                passes = config(kernel, dim, DTYPES[dtype]).passes
                wanted = ("DK", "DV") if kernel == "key_gradients" and passes == 2 else (None,)
                found += [[kernel, dim, dtype, window, None, part] for window in windows for part in wanted]
    return found


@cache
def compiled(arguments: str) -> tuple[dict[str, Any], ...]:
    """What `sm90.py` prints."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", str(Path(__file__).parent / "sm90.py"), arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return tuple(json.loads(line) for line in done.stdout.splitlines())


def check(arguments: list[list[Any]]) -> None:
    results = compiled(json.dumps(arguments))
    assert len(results) == len(arguments)
    for result in results:
        assert result["spill_bytes"] <= (FLOAT32_SPILL_BYTES if result["dtype"] == "fp32" else 0), result
        assert result["shared_bytes"] <= SHARED_BYTES, result
        assert result["wgmma"] > 0, result
        assert result["tma"] > 0, result


def test_core() -> None:
    check(jobs((128, 64), ("bf16",), (False,)))


def test_small_kernels() -> None:
    results = compiled(json.dumps([[kernel, 128, "bf16"] for kernel in _SIDE_KERNELS]))
    assert all(result["spill_bytes"] == 0 and result["shared_bytes"] <= SHARED_BYTES for result in results)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", (64, 96, 128, 256))
def test_all(dim: int, dtype: str) -> None:
    if wanted := jobs((dim,), (dtype,), (False, True)):
        check(wanted)
