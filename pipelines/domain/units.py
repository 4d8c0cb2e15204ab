"""Units: bytes, seconds and tokens inside; GiB and ms only when shown."""

KIB, MIB, GIB = 1024, 1024**2, 1024**3
HOUR, DAY = 3600, 24 * 3600
"""Seconds."""


def show_bytes(count: float) -> str:
    """Show a byte count with a binary unit: 1536 -> "1.5 KiB"."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{int(count)} B"


def show_seconds(seconds: float) -> str:
    """Show a duration: 0.34 -> "0.34 s", 75 -> "1 min 15 s"."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def rate_of_users(users: float, requests_per_user_day: float, hours: float = 24.0) -> float:
    """Average requests per second of a number of daily users, spread evenly over `hours`."""
    return users * requests_per_user_day / (hours * HOUR)
