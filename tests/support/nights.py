"""Synthetic histories of nights for tests: a cell, its loads, and the measurements of each night."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from pipelines.nightly.accuracy import Record, pack_bits
from pipelines.nightly.config import NightlySettings

FIRST = datetime(2026, 11, 1, 2, 30, tzinfo=UTC)
FLOORS = {"output_tokens_per_s": 5, "ttft_p50_s": 10, "accuracy": 0.5, "engine_bytes": 1, "error_share": 0}


def nightly_settings(**changed: Any) -> NightlySettings:
    """Return settings of a run with few floors; `expect` is merged."""
    expect = {"accuracy_loss_percent": {"fp8": 1}, "floor_percent": FLOORS, "accepted": (), "pinned": ()}
    given: dict[str, Any] = {
        "name": "test", "matrix": {"quant": ["none", "fp8"]}, "set": (), "cells": (), "measure": True, "rebuild": True,
        "history": "nightly", "timeout_s": 60, "window": 20, "false_alarms": 0.05, "confirmations": 2,
        "expect": expect | changed.pop("expect", {}),
    }  # fmt: skip
    return NightlySettings.model_validate(given | changed)


def load(rate: float = 1000.0, ttft: float = 0.02, **changed: Any) -> dict[str, Any]:
    """Return one load as recorded by a benchmark."""
    spread = {"p50": ttft, "p90": 1.2 * ttft, "p95": 1.3 * ttft, "p99": 1.5 * ttft}
    return {
        "load": "concurrency 8", "concurrency": 8, "request_rate": None, "isl": 128.0, "osl": 64.0, "requests": 100,
        "errors": {}, "error_share": 0.0, "output_tokens_per_s": rate, "requests_per_s": rate / 64,
        "goodput_per_s": None, "ttft_s": spread, "itl_s": {"p50": 0.005}, "e2e_s": {"p99": 0.5},
        "client_limited": False, "complete": True,
    } | changed  # fmt: skip


def accuracy(right: Sequence[bool], baseline: float = 1.0, **changed: Any) -> dict[str, Any]:
    """Return the accuracy of a night, including every answer."""
    share = sum(right) / len(right)
    return {
        "task": "mini_mmlu", "num_fewshot": 5, "questions": len(right), "prompts_sha256": "p", "accuracy": share,
        "stderr": 0.01, "baseline": baseline, "loss_percent": 100 * (1 - share / baseline),
        "lost": 0, "gained": 0, "subjects": {}, "right": pack_bits(right),
    } | changed  # fmt: skip


def night(number: int, rate: float = 1000.0, *, cell: str = "tiny_gemma fp8 fixed", **changed: Any) -> Record:
    """Return the history line of one cell of the n-th night."""
    at = FIRST + timedelta(days=number)
    given: dict[str, Any] = {
        "run": f"{at:%Y%m%dT%H%M%SZ}-host-1", "at": at.isoformat(), "cell": cell, "key": f"key of {cell}",
        "machine_class": "2 x NVIDIA H100 80GB HBM3", "status": "done", "commit": f"{number:012}{number:028}",
        "model": "tiny_gemma", "precision": "fp8", "engine": "openvino", "tp_size": 1,
        "protocol": {"workload.isl.mean": 128}, "settings_digest": "d0", "overrides": [],
        "machine": {"cpu_count": 2, "gpus": []},
        "versions": {"openvino": "2026.4.1"}, "accuracy": accuracy([True] * 100), "measurements": [[load(rate)]],
        "sizes": {"engine_bytes": 4_000_000}, "seconds": {"build": 3.0}, "log": "runs/x.log",
    }  # fmt: skip
    return Record(**(given | changed))
