"""Formats ranked under a limit, the tiles that answer, and the numbers beside the page."""

import csv
import io
import json
from dataclasses import replace
from functools import partial

import pytest

from pipelines.document.blocks import Ranking
from pipelines.domain.benchmark import Distribution, Slo
from pipelines.domain.errors import UserError
from pipelines.predict.config import PriceSettings
from pipelines.report.collect import collect
from pipelines.report.compare import comparison
from pipelines.report.report_command import report
from pipelines.report.sections import NO_LOAD, NO_TTFT, document, ranking
from pipelines.report.stored import ReportedNumbers, attachments, earlier_numbers, side_by_side
from pipelines.report.tiles import tiles, usd_per_hour
from pipelines.store.store import Store
from tests.support.report_store import add_benchmark, add_format, benchmark, full_store

H100 = {"name": "NVIDIA H100 80GB HBM3", "sm": 9.0, "memory_bytes": 85_520_809_984}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return collect(full_store(tmp_path_factory.mktemp("all"), slo=Slo("given", 15.0)))


def ranked(data) -> Ranking:
    return ranking(data, comparison(data)[0], 1.0, partial(tiles, data, prices=PriceSettings()))


def answers(data, **prices):
    """The first screen by title."""
    return {card.title: card for card in tiles(data, comparison(data)[0], PriceSettings(**prices))}


def files(data):
    """The files beside the page by name."""
    return {each.name: each.content.decode() for each in attachments(ReportedNumbers.of(comparison(data), data.newest))}


def changed(data, **facts):
    """The same runs with other facts of their results."""
    runs = lambda each: tuple(replace(run, result=replace(run.result, **facts)) for run in each.runs)  # noqa: E731
    return replace(data, workloads=tuple(replace(each, runs=runs(each)) for each in data.workloads))


def test_every_step_is_what_the_comparison_says_under_that_limit(data):
    """The thresholds are the TTFTs that were measured; each is compared as if it had been the limit of the SLO."""
    steps = ranked(data).views[0][1]
    assert steps[0].at == 0
    assert len(steps) > 8
    for step in steps:
        (expected,) = comparison(changed(data, slo=Slo("given", step.at)))
        assert step.answer.text == expected.reason
        chosen = None if step.table.strong is None else step.table.rows[step.table.strong][0]
        assert chosen == expected.chosen


def test_the_first_step_is_the_choice_of_the_report(data):
    (expected,) = comparison(data)
    made = document(data)
    (first,) = (block.first for block in made.lead if isinstance(block, Ranking))
    assert first.answer.text == expected.reason
    assert first.cards[0] == made.cards[0]
    assert ranked(changed(data, slo=Slo())).first.at is None


def test_a_format_with_no_go_has_no_rank_at_any_limit(data):
    ranks = {
        (row[0], row[1])
        for _, steps in ranked(data).views
        for step in steps
        for row in step.table.rows
        if row[0] == "int4_wo"
    }
    assert ranks == {("int4_wo", "–")}


def test_one_load_for_all_formats(data):
    """At 4 users, TTFT p99 is 11 ms / speed; at a limit of 9 ms the baseline is shown, but has no rank."""
    views = dict(ranked(data).views)
    assert list(views) == ["each format at its best load", "concurrency 1", "concurrency 4", "concurrency 16"]
    step = next(step for step in reversed(views["concurrency 4"][:-1]) if step.at <= 9)
    rows = {row[0]: row for row in step.table.rows}
    assert {row[3] for row in rows.values()} == {"4"}
    assert (rows["none"][1], rows["none"][-1]) == ("–", "no load met the limits of the SLO at p99")
    assert (rows["int4_awq"][1], rows["fp8"][1]) == ("1", "2")
    assert "at concurrency 4" in step.answer.text


def test_an_order_that_is_not_decided_has_no_ranks(tmp_path):
    step = ranked(collect(full_store(tmp_path, ("none", "fp8"), bottleneck=16))).first
    assert step.answer.text.startswith("The fastest format is not decided")
    assert [row[1] for row in step.table.rows] == ["–", "–"]
    assert step.table.strong is None


def test_without_latencies_there_is_no_slider_but_a_sentence(data):
    def untimed(level):
        return replace(level, summary=replace(level.summary, ttft_s=Distribution(0)))

    levels = tuple(map(untimed, data.workloads[0].runs[0].result.levels))
    found = ranked(changed(data, slo=Slo(), levels=levels))
    assert found.hint == NO_TTFT
    assert {len(steps) for _, steps in found.views} == {1}


def test_formats_that_were_not_benchmarked_are_not_ranked(tmp_path):
    store = Store(tmp_path)
    for variant in ("none", "fp8"):
        add_format(store, variant)
    assert ranked(collect(store)).hint == NO_LOAD


def test_a_format_without_the_load_says_so(tmp_path):
    store = full_store(tmp_path, ("none", "int4_awq"))
    add_benchmark(store, add_format(store, "fp8"), "fp8", concurrencies=(1, 4))
    views = dict(ranked(collect(store)).views)
    rows = {row[0]: row for row in views["concurrency 16"][-1].table.rows}
    assert rows["fp8"][-1] == "it was not measured at concurrency 16"


def test_the_tiles_answer(data):
    cards = answers(data)
    assert (cards["Size saved"].value, cards["Size saved"].detail) == (
        "44 %",
        "int4_awq: 4.4 MiB instead of 8.0 MiB in 16 bit",
    )
    assert cards["Loss of accuracy"].value == "0.50 %"
    assert cards["Loss of accuracy"].detail.startswith("int4_awq UNDECIDED: at most 2.35 %; mini_mmlu, 5-shot")
    assert cards["Throughput"].detail == "int4_awq at concurrency 16, within the SLO TTFT 15 ms"
    assert "Price" not in cards


def test_the_size_saved_is_unknown_without_the_baselines_engine(data):
    formats = tuple(
        replace(item, chain=tuple(each for each in item.chain if each.stage != "build" or item.variant != "none"))
        for item in data.formats
    )
    assert answers(replace(data, formats=formats))["Size saved"].value == "unknown"


@pytest.mark.parametrize(
    ("engine", "gpus", "prices", "hour", "what"),
    [
        ("tensorrt_llm", [H100] * 2, {"gpu_hour_usd": 2.5}, 5.0, "2 GPUs"),
        ("tensorrt_llm", [H100] * 2, {"gpu_hour_usd": {"h100_sxm": 3.0}}, 6.0, "2 GPUs"),
        ("tensorrt_llm", [H100], {"server_usd": 8760.0, "years": 1.0}, 1.0, "1 whole server"),
        ("tensorrt_llm", [H100], {"gpu_hour_usd": {"l40s": 1.0}}, None, "no price is given for NVIDIA H100 80GB HBM3"),
        ("tensorrt_llm", [], {"server_usd": 1.0, "years": 1.0}, None, "the GPUs of one server are not known"),
        ("openvino", [], {"gpu_hour_usd": 2.5}, None, "it ran on a CPU, and the price given is that of a GPU"),
        ("openvino", [], {"server_usd": 8760.0, "years": 2.0}, 0.5, "one server"),
        ("unknown", [], {"gpu_hour_usd": 2.5}, None, "the machine of a server elsewhere is not known"),
    ],
)
def test_the_price_of_an_hour(engine, gpus, prices, hour, what):
    result = replace(benchmark("fp8")[0], engine=engine, machine={"gpus": gpus}, gpu_count=len(gpus) or None)
    assert usd_per_hour(result, PriceSettings(**prices)) == (hour, what)


def test_the_price_of_a_million_tokens(data):
    """2,883 output tokens/s at 1 USD an hour are 0.0963 USD for a million of them."""
    card = answers(data, server_usd=8760.0, years=1.0)["Price"]
    rate = next(row for row in comparison(data)[0].rows if row.variant == "int4_awq").score
    assert card.unit == "USD per million output tokens"
    assert float(card.value) == pytest.approx(1e6 / (3600 * rate), rel=1e-2)
    assert answers(data, gpu_hour_usd=2.0)["Price"].value == "unknown"


def test_csv_and_json_have_every_load(data):
    rows = list(csv.DictReader(io.StringIO(files(data)["comparison.csv"])))
    numbers = ReportedNumbers.from_json(json.loads(files(data)["comparison.json"]))
    assert len(rows) == len(numbers.loads) == 15
    for row, load in zip(rows, numbers.loads, strict=True):
        assert (row["format"], row["load"], row["verdict"]) == (load.format, load.load, load.verdict)
        assert float(row["ttft_p99_s"]) == load.figures["ttft_p99_s"]
        assert row["chosen"] == str(load.format == "int4_awq")


def test_no_cell_is_a_formula(tmp_path):
    store = Store(tmp_path)
    add_benchmark(store, add_format(store, "none", model="=cmd()"), "none", model="=cmd()")
    (row, *_) = csv.DictReader(io.StringIO(files(collect(store))["comparison.csv"]))
    assert row["model"] == "'=cmd()"


def test_two_days_stand_side_by_side(data, tmp_path):
    """fp8 got slower by a quarter, int4_awq is new, the machine is another."""
    numbers = ReportedNumbers.of(comparison(data), data.newest)
    loads = tuple(
        replace(load, figures={**load.figures, "output_tokens_per_s": load.figures["output_tokens_per_s"] / 0.75})
        for load in numbers.loads
        if load.format == "fp8"
    )
    conditions = {name: {**each, "machine": {"cpu": "another"}} for name, each in numbers.conditions.items()}
    before = replace(numbers, loads=loads, conditions=conditions, newest="2025-12-24T08:00:00+00:00")
    before.save(tmp_path / "before.json")
    (table,) = side_by_side(earlier_numbers(tmp_path / "before.json"), numbers).blocks
    rows = {row[0]: row for row in table.rows}
    assert rows["fp8"][1:5] == ("16", "2,748", "2,061", "-25.0")
    assert rows["int4_awq"][1:4] == ("–", "–", "–")
    assert rows["int4_awq"][9:11] == ("–", "UNDECIDED")
    assert "2025-12-24 08:00 UTC then" in table.caption
    assert any("machine.cpu another then, not given now" in note for note in table.notes)


def test_an_earlier_report_of_something_else_is_said(data):
    numbers = ReportedNumbers.of(comparison(data), data.newest)
    other = replace(numbers, answers={"gemma, chat": ""})
    (text,) = side_by_side(other, numbers).blocks
    assert text.text == "The earlier report has nothing of synthetic, chat; it has gemma, chat."


def test_an_earlier_report_without_conditions_is_shown_as_not_given(data):
    numbers = ReportedNumbers.of(comparison(data), data.newest)
    (table,) = side_by_side(replace(numbers, conditions={}), numbers).blocks
    assert any("engine not given then, openvino now" in note for note in table.notes)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "There is no comparison of formats at"),
        ("{", "is not valid JSON"),
        ('{"newest": 5}', "is not a comparison of formats: "),
    ],
)
def test_what_is_no_earlier_report_is_refused_before_anything_is_written(content, said, data, tmp_path):
    path = tmp_path / "comparison.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=r"report\.against='.*' is no earlier report: .*" + said):
        report([f"paths.store={tmp_path}/store", f"report.folder={tmp_path}/out", f"report.against={path}"])
    assert not (tmp_path / "out").exists()
