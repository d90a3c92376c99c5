"""`Cluster`: nodes, devices and links, as numbers with sources. A value; it knows nothing of models.

Figures are those of the vendors' data sheets: peaks dense (no sparsity), links in one direction, decimal units (1 GB
= 1e9 bytes). Memory is the advertised size in decimal bytes, a little below what is there: the rest is the driver's
context.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mmcompile.errors import ConfigError

GPU_EFFICIENCY = 0.5
"""[Empirical] Share of peak that large matrix products inside a whole model reach; replace by a calibration."""
GPU_LAUNCH_S = 4e-6
"""[Empirical] Launch, ramp-up and tail of one GPU kernel."""
LOCAL_NAME = "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One accelerator, or one CPU core."""

    name: str
    peak_flops: Mapping[str, float]
    """dtype name (`"bfloat16"`) -> dense FLOP/s."""
    memory_bytes: int
    memory_bytes_per_s: float
    launch_s: float
    """Time a kernel costs beyond its work: launch, ramp-up, tail."""
    efficiency: float
    """Share of `peak_flops` that compute-bound layers reach, 0..1."""
    source: str

    def flops_per_s(self, dtype: str) -> float:
        """Reachable FLOP/s for a dtype. Raises ConfigError if the device has no figure for it."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Equal nodes of equal devices. `str(cluster)` is the text `Cluster.parse` reads."""

    num_nodes: int
    devices_per_node: int
    device: Device
    intra: Interconnect
    """Between two devices of one node."""
    inter: Interconnect
    """Between two nodes, per device."""

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def is_local(self) -> bool:
        """CPU cores: more processes than devices can run, sharing them."""
        return self.device.name == LOCAL_NAME

    def __str__(self) -> str:
        return f"{self.num_nodes}x{self.devices_per_node}x{self.device.name}"

    def between(self, rank: int, other: int) -> Interconnect:
        """The link between two ranks, ranks being numbered node by node."""
        same_node = rank // self.devices_per_node == other // self.devices_per_node
        return self.intra if same_node else self.inter

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Read `nodes x devices x name`, for example `4x8xH100`; `8xH100` is one node; `local` is this machine.

        Raises:
            ConfigError: the text has another form, a count is zero, or the device is unknown (valid names are listed).
        """
        if text.strip().lower() == "local":
            return cls.local()
        match = re.fullmatch(r"(?:(\d+)x)?(\d+)x([A-Za-z][\w-]*)", text.strip())
        if match is None:
            raise ConfigError(
                f"cluster {text!r} is not NODESxDEVICESxNAME (4x8xH100) or 'local'; names are {device_names()}"
            )
        nodes, devices, name = int(match[1] or 1), int(match[2]), match[3]
        if nodes < 1 or devices < 1:
            raise ConfigError(f"cluster {text!r} has {nodes} nodes of {devices} devices; both must be at least 1")
        device, intra, inter = _find(name)
        return cls(num_nodes=nodes, devices_per_node=devices, device=device, intra=intra, inter=inter)

    @classmethod
    def local(cls, num_devices: int | None = None) -> Cluster:
        """This machine, each CPU core a device; the memory is shared equally between them.

        Args:
            num_devices: cores to use; all that this process may run on by default.
        """
        cores = num_devices or _num_cores()
        device, intra, inter = DEVICES[LOCAL_NAME]
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        device = replace(device, memory_bytes=memory // cores)
        return cls(num_nodes=1, devices_per_node=cores, device=device, intra=intra, inter=inter)


def device_names() -> str:
    """Every name `Cluster.parse` knows, comma separated."""
    return ", ".join(DEVICES)


def _num_cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _find(name: str) -> tuple[Device, Interconnect, Interconnect]:
    for known, entry in DEVICES.items():
        if known.lower() == name.lower():
            return entry
    raise ConfigError(f"unknown device {name!r}; known are {device_names()}")


def _gpu(name: str, memory_gb: int, memory_gb_per_s: int, source: str, **peaks_tflops: float) -> Device:
    return Device(
        name=name,
        peak_flops={dtype: tflops * 1e12 for dtype, tflops in peaks_tflops.items()},
        memory_bytes=memory_gb * 10**9,
        memory_bytes_per_s=memory_gb_per_s * 1e9,
        launch_s=GPU_LAUNCH_S,
        efficiency=GPU_EFFICIENCY,
        source=source,
    )


def _link(gb_per_s: float, latency_us: float, source: str) -> Interconnect:
    return Interconnect(bytes_per_s=gb_per_s * 1e9, latency_s=latency_us * 1e-6, source=source)


_PCIE4 = _link(32, 10, "PCIe 4.0 x16, one direction; latency [Empirical]")
_NVLINK3 = _link(300, 8, "NVLink 3, 600 GB/s both directions (NVIDIA A100 data sheet); latency [Empirical]")
_NVLINK4 = _link(450, 8, "NVLink 4, 900 GB/s both directions (NVIDIA H100 data sheet); latency [Empirical]")
_IB_HDR = _link(25, 15, "assumed: one 200 Gb/s HDR port a device; latency [Empirical]")
_IB_NDR = _link(50, 15, "assumed: one 400 Gb/s NDR port a device; latency [Empirical]")
_ETHERNET = _link(12.5, 30, "assumed: one 100 Gb/s Ethernet port a device; latency [Empirical]")
_GLOO = _link(1, 100, "[Empirical] gloo over loopback, half of 2.4 GB/s measured between two processes (torch 2.13)")

_CPU_CORE = Device(
    name=LOCAL_NAME,
    peak_flops={"float32": 1e11, "float64": 5e10, "bfloat16": 1e11, "float16": 5e10},
    memory_bytes=4 * 10**9,
    memory_bytes_per_s=1e10,
    launch_s=5e-6,
    efficiency=0.5,
    source="[Empirical] two thirds of one Xeon core's matmul (150 float32, 79 float64 GFLOP/s, AVX-512, torch 2.13)",
)

DEVICES: Mapping[str, tuple[Device, Interconnect, Interconnect]] = {
    "A40": (
        _gpu("A40", 48, 696, "NVIDIA A40 data sheet", float32=37.4, bfloat16=149.7, float16=149.7),
        _PCIE4,
        _IB_HDR,
    ),
    "A100-40G": (
        _gpu("A100-40G", 40, 1555, "NVIDIA A100 data sheet", float64=9.7, float32=19.5, bfloat16=312, float16=312),
        _NVLINK3,
        _IB_HDR,
    ),
    "A100-80G": (
        _gpu("A100-80G", 80, 2039, "NVIDIA A100 SXM data sheet", float64=9.7, float32=19.5, bfloat16=312, float16=312),
        _NVLINK3,
        _IB_HDR,
    ),
    "H100": (
        _gpu("H100", 80, 3350, "NVIDIA H100 SXM data sheet", float64=34, float32=67, bfloat16=989.4, float16=989.4),
        _NVLINK4,
        _IB_NDR,
    ),
    "H200": (
        _gpu("H200", 141, 4800, "NVIDIA H200 SXM data sheet", float64=34, float32=67, bfloat16=989.4, float16=989.4),
        _NVLINK4,
        _IB_NDR,
    ),
    "L4": (
        _gpu("L4", 24, 300, "NVIDIA L4 data sheet", float32=30.3, bfloat16=121, float16=121),
        _PCIE4,
        _ETHERNET,
    ),
    LOCAL_NAME: (_CPU_CORE, _GLOO, _GLOO),
}
