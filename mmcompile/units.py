"""Numbers with units, for people to read."""

from __future__ import annotations

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(num_bytes: float) -> str:
    """Format bytes by powers of 1024: `1536` -> `"1.5 KiB"`."""
    value = float(num_bytes)
    for unit in _BINARY[:-1]:
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} {_BINARY[-1]}"


def format_seconds(seconds: float) -> str:
    """Format seconds: `0.0015` -> `"1.50 ms"`; microseconds to hours, three significant digits below a minute."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1:
        return f"{seconds * 1e3:#.3g} ms".replace(". ", " ")
    if seconds < 60:
        return f"{seconds:#.3g} s".replace(". ", " ")
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def format_count(count: float) -> str:
    """Format a count by powers of 1000 (k, M, B, T): `7_063_000_000` -> `"7.06 B"`."""
    value = float(count)
    for unit in ("", " k", " M", " B"):
        if abs(value) < 1000:
            return f"{value:.0f}" if not unit else f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g} T"
