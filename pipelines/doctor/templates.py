"""NVIDIA's model templates, where its container is: which parameters they have and this project does not know."""

from __future__ import annotations

import re
from pathlib import Path

from pipelines.doctor.record import Finding
from triton_repo import parameters

TEMPLATES = Path("/app/all_models/inflight_batcher_llm")
MODELS = ("preprocessing", "postprocessing", "tensorrt_llm", "tensorrt_llm_bls")
KEY = re.compile(r'parameters\s*:?\s*\{\s*key:\s*"(\w+)"')


def look(folder: Path = TEMPLATES) -> list[Finding]:
    """Hold the templates against the parameters this project writes; nothing outside of the container."""
    if not folder.is_dir():
        return []
    found: list[Finding] = []
    for model in MODELS:
        file = folder / model / "config.pbtxt"
        try:
            theirs = set(KEY.findall(file.read_text(encoding="utf-8")))
        except OSError as error:
            found.append(Finding("templates", f"{file}: {error.strerror}", "note", "Is this NVIDIA's container?"))
            continue
        found += _difference(model, theirs, set(parameters.NAMES[model]))
    return found or [Finding("templates", f"{folder}: the parameters are those of our table")]


def _difference(model: str, theirs: set[str], ours: set[str]) -> list[Finding]:
    todo = "Report it: the parameter table was made from the newest templates that are public."
    found = []
    if new := sorted(theirs - ours):
        found.append(Finding("templates", f"{model} has {', '.join(new)}, which we do not know", "note", todo))
    if gone := sorted(ours - theirs):
        found.append(Finding("templates", f"{model} has no {', '.join(gone)} here", "note", todo))
    return found
