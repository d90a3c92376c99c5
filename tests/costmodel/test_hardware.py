"""The table of devices: figures with sources, checked against another table where that is right."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.analysis.device_info import lookup_device_info

from mmcompile.costmodel.hardware import DEVICES, find_device
from mmcompile.errors import ConfigError

GPUS = [name for name in DEVICES if name != "cpu"]


@pytest.mark.parametrize("name", DEVICES)
def test_figures_are_plausible_and_have_sources(name: str) -> None:
    device, intra, inter = DEVICES[name]
    assert device.name == name
    assert device.source and intra.source and inter.source
    assert 0 < device.efficiency <= 1
    assert device.peak_flops["bfloat16"] >= device.peak_flops["float32"] > 0
    assert intra.bytes_per_s >= inter.bytes_per_s > 0
    assert intra.bytes_per_s >= intra.ring_bytes_per_s > 0
    # A byte from memory is never dearer than a byte from another device.
    assert device.memory_bytes_per_s > intra.bytes_per_s


@pytest.mark.parametrize("name", GPUS)
def test_matrix_units_are_faster_than_float32_and_equal_for_both_halves(name: str) -> None:
    peaks = DEVICES[name][0].peak_flops
    assert peaks["bfloat16"] == peaks["float16"] >= 3 * peaks["float32"]
    assert peaks.get("float64", 0.0) <= peaks["float32"]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("A100-80G", "NVIDIA A100"),
        ("H100", "NVIDIA H100"),
        ("L4", "NVIDIA L4"),
        ("MI300X", "AMD MI300X"),
    ],
)
def test_torch_has_the_same_figures(name: str, known: str) -> None:
    device, info = DEVICES[name][0], lookup_device_info(known)
    assert info is not None
    assert device.memory_bytes == info.dram_gb * 1e9
    assert device.peak_flops["float32"] == pytest.approx(info.tops[torch.float32] * 1e12)
    if name == "L4":
        # torch has the data sheet's figure with sparsity there, and the bandwidth of an H100.
        assert 2 * device.peak_flops["bfloat16"] == pytest.approx(info.tops[torch.bfloat16] * 1e12)
        assert (device.memory_bytes_per_s, info.dram_bw_gbs) == (300e9, 3350)
        return
    # Not in torch 2.11, which has dense figures everywhere; both ways of counting are within half a percent of the data sheet.
    dense = {info.tops[torch.bfloat16] / factor for factor in (1, 2)}
    assert any(device.peak_flops["bfloat16"] == pytest.approx(peak * 1e12, rel=5e-3) for peak in dense)
    assert device.memory_bytes_per_s == info.dram_bw_gbs * 1e9


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="unknown device 'B300'; known are A40, A100-40G, .*, MI300X, cpu"):
        find_device("B300")
    assert find_device("h100-pcie")[0].name == "H100-PCIe"
