"""The command `doctor`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from pipelines.doctor.examine import examine
from pipelines.doctor.text import render
from pipelines.host.machine import gather
from pipelines.settings.compose import load


def doctor(overrides: Sequence[str]) -> int:
    """Show what this machine has and what works on it.

    Returns:
        0, or 1 when the configuration given does not run here.
    """
    settings = load(overrides)
    found = examine(settings, gather(), os.environ)
    text = json.dumps(found.to_json(), indent=2) + "\n" if settings.doctor.format == "json" else render(found)
    sys.stdout.write(text)
    return 1 if found.broken else 0
