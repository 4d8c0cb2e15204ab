"""The command `doctor`."""

import json
import os
import platform
import re
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import triton_repo
from pipelines.compress.config import QuantSettings
from pipelines.doctor import versions
from pipelines.doctor.kubernetes import probe_cluster
from pipelines.doctor.versions import CombinationVerdict, Diagnosis, ProbeResult, render
from pipelines.document.show import count
from pipelines.domain.errors import Fault, UserError
from pipelines.domain.formats import QFormat
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.units import GIB, show_bytes
from pipelines.engines.registry import ENGINES, EngineDescription
from pipelines.engines.tensorrt_llm.config import BuildSettings
from pipelines.engines.tensorrt_llm.releases import release_for
from pipelines.host.disk import is_writable, nearest, why_no_folder
from pipelines.host.machine import CGROUP, Machine, cpu_quota, gather, library_versions, native_bf16
from pipelines.plan import checks
from pipelines.plan.deployment import Deployment
from pipelines.plan.plan import make_plan
from pipelines.settings.compose import load
from pipelines.settings.groups import choices
from pipelines.settings.root import Settings
from pipelines.store.sources import shape_of
from pipelines.store.store import Store

# Compare NVIDIA's model templates, inside its container, with the parameters this project knows.

TEMPLATES = Path("/app/all_models/inflight_batcher_llm")
TABLE = Path(triton_repo.__file__).parent / "template_params.json"
PLACEHOLDER = re.compile(r"\$\{(\w+)\}")
TODO = "Please report it: the parameter table was made from the newest public templates."


def probe_templates(folder: Path = TEMPLATES) -> list[ProbeResult]:
    """Compare the templates with the table of parameters; no result outside the container."""
    if not folder.is_dir():
        return []
    results: list[ProbeResult] = []
    for model, ours in json.loads(TABLE.read_text(encoding="utf-8")).items():
        file = folder / model / "config.pbtxt"
        try:
            theirs = set(PLACEHOLDER.findall(file.read_text(encoding="utf-8")))
        except OSError as error:
            if model != "multimodal_encoders":
                text = f"{file}: {error.strerror}"
                results.append(ProbeResult("templates", text, "note", "Is this NVIDIA's container?"))
            continue
        if more := theirs - set(ours):
            text = f"{model} takes {', '.join(sorted(more))}, unknown to this project"
            results.append(ProbeResult("templates", text, "note", TODO))
        if lacking := set(ours) - theirs:
            text = f"{model} does not take {', '.join(sorted(lacking))} here"
            results.append(ProbeResult("templates", text, "note", TODO))
    return results or [ProbeResult("templates", f"{folder}: parameters match our table")]


# Folders that are written to: whether they are writable, and how much room they have.

LEAST_BYTES = GIB
"""With less than this, not even the bundled models and their logs fit."""
ROOM_BYTES = 10 * GIB
"""With less than this, a model of a few billion parameters does not fit with its copies."""


def probe_places(store: Path, runs: Path, environment: Mapping[str, str]) -> list[ProbeResult]:
    """Describe store, runs and the Hub's cache."""
    cache = environment.get("HF_HUB_CACHE") or Path(hub_home(environment)) / "hub"
    return [
        _place("store", store, f"paths.store={store}"),
        _place("runs", runs, f"paths.runs={runs}"),
        _place("HF cache", Path(cache).expanduser(), "HF_HOME"),
    ]


def hub_home(environment: Mapping[str, str]) -> str:
    """Return the folder of huggingface_hub's cache."""
    shared = environment.get("XDG_CACHE_HOME", "~/.cache")
    return str(Path(environment.get("HF_HOME") or f"{shared}/huggingface").expanduser())


def _place(name: str, folder: Path, setting: str) -> ProbeResult:
    folder = folder.expanduser().absolute()
    if why := why_no_folder(folder):
        return ProbeResult(name, f"{folder} cannot be created: {why}", "bad", f"Set another folder: {setting}")
    if not is_writable(folder):
        return ProbeResult(name, f"{folder} is not writable", "bad", f"Give another folder than {setting}.")
    try:
        free = shutil.disk_usage(nearest(folder)).free
    except OSError as error:
        return ProbeResult(name, f"{folder}: free space unknown, {error.strerror}", "note")
    text = f"{folder}, {show_bytes(free)} free"
    if free < LEAST_BYTES:
        return ProbeResult(name, text, "bad", f"Free at least {show_bytes(LEAST_BYTES)}, or move it: {setting}")
    if free < ROOM_BYTES:
        return ProbeResult(name, text, "note", "Enough for the bundled models; large models need tens of GiB.")
    return ProbeResult(name, text)


# The Hugging Face Hub: whether it answers, and whether there is a token. The token's value is never read here.

ENDPOINT = "https://huggingface.co"
YES = ("1", "on", "yes", "true")


def probe_hub(environment: Mapping[str, str], timeout_s: float) -> list[ProbeResult]:
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


# Processor and memory, and how much of them a container leaves.

FEATURES = {
    "avx2": "AVX2",
    "avx512f": "AVX512",
    "avx512_vnni": "VNNI",
    "avx512_bf16": "BF16",
    "amx_bf16": "AMX-BF16",
    "amx_int8": "AMX-INT8",
    "bf16": "BF16",
    "i8mm": "I8MM",
}
"""Flags of /proc/cpuinfo that decide what the CPU engine computes with -> their common names."""


def probe_processor(
    machine: Machine, *, cpuinfo: Path = Path("/proc/cpuinfo"), cgroup: Path = CGROUP
) -> list[ProbeResult]:
    """Describe processor and memory."""
    try:  # the fields of the first processor
        first = cpuinfo.read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    except OSError:
        first = ""
    pairs = (line.partition(":") for line in first.splitlines())
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    system = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    cores = _cores(machine, fields.get("model name") or platform.machine(), cgroup)
    text = show_bytes(machine.memory_bytes) + (" (limit of this container)" if machine.memory_limited else "")
    memory = ProbeResult("memory", text)
    if machine.memory_bytes < 4 * GIB:
        memory = ProbeResult("memory", text, "note", "While quantizing, the libraries alone take 2 GiB.")
    return [cores, _features(fields, cpuinfo), memory, ProbeResult("system", system)]


def _cores(machine: Machine, model: str, cgroup: Path) -> ProbeResult:
    text, quota = f"{model}, {count(machine.cpu_count, 'core')}", cpu_quota(cgroup)
    if quota is not None and quota < machine.cpu_count:
        todo = "Set engine.openvino.num_threads to that, or give the container more."
        return ProbeResult("processor", f"{text}, of which this container may use {quota:g}", "note", todo)
    return ProbeResult("processor", text)


def _features(fields: Mapping[str, str], cpuinfo: Path) -> ProbeResult:
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    if not flags:
        return ProbeResult("features", f"unknown: {cpuinfo} does not say", "note")
    if platform.machine() == "x86_64" and "avx2" not in flags:
        todo = "OpenVINO's CPU plugin is slow or fails here; use another machine."
        return ProbeResult("features", "no AVX2", "bad", todo)
    names = ", ".join(dict.fromkeys(name for flag, name in FEATURES.items() if flag in flags)) or "none of note"
    computes = "" if native_bf16(cpuinfo) else "no native bf16: "
    computes += f"the CPU engine computes in {'f32' if computes else 'bf16'}"
    return ProbeResult("features", f"{names}; {computes}")


# Judge every model in every format on every engine by the rules of `make plan`.


def judge_combinations(settings: Settings, machine: Machine) -> list[CombinationVerdict]:
    """Judge all combinations, with the rest of the configuration as it is."""
    models = [load([f"model={name}"]) for name in choices("model") if name != "hub"]
    shapes = [(model, shape_of(model.model)) for model in models]
    quants = [load([f"quant={name}"]).quant for name in choices("quant")]
    quants.sort(key=lambda quant: list(QFormat).index(quant.qformat))
    usual = load([]).build
    return [
        _judge(_combined(settings, model, usual, quant, engine), machine, engine, shape)
        for engine in ENGINES.values()
        for model, shape in shapes
        for quant in quants
    ]


def _judge(
    settings: Settings, machine: Machine, engine: EngineDescription, shape: ModelShape | None
) -> CombinationVerdict:
    def verdict(reason: str = "", todo: str = "", *, works: bool = False) -> CombinationVerdict:
        model, quant = settings.model.name, settings.quant.qformat.value
        return CombinationVerdict(engine.setting, model, quant, works, reason, todo)

    if lacking := _missing(engine, machine, settings.build.tp_size * settings.build.pp_size):
        return verdict(*lacking)
    try:
        checked = checks.check(Deployment(settings, "serve", engine, machine, shape=shape))
    except UserError as error:
        checked = checks.Checked(faults=list(error.faults))
    if faults := checked.faults:
        return verdict(faults[0].message, f"{faults[0].allowed} {faults[0].todo}".strip())
    return verdict(next((note for note in checked.notes if note.startswith(checks.NO_MEMORY)), ""), works=True)


def _missing(engine: EngineDescription, machine: Machine, ranks: int) -> tuple[str, str] | None:
    """Return what the machine lacks for an engine, whatever the model: (reason, what to do)."""
    lacks = engine.lacks(machine)
    if engine.needs_gpu and machine.gpus and len(machine.gpus) < ranks:
        lacks.append(f"{count(ranks, 'rank')} on {count(ranks, 'GPU')}, of which there are {len(machine.gpus)}")
    todo = "Use NVIDIA's container on a GPU machine (make shell); `make plan` and engine=openvino work here."
    if not engine.writes_engine:
        todo = "`make build` makes its files here"
        todo += "." if engine.on_device else "; NVIDIA's container with trtllm-serve (image.base_llm_api) serves them."
    return ("; ".join(lacks), todo) if lacks else None


def _combined(
    settings: Settings, chosen: Settings, usual: BuildSettings, quant: QuantSettings, engine: EngineDescription
) -> Settings:
    """Return the settings with a model, a format and an engine; a model that sees brings its encoder and limits."""
    named = settings.engine.model_copy(update={"name": engine.setting})
    combined = settings.model_copy(update={"model": chosen.model, "quant": quant, "engine": named})
    if chosen.multimodal.path is None:
        return combined
    limits = {name: value for name, value in chosen.build if value != getattr(usual, name)}
    build = settings.build.model_copy(update=limits)
    return combined.model_copy(update={"multimodal": chosen.multimodal, "build": build})


# Run every probe and collect the results.


def examine(settings: Settings, machine: Machine, environment: Mapping[str, str]) -> Diagnosis:
    """Run all probes, the slow ones (Hub, nvidia-smi, trtllm-build) at the same time."""
    release = release_for(library_versions(("tensorrt-llm",))["tensorrt-llm"])
    builder = shutil.which("trtllm-build")
    with ThreadPoolExecutor() as pool:
        hub = pool.submit(probe_hub, environment, settings.doctor.timeout_s)
        gpus = pool.submit(versions.probe_gpus, machine, release)
        builder_help = pool.submit(versions.help_of_builder, builder) if builder else None
        cluster = pool.submit(probe_cluster, settings)
        software = [*versions.probe_software(settings.serving)]
        folders = probe_places(settings.paths.store, settings.paths.runs, environment)
        judged = judge_combinations(settings, machine)
        broken = _broken(settings, machine, [*software, *folders, *cluster.result()])
        if builder_help:
            software += builder_help.result()
        sections = {
            "Machine": [*probe_processor(machine), *gpus.result()],
            "Software": [*software, *probe_templates()],
            "Places": [*folders, *hub.result()],
            **({"Cluster": cluster_result} if (cluster_result := cluster.result()) else {}),
            "Versions that go together": versions.go_together(settings.image.base_llm_api),
        }
    return Diagnosis(sections, judged, broken)


def _broken(settings: Settings, machine: Machine, findings: list[ProbeResult]) -> list[ProbeResult]:
    """List the blockers of the configured pipeline on this machine: planning faults and broken probes."""
    broken = [finding for finding in findings if finding.status == "bad"]
    try:
        faults: Sequence[Fault] = make_plan(settings, "all", Store(settings.paths.store), machine).refusals
    except UserError as error:
        faults = error.faults
    reported = " ".join(finding.value for finding in broken)
    return broken + [
        ProbeResult("plan", fault.message, "bad", f"{fault.allowed} {fault.todo}".strip())
        for fault in faults
        if fault.message not in reported
    ]


def doctor(overrides: Sequence[str]) -> int:
    """Show what this machine has and what works on it.

    Returns:
        0, or 1 when the configuration given does not run here.
    """
    settings = load(overrides)
    diagnosis = examine(settings, gather(), os.environ)
    as_json = settings.doctor.format == "json"
    sys.stdout.write(json.dumps(diagnosis.to_json(), indent=2) + "\n" if as_json else render(diagnosis))
    return 1 if diagnosis.broken else 0
