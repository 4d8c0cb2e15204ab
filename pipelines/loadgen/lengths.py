"""Draw the lengths of prompts and outputs for each request."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from random import Random

from pipelines.domain.errors import UserError
from pipelines.host.files import small_text
from pipelines.settings.load import LengthSettings


def sampler(length: LengthSettings, rng: Random, *, key: str) -> Callable[[], int]:
    """Return a function that draws one length, in tokens, at least 1.

    Args:
        length: the distribution.
        rng: random number generator; the same seed gives the same lengths.
        key: its name in the configuration, for messages, e.g. "workload.isl".

    Raises:
        UserError: the file of an empirical distribution cannot be read.
    """
    low, high = length.min or 1, length.max or math.inf
    draw = _family(length, rng, key)
    return lambda: int(min(max(round(draw()), low), high))


def _family(length: LengthSettings, rng: Random, key: str) -> Callable[[], float]:
    mean, stdev = length.mean or 0.0, length.stdev or 0.0
    if length.distribution == "fixed":
        return lambda: mean
    if length.distribution == "normal":
        return lambda: rng.gauss(mean, stdev)
    if length.distribution == "lognormal":
        # For the tokens themselves: mean = exp(mu + sigma^2/2), (stdev/mean)^2 = exp(sigma^2) - 1.
        variance = math.log1p((stdev / mean) ** 2)
        return lambda: rng.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))
    if length.distribution == "uniform":
        low, high = length.min or 1, length.max or 1
        return lambda: rng.randint(low, high)
    values = length.values if length.values is not None else _read(length.file, key)
    return lambda: rng.choice(values)


def _read(path: Path | None, key: str) -> tuple[int, ...]:
    """Read one positive integer per line; empty lines are skipped."""
    assert path is not None  # checked by the settings
    try:
        lines = small_text(path).splitlines()
    except (OSError, UserError, UnicodeDecodeError) as error:
        reason = f"{error.strerror}." if isinstance(error, OSError) else str(error)
        raise UserError(f"{key}.file={path} cannot be read: {reason}") from None
    values = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text and not (text.isdecimal() and int(text) > 0):
            raise UserError(
                f"{key}.file={path}, line {number}: '{text[:40]}' is not a positive number.",
                allowed="One positive number per line.",
            )
        values += [int(text)] if text else []
    if not values:
        raise UserError(f"{key}.file={path} holds no numbers.", allowed="One positive number per line.")
    return tuple(values)
