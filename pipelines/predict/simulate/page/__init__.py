"""The page that animates batching in a browser: a single file that loads nothing else.

`model.js` reimplements the simulator in ticks; a test checks in a real browser that both give the same numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from pipelines.document.canvas import variables

FOLDER = Path(__file__).resolve().parent
MAX_SLOTS, MAX_REQUESTS = 64, 2000
"""Range of the page's controls."""
CONTROLS: Mapping[str, Any] = {
    "slots": 4,
    "prefill": 2,
    "decode": 1,
    "chunks": 1,
    "max_num_tokens": 68,
    "requests": 100,
    "isl": 128,
    "mean": 10,
    "spread": 8,
    "arrival": "once",
    "rate": 30,
    "seed": 1,
    "left": "static",
    "right": "inflight",
    "until": 100,
}
"""Initial values of the controls."""


def page(
    light: Mapping[str, str],
    dark: Mapping[str, str],
    controls: Mapping[str, Any] | None = None,
    load: Sequence[Mapping[str, float]] | None = None,
) -> str:
    """Return the whole page as text.

    Args:
        light: colours by role, as `pipelines.document.canvas.LIGHT`.
        dark: the same for dark mode.
        controls: values that replace those of `CONTROLS`.
        load: initial requests ({"arrival": ticks, "isl": ..., "osl": ...}); with None the page draws them.
    """
    initial = {"controls": {**CONTROLS, **(controls or {})}, "load": None if load is None else list(load)}
    return Template(_text("page.html")).substitute(
        light=variables(light),
        dark=variables(dark),
        style=_text("page.css"),
        model=_text("model.js"),
        page=_text("page.js"),
        initial=json.dumps(initial).replace("<", "\\u003c"),
    )


def _text(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")
