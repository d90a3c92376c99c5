"""Numbers with units, for people to read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

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


def milliseconds(seconds: float) -> str:
    """Return seconds as text in milliseconds: `0.0271828` -> `"27.18"`, with four digits, without exponent for large values."""
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def counted(count: float, what: str) -> str:
    """Return a count with its noun: `(2, "stage")` -> `"2 stages"`, `(2.5, "microbatch")` -> `"2.5 microbatches"`."""
    plural = "" if count == 1 else "es" if what.endswith("ch") else "s"
    return f"{count if isinstance(count, int) else f'{count:.4g}'} {what}{plural}"


def span(values: Iterable[float], text: Callable[[float], str] = str) -> str:
    """Return a range of values as text, `smallest..largest`; a single text if both ends read alike."""
    listed = list(values)
    least, most = text(min(listed)), text(max(listed))
    return least if least == most else f"{least}..{most}"


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return ascending numbers as runs of neighbours, (first, last) each, both included: `0, 1, 2, 8` -> (0, 2), (8, 8)."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        joins = bool(found) and found[-1][1] == number - 1
        found.append((found.pop()[0] if joins else number, number))
    return found


def labelled(label: str, lines: Iterable[object], width: int) -> list[str]:
    """Return lines indented by `width` characters, with a label before the first."""
    return [f"{label if index == 0 else '':<{width}}{line}" for index, line in enumerate(lines)]


def columns(rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> Iterator[str]:
    """Yield rows of cells as lines with aligned columns. Columns in `left` are left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        line = (cell.ljust(size) if index in left else cell.rjust(size) for index, (cell, size) in enumerate(cells))
        yield "  ".join(line).rstrip()


def format_count(count: float) -> str:
    """Format a count by powers of 1000 (k, M, B, T): `7_063_000_000` -> `"7.06 B"`."""
    value = float(count)
    for unit in ("", " k", " M", " B"):
        if abs(value) < 1000:
            return f"{value:.0f}" if not unit else f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g} T"
