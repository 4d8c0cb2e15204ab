"""Format numbers for a report. "No value" is a dash, never 0."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipelines.domain.units import show_bytes

NONE = "–"


def number(value: float | None) -> str:
    """Format with three significant digits and grouped thousands: 1234.5 -> "1,234", 0.0001234 -> "0.000123"."""
    if value is None:
        return NONE
    size = abs(value)
    if size >= 99.95:
        return f"{value:,.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    if size >= 0.9995 or size == 0:
        return f"{value:.2f}"
    return f"{value:.3f}" if size >= 0.0995 else f"{value:.3g}"


def count(amount: int, word: str) -> str:
    """Format a number with its noun: "1 request", "2,048 requests"."""
    return f"{amount:,} {word}{'' if amount == 1 else 's'}"


def ms(seconds: float | None) -> str:
    """Format seconds as milliseconds without the unit."""
    return NONE if seconds is None else number(1000 * seconds)


def percent(share: float | None, digits: int = 2) -> str:
    """Format a share (0..1) in percent without the sign."""
    return NONE if share is None else f"{100 * share:.{digits}f}"


def settings_text(values: Mapping[str, Any]) -> str:
    """Format a mapping on one line: "isl 128, osl 32"; nested keys have dots, empty values are omitted."""
    return ", ".join(f"{name} {value}" for name, value in flat(values))


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Flatten a mapping to (dotted name, value) pairs, without empty values."""
    pairs: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            pairs += flat(value, f"{prefix}{name}.")
        elif value is not None and value != [] and value != "":
            text = ", ".join(map(_plain, value)) if isinstance(value, list | tuple) else _plain(value)
            pairs.append((f"{prefix}{name}", text))
    return pairs


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return settings_text(value)
    return f"{value:g}" if isinstance(value, float) and abs(value) < 1e6 else str(value)


def machine_text(machine: Mapping[str, Any]) -> str:
    """Describe a machine on one line: GPUs or processors, memory, system."""
    parts = [f"{gpu.get('name', 'GPU')} ({show_bytes(gpu['memory_bytes'])})" for gpu in machine.get("gpus") or ()]
    if machine.get("cpu"):
        parts.append(str(machine["cpu"]))
    if machine.get("cpu_count"):
        parts.append(f"{machine['cpu_count']} CPU cores")
    if machine.get("memory_bytes"):
        parts.append(f"{show_bytes(machine['memory_bytes'])} memory")
    if machine.get("platform"):
        parts.append(str(machine["platform"]))
    return ", ".join(parts) or "unknown"


def versions_text(versions: Iterable[Mapping[str, str]]) -> list[tuple[str, str]]:
    """List the names of libraries in order, each with all its versions."""
    by_name: dict[str, set[str]] = {}
    for each in versions:
        for name, version in each.items():
            by_name.setdefault(name, set()).add(str(version))
    return [(name, ", ".join(sorted(values))) for name, values in sorted(by_name.items())]


def when(iso: str) -> str:
    """Format an ISO time without seconds: "2026-11-21 09:30 UTC"."""
    return f"{iso[:10]} {iso[11:16]} UTC" if len(iso) >= 16 else iso


def span(numbers: Iterable[int]) -> str:
    """Return whole numbers as their range: "69 to 1,104", or one number if all are equal."""
    each = tuple(numbers)
    least, most = min(each), max(each)
    return f"{most:,}" if least == most else f"{least:,} to {most:,}"


def csv_text(head: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """Format a table as CSV; None is an empty cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return out.getvalue()
