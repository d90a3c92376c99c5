"""The hardware table: devices and the links between them, every figure with its source.

Figures are those of the vendors' data sheets: peaks dense (no sparsity), float32 and float64 without matrix units'
reduced precision, links in one direction, decimal units (1 GB = 1e9 bytes). Memory is the advertised size in decimal
bytes, a little below the installed memory: the rest is the driver's context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mmcompile.errors import ConfigError

_GPU_EFFICIENCY = 0.5
"""Fraction of peak FLOP/s that large matrix products inside a whole model reach [Empirical]; a calibration replaces it."""
_GPU_LAUNCH_S = 4e-6
"""Seconds that a GPU kernel takes besides its work: launch, ramp-up and tail [Empirical]."""
LOCAL_NAME = "cpu"

Generation = Literal["volta", "ampere", "hopper", "blackwell"]
"""GPU generation: row of NCCL's bandwidth tables."""
LinkKind = Literal["nvlink", "pcie", "mesh", "network", "loopback"]
"""Kind of link. `nvlink`: switched, every pair at full rate; `mesh`: a separate link for every pair (Infinity Fabric)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One accelerator, or one CPU core."""

    name: str
    peak_flops: Mapping[str, float]
    """dtype name (`"bfloat16"`) -> dense peak FLOP/s."""
    memory_bytes: int
    memory_bytes_per_s: float
    launch_s: float
    """Seconds that a kernel costs beyond its work: launch, ramp-up, tail."""
    efficiency: float
    """Fraction of `peak_flops` that compute-bound layers reach, 0..1."""
    source: str
    generation: Generation = "ampere"
    """Generation by which NCCL picks its limits; compute capability 8.9 counts as Ampere there."""

    def flops_per_s(self, dtype: str) -> float:
        """Return the reachable FLOP/s for a dtype. Raises ConfigError if the device has no peak for it."""
        try:
            return self.efficiency * self.peak_flops[dtype]
        except KeyError:
            known = ", ".join(sorted(self.peak_flops))
            raise ConfigError(f"device {self.name} has no peak for dtype {dtype!r}; it has {known}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Interconnect:
    """A link between two devices: one direction, one message at a time."""

    bytes_per_s: float
    latency_s: float
    source: str
    kind: LinkKind = "network"
    collective_bytes_per_s: float = 0.0
    """Bytes/s of a collective's ring through each device (of a `mesh`: through each link); 0 means `bytes_per_s`."""

    @property
    def ring_bytes_per_s(self) -> float:
        """Bytes/s of a collective's ring through each device; if `kind` is `mesh`, through each link of a device."""
        return self.collective_bytes_per_s or self.bytes_per_s


Entry = tuple[Device, Interconnect, Interconnect]
"""(device, link between two devices of a node, link of one device to other nodes)."""


def find_device(name: str) -> Entry:
    """Return the table entry of a device name, in any case. Raises ConfigError, with the valid names, if there is none."""
    for known, entry in DEVICES.items():
        if known.lower() == name.lower():
            return entry
    raise ConfigError(f"unknown device {name!r}; known are {', '.join(DEVICES)}")


def _gpu(
    name: str, memory_gb: int, gb_per_s: int, generation: Generation, source: str, peaks_tflops: Mapping[str, float]
) -> Device:
    return Device(
        name=name,
        peak_flops={dtype: tflops * 1e12 for dtype, tflops in peaks_tflops.items()},
        memory_bytes=memory_gb * 10**9,
        memory_bytes_per_s=gb_per_s * 1e9,
        launch_s=_GPU_LAUNCH_S,
        efficiency=_GPU_EFFICIENCY,
        source=source,
        generation=generation,
    )


def _link(kind: LinkKind, gb_per_s: float, latency_us: float, source: str, ring_gb_per_s: float = 0.0) -> Interconnect:
    return Interconnect(
        kind=kind,
        bytes_per_s=gb_per_s * 1e9,
        latency_s=latency_us * 1e-6,
        source=source,
        collective_bytes_per_s=ring_gb_per_s * 1e9,
    )


_PCIE4 = _link(
    "pcie",
    32,
    10,
    "PCIe 4.0 x16, one direction; 24 GB/s of NCCL's rings by torch's NCCL model; latency [Empirical]",
    24,
)
_PCIE5 = _link(
    "pcie", 64, 10, "PCIe 5.0 x16, one direction; rings assumed at 3/4 as on PCIe 4.0; latency [Empirical]", 48
)
_NVLINK = "NVLink {}, {} GB/s both directions (NVIDIA {} data sheet); rings {} GB/s (NCCL topo.h); latency [Empirical]"
_NVLINK3 = _link("nvlink", 300, 8, _NVLINK.format(3, 600, "A100", 240), 240)
_NVLINK4 = _link("nvlink", 450, 8, _NVLINK.format(4, 900, "H100", 370), 370)
_INFINITY_SOURCE = (
    "Infinity Fabric, 128 GB/s both directions to each of 7 peers (AMD MI300X platform data sheet); rings assumed at 3/4 of "
    "it; latency [Empirical]"
)
_INFINITY = _link("mesh", 64, 8, _INFINITY_SOURCE, 48)
_IB_HDR = _link("network", 25, 15, "one 200 Gb/s HDR port a device (NVIDIA DGX A100 data sheet); latency [Empirical]")
_IB_HDR_ASSUMED = _link("network", 25, 15, "assumed: one 200 Gb/s HDR port a device; latency [Empirical]")
_IB_NDR = _link("network", 50, 15, "one 400 Gb/s NDR port a device (NVIDIA DGX H100 data sheet); latency [Empirical]")
_IB_NDR_ASSUMED = _link("network", 50, 15, "assumed: one 400 Gb/s NDR port a device; latency [Empirical]")
_ROCE_400 = _link("network", 50, 20, "assumed: one 400 Gb/s RoCE port a device; latency [Empirical]")
_ETHERNET = _link("network", 12.5, 30, "assumed: one 100 Gb/s Ethernet port a device; latency [Empirical]")
_GLOO = _link(
    "loopback", 1, 100, "[Empirical] gloo over loopback, half of 2.4 GB/s measured between two processes (torch 2.13)"
)

_CPU_CORE = Device(
    name=LOCAL_NAME,
    peak_flops={"float32": 1e11, "float64": 5e10, "bfloat16": 1e11, "float16": 5e10},
    memory_bytes=4 * 10**9,
    memory_bytes_per_s=1e10,
    launch_s=5e-6,
    efficiency=0.5,
    source="[Empirical] two thirds of one Xeon core's matmul (150 float32, 79 float64 GFLOP/s, AVX-512, torch 2.13)",
)
_A40 = {"float32": 37.4, "bfloat16": 149.7, "float16": 149.7}
_A100 = {"float64": 9.7, "float32": 19.5, "bfloat16": 312, "float16": 312}
_H100 = {"float64": 34, "float32": 67, "bfloat16": 989.4, "float16": 989.4}
_H100_PCIE = {"float64": 26, "float32": 51, "bfloat16": 756, "float16": 756}
_L4 = {"float32": 30.3, "bfloat16": 121, "float16": 121}
_MI300X = {"float64": 81.7, "float32": 163.4, "bfloat16": 1307.4, "float16": 1307.4}
_MI300X_SOURCE = "AMD Instinct MI300X data sheet; limits of collectives assumed as NCCL's on Hopper"

_GPUS: tuple[Entry, ...] = (
    (_gpu("A40", 48, 696, "ampere", "NVIDIA A40 data sheet", _A40), _PCIE4, _IB_HDR_ASSUMED),
    (_gpu("A100-40G", 40, 1555, "ampere", "NVIDIA A100 SXM data sheet", _A100), _NVLINK3, _IB_HDR),
    (_gpu("A100-80G", 80, 2039, "ampere", "NVIDIA A100 SXM data sheet", _A100), _NVLINK3, _IB_HDR),
    (_gpu("H100", 80, 3350, "hopper", "NVIDIA H100 SXM data sheet", _H100), _NVLINK4, _IB_NDR),
    (_gpu("H100-PCIe", 80, 2000, "hopper", "NVIDIA H100 PCIe data sheet", _H100_PCIE), _PCIE5, _IB_NDR_ASSUMED),
    (_gpu("H200", 141, 4800, "hopper", "NVIDIA H200 SXM data sheet", _H100), _NVLINK4, _IB_NDR),
    (_gpu("L4", 24, 300, "ampere", "NVIDIA L4 data sheet", _L4), _PCIE4, _ETHERNET),
    (_gpu("MI300X", 192, 5300, "hopper", _MI300X_SOURCE, _MI300X), _INFINITY, _ROCE_400),
)
DEVICES: Mapping[str, Entry] = {entry[0].name: entry for entry in (*_GPUS, (_CPU_CORE, _GLOO, _GLOO))}
"""Device name -> entry. NVLink bridges between pairs of A40 or H100 PCIe are not modelled: all pairs use PCIe."""
