"""NVIDIA's model templates, where its container is: which parameters they take that this project does not know."""

from __future__ import annotations

import json
import re
from pathlib import Path

import triton_repo
from pipelines.doctor.record import ProbeResult

TEMPLATES = Path("/app/all_models/inflight_batcher_llm")
TABLE = Path(triton_repo.__file__).parent / "template_params.json"
PLACEHOLDER = re.compile(r"\$\{(\w+)\}")
TODO = "Report it: the parameter table was made from the newest templates that are public."


def look(folder: Path = TEMPLATES) -> list[ProbeResult]:
    """Hold the templates against the table of their parameters; nothing outside of the container."""
    if not folder.is_dir():
        return []
    found: list[ProbeResult] = []
    for model, ours in json.loads(TABLE.read_text(encoding="utf-8")).items():
        file = folder / model / "config.pbtxt"
        try:
            theirs = set(PLACEHOLDER.findall(file.read_text(encoding="utf-8")))
        except OSError as error:
            if model != "multimodal_encoders":
                found.append(
                    ProbeResult("templates", f"{file}: {error.strerror}", "note", "Is this NVIDIA's container?")
                )
            continue
        found += _differences(model, theirs, set(ours))
    return found or [ProbeResult("templates", f"{folder}: their parameters are those of our table")]


def _differences(model: str, theirs: set[str], ours: set[str]) -> list[ProbeResult]:
    told = ((theirs - ours, "takes {names}, which we do not know"), (ours - theirs, "does not take {names} here"))
    return [
        ProbeResult("templates", f"{model} " + text.format(names=", ".join(sorted(names))), "note", TODO)
        for names, text in told
        if names
    ]
