"""The check of `make calibrate` over HTTP: its loads are possible; a row shows measured, modelled and the error."""

from dataclasses import replace

import pytest

from pipelines.domain.benchmark import Distribution, Summary
from pipelines.loadgen.config import load_faults
from pipelines.predict.performance.calibrate_command import compared
from pipelines.predict.performance.fit import FittedLevel
from pipelines.predict.performance.measured import MeasuredLevel
from pipelines.settings.compose import load
from scripts.fit_http import APART, MIXED, resolved


@pytest.mark.parametrize("words", [MIXED, *APART])
def test_every_load_composes_and_fits_the_engine(words):
    settings = load(["quant=none", "engine=openvino", *resolved(words, 20.0)])
    assert not load_faults(settings.workload, settings.benchmark)
    assert (settings.workload.isl.longest or 0) <= settings.build.max_input_len


def test_rates_are_shares_of_the_capacity():
    assert resolved(("workload=poisson", "benchmark.request_rate=@0.5"), 31.0)[1] == "benchmark.request_rate=15.50"


def row(real, made):
    times = Distribution(10, *[real] * 7)
    level = MeasuredLevel("closed", 4, None, 100, 10, 10, real, times, times, times)
    said = Distribution(10, *[made] * 7)
    rates = {"requests_per_s": made, "output_tokens_per_s": 10 * made, "total_tokens_per_s": 110 * made}
    lengths = {"isl": said, "osl": said}
    summary = Summary(
        window_s=1.0,
        requests=10,
        errors={},
        goodput_per_s=None,
        ttft_s=said,
        itl_s=said,
        e2e_s=said,
        **rates,
        **lengths,
    )
    return FittedLevel(level, summary)


def test_a_row_shows_what_was_measured_what_is_modelled_and_the_difference():
    _head, measured, modelled, error, medians_ = (line.split()[-4:] for line in compared([row(2.0, 2.5)]))
    assert (measured[:2], modelled[:2], error[:2]) == (["2", "2,000"], ["2.5", "2,500"], ["+25", "+25"])
    assert medians_[0] == "25.0"


def test_a_metric_without_a_value_is_left_out():
    level = replace(row(1.0, 1.1).level, itl_s=Distribution(0))
    assert "itl_mean" not in FittedLevel(level, row(1.0, 1.1).modelled).errors()
