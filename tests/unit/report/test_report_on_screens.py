"""A report in a real browser: nothing is cut at 1280 px, and what scrolls on a phone says so."""

from dataclasses import replace

import pytest

from pipelines.document.canvas import render_html
from pipelines.report.collect import collect
from pipelines.report.data import ModelledRun
from pipelines.report.sections import document
from tests.support.chromium import DARK_THEME, LIGHT_THEME, needs_chromium, said_by
from tests.support.report_store import full_store

MEASURE = """
document.querySelectorAll("details").forEach(each => each.open = true);
await new Promise(resolve => setTimeout(resolve, 500));  // what scrolls is known some frames after the layout
const framed = [...document.querySelectorAll("figure.table, figure.plot")].map(figure => {
  const scroll = figure.querySelector(".scroll"), hint = figure.querySelector(".hint");
  return {name: scroll.getAttribute("aria-label"), cut: scroll.scrollWidth > scroll.clientWidth,
          said: hint.getBoundingClientRect().height > 0};
});
const struck = [...document.querySelectorAll("#accuracy ~ .plot")].flatMap(plot => {
  const lines = [...plot.querySelectorAll("path")].map(each => each.getBoundingClientRect());
  const upright = lines.filter(each => each.width < 3 && each.height > 20);
  const numbers = [...plot.querySelectorAll("text")].filter(each => /^[+-]\\d/.test(each.textContent.trim()));
  return numbers.map(each => each.getBoundingClientRect())
    .map(box => upright.some(line => line.left < box.right && line.right > box.left
                                     && line.top < box.bottom && line.bottom > box.top));
});
const ends = [...document.querySelectorAll(".card")].map(each => each.getBoundingClientRect());
const cards = document.querySelector(".cards").getBoundingClientRect();
const area = ends.reduce((sum, each) => sum + each.width * each.height, 0);
const lines = cell => { const range = document.createRange(); range.selectNodeContents(cell);
                        return new Set([...range.getClientRects()].map(each => each.top)).size; };
const broken = [...document.querySelectorAll("td")].filter(each => /^[0-9a-f]{12}$/.test(each.textContent))
  .map(each => lines(each) > 1);
answer({page: document.documentElement.scrollWidth, framed, struck, filled: area / (cards.width * cards.height),
        broken});
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The widest report: two formats with limits on two GPUs each, with a model beside the measurements."""
    data = collect(full_store(tmp_path_factory.mktemp("store"), ("none", "fp8")))

    def wide(run):
        result = replace(run.result, tp_size=2, world_size=2)
        return replace(run, result=result, modelled=ModelledRun({"requests-1.json.gz": result.levels[1].summary}, "x"))

    workloads = tuple(replace(each, runs=tuple(map(wide, each.runs))) for each in data.workloads)
    made = document(replace(data, workloads=workloads))
    return render_html(replace(made, cards=made.cards[:3]))


@pytest.fixture(scope="module")
def laptop(page, tmp_path_factory):
    return seen(page, tmp_path_factory.mktemp("laptop"), 1280, LIGHT_THEME)


@pytest.fixture(scope="module")
def phone(page, tmp_path_factory):
    return seen(page, tmp_path_factory.mktemp("phone"), 400, DARK_THEME)


def seen(page, folder, width, theme):
    return said_by(page, folder, MEASURE, theme, width=width)


@needs_chromium
def test_nothing_is_cut_on_a_laptop(laptop):
    assert laptop["page"] == 1280
    assert [each for each in laptop["framed"] if each["cut"] or each["said"]] == []


@needs_chromium
def test_what_scrolls_on_a_phone_says_so(phone):
    assert phone["page"] == 400
    assert [each for each in phone["framed"] if each["cut"] != each["said"]] == []
    assert any(each["said"] for each in phone["framed"])


@needs_chromium
def test_three_tiles_leave_no_empty_one(laptop, phone):
    """All of the frame but its border and the hairlines between the tiles."""
    assert laptop["filled"] > 0.97
    assert phone["filled"] > 0.97


@needs_chromium
def test_no_line_strikes_a_number_through(laptop):
    """The change of one format, +0.00, stood on the line of zero."""
    assert laptop["struck"] == [False]


@needs_chromium
def test_a_digest_is_not_broken(laptop, phone):
    assert set(laptop["broken"]) == set(phone["broken"]) == {False}
