"""A store with synthetic results, only for tests of the report: round numbers, fixed times, no real model."""

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.results import EvalResult, QuestionRecord, Score
from pipelines.domain.benchmark import BenchmarkResult, ClientHealth, LoadPoint, Slo
from pipelines.domain.summary import summarise, whole_window
from pipelines.store.store import Artifact, Store, fingerprint
from tests.support.load_records import RequestTiming, columns_of, to_columns

MS = 1_000_000
MACHINE = {"cpu_count": 2, "memory_bytes": 8 * 2**30, "gpus": [], "platform": "Linux x86_64 Python 3.11.7"}
VARIANTS = {"none": 1.0, "fp8": 1.4, "int8_sq": 1.25, "int4_awq": 1.8, "int4_wo": 1.9}
"""Synthetic speed factor of each variant."""
WRONG = {"none": 0, "fp8": 0, "int8_sq": 1, "int4_awq": 1, "int4_wo": 40}
"""Number of questions, out of 200, that each variant answers wrongly."""


def commit(
    store: Store, stage: str, label: str, facts: Mapping[str, Any], inputs: Mapping[str, Artifact | str],
    settings: Mapping[str, Any], files: Mapping[str, Any], minute: int = 0, model: str = "synthetic",
) -> Artifact:  # fmt: skip
    """Put one artifact into a store the way the runner does, at a fixed time."""
    digests = {name: item.digest if isinstance(item, Artifact) else item for name, item in inputs.items()}
    made_from = {"stage": stage, "version": "1", "settings": dict(settings), "libraries": {"openvino": "2026.4.1"},
                 "inputs": digests}  # fmt: skip
    manifest = {
        "key": fingerprint([made_from, minute, label]),
        "stage": stage,
        "label": label,
        "created": f"2026-01-02T03:{minute:02d}:00+00:00",
        "seconds": 12.5,
        "peak_memory_bytes": 300 * 2**20,
        "made_from": made_from,
        "input_paths": {n: str(i.path) if isinstance(i, Artifact) else f"/data/{n}" for n, i in inputs.items()},
        "facts": dict(facts),
        "repeat": f"python -m pipelines {stage} quant={label.rpartition('-')[2]}",
        "settings": {"model": {"name": model, "path": None, "hub_id": None}},
        "pipelines_version": "0.1.0",
        "git_commit": "0123456789abcdef0123456789abcdef01234567",
        "machine": MACHINE,
    }
    with store.staging(str(manifest["key"])) as staging:
        for name, content in files.items():
            raw = json.dumps(content).encode()
            (staging / name).write_bytes(gzip.compress(raw, mtime=0) if name.endswith(".gz") else raw)
        return store.commit(staging, manifest, label)


def evaluation(variant: str, wrong: int, model: str = "synthetic") -> EvalResult:
    """Return an evaluation of 200 questions, all answered correctly except the last `wrong`."""
    records = tuple(
        QuestionRecord("letters", i, (-0.1, -2.0), int(i >= 200 - wrong), 0, i < 200 - wrong) for i in range(200)
    )
    score = Score(1 - wrong / 200, 0.01, 200)
    return EvalResult(
        model, variant, "openvino", "mini_mmlu", 5, None, 512, 0, "0.4.13", "ab" * 32, score,
        {"other": score}, {"letters": score}, records,
    )  # fmt: skip


def requests(concurrency: int, speed: float, count: int = 24, osl: int = 8) -> list[RequestTiming]:
    """Return a noise-free closed loop: TTFT (5 + concurrency) ms, ITL (2 + concurrency / 4) ms, divided by speed."""
    timings, free = [], [0] * concurrency
    for index in range(count):
        user = index % concurrency
        sent = free[user]
        first = sent + round((5 + concurrency + index % 3) * MS / speed)
        chunks = tuple(first + round(i * (2 + concurrency / 4) * MS / speed) for i in range(osl))
        timings.append(RequestTiming(index, sent, sent, first, chunks[-1], 128, osl, chunks, None))
        free[user] = chunks[-1] + MS
    return timings


def benchmark(
    variant: str, concurrencies: Sequence[int] = (1, 4, 16), *, speed: float | None = None, name: str = "chat",
    slo: Slo | None = None, bottleneck: int | None = None, cut: int | None = None, model: str = "synthetic",
    notes: tuple[str, ...] = (), intervals: Mapping[str, tuple[float, float]] | None = None, isl: int = 128,
) -> tuple[BenchmarkResult, dict[str, Any]]:  # fmt: skip
    """Return a result and its files; `bottleneck` and `cut` are concurrencies marked client-limited and cut short."""
    files, levels = {}, []
    for number, concurrency in enumerate(concurrencies):
        timings = requests(concurrency, speed or VARIANTS[variant])
        window = whole_window(columns_of(timings))
        files[f"requests-{number}.json.gz"] = {**to_columns(timings), "window_ns": window}
        limited = concurrency == bottleneck
        health = ClientHealth(limited, "cpu 98 %" if limited else "", {"loop_lag_p99_ms": 0.2, "cpu_share": 0.3})
        levels.append(
            LoadPoint(
                "closed",
                concurrency,
                None,
                summarise(columns_of(timings), window, slo),
                health,
                {"queue_s": 0.5, "kv_blocks_used_max": 12},
                f"requests-{number}.json.gz",
                concurrency != cut,
                "the server died" if concurrency == cut else "",
                notes,
                intervals or {},
                3 if intervals else 1,
            )
        )
    result = BenchmarkResult(
        model, variant, "openvino", 1, 1,
        {"name": name, "isl": isl, "osl": 8, "arrival": "closed"}, {"warmup_requests": 2, "start_burst": "excluded"},
        {"url": "127.0.0.1:8001", "server_version": "2.51.0"}, MACHINE, {"tritonclient": "2.73.0"},
        "2026-01-02T03:30:00+00:00", slo or Slo(), tuple(levels), cut is None, "" if cut is None else "the server died",
    )  # fmt: skip
    return result, {**files, "benchmark.json": result.to_json()}


def add_format(
    store: Store, variant: str, minute: int = 0, model: str = "synthetic", tp: int = 1, **build_facts: Any
) -> Artifact:
    """Add checkpoint, engine, accuracy and repository of one variant; return the repository."""
    label = f"{model}-{variant}"
    checkpoint = commit(
        store, "quantize", label, {"total_bytes": 6 * 2**20, "source_bytes": 8 * 2**20}, {"model": "cd" * 32},
        {"qformat": variant, "tp_size": tp}, {"config.json": {"variant": variant, "tp": tp}}, minute, model,
    )  # fmt: skip
    engine_bytes = round(8 * 2**20 / VARIANTS[variant])
    engine = commit(
        store, "build", label, {"engine_bytes": engine_bytes, **build_facts}, {"checkpoint": checkpoint},
        {"engine": "openvino"}, {"config.json": {"engine": variant, "tp": tp, "model": model}},
        minute + 1, model,
    )  # fmt: skip
    result = evaluation(variant, WRONG[variant], model)
    commit(
        store, "evaluate", label, {"accuracy": result.accuracy, "questions": 200},
        {"engine": engine, "model": "cd" * 32}, {"model": model, "variant": variant, "task": "mini_mmlu"},
        {"evaluation.json": result.to_json()}, minute + 2, model,
    )  # fmt: skip
    return commit(
        store, "repository", label, {"flavour": "openvino"}, {"engine": engine, "model": "cd" * 32},
        {"model": model, "variant": variant}, {"repository.json": {"engine": engine.digest}}, minute + 3, model,
    )  # fmt: skip


def add_benchmark(
    store: Store, repository: Artifact | None, variant: str, minute: int = 10, model: str = "synthetic",
    how: Mapping[str, Any] | None = None, **load: Any,
) -> Artifact:  # fmt: skip
    """Add one benchmark of a repository, or of a server elsewhere, `how` being the settings of the benchmark."""
    result, files = benchmark(variant, model=model, **load)
    settings = {"model": model, "precision": variant, "workload": dict(result.workload)} | (
        {"benchmark": how} if how else {}
    )
    inputs = {"model": "cd" * 32} | ({"repository": repository} if repository else {})
    return commit(
        store, "benchmark", f"{model}-{variant}", {"levels": len(result.levels)}, inputs, settings, files, minute,
        model,
    )  # fmt: skip


def full_store(root: Path, variants: Sequence[str] = tuple(VARIANTS), **load: Any) -> Store:
    """Fill a store with every variant, evaluated and benchmarked under one workload."""
    store = Store(root)
    for variant in variants:
        add_benchmark(store, add_format(store, variant), variant, **load)
    return store
