"""The trend report: what it says first, its pictures, and that the same history gives the same bytes."""

import re

import pytest

from pipelines.document.canvas import render_html, write_document
from pipelines.nightly.accuracy import named, scale, title
from pipelines.nightly.sentences import History
from pipelines.nightly.trend import trend_document
from pipelines.nightly.verdict import judge
from tests.support.nights import load, night, nightly_settings

SETTINGS = nightly_settings()


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    """Nine nights of two cells, the last of one slower; a third is refused."""
    history = History(tmp_path_factory.mktemp("history"))
    for number in range(9):
        wobble = 1 + 0.002 * (-1) ** number * (number % 3)
        history.append(night(number, 1000.0 * wobble * (0.8 if number == 8 else 1)))
        history.append(night(number, 900.0 * wobble, cell="tiny_gemma none fixed", precision="none"))
        refused = {"status": "not possible", "reason": "nvfp4 <b>needs</b> Blackwell"}
        history.append(night(number, cell="tiny_gemma nvfp4 fixed", measurements=[], **refused))
    read = history.read()
    verdict = judge(read.records, read.records[-1].run, SETTINGS)
    return trend_document(history, read, verdict, SETTINGS)


def test_a_regression_is_the_first_thing_said(document):
    assert [(card.title, card.value) for card in document.cards][:2] == [
        ("Regressions", "1"), ("Cells measured", "2 of 3"),
    ]  # fmt: skip
    assert document.lead[0].kind == "warning"
    assert document.lead[0].text.startswith("tiny_gemma fp8 fixed: output tokens/s at concurrency 8: 1,000/s before")


def test_the_cell_that_got_worse_has_its_picture_in_the_open(document):
    trends = next(section for section in document.sections if section.id == "trends")
    assert trends.blocks[0].title == "tiny_gemma fp8 fixed"
    assert "precision fp8; ISL 128; OSL 64; concurrency 8; TP 1" in trends.blocks[0].caption


@pytest.mark.pictures
def test_the_loads_of_a_picture_are_named_once_below_all_of_its_panels(tmp_path):
    """Names within each panel lay over the curves."""
    history = History(tmp_path)
    loads = [load(concurrency=users, load=f"concurrency {users}") for users in (1, 4)]
    for number in range(9):
        history.append(night(number, measurements=[loads]))
    read = history.read()
    verdict = judge(read.records, read.records[-1].run, SETTINGS)
    document = trend_document(history, read, verdict, SETTINGS)
    (figure,) = (block for block in document.figures() if block.title == "tiny_gemma fp8 fixed")
    assert [figure.svg.count(f">concurrency {users}</text>") for users in (1, 4)] == [1, 1]


def test_every_number_of_tonight_stands_in_one_table(document):
    table = next(section for section in document.sections if section.id == "tonight").blocks[0]
    rows = {row[0]: row for row in table.rows}
    assert rows["tiny_gemma fp8 fixed"][1:10] == (
        "worse",
        "128",
        "64",
        "concurrency 8",
        "100.00",
        "0.00",
        "UNDECIDED",
        "803",
        "-19.7",
    )
    assert rows["tiny_gemma none fixed"][1] == ""


def test_the_page_escapes_and_fetches_nothing(document):
    page = render_html(document)
    assert "nvfp4 &lt;b&gt;needs&lt;/b&gt; Blackwell" in page
    assert page.count("<script") == 1
    assert "http://" not in re.sub(r'"http://www\.w3\.org/[^"]*"', "", page)
    assert "<title>Nightly test: nightly report</title>" in page


def test_written_twice_it_is_the_same(document, tmp_path):
    first, second = write_document(document, tmp_path / "1"), write_document(document, tmp_path / "2")
    assert first.html.read_bytes() == second.html.read_bytes()
    assert first.markdown.read_bytes() == second.markdown.read_bytes()
    assert {path.name for path in first.plots} == {"trend-1.svg", "trend-2.svg"}


def test_a_first_night_is_no_more_than_a_beginning(tmp_path):
    history = History(tmp_path)
    history.append(night(0, measurements=[[load(client_limited=True)]]))
    read = history.read()
    made = trend_document(history, read, judge(read.records, read.records[-1].run, SETTINGS), SETTINGS)
    assert made.lead[0].kind == "good"
    assert "still too short to estimate their noise" in made.lead[0].text
    assert render_html(made)


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ("output_tokens_per_s at concurrency 8", "output tokens/s at concurrency 8"),
        ("ttft_p50_s at 4 requests/s (poisson)", "TTFT p50 at 4 requests/s (poisson)"),
        ("error_share at concurrency 8", "failed requests at concurrency 8"),
        ("accuracy", "accuracy"),
        ("engine_bytes", "engine size"),
        ("build_s", "build time"),
        ("build_peak_bytes", "build peak memory"),
    ],
)
def test_metrics_are_named_in_words(metric, words):
    assert named(metric) == words


def test_no_key_of_a_metric_is_on_the_page(document):
    assert not re.search(r"tokens_per_s|_p50_s|error_share|engine_bytes", render_html(document))


def test_cells_refused_for_one_reason_share_a_row(tmp_path):
    history = History(tmp_path)
    history.append(night(0))
    for cell in ("a nvfp4", "b nvfp4"):
        history.append(night(0, cell=cell, measurements=[], status="not possible", reason="needs Blackwell"))
    read = history.read()
    made = trend_document(history, read, judge(read.records, read.records[-1].run, SETTINGS), SETTINGS)
    (table,) = next(section for section in made.sections if section.id == "not-measured").blocks
    assert table.rows == (("a nvfp4, b nvfp4", "not possible", "needs Blackwell"),)


def test_titles_of_plots_have_the_unit_of_their_values():
    """Memory is stored in bytes and drawn in MiB; its title was "build_peak_bytes, s"."""
    assert title("build_peak_bytes") == "build peak memory, MiB"
    assert scale("build_peak_bytes") * 2**20 == 1
    assert title("build_s") == "build, s"
    assert (title("engine_bytes"), scale("engine_bytes") * 2**20) == ("engine, MiB", 1)
