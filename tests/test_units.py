"""Numbers as people read them."""

from __future__ import annotations

import pytest

from mmcompile.units import format_bytes, format_count, format_seconds


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (5 << 60, "5120.0 PiB")],
)
def test_bytes(value: int, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 us"),
        (2.5e-6, "2.5 us"),
        (1.5e-3, "1.50 ms"),
        (0.25, "250 ms"),
        (12.34, "12.3 s"),
        (75.2, "1 min 15 s"),
        (7265, "2 h 01 min"),
    ],
)
def test_seconds(value: float, text: str) -> None:
    assert format_seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999, "999"), (1500, "1.5 k"), (7_063_000_000, "7.06 B"), (1.2e13, "12 T")],
)
def test_counts(value: float, text: str) -> None:
    assert format_count(value) == text
