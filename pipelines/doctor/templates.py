"""Compare NVIDIA's model templates, inside its container, with the parameters this project knows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import triton_repo
from pipelines.doctor.record import ProbeResult

TEMPLATES = Path("/app/all_models/inflight_batcher_llm")
TABLE = Path(triton_repo.__file__).parent / "template_params.json"
PLACEHOLDER = re.compile(r"\$\{(\w+)\}")
TODO = "Please report it: the parameter table was made from the newest public templates."


def look(folder: Path = TEMPLATES) -> list[ProbeResult]:
    """Compare the templates with the table of parameters; no result outside the container."""
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
    return found or [ProbeResult("templates", f"{folder}: parameters match our table")]


def _differences(model: str, theirs: set[str], ours: set[str]) -> list[ProbeResult]:
    told = ((theirs - ours, "takes {names}, unknown to this project"), (ours - theirs, "does not take {names} here"))
    return [
        ProbeResult("templates", f"{model} " + text.format(names=", ".join(sorted(names))), "note", TODO)
        for names, text in told
        if names
    ]
