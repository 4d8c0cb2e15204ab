"""Predicting published measurements from the command line."""

import csv
import math
from dataclasses import replace

import numpy as np
import pytest

from pipelines.predict.performance.performance import PerformanceModel
from pipelines.predict.simulator.run import IterationCost
from scripts.published.bench import StackedCases, first_token
from scripts.published.cases import COLUMNS, PUBLISHED, case_of, read_rows
from scripts.published.predict import main, predict, values_of

ROWS = [row for row in read_rows(PUBLISHED) if row["mode"] in ("static_batch", "inflight_maxload")]
CLOSED = next(row for row in read_rows(PUBLISHED) if row["source"] == "nim-docs")


def saved(path, rows, columns=None):
    with path.open("w", newline="", encoding="utf-8") as lines:
        writer = csv.DictWriter(lines, columns or list(rows[0]), extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def read(path):
    with path.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def test_rows_come_back_in_order_with_what_is_predicted(tmp_path, capsys):
    """All columns stay; low < predicted < high; the summary counts."""
    rows = [ROWS[500], CLOSED, ROWS[3]]
    assert main(["--cases", str(saved(tmp_path / "in.csv", rows)), "--out", str(tmp_path / "out.csv")]) == 0
    found = read(tmp_path / "out.csv")
    assert [row["case_id"] for row in found] == [row["case_id"] for row in rows]
    assert [row["value"] for row in found] == [row["value"] for row in rows]
    for row in found:
        assert 0 < float(row["low"]) < float(row["predicted"]) < float(row["high"])
        assert (row["provenance"], row["reason"]) == ("fitted", "")
    assert "3 rows, 3 predicted, 0 refused" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_measured_value_is_not_read():
    """Other values, and none, give identical predictions."""
    plain = predict(ROWS[:20])
    shuffled = [{**row, "value": other["value"]} for row, other in zip(ROWS[:20], ROWS[20:40], strict=True)]
    assert predict(shuffled) == plain
    assert predict([{key: row[key] for key in COLUMNS} for row in ROWS[:20]]) == plain


def test_a_prediction_does_not_depend_on_the_rows_around_it():
    alone, among = predict([CLOSED])[0], predict([*ROWS[:5], CLOSED, *ROWS[5:9]])[5]
    assert alone.value == pytest.approx(among.value, rel=1e-9)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gpu": "H100-SMX-80GB"}, r"GPU 'H100-SMX-80GB' is not known.*Did you mean 'h100-sxm-80gb'"),
        ({"model": "llama-3.1-9b"}, r"model 'llama-3\.1-9b' is not known"),
        ({"metric": "ttft_s"}, r"metric='ttft_s' is not known.*Did you mean 'ttft_ms'"),
        ({"mode": "open_loop"}, "mode='open_loop' is not known"),
        ({"precision": "fp7"}, "precision='fp7' is not known"),
        ({"gpu": "A100-SXM-80GB", "precision": "fp8"}, "needs FP8 tensor cores; A100-SXM-80GB has none"),
        ({"gpu": "H100-SXM-80GB", "precision": "fp4"}, "needs FP4 tensor cores; H100-SXM-80GB has none"),
        ({"isl": ""}, "isl is empty"),
        ({"concurrency": "0"}, "concurrency='0' is not a whole number above 0"),
        ({"osl": "many"}, "osl='many' is not a whole number above 0"),
        ({"framework": "Orca 1"}, "framework 'Orca 1' is not known"),
    ],
)
def test_what_cannot_be_predicted_is_refused_with_a_reason(change, reason):
    """The row keeps its place with an empty prediction."""
    refused, kept = predict([{**CLOSED, **change}, ROWS[0]])
    assert math.isnan(refused.value)
    assert kept.value > 0
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(refused.reason)


def test_refused_rows_are_written_empty(tmp_path):
    cases = saved(tmp_path / "in.csv", [{**CLOSED, "gpu": "TPU"}])
    assert main(["--cases", str(cases), "--out", str(tmp_path / "out.csv")]) == 0
    row = read(tmp_path / "out.csv")[0]
    assert (row["predicted"], row["low"], row["provenance"]) == ("", "", "")
    assert "GPU 'TPU' is not known" in row["reason"]


def test_missing_columns_are_one_error_that_names_them(tmp_path, capsys):
    columns = [name for name in COLUMNS if name not in ("isl", "gpu")]
    cases = saved(tmp_path / "in.csv", [CLOSED], columns)
    assert main(["--cases", str(cases), "--out", str(tmp_path / "out.csv")]) == 2
    assert "has no column gpu, isl." in capsys.readouterr().err
    assert not (tmp_path / "out.csv").exists()


def test_files_that_are_not_there_are_an_error(tmp_path, capsys):
    assert main(["--cases", str(tmp_path / "no.csv"), "--out", str(tmp_path / "out.csv")]) == 2
    assert "There is no file" in capsys.readouterr().err
    cases = saved(tmp_path / "in.csv", [CLOSED])
    assert main(["--cases", str(cases), "--out", str(tmp_path / "no" / "out.csv")]) == 2
    assert "There is no folder" in capsys.readouterr().err


def test_a_table_without_rows_gives_one(tmp_path):
    cases = saved(tmp_path / "in.csv", [], list(CLOSED))
    assert main(["--cases", str(cases), "--out", str(tmp_path / "out.csv")]) == 0
    assert read(tmp_path / "out.csv") == []


def test_more_users_wait_longer():
    """A closed loop of 64 users has a higher TTFT, ITL and rate than one of 4."""
    metrics = ("ttft_ms", "itl_ms", "output_tok_s")
    ask = [{**CLOSED, "concurrency": users, "metric": metric} for users in ("4", "64") for metric in metrics]
    few, many = (found[index : index + 3] for found in [predict(ask)] for index in (0, 3))
    assert all(high.value > low.value for low, high in zip(few, many, strict=True))


def test_the_times_of_a_static_batch_add_up():
    """A prompt and then a token an iteration: e2e = TTFT + (osl - 1) x TPOT, and each request gets osl tokens in it."""
    row = next(row for row in ROWS if row["mode"] == "static_batch")
    cases = [case_of(row | {"metric": metric}) for metric in ("ttft_ms", "tpot_ms", "e2e_ms", "output_tok_s")]
    bench = StackedCases(cases)
    ttft, tpot, e2e, rate = np.exp(bench.log_predicted(values_of(bench, PerformanceModel.load().parameters)))
    assert e2e == pytest.approx(ttft + (cases[0].osl - 1) * tpot)
    assert rate == pytest.approx(1e3 * cases[0].batch * cases[0].osl / e2e)


def test_a_request_that_comes_at_random_waits_for_half_an_iteration_and_then_for_its_own():
    """Iterations of 0.1 s whatever their prompts: 150 ms."""
    case = next(
        case_of(row) for row in read_rows(PUBLISHED) if row["mode"] == "mlperf_server" and row["stat"] == "mean"
    )
    fixed = IterationCost(0, 0, 0, 0, fixed=0.1)
    assert first_token(case, fixed, batch=30, rate=5, iteration=0.1) == pytest.approx(0.15)
    longer = replace(fixed, prefill=0.05)  # its own prompt, and others at random
    assert first_token(case, longer, batch=30, rate=5, iteration=0.1) == pytest.approx(0.15 + 0.05 + 5 * 0.05**2 / 2)


def test_prompts_that_wait_for_others_come_later_by_up_to_twenty_iterations():
    """InferenceMAX lets TensorRT-LLM wait for 1,024 tokens in and out on fewer than 8 GPUs: up to 400 ms at 20 ms."""
    rows = [row for row in read_rows(PUBLISHED) if row["source"] == "aiconfigurator-silicon"]
    (waits,) = (
        case_of(row)
        for row in rows
        if (row["framework"], row["gpu"], row["isl"], row["osl"], row["tp"], row["concurrency"], row["metric"])
        == ("TensorRT-LLM (version not stated)", "H200-SXM-141GB", "1024", "1024", "1", "4", "ttft_ms")
    )
    alone = replace(waits, osl=1025)
    bench = StackedCases([waits, alone, replace(waits, metric="tpot_ms")])
    held, at_once, itl = np.exp(bench.log_predicted(values_of(bench, PerformanceModel.load().parameters)))
    assert 18 * itl < held - at_once < 20 * itl
