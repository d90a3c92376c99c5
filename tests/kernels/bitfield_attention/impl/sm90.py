"""Compile kernels for an H100 where there is none, and print what they need, one line of JSON for each.

    python -P sm90.py '[[kernel, head dim, dtype, window, tiles, wanted], ...]'

Kernels are named as in `triton_configs`, or `merge`, `prepare`, `add_parts`; `tiles` are numbers in the order of the fields of
`Config`, or null for the configuration that ships; `wanted` is "DK" or "DV" where `key_gradients` computes only one of them.
The environment must not hold TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mmcompile.kernels.bitfield_attention.impl import triton_backward, triton_forward
from mmcompile.kernels.bitfield_attention.impl.triton_configs import Config, block_d, config

_BLOCK = 128
_KERNELS = {
    "forward": triton_forward.attend,
    "merge": triton_forward.merge,
    "prepare": triton_backward.prepare,
    "query_gradients": triton_backward.query_gradients,
    "key_gradients": triton_backward.key_gradients,
    "add_parts": triton_backward.add_parts,
}
_LOOPED = ("forward", "query_gradients", "key_gradients")
_FLOAT32 = (
    "lse",
    "dlse",
    "shift",
    "delta",
    "partial",
    "partial_out",
    "partial_lse",
    "partial_dq",
    "partial_dk",
    "partial_dv",
)
_INT32 = ("words", "positions", "kv_words", "kv_positions", "items", "other", "splits")
_ELEMENTS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv", "total")
_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def compile_kernel(
    name: str,
    head_dim: int,
    dtype: str,
    window: bool = False,
    numbers: list[int] | None = None,
    wanted: str | None = None,
) -> dict[str, Any]:
    """Registers, spills, bytes of shared memory and counts of instructions of one kernel."""
    if name in _LOOPED:
        tiles = Config(**dict(zip(Config.__dataclass_fields__, numbers, strict=False))) if numbers else None
        tiles = tiles or config(
            name, head_dim, {"fp32": torch.float32, "bf16": torch.bfloat16}.get(dtype, torch.float16)
        )
    else:
        tiles = Config(block_m=64, block_n=64, block_g=64, num_warps=4, num_stages=3)
    constants = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d(head_dim),
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_G": tiles.block_g,
        "STAGES": tiles.num_stages,
        "WINDOW": window,
        "GROUP": 4,
        "DK": wanted != "DV",
        "DV": wanted != "DK",
        "PRECISION": "tf32",
        **dict.fromkeys(("BLOCK", "BLOCK_Q", "BLOCK_KV"), _BLOCK),
    }
    kernel = _KERNELS[name]
    signature = {name_: _type(name, name_, dtype, tiles, constants) for name_ in kernel.arg_names}
    pointers = [i for i, kind in enumerate(signature.values()) if kind.startswith("*") or kind == "i64"]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={key: value for key, value in constants.items() if key in signature},
        attrs={(i,): [["tt.divisibility", 16]] for i in pointers},
    )
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return {
        "kernel": name,
        "head_dim": head_dim,
        "dtype": dtype,
        "window": window,
        "wanted": wanted,
        "tiles": astuple(tiles),
        "shared_bytes": compiled.metadata.shared,
        "wgmma": len(re.findall(r"wgmma\.mma_async", compiled.asm["ptx"])),
        "mma": len(re.findall(r"\bmma\.sync", compiled.asm["ptx"])),
        "tma": len(re.findall(r"cp\.async\.bulk\.tensor", compiled.asm["ptx"])),
        **_usage(compiled.asm["cubin"]),
    }


def _type(kernel: str, argument: str, dtype: str, tiles: Config, constants: dict[str, Any]) -> str:
    if argument in constants:
        return "constexpr"
    name = argument.removesuffix("_general")
    if kernel in _LOOPED and name in ("q", "k", "v", "dout"):
        rows = tiles.block_m if name in ("q", "dout") else tiles.block_n
        return f"tensordesc<{dtype}[1, 1, {tiles.block_g if name != argument else rows}, {constants['BLOCK_D']}]>"
    if argument in _ELEMENTS:
        return f"*{dtype}"
    if argument in _FLOAT32:
        return "*fp32"
    if argument in _INT32:
        return "*i32"
    if argument.startswith("stride_"):
        return "i64"
    return "fp32" if argument == "scale" else "i32"


def _usage(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes it keeps in local memory, which is where spills go."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run([_CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", run.stdout + run.stderr))
    return {"registers": int(found["REG"]), "spill_bytes": int(found["STACK"]) + int(found["LOCAL"])}


if __name__ == "__main__":
    for job in json.loads(sys.argv[1]):
        print(json.dumps(compile_kernel(*job)), flush=True)
