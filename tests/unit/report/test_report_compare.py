"""Comparing formats: the choice and its reasons."""

import dataclasses

import pytest

from pipelines.domain.benchmark import Slo
from pipelines.report.collect import collect
from pipelines.report.compare import comparison, meets
from pipelines.report.compare_text import comparison_text
from pipelines.store.store import Store
from tests.support.report_store import add_benchmark, add_format, benchmark, full_store


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    return collect(full_store(tmp_path_factory.mktemp("all")))


def test_the_fastest_within_the_loss_is_chosen(everything):
    """int4_wo is faster, but 40 of 200 questions are lost: 20 %. int4_awq loses 1 of 200: 0.5 %."""
    (found,) = comparison(everything, 1.0)
    assert found.chosen == "int4_awq"
    reasons = {rejection.variant: rejection.reason for rejection in found.rejected}
    assert reasons["int4_wo"] == "loses 20.00 % of the accuracy; the limit is 1 %"
    assert reasons["none"].endswith("44 % below int4_awq")  # speed 1.0 against 1.8


def test_a_stricter_limit_changes_the_choice(everything):
    (found,) = comparison(everything, 0.2)
    assert found.chosen == "fp8"


def test_a_wide_interval_is_said(everything):
    (found,) = comparison(everything, 1.0)
    assert any("95 % interval of the accuracy loss of int4_awq reaches 1.48 %" in note for note in found.notes)


def test_an_unknown_accuracy_is_not_chosen(tmp_path):
    store = Store(tmp_path)
    add_benchmark(store, add_format(store, "fp8"), "fp8")
    (found,) = comparison(collect(store))
    assert found.chosen is None
    assert found.rejected[0].reason == "its accuracy is unknown (no baseline)"


def test_with_limits_the_load_that_meets_them_decides(tmp_path):
    """ITL is (2 + c / 4) / speed ms: 2.25, 3 and 6 ms at 1, 4 and 16 for the baseline, so 3 ms ends at 4."""
    (found,) = comparison(collect(full_store(tmp_path, ("none", "fp8"), slo=Slo("given", None, 3.001))))
    none = next(row for row in found.rows if row.variant == "none")
    assert none.at_slo.concurrency == 4
    assert none.peak.concurrency == 16
    assert none.score == none.at_slo.summary.output_tokens_per_s


def test_limits_nobody_meets_leave_no_choice(tmp_path):
    (found,) = comparison(collect(full_store(tmp_path, ("none",), slo=Slo("given", 0.5))))
    assert found.chosen is None
    assert found.rejected[0].reason == "no load met the limits of the SLO at p99"


def test_a_client_that_was_the_limit_is_said(tmp_path):
    (found,) = comparison(collect(full_store(tmp_path, ("none", "fp8"), bottleneck=16)))
    assert any("fp8 at concurrency 16 (cpu 98 %)" in note and "lower bound" in note for note in found.notes)


def test_an_incomplete_level_is_not_the_peak(tmp_path):
    (found,) = comparison(collect(full_store(tmp_path, ("none",), cut=16)))
    assert found.rows[0].peak.concurrency == 4


@pytest.mark.parametrize(("speed", "said"), [(1.05, "cannot be told apart"), (2.0, "do not overlap")])
def test_repeated_runs_say_whether_noise_explains_the_order(tmp_path, speed, said):
    """None runs at 1.0 and 1.2; fp8 at `speed` and 1.3: from 1.05 the ranges overlap, from 2.0 they do not."""
    store = Store(tmp_path)
    for variant, speeds in (("none", (1.0, 1.2)), ("fp8", (speed, 1.3 if speed < 2 else 2.1))):
        repository = add_format(store, variant)
        for minute, each in enumerate(speeds, 10):
            add_benchmark(store, repository, variant, minute=minute, speed=each)
    (found,) = comparison(collect(store))
    assert found.chosen == "fp8"
    assert any(said in note for note in found.notes)


def test_a_load_meets_limits_at_p99_only(two_formats):
    """Baseline at concurrency 1: TTFT 6, 7 and 8 ms; p99 is 8 ms."""
    level = benchmark("none", (1,))[0].levels[0]
    assert meets(level, Slo("given", 8.0))
    assert not meets(level, Slo("given", 7.9))
    assert not meets(level, Slo())


def test_the_table_fits_a_terminal(everything):
    text = comparison_text(comparison(everything))
    assert max(map(len, text.splitlines())) <= 79
    assert "int4_awq gives the most throughput" in text
    assert text.splitlines()[1].split()[:4] == ["none", "100.00", "0.00", "8.00"]


def test_a_long_format_name_gets_a_line_of_its_own(everything):
    (found,) = comparison(everything)
    row = dataclasses.replace(found.rows[0], variant="sparsegpt_2_4-int8_sq-kv_int8")
    text = comparison_text([dataclasses.replace(found, rows=(row,))])
    assert "\nsparsegpt_2_4-int8_sq-kv_int8\n" in text
