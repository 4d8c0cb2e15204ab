"""Check installed versions against the table of versions that belong together."""

from __future__ import annotations

import json
import platform
import subprocess
from pathlib import Path
from typing import Any

from pipelines.doctor.gpus import numbers
from pipelines.doctor.record import ProbeResult, Status
from pipelines.host.machine import library_versions
from pipelines.serving.locate import locate
from pipelines.settings.serving import ServingSettings

TABLE = Path(__file__).with_name("compatibility.json")
ABSENT = "absent"
LIBRARIES = {
    "TensorRT-LLM": "tensorrt-llm",
    "TensorRT": "tensorrt",
    "ModelOpt": "nvidia-modelopt",
    "transformers": "transformers",
    "torch": "torch",
    "numpy": "numpy",
    "openvino": "openvino",
    "openvino-genai": "openvino-genai",
}
"""Common name -> name of the distribution."""
COLUMNS = {"TensorRT": "tensorrt", "ModelOpt": "modelopt", "transformers": "transformers", "torch": "torch"}
GPU_ONLY = ("TensorRT-LLM", "TensorRT")
CPU_ONLY = ("openvino", "openvino-genai")


def release_for(version: str) -> dict[str, Any] | None:
    """Return the row of a TensorRT-LLM version, or None; that of 1.2.1, the one to install, when it is absent."""
    wanted = "1.2.1" if version == ABSENT else version
    rows: list[dict[str, Any]] = json.loads(TABLE.read_text(encoding="utf-8"))["releases"]
    return next((row for row in rows if begins(wanted, row["tensorrt_llm"])), None)


def begins(version: str, prefix: str) -> bool:
    """Return whether a version matches the table's entry: 10.14.1.48 begins with 10.14.1."""
    return numbers(version)[: len(numbers(prefix))] == numbers(prefix)


def look(serving: ServingSettings) -> list[ProbeResult]:
    """Describe what is installed."""
    installed = library_versions(tuple(LIBRARIES.values()))
    version = installed["tensorrt-llm"]
    release = release_for(version)
    found = [_library(name, installed[dist], version, release) for name, dist in LIBRARIES.items()]
    return [*found, _python(release if version != ABSENT else None), _triton(serving)]


def _library(name: str, version: str, engine: str, release: dict[str, Any] | None) -> ProbeResult:
    if version == ABSENT:
        if name in GPU_ONLY:
            return ProbeResult(
                name, ABSENT, "note", "" if name == "TensorRT" else "Only in NVIDIA's container: make shell"
            )
        if name in CPU_ONLY and engine != ABSENT:
            return ProbeResult(name, ABSENT, "note", "Only engine=openvino needs it.")
        return ProbeResult(name, ABSENT, "bad", "Run: make setup")
    if name == "TensorRT-LLM":
        return _engine(version, release)
    if name == "numpy" and numbers(version)[0] >= 2:
        return ProbeResult(name, version, "bad", "Triton's python backend crashes with numpy 2. Run: make setup")
    needed = release.get(COLUMNS[name]) if release and engine != ABSENT and name in COLUMNS else None
    if needed and not _within(version, needed):
        wanted = needed if isinstance(needed, str) else f"{needed[0]} to {needed[1]}"
        return ProbeResult(
            name, f"{version}; TensorRT-LLM {engine} goes with {wanted}", "note", f"Install {name} {wanted}."
        )
    return ProbeResult(name, version)


def _engine(version: str, release: dict[str, Any] | None) -> ProbeResult:
    if release is None:
        todo = "Known versions: 1.2.1 (containers 26.04 to 26.07) and those in pipelines/doctor/compatibility.json."
        return ProbeResult("TensorRT-LLM", f"{version}, which is not in the table", "note", todo)
    tags = release["containers"]
    text = f"{version}" + (f" (container {tags[0]} to {tags[-1]})" if tags else "")
    if not release["engines"]:
        return ProbeResult(
            "TensorRT-LLM",
            f"{text}: no longer supports TensorRT engines",
            "note",
            "Use engine=tensorrt_llm_llmapi here, or a container with 1.2.1 (26.04 to 26.07) for engines.",
        )
    return ProbeResult("TensorRT-LLM", text)


def _within(version: str, needed: str | list[str]) -> bool:
    if isinstance(needed, str):
        return begins(version, needed)
    low, high = (numbers(bound) for bound in needed)
    return low <= numbers(version)[: len(low)] and numbers(version)[: len(high)] <= high


def _python(release: dict[str, Any] | None) -> ProbeResult:
    version = platform.python_version()
    here: list[str] = json.loads(TABLE.read_text(encoding="utf-8"))["here"]["python"]
    if not any(begins(version, known) for known in here):
        todo = f"This project is tested with {' and '.join(here)}."
        return ProbeResult("Python", version, "bad" if numbers(version) < (3, 11) else "note", todo)
    known = (release or {}).get("python")
    if known and not any(begins(version, each) for each in known):
        return ProbeResult("Python", version, "note", f"TensorRT-LLM is made for {' and '.join(known)}.")
    return ProbeResult("Python", version)


def _triton(serving: ServingSettings) -> ProbeResult:
    from pipelines.domain.errors import UserError

    try:
        found = locate(serving)
    except UserError as error:
        (fault,) = error.faults
        return ProbeResult("tritonserver", fault.message, "bad", f"{fault.allowed} {fault.todo}".strip())
    if found.wheel is not None:
        return ProbeResult("tritonserver", f"of nvidia-pytriton {found.wheel.version}, CPU")
    version, status = _triton_version(found.binary)
    return ProbeResult("tritonserver", f"{version}, {found.binary}", status)


def _triton_version(binary: Path) -> tuple[str, Status]:
    """Read the server's version in a container from the file beside the binary, since it has no `--version`."""
    for file in (binary.parent.parent / "TRITON_VERSION", Path("/opt/tritonserver/TRITON_VERSION")):
        try:
            return file.read_text(encoding="utf-8").strip(), "ok"
        except OSError:
            continue
    return "version unknown", "ok" if binary.is_file() else "note"


def help_of_builder(tool: str) -> list[ProbeResult]:
    """Compare `trtllm-build --help` with the options this project knows.

    Args:
        tool: path of the program.
    """
    from pipelines.engines.tensorrt_llm.options import extra_choices, help_differences

    try:
        answer = subprocess.run([tool, "--help"], capture_output=True, text=True, timeout=180, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [ProbeResult("trtllm-build", f"{tool} --help failed: {error}", "note", "Repair the installation.")]
    if answer.returncode != 0:
        last = (answer.stderr or answer.stdout).strip().splitlines() or ["nothing"]
        said = f"{tool} --help says: {last[-1]} (exit code {answer.returncode})"
        return [ProbeResult("trtllm-build", said, "note", "Repair the installation.")]
    faults = help_differences(answer.stdout)
    notes = [
        ProbeResult("trtllm-build", f"{extra}, which our table lacks", "note", "Nothing: the settings work without it.")
        for extra in extra_choices(answer.stdout)
    ]
    if not faults:
        return [ProbeResult("trtllm-build", f"{tool}: options match our table"), *notes]
    todo = "Please report it: the option table was made from single files of the 1.2 line."
    return [*(ProbeResult("trtllm-build", str(fault), "note", todo) for fault in faults), *notes]
