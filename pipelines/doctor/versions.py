"""Check installed versions against the table of versions that belong together."""

import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from string import ascii_lowercase
from typing import Any, Literal

from pipelines.domain.errors import UserError
from pipelines.domain.formats import FORMATS
from pipelines.domain.units import show_bytes
from pipelines.engines.tensorrt_llm.folder import extra_choices, help_differences
from pipelines.engines.tensorrt_llm.releases import (
    ABSENT,
    begins,
    compatibility,
    newest_with_engines,
    numbers,
    release_for,
)
from pipelines.host.machine import GpuFacts, Machine, library_versions
from pipelines.host.screen import coloured, table, wrapped
from pipelines.predict.performance.gpus import row_of
from pipelines.serving.config import ServingSettings
from pipelines.serving.locate import locate

# Records of a diagnosis.

Status = Literal["ok", "note", "bad"]
"""In this order: works; worth knowing, or missing but not needed; needed and broken."""

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Result of one probe."""

    name: str
    value: str
    status: Status = "ok"
    todo: str = ""


@dataclass(frozen=True, slots=True)
class CombinationVerdict:
    """Verdict on one combination of engine, model and format on this machine.

    Attributes:
        reason: why it does not work; if it works, why nobody knows whether the memory suffices.
    """

    engine: str
    model: str
    quant: str
    works: bool
    reason: str = ""
    todo: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """The whole diagnosis.

    Attributes:
        sections: title -> results, in the order shown.
        broken: what the configured pipeline needs and this machine lacks; empty when it would run.
    """

    sections: dict[str, list[ProbeResult]]
    verdicts: list[CombinationVerdict] = field(default_factory=list)
    broken: list[ProbeResult] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the diagnosis as JSON; docs/gpu.md has the schema."""
        return {"schema": SCHEMA, "works": not self.broken, **asdict(self)}


# GPUs, driver and CUDA, as nvidia-smi reports them.

OLDEST = 8.0
"""Lowest compute capability that TensorRT-LLM 1.2 supports (support-matrix.md)."""


def probe_gpus(machine: Machine, release: dict[str, Any] | None) -> list[ProbeResult]:
    """Describe the GPUs.

    Args:
        machine: what nvidia-smi lists.
        release: row of the compatibility table for the installed TensorRT-LLM, or for the one to install.
    """
    if not machine.gpus:
        meant = "not installed" in machine.no_gpu_reason or "CUDA_VISIBLE_DEVICES" in machine.no_gpu_reason
        todo = "" if meant else "Repair the driver: nvidia-smi must list the GPUs."
        return [ProbeResult("GPU", f"none: {machine.no_gpu_reason}", "note", todo)]
    return [*(_gpu(index, gpu) for index, gpu in enumerate(machine.gpus)), _driver(machine.gpus[0], release or {})]


def _gpu(index: int, gpu: GpuFacts) -> ProbeResult:
    row = row_of(gpu)
    text = f"{gpu.name}, compute capability {gpu.sm}, {show_bytes(gpu.memory_bytes)}"
    if gpu.sm < OLDEST:
        todo = f"TensorRT-LLM needs compute capability {OLDEST} (A100) or newer."
        return ProbeResult(f"GPU {index}", text, "note", todo)
    if row is None:
        todo = "`make plan` does not know its bandwidth."
        return ProbeResult(f"GPU {index}", f"{text}; not in conf/hardware", "note", todo)
    return ProbeResult(f"GPU {index}", f"{text} = hardware={row.name}")


def _driver(gpu: GpuFacts, release: Mapping[str, Any]) -> ProbeResult:
    cuda, needed = _cuda_version(), release.get("cuda")
    text = f"{gpu.driver or 'version unknown'}, CUDA {cuda or 'unknown'}"
    if cuda and needed and numbers(cuda)[:1] < numbers(needed)[:1]:
        newer = f" ({release['driver']} or newer)" if release.get("driver") else ""
        text += f"; TensorRT-LLM {release['tensorrt_llm']} is built for CUDA {needed}"
        return ProbeResult("driver", text, "note", f"Install a driver for CUDA {needed.split('.')[0]}{newer}.")
    return ProbeResult("driver", text)


def _cuda_version() -> str:
    """Return the newest CUDA the driver supports, from the head of nvidia-smi's table; empty when it is not stated."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    try:
        answer = subprocess.run([tool], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    stated = re.search(r"CUDA Version:\s*([\d.]+)", answer.stdout)
    return stated[1] if stated else ""


# Render a diagnosis for a terminal of 60 columns or more.

MARKS = {"ok": "ok", "note": "--", "bad": "!!"}
COLOURS = {"ok": "32", "note": "33", "bad": "31"}
HEADINGS = {qformat.value: spec.heading for qformat, spec in FORMATS.items()}
WORDS = re.compile(r"\d+(?:\.\d+)?(?: [KMGT]iB)?|\w+|\W")
"""Splits a reason into words and what is between them; a size and its unit are one word."""


def render(diagnosis: Diagnosis) -> str:
    """Render the whole page."""
    lines: list[str] = []
    for title, findings in diagnosis.sections.items():
        lines += [title, *_findings(findings), ""]
    for engine, judged in groupby(diagnosis.verdicts, key=lambda verdict: verdict.engine):
        lines += [f"engine={engine}", *_verdicts(list(judged)), ""]
    broken = [
        wrapped(f"  !! {each.name}: {each.value.rstrip('.')}. {each.todo}".rstrip(), 5) for each in diagnosis.broken
    ]
    head = "does not run here:" if broken else "runs here: make all"
    return "\n".join([*lines, wrapped(f"The configured pipeline {head}"), *broken]) + "\n"


def _findings(findings: list[ProbeResult]) -> list[str]:
    column = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        mark = MARKS[finding.status]
        line = wrapped(f"  {mark} {finding.name:<{column}}  {finding.value}", column + 7)
        lines.append(coloured(line, mark, COLOURS[finding.status], sys.stdout))
        lines += [wrapped(" " * (column + 7) + f"-> {finding.todo}", column + 7)] if finding.todo else []
    return lines


def _verdicts(verdicts: list[CombinationVerdict]) -> list[str]:
    """Render a table of models by formats, and below it each kind of reason once, with all its cases."""
    reasons: dict[tuple[str, ...], list[CombinationVerdict]] = {}
    if all(not verdict.works for verdict in verdicts) and len({verdict.reason for verdict in verdicts}) == 1:
        return [wrapped(f"  none: {verdicts[0].reason}. {verdicts[0].todo}")]
    quants = list(dict.fromkeys(verdict.quant for verdict in verdicts))
    rows = [("", *(HEADINGS.get(quant, (quant, ""))[line] for quant in quants)) for line in (0, 1)]
    for model, judged in groupby(verdicts, key=lambda verdict: verdict.model):
        marks = [_mark(verdict, reasons) for verdict in judged]
        rows.append((model, *marks))
    lines = table(rows, indent=2)
    for letter, cases in zip(ascii_lowercase, reasons.values(), strict=False):
        lines.append(wrapped(f"  {letter}: {_together(cases)} {cases[0].todo}", 5))
    if open_cases := dict.fromkeys(verdict.reason for verdict in verdicts if verdict.works and verdict.reason):
        lines.append(wrapped(f"  ?: {'; '.join(open_cases)}.", 5))
    return lines


def _mark(verdict: CombinationVerdict, reasons: dict[tuple[str, ...], list[CombinationVerdict]]) -> str:
    """Return "yes", "?" or the letter of the reason; reasons that differ in names and numbers alone share a letter."""
    if verdict.works:
        return "?" if verdict.reason else "yes"
    of_case = re.compile(rf"{re.escape(verdict.model)}|{verdict.quant}|\d.*|\w+ForCausalLM")
    kind = tuple("" if of_case.fullmatch(word) else word for word in WORDS.findall(verdict.reason))
    reasons.setdefault(kind, []).append(verdict)
    return ascii_lowercase[list(reasons).index(kind)]


def _together(cases: list[CombinationVerdict]) -> str:
    of_model = {
        model: [_span(values) for values in zip(*(WORDS.findall(case.reason) for case in judged), strict=True)]
        for model, judged in groupby(cases, key=lambda case: case.model)
    }
    first = next(iter(of_model.values()))
    others: dict[str, list[str]] = {}
    for model, spans in list(of_model.items())[1:]:
        own = [word for word, usual in zip(spans, first, strict=True) if word not in (usual, model)]
        others.setdefault(", ".join(own), []).append(model)
    listed = "; ".join(", ".join(models) + (f" ({own})" if own else "") for own, models in others.items())
    return "".join(first) + (f" Likewise {listed}." if listed else "")


def _span(values: tuple[str, ...]) -> str:
    """Merge the words of several formats into one: the word itself, or the range from least to most."""
    different = sorted(set(values), key=_size)
    least, most = different[0], different[-1]
    unit = most[-4:] if most.endswith("iB") else ""
    return least if len(different) == 1 else f"{least.removesuffix(unit)} to {most}"


def _size(word: str) -> tuple[int, float, str]:
    """Return the sort key of a word: sizes by size, other words alphabetically."""
    number, _, unit = word.partition(" ")
    return "KMGT".find(unit[:1]), float(number) if unit else 0.0, word


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


def go_together(llm_api_image: str) -> list[ProbeResult]:
    """Say for each engine which versions belong together."""
    whole, engines = compatibility(), newest_with_engines()
    names = {"TensorRT-LLM": "tensorrt_llm", "Triton": "containers", **COLUMNS, "CUDA": "cuda", "driver": "driver"}
    together = ", ".join(f"{name} {_stretch(engines[key])}" for name, key in names.items() if engines.get(key))
    here = whole["here"]
    names_here = {"Python": "python", "ModelOpt": "modelopt", "transformers": "transformers"}
    tried = {name: " and ".join(here[key]) for name, key in names_here.items()}
    in_triton = [tag for row in whole["releases"] if not row["engines"] for tag in row["containers"]]
    edge = ", ".join(f"{name.replace('_', '-')} {version}" for name, version in whole["edge"].items())
    return [
        ProbeResult("tensorrt_llm", together),
        ProbeResult("llm_api", f"{llm_api_image}; Triton {_stretch(in_triton) if in_triton else 'has none'}"),
        ProbeResult("edge", f"{edge}, in an environment of its own (make setup-edge)"),
        ProbeResult("openvino", ", ".join(f"{name} {tested}" for name, tested in tried.items())),
    ]


def _stretch(versions: str | list[str]) -> str:
    return versions if isinstance(versions, str) else f"{versions[0]} to {versions[-1]}"


def probe_software(serving: ServingSettings) -> list[ProbeResult]:
    """Describe what is installed."""
    installed = library_versions(tuple(LIBRARIES.values()))
    version = installed["tensorrt-llm"]
    release = release_for(version)
    libraries = [_library(name, installed[dist], version, release) for name, dist in LIBRARIES.items()]
    return [*libraries, _python(release if version != ABSENT else None), _triton(serving)]


def _library(name: str, version: str, engine: str, release: dict[str, Any] | None) -> ProbeResult:
    if version == ABSENT:
        if name in GPU_ONLY:
            todo = "" if name == "TensorRT" else "Only in NVIDIA's container: make shell"
            return ProbeResult(name, ABSENT, "note", todo)
        if name in CPU_ONLY and engine != ABSENT:
            return ProbeResult(name, ABSENT, "note", "Only engine=openvino needs it.")
        return ProbeResult(name, ABSENT, "bad", "Run: make setup")
    if name == "TensorRT-LLM":
        return _engine(version, release)
    if name == "numpy" and numbers(version)[0] >= 2:
        return ProbeResult(name, version, "bad", "Triton's python backend crashes with numpy 2. Run: make setup")
    needed = release.get(COLUMNS[name]) if release and engine != ABSENT and name in COLUMNS else None
    if needed and not _within(version, needed):
        text = f"{version}; TensorRT-LLM {engine} goes with {_stretch(needed)}"
        return ProbeResult(name, text, "note", f"Install {name} {_stretch(needed)}.")
    return ProbeResult(name, version)


def _engine(version: str, release: dict[str, Any] | None) -> ProbeResult:
    if release is None:
        todo = f"Known versions: {', '.join(row['tensorrt_llm'] for row in compatibility()['releases'])}."
        return ProbeResult("TensorRT-LLM", f"{version}, which is not in the table", "note", todo)
    tags = release["containers"]
    text = f"{version}" + (f" (container {_stretch(tags)})" if tags else "")
    if not release["engines"]:
        todo = "Use engine=tensorrt_llm_llmapi here, or a container with 1.2.1 (26.04 to 26.07) for engines."
        return ProbeResult("TensorRT-LLM", f"{text}: no longer supports TensorRT engines", "note", todo)
    return ProbeResult("TensorRT-LLM", text)


def _within(version: str, needed: str | list[str]) -> bool:
    if isinstance(needed, str):
        return begins(version, needed)
    low, high = (numbers(bound) for bound in needed)
    return low <= numbers(version)[: len(low)] and numbers(version)[: len(high)] <= high


def _python(release: dict[str, Any] | None) -> ProbeResult:
    version = platform.python_version()
    here: list[str] = compatibility()["here"]["python"]
    if not any(begins(version, tested) for tested in here):
        todo = f"This project is tested with {' and '.join(here)}."
        return ProbeResult("Python", version, "bad" if numbers(version) < (3, 11) else "note", todo)
    theirs = (release or {}).get("python")
    if theirs and not any(begins(version, each) for each in theirs):
        return ProbeResult("Python", version, "note", f"TensorRT-LLM is made for {' and '.join(theirs)}.")
    return ProbeResult("Python", version)


def _triton(serving: ServingSettings) -> ProbeResult:
    try:
        server = locate(serving)
    except UserError as error:
        (fault,) = error.faults
        return ProbeResult("tritonserver", fault.message, "bad", f"{fault.allowed} {fault.todo}".strip())
    if server.wheel is not None:
        return ProbeResult("tritonserver", f"of nvidia-pytriton {server.wheel.version}, CPU")
    version, status = _triton_version(server.binary)
    return ProbeResult("tritonserver", f"{version}, {server.binary}", status)


def _triton_version(binary: Path) -> tuple[str, Status]:
    """Read the server's version in a container from the file beside the binary, since it has no `--version`."""
    for file in (binary.parent.parent / "TRITON_VERSION", Path("/opt/tritonserver/TRITON_VERSION")):
        try:
            return file.read_text(encoding="utf-8").strip(), "ok"
        except OSError:
            continue
    return "version unknown", "ok" if binary.is_file() else "note"


def help_of_builder(tool: str) -> list[ProbeResult]:
    """Compare `trtllm-build --help` with the options this project knows."""
    try:
        answer = subprocess.run([tool, "--help"], capture_output=True, text=True, timeout=180, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [ProbeResult("trtllm-build", f"{tool} --help failed: {error}", "note", "Repair the installation.")]
    if answer.returncode != 0:
        last = (answer.stderr or answer.stdout).strip().splitlines() or ["nothing"]
        text = f"{tool} --help says: {last[-1]} (exit code {answer.returncode})"
        return [ProbeResult("trtllm-build", text, "note", "Repair the installation.")]
    faults = help_differences(answer.stdout)
    notes = [
        ProbeResult("trtllm-build", f"{extra}, which our table lacks", "note", "Nothing: the settings work without it.")
        for extra in extra_choices(answer.stdout)
    ]
    if not faults:
        return [ProbeResult("trtllm-build", f"{tool}: options match our table"), *notes]
    todo = "Please report it: the option table was made from single files of the 1.2 line."
    return [*(ProbeResult("trtllm-build", str(fault), "note", todo) for fault in faults), *notes]
