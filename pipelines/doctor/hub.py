"""The Hugging Face Hub: whether it answers, and whether there is a token. The token's value is never read here."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from pipelines.doctor.places import hub_home
from pipelines.doctor.record import ProbeResult

ENDPOINT = "https://huggingface.co"
YES = ("1", "on", "yes", "true")


def look(environment: Mapping[str, str], timeout_s: float) -> list[ProbeResult]:
    """Describe access to the Hub by sending one request without a token."""
    return [_reachable(environment, timeout_s), _token(environment)]


def _reachable(environment: Mapping[str, str], timeout_s: float) -> ProbeResult:
    if any(environment.get(name, "").lower() in YES for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")):
        return ProbeResult("Hub", "offline mode (HF_HUB_OFFLINE): only what is in the cache", "note")
    endpoint = environment.get("HF_ENDPOINT") or ENDPOINT
    todo = "Set HF_ENDPOINT to a mirror, or take a folder: model.path=... The bundled models need no Hub."
    if not endpoint.startswith(("http://", "https://")):
        return ProbeResult("Hub", f"HF_ENDPOINT='{endpoint}' is not an address", "note", "Give http:// or https://.")
    try:
        with urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=timeout_s):
            return ProbeResult("Hub", f"{endpoint} answers")
    except urllib.error.HTTPError:  # any answer will do
        return ProbeResult("Hub", f"{endpoint} answers")
    except (OSError, ValueError) as error:  # URLError and timeouts are OSErrors
        reason = getattr(error, "reason", error)
        return ProbeResult("Hub", f"{endpoint} does not answer: {reason}", "note", todo)


def _token(environment: Mapping[str, str]) -> ProbeResult:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if environment.get(name):
            return ProbeResult("token", f"in {name}")
    file = Path(environment.get("HF_TOKEN_PATH") or Path(hub_home(environment)) / "token").expanduser()
    try:
        if file.read_text(encoding="utf-8").strip():
            return ProbeResult("token", f"in {file}")
    except OSError:
        pass
    todo = "Gated models (Gemma, Llama) need one: accept the licence on the Hub, set HF_TOKEN."
    return ProbeResult("token", "none", "note", todo)
