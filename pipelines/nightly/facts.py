"""Turn the artifacts of a finished cell into the fields of its line in the history."""

import json
import platform
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from eval.perplexity import PerplexityResult
from eval.results import RESULT, EvalResult, compare_pair
from pipelines.domain.benchmark import RESULT as BENCHMARK
from pipelines.domain.benchmark import BenchmarkResult, LoadPoint
from pipelines.domain.errors import UserError
from pipelines.domain.metrics import NIGHTLY_LATENCIES, NIGHTLY_RATES
from pipelines.host.machine import Machine
from pipelines.nightly.accuracy import pack_bits
from pipelines.settings.root import Settings
from pipelines.stages.evaluate import baseline_of
from pipelines.store.manifest import read_manifest
from pipelines.store.store import fingerprint

LIBRARIES = (
    "torch", "transformers", "nvidia-modelopt", "openvino", "openvino-genai", "nvidia-pytriton", "tritonclient",
    "lm-eval", "numpy", "tensorrt-llm", "tensorrt", "huggingface-hub", "datasets",
)  # fmt: skip
NOT_DECIDING = (
    "paths", "store", "report", "verify", "nightly", "image", "manifests", "cluster", "doctor", "plan",
    "stage", "migrate",
)  # fmt: skip
"""Groups of settings that do not affect results."""
LOADS = ("benchmark.concurrency", "benchmark.request_rate")
"""The load is part of a metric's name, so that adding a load keeps the series of the others."""
CRITERIA = ("eval.margin_points", "eval.false_go")
"""How an accuracy is judged, which is not part of the measurement."""
PLACES = ("eval.dataset_path", "workload.trace", "benchmark.url", "benchmark.metrics_url")
Artifacts = Mapping[str, Path]


def machine_class(machine: Machine) -> str:
    """Return the class of machines to compare with: the GPUs or, without any, the processor and its usable cores."""
    if machine.gpus:
        return ", ".join(f"{count} x {name}" for name, count in sorted(Counter(g.name for g in machine.gpus).items()))
    names = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [" ".join(line.partition(":")[2].split()) for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.processor() or platform.machine()
    return f"{processor}, {machine.cpu_count} cores"


def deciding(settings: Settings) -> dict[str, Any]:
    """Return all settings that determine the result, flattened, for the digest and for naming changes."""
    raw = {group: value for group, value in settings.every().items() if group not in NOT_DECIDING}
    return {key: value for key, value in flatten(raw).items() if key not in CRITERIA}


def protocol(settings: Settings) -> dict[str, Any]:
    """Return the settings of the measurements: workload, benchmark, eval."""
    return {
        key: value
        for key, value in deciding(settings).items()
        if key.split(".")[0] in ("workload", "benchmark", "eval") and key not in (*LOADS, *PLACES)
    }


def digest(values: Mapping[str, Any]) -> str:
    """Return a short digest of settings."""
    return fingerprint(values)[:16]


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a dictionary: {"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def of_artifacts(artifacts: Artifacts, since: datetime) -> dict[str, Any]:
    """Collect accuracy, sizes, seconds, memory and versions of a cell.

    Args:
        artifacts: node id -> folder.
        since: when the run began; artifacts made earlier came from the store and have no duration for tonight.
    """
    manifests = {node: read_manifest(path) for node, path in artifacts.items()}
    created = {
        manifest["stage"]: manifest
        for node, manifest in manifests.items()
        if "." not in node and node != "benchmark" and datetime.fromisoformat(manifest["created"]) >= since
    }
    versions: dict[str, str] = {}
    for manifest in manifests.values():
        versions |= manifest["made_from"]["libraries"]
    result = BenchmarkResult.from_json(json.loads((artifacts["benchmark"] / BENCHMARK).read_text()))
    facts = {name: manifests[name]["facts"] for name in ("quantize", "build") if name in manifests}
    named = {
        "checkpoint_bytes": facts.get("quantize", {}).get("total_bytes"),
        "engine_bytes": facts.get("build", {}).get("engine_bytes"),
    }
    return {
        "engine": result.engine,
        "tp_size": result.tp_size,
        "precision": result.precision,
        "accuracy": _accuracy(artifacts),
        "sizes": {name: int(value) for name, value in named.items() if value},
        "seconds": {stage: m["seconds"] for stage, m in created.items() if m["seconds"] is not None},
        "peak_memory_bytes": {stage: m["peak_memory_bytes"] for stage, m in created.items() if m["peak_memory_bytes"]},
        "versions": versions
        | {str(k): str(v) for k, v in result.versions.items()}
        | ({"tritonserver": str(result.server["version"])} if result.server.get("version") else {}),
    }


def loads(benchmark: Path) -> list[dict[str, Any]]:
    """List every load of a benchmark artifact with its measurements."""
    result = BenchmarkResult.from_json(json.loads((benchmark / BENCHMARK).read_text()))
    return [_load(level) for level in result.levels]


def _load(level: LoadPoint) -> dict[str, Any]:
    summary = level.summary
    failed = sum(summary.errors.values())
    figures: dict[str, Any] = {
        "load": level.load,
        "concurrency": level.concurrency,
        "request_rate": level.request_rate,
        "isl": summary.isl.mean,
        "osl": summary.osl.mean,
        "requests": summary.requests,
        "errors": dict(summary.errors),
        "error_share": failed / (failed + summary.requests) if failed + summary.requests else 1.0,
        **{figure.key: figure.of(summary) for figure in NIGHTLY_RATES},
        "client_limited": level.client.bottleneck,
        "complete": level.complete and summary.requests > 0,
    }
    for figure in NIGHTLY_LATENCIES:
        figures.setdefault(figure.metric.name, {})[figure.statistic] = figure.of(summary)
    return figures


def _accuracy(artifacts: Artifacts) -> dict[str, Any] | None:
    """Collect accuracy, its comparison with the 16-bit baseline, accuracy per subject, and every answer as a bit.

    None if no questions were asked.
    """
    if "evaluate" not in artifacts:
        return None
    if (artifacts["evaluate"] / PerplexityResult.FILE).is_file():
        raise UserError(
            "The task of this cell measures perplexity; a night judges answers.", todo="Choose another task with eval=."
        )
    after = EvalResult.load(artifacts["evaluate"] / RESULT)
    baseline = baseline_of(artifacts, after.qformat)
    pair = compare_pair(EvalResult.load(baseline), after) if baseline else None
    interims = pair.evidence.interims if pair else ()
    # at each look: questions, lost and gained answers, and its share of the probability of error
    rows = [[each.changed.questions, each.changed.lost, each.changed.gained, each.share] for each in interims]
    # the baseline's correct answers, and the number of questions per chance of guessing
    before = [[each.before.right, [*map(list, each.before.chances)]] for each in interims if each.before]
    return {
        "task": after.task,
        "num_fewshot": after.num_fewshot,
        "questions": after.questions,
        "prompts_sha256": after.prompts_sha256,
        "accuracy": after.accuracy,
        "stderr": after.overall.stderr,
        "baseline": pair.baseline_accuracy if pair else None,
        "loss_percent": pair.loss_percent if pair else None,
        "lost": pair.lost if pair else None,
        "gained": pair.gained if pair else None,
        "looks": rows if pair else None,
        "before": before if pair else None,
        "subjects": {name: [score.questions, score.accuracy] for name, score in after.subjects.items()},
        "right": pack_bits([record.correct for record in after.records]),
    }
