"""Parts of the plots: thinning, labels that keep apart, numbers as text."""

import dataclasses

import pytest
from matplotlib.figure import Figure

from pipelines.document.blocks import Column, Table
from pipelines.document.canvas import LIGHT, Theme, apart, beside, dash, marker
from pipelines.document.show import flat, ms, number, settings_text, when
from pipelines.domain.benchmark import Distribution
from pipelines.domain.summary import summarise
from pipelines.report.collect import collect
from pipelines.report.config import ReportSettings
from pipelines.report.data import lengths, loads
from pipelines.report.plots_requests import MAX_STEPS, distributions, steps
from pipelines.report.tables import build_memory_table
from pipelines.report.tables_load import levels_table
from pipelines.store.store import Store
from tests.support.report_store import add_format, benchmark


def test_a_cumulative_curve_ends_at_all():
    assert steps([1, 2, 4, 8]) == ([1, 1, 2, 4, 8], [0, 25, 50, 75, 100])


def test_a_long_curve_is_thinned_and_keeps_its_ends():
    xs, ys = steps([float(i) for i in range(10_000)])
    assert len(xs) == MAX_STEPS + 1
    assert (xs[0], xs[-1], ys[-1]) == (0.0, 9999.0, 100.0)


@pytest.mark.parametrize("last", [3, 4])
def test_a_distribution_has_the_requests_that_its_table_counts(last, two_formats):
    """Warm-up is left out, and medians are those of the table."""
    run = collect(two_formats).formats[0].runs[0]
    name = run.result.levels[0].requests_file
    requests, _ = run.requests[name]
    window = (requests.due[1], requests.due[last])
    figure = distributions(dataclasses.replace(run, requests={name: (requests, window)}), "figure")
    median = 1000 * summarise(requests, window).ttft_s.p50
    assert f"Time to first token, medians: 1: {median:.3g} ms." in figure.alt
    assert distributions(dataclasses.replace(run, requests={name: (requests, None)}), "figure") is None


def test_no_two_of_64_curves_look_alike():
    """From the ninth format on a colour repeats, with another marker and another line."""
    looks = [(Theme(LIGHT).series(index), marker(index), str(dash(index))) for index in range(64)]
    assert len(set(looks)) == 64
    assert len({(colour, line) for colour, _, line in looks}) == 64


def test_names_keep_their_order_and_distance():
    assert apart([0.5, 0.5, 0.1], 0.1) == pytest.approx([0.5, 0.6, 0.1])


def test_names_at_the_top_move_down():
    assert apart([0.98, 1.0], 0.1) == pytest.approx([0.9, 1.0])


def test_no_name_of_a_curve_lies_over_the_axis_beside_it():
    """Three curves that end near the y axis: names stand to their right or in the column beside the picture."""
    figure = Figure(figsize=(3.6, 3.7))
    axes = figure.subplots()
    axes.set_xlim(0, 1000)
    axes.set_ylim(0, 10)
    figure.canvas.draw()
    points = [(20.0, 5.0), (20.0, 5.1), (21.0, 5.2)]
    beside(axes, [(point, "DEP 8 nvfp4, KV fp8", "black") for point in points], points, "grey")
    names = list(axes.texts)
    assert len(names) == 3
    wall, _ = axes.transAxes.transform((0, 0))
    assert all(name.get_window_extent().x0 > wall for name in names)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1234.5, "1,234"),
        (99.96, "100"),
        (12.34, "12.3"),
        (1.239, "1.24"),
        (0.1234, "0.123"),
        (0.0001234, "0.000123"),
        (0, "0.00"),
        (None, "–"),
    ],
)
def test_numbers_have_three_digits(value, shown):
    assert number(value) == shown


def test_milliseconds_are_shown_without_unit():
    assert ms(0.01234) == "12.3"


def test_lengths_are_one_number_when_all_are_equal():
    """(10 x 100 + 30 x 200) / 40 = 175."""
    assert lengths([Distribution(5, 128, 128, 128, 128, 128, 128, 128)]) == "128"
    mixed = [Distribution(10, 100, 50, 0, 0, 0, 0, 120), Distribution(30, 200, 90, 0, 0, 0, 0, 300)]
    assert lengths(mixed) == "175 (50..300)"
    assert lengths([Distribution(0)]) == "–"


def test_loads_are_listed_together():
    assert loads(benchmark("none", (1, 4))[0].levels) == "concurrency 1, 4"


def test_settings_are_flat_and_without_empty_values():
    given = {"isl": {"mean": 128.0, "stdev": None}, "chat": False, "rates": [1, 2.5]}
    assert flat(given) == [("isl.mean", "128"), ("chat", "no"), ("rates", "1, 2.5")]
    assert settings_text({"a": 1}) == "a 1"


def test_times_are_shown_to_the_minute():
    assert when("2026-01-02T03:04:05+00:00") == "2026-01-02 03:04 UTC"


def test_a_cell_under_the_wrong_title_cannot_be_shown():
    with pytest.raises(ValueError, match="a row of 'speeds' does not have 2 cells"):
        Table("speeds", "measured", (Column("load"), Column("tok/s")), (("1",),))


def test_the_levels_have_their_numbers_under_their_titles(two_formats):
    """Baseline at concurrency 4: TTFT 9, 10 and 11 ms, ITL 3 ms, E2E = TTFT + 7 x 3 ms."""
    table = levels_table(collect(two_formats).workloads[0].runs[0])
    row = {(column.group, column.title): cell for column, cell in zip(table.columns, table.rows[1], strict=True)}
    assert (row["requests", "done"], row["length, tokens", "ISL"], row["length, tokens", "OSL"]) == ("24", "128", "8")
    assert (row["TTFT, ms", "p50"], row["ITL, ms", "p99"], row["E2E, ms", "p50"]) == ("10.0", "3.00", "31.0")
    assert ("throughput", "goodput/s") not in row


def test_throughput_per_gpu_divides_by_all_ranks(two_formats):
    """TP 2 x PP 2 = 4 GPUs."""
    run = collect(two_formats).workloads[0].runs[0]
    spread = dataclasses.replace(run, result=dataclasses.replace(run.result, tp_size=2, world_size=4))
    titles = [column.title for column in levels_table(spread).columns]
    whole, share = (levels_table(spread).rows[0][titles.index(name)] for name in ("req/s", "req/s/GPU"))
    assert float(share) == pytest.approx(float(whole) / 4, rel=0.01)
    assert "PP 2" in levels_table(spread).caption


def test_a_loss_above_everything_is_refused():
    assert ReportSettings().max_accuracy_loss_percent == 1.0
    with pytest.raises(ValueError, match="max_accuracy_loss_percent"):
        ReportSettings(max_accuracy_loss_percent=101)


def test_memory_of_a_tensorrt_engine_stands_beside_its_prediction(tmp_path):
    """LLaMA-7B's weights and activations as trtllm-build logs them; a log that lacks a number leaves a dash."""
    store = Store(tmp_path)
    predicted = {"weights": 13476831232.0, "activations": 8.0e9}
    add_format(store, "none", memory_predicted=predicted, weights_bytes=13476831737, activation_bytes=8791261348)
    add_format(store, "fp8", minute=10)
    table = build_memory_table(collect(store))
    assert table is not None
    (row,) = table.rows
    assert row[-5:] == ("12.6 GiB", "7.5 GiB", "12.6 GiB", "8.2 GiB", "–")


def test_engines_that_log_no_memory_have_no_such_table(tmp_path):
    store = Store(tmp_path)
    add_format(store, "none")
    assert build_memory_table(collect(store)) is None
