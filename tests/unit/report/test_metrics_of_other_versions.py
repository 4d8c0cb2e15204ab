"""Results of earlier and later versions load; a metric that a file lacks is shown as a dash."""

import json
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.document.show import NONE, number
from pipelines.domain import metrics
from pipelines.domain.benchmark import DISTRIBUTIONS, BenchmarkResult, Distribution, Summary
from pipelines.domain.errors import UserError
from pipelines.domain.metrics import BY_NAME, FIGURES, METRICS, figures
from pipelines.loadgen.run import benchmark_table
from pipelines.nightly.accuracy import higher_is_better, load_metrics, shown, title
from pipelines.report.tables_load import levels_table, percentiles_table

EARLIER = Path(__file__).parent / "data" / "benchmark_of_an_earlier_version.json"
"""Written before there were token gaps and 95th percentiles."""


def stored() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(EARLIER.read_text())
    return found


def run_of(result: BenchmarkResult) -> Any:
    return SimpleNamespace(result=result, modelled=None)


def test_a_metric_that_an_earlier_result_lacks_is_a_dash() -> None:
    result = BenchmarkResult.from_json(stored())
    summary = result.levels[0].summary
    assert summary.token_gap_s == Distribution(0)
    assert summary.ttft_s.p95 is None
    assert summary.ttft_s.p50 == pytest.approx(0.010)
    row = dict(zip([column.title for column in levels_table(run_of(result)).columns],
                   levels_table(run_of(result)).rows[0], strict=True))  # fmt: skip
    assert row["p95"] == NONE
    gaps = [cells for cells in percentiles_table(run_of(result)).rows if cells[0] == "token gap"]
    assert gaps == [("token gap", "4", "0", *[NONE] * 7)]
    assert "concurrency req/s" in benchmark_table(result)


def test_several_gpus_have_rates_of_each() -> None:
    result = BenchmarkResult.from_json(stored())
    one, two = (levels_table(run_of(replace(result, gpu_count=gpus))) for gpus in (1, 2))
    per_gpu = [at for at, column in enumerate(two.columns) if column.title.endswith("/GPU")]
    assert (len(two.columns) - len(one.columns), len(per_gpu)) == (2, 2)
    tokens_per_s = result.levels[0].summary.output_tokens_per_s
    assert tokens_per_s is not None
    assert two.rows[0][per_gpu[0]] == number(tokens_per_s / 2)


def test_what_a_later_version_added_is_left_out() -> None:
    data = stored()
    summary = data["levels"][0]["summary"]
    expected = BenchmarkResult.from_json(stored())
    summary["energy_j"] = 12.5
    summary["first_decode_s"] = {"count": 1, "p50": 0.1}
    summary["itl_s"]["p999"] = 0.004
    assert BenchmarkResult.from_json(data) == expected


def test_a_result_without_its_rates_is_refused() -> None:
    data = stored()
    del data["levels"][0]["summary"]["requests_per_s"]
    with pytest.raises(UserError, match="requests_per_s"):
        BenchmarkResult.from_json(data)


def test_a_line_of_the_history_from_before_a_metric_has_no_value_of_it() -> None:
    load = {"load": "concurrency 1", "error_share": 0.0, "client_limited": False, "complete": True,
            "output_tokens_per_s": 10.0, "ttft_s": {"p50": 0.1, "p999": 0.3}, "energy_j": 3.0}  # fmt: skip
    assert load_metrics(load) == {"error_share": 0.0, "output_tokens_per_s": 10.0, "ttft_p50_s": 0.1}


def test_the_table_knows_every_figure_of_a_summary() -> None:
    counts = {"window_s", "requests", "errors"}
    assert {item.name for item in fields(Summary)} - counts <= set(BY_NAME)
    assert len(BY_NAME) == len(METRICS)
    assert set(DISTRIBUTIONS) <= set(BY_NAME)
    for name, view in vars(metrics).items():
        if name.isupper() and isinstance(view, tuple) and view and isinstance(view[0], metrics.MetricStatistic):
            assert all(FIGURES[figure.key] == figure for figure in view), name
    with pytest.raises(KeyError, match="ttft_p42_s"):
        figures("ttft_p42_s")


@pytest.mark.parametrize(
    ("metric", "higher", "text", "heading"),
    [
        ("goodput_per_s at concurrency 8", True, "12.5/s", "goodput, requests/s at concurrency 8"),
        ("requests_per_s", True, "12.5/s", "requests/s"),
        ("itl_p99_s at concurrency 8", False, "12,500 ms", "ITL p99, ms at concurrency 8"),
        ("accuracy", True, "1250.00 %", "accuracy, %"),
        ("engine_bytes", False, "12 B", "engine, MiB"),
        ("quantize_s", False, "12 s", "quantize, s"),
    ],
)
def test_direction_unit_and_title_are_those_of_the_table(metric: str, higher: bool, text: str, heading: str) -> None:
    assert higher_is_better(metric) is higher
    assert shown(metric, 12.5) == text
    assert title(metric) == heading
