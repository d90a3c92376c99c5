"""`Cluster`: nodes, devices and links, as numbers with sources. A value, independent of models."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, replace

from mmcompile.costmodel.hardware import DEVICES, LOCAL_NAME, Device, Interconnect, find_device
from mmcompile.errors import ConfigError

_FORM = re.compile(r"(?:(\d+)x)?(\d+)x([A-Za-z][\w-]*)(?:@(\d+(?:\.\d+)?)(GB|Gb)/s)?")
_SIZE = {"GB": 1e9, "Gb": 1e9 / 8}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Cluster of equal nodes with equal devices. `Cluster.parse` reads the text that `str(cluster)` gives."""

    num_nodes: int
    devices_per_node: int
    device: Device
    intra: Interconnect
    """Link between two devices of one node."""
    inter: Interconnect
    """Link from one device to other nodes."""

    @property
    def num_devices(self) -> int:
        """Number of devices in all nodes together."""
        return self.num_nodes * self.devices_per_node

    @property
    def is_local(self) -> bool:
        """True if the devices are CPU cores of this machine, which more processes than cores can share."""
        return self.device.name == LOCAL_NAME

    def __str__(self) -> str:
        text = f"{self.num_nodes}x{self.devices_per_node}x{self.device.name}"
        usual = find_device(self.device.name)[2].bytes_per_s
        rate = self.inter.bytes_per_s
        return text if rate == usual else f"{text}@{_gigabytes(rate)}GB/s"

    def between(self, rank: int, other: int) -> Interconnect:
        """Return the link between two ranks; ranks are numbered node by node."""
        same_node = rank // self.devices_per_node == other // self.devices_per_node
        return self.intra if same_node else self.inter

    def together(self, num_ranks: int, stride: int = 1) -> int:
        """Return how many of a group's `num_ranks` ranks are on one node, if they are `stride` ranks apart; at least 1."""
        return max(1, min(num_ranks, self.devices_per_node // stride))

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Read a cluster from text of the form `nodes x devices x name [@ rate]`.

        `4x8xH100` is 4 nodes of 8; `8xH100` is one node; `6x4xA40@6.25GB/s` (or `@50Gb/s`) gives each device 6.25 GB/s
        to other nodes, where the table assumes another network; `local` is this machine.

        Raises:
            ConfigError: the text has another form, a count or rate is zero, or the device is unknown (valid names are
                listed).
        """
        if text.strip().lower() == "local":
            return cls.local()
        match = _FORM.fullmatch(text.strip())
        if match is None:
            raise ConfigError(
                f"cluster {text!r} is not NODESxDEVICESxNAME (4x8xH100, 4x8xH100@25GB/s) or 'local'; names are "
                + ", ".join(DEVICES)
            )
        nodes, devices = int(match[1] or 1), int(match[2])
        if nodes < 1 or devices < 1:
            raise ConfigError(f"cluster {text!r} has {nodes} nodes of {devices} devices; both must be at least 1")
        device, intra, inter = find_device(match[3])
        if match[4]:
            inter = _network(inter, float(round(float(match[4]) * _SIZE[match[5]])), text)
        return cls(num_nodes=nodes, devices_per_node=devices, device=device, intra=intra, inter=inter)

    @classmethod
    def local(cls, num_devices: int | None = None) -> Cluster:
        """Return CPU cores of this machine, by default all that this process may run on, as devices with equal memory."""
        cores = num_devices or (len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1)
        device, intra, inter = DEVICES[LOCAL_NAME]
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        device = replace(device, memory_bytes=memory // cores)
        return cls(num_nodes=1, devices_per_node=cores, device=device, intra=intra, inter=inter)


def _network(usual: Interconnect, bytes_per_s: float, text: str) -> Interconnect:
    if bytes_per_s <= 0:
        raise ConfigError(f"cluster {text!r} has a network of 0 bytes a second; give what one device can send")
    if bytes_per_s == usual.bytes_per_s:
        return usual
    source = f"as asked for: {_gigabytes(bytes_per_s)} GB/s a device; latency as of {usual.source}"
    return replace(usual, bytes_per_s=bytes_per_s, collective_bytes_per_s=0.0, source=source)


def _gigabytes(num_bytes: float) -> str:
    """Return bytes as text in gigabytes: exact to the byte and without exponent, so that it parses back."""
    return f"{num_bytes / 1e9:.9f}".rstrip("0").rstrip(".")
