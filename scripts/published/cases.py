"""Published measurements, one per row of a CSV: the configuration that ran, and the figure that the row holds."""

import csv
import gzip
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.domain.errors import UserError, did_you_mean
from pipelines.domain.formats import BY_ALIAS, FORMATS, KvFormat, kv_formats_for
from pipelines.predict.performance.gpus import gpu_named
from pipelines.predict.performance.models import model_named
from pipelines.predict.performance.performance import Setup, refuse
from scripts.published.frameworks import framework_named

PUBLISHED = Path(__file__).parent / "data" / "published.csv.gz"
"""Public measurements, each with its source; see data/README.md."""
COLUMNS = (
    "case_id", "source", "model", "gpu", "n_gpus", "tp", "precision", "isl", "osl", "concurrency", "metric",
    "framework", "mode", "batch_size", "stat", "note",
)  # fmt: skip
"""Columns that a prediction needs. The measured `value` is not among them."""

METRICS = {
    "static_batch": ("ttft_ms", "prefill_batch_ms", "tpot_ms", "e2e_ms", "output_tok_s", "output_tok_s_per_gpu"),
    "inflight_maxload": ("output_tok_s", "output_tok_s_per_gpu", "requests_s"),
    "closed_loop_concurrency": (
        "ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "output_tok_s", "output_tok_s_per_gpu", "requests_s",
    ),
    "mlperf_offline": ("output_tok_s", "requests_s"),
    "mlperf_server": ("output_tok_s", "requests_s", "ttft_ms", "tpot_ms"),
    "mlperf_interactive": ("output_tok_s", "requests_s", "ttft_ms", "tpot_ms"),
    "open_loop_trace": ("ttft_ms", "tpot_ms", "e2e_ms"),
}  # fmt: skip
"""Metrics that can be predicted, by mode."""
DATASETS = {
    "OpenOrca": (294, 292),
    "CNN-DailyMail": (778, 128),
    "LongBench": (9428, 653),
    "GSM8K": (294, 145),
}
"""Mean input and output tokens of data sets, by a word of the note. Output: tokens over requests of the public results;
input: MLCommons (assumed)."""
SHAREGPT = (858, 653)
"""Mean lengths of the replayed ShareGPT requests (`bench.TRACES`)."""
INFERENCE_MAX = "InferenceM"
"""Part of the notes of rows that InferenceMAX measured."""


ATTENTION_DP, EIGHT_BIT_KV = "attention data parallel", "8-bit KV cache"
"""Parts of the notes of rows whose ranks have the whole attention, and whose KV cache does not follow the weights."""


@dataclass(frozen=True, slots=True)
class PublishedCase:
    """One row that can be predicted.

    Attributes:
        setup: the model on its GPUs, for one instance.
        instances: number of instances.
        gpus: GPUs of all instances.
        mode: how it was measured.
        metric: metric that was measured.
        stat: mean, p99, ...
        isl: input tokens.
        osl: output tokens.
        users: requests kept in flight; 0 unless it is a closed loop.
        batch: requests of a static batch; 0 otherwise.
        requests: requests of a run at full load that were all sent at once, where that is known; else 0.
        source: origin of the row.
        note: remark on the row.
    """

    setup: Setup
    instances: int
    gpus: int
    mode: str
    metric: str
    stat: str
    isl: int
    osl: int
    users: int
    batch: int
    requests: int
    source: str
    note: str

    @property
    def randomised(self) -> bool:
        """Whether lengths were drawn around the nominal ones (InferenceMAX)."""
        return INFERENCE_MAX in self.note


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read the rows of a CSV file, optionally gzipped.

    Raises:
        UserError: the file is missing or empty, or columns are missing (all are named).
    """
    if not path.is_file():
        raise UserError(f"There is no file {path}.", todo="Give a CSV file of cases.")
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines)
        columns = reader.fieldnames or []
        rows = list(reader)
    missing = [name for name in COLUMNS if name not in columns]
    if missing:
        raise UserError(f"{path} has no column {', '.join(missing)}.", allowed=f"Needed: {', '.join(COLUMNS)}.")
    return rows


def case_of(row: Mapping[str, str]) -> PublishedCase:
    """Convert a row to a case.

    Raises:
        UserError: a name is unknown or a value impossible; the message is the reason for refusing the row.
    """
    mode, metric = row["mode"], row["metric"]
    _known("mode", mode, tuple(METRICS))
    _known("metric", metric, METRICS[mode])
    lengths = next((each for word, each in DATASETS.items() if word in row["note"]), (None, None))
    mean_isl, mean_osl = SHAREGPT if mode == "open_loop_trace" else lengths
    gpus = _number(row, "n_gpus", None)
    tp = _number(row, "tp", 0)
    small_kv = INFERENCE_MAX in row["note"]
    setup = _setup(row["model"], row["gpu"], row["precision"].lower(), row["framework"], tp, gpus, small_kv)
    if EIGHT_BIT_KV in row["note"]:
        setup = replace(setup, kv_format=KvFormat.FP8)
    setup = replace(setup, attention_dp=ATTENTION_DP in row["note"])
    return PublishedCase(
        setup=setup,
        instances=max(1, gpus // setup.gpus),
        gpus=gpus,
        mode=mode,
        metric=metric,
        stat=row["stat"],
        isl=_number(row, "isl", mean_isl),
        osl=_number(row, "osl", mean_osl),
        users=_number(row, "concurrency", None if mode == "closed_loop_concurrency" else 0),
        batch=_number(row, "batch_size", None if mode == "static_batch" else 0),
        requests=int(sent[1]) if (sent := re.search(r"\b(\d+) requests$", row["note"])) else 0,
        source=row["source"],
        note=row["note"],
    )


@cache
def published_cases() -> tuple[list[dict[str, str]], list[PublishedCase], Any]:
    """Return the public rows without typos of their source, their cases, and what was measured, float64[rows]."""
    rows = [row for row in read_rows(PUBLISHED) if not row["suspect"]]
    return rows, [case_of(row) for row in rows], np.array([float(row["value"]) for row in rows])


@cache
def _setup(model: str, gpu: str, precision: str, framework: str, tp: int, gpus: int, small_kv: bool) -> Setup:
    """Build the setup of a row; if `tp` is 0, the smallest possible layout that fits.

    With `small_kv`, the KV cache is 8 bit beside such weights in every framework, as in InferenceMAX's scripts.
    """
    _known("precision", precision, tuple(BY_ALIAS))
    served, spec, qformat = framework_named(framework), gpu_named(gpu), BY_ALIAS[precision]
    eight_bit = (served.kv_follows or small_kv) and FORMATS[qformat].fp8_kv_cache
    kv_format = KvFormat.FP8 if eight_bit and KvFormat.FP8 in kv_formats_for(spec.sm) else KvFormat.AUTO
    one = Setup(model_named(model), spec, qformat, kv_format, runs_on=served)
    setups = [replace(one, tp=ranks) for ranks in ([tp] if tp else [n for n in (1, 2, 4, 8) if n <= gpus])]
    for setup in setups:
        refuse(setup)
        if setup.weight_bytes <= 0.8 * setup.gpu.reported_bytes:  # a fifth of the memory is for the KV cache
            return setup
    return setups[-1]


def _known(column: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        near = did_you_mean(value, allowed)
        raise UserError(f"{column}='{value}' is not known.", allowed=f"Known: {', '.join(allowed)}.", todo=near)


def _number(row: Mapping[str, str], column: str, default: int | None) -> int:
    text = row[column].strip()
    if not text:
        if default is None:
            raise UserError(f"{column} is empty.", todo="Give a whole number.")
        return default
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if number <= 0 or number != int(number):
        raise UserError(f"{column}='{text}' is not a whole number above 0.")
    return int(number)
