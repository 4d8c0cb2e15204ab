"""The report in a real browser: a limit ranks again, columns sort, plots tell values, contents stay; and without it."""

import re
from dataclasses import replace

import pytest

from pipelines.document.canvas import render_html
from pipelines.domain.benchmark import Distribution, Slo
from pipelines.report.collect import collect
from pipelines.report.compare import comparison
from pipelines.report.sections import document
from tests.support.chromium import needs_chromium, said_by
from tests.support.report_store import full_store

pytestmark = needs_chromium
LIMITS = [0.5, 4.2, 5, 7.5, 8, 10.125, 11.2, 13, 16.5, 20, 23.1, 1000, None]
"""TTFT p99 is (7 + users) ms / speed, from 4.2 ms to 23 ms."""

RANKS = """
const field = document.querySelector(".controls [type=number]"), view = document.querySelector(".controls select");
const set = (input, value, kind) => { input.value = value; input.dispatchEvent(new Event(kind, {bubbles: true})); };
const table = document.querySelector(".ranking table");
const seen = () => ({
  chosen: table.querySelector("tr.strong th")?.firstChild.textContent ?? null,
  answer: document.querySelector(".ranking .callout").textContent,
  ranks: Object.fromEntries([...table.tBodies[0].rows].map(row => [row.cells[0].firstChild.textContent,
                                                                   row.cells[1].textContent])),
  tile: document.querySelector(".card .detail").textContent, shown: document.querySelector(".shown").textContent,
  caption: document.querySelector(".ranking figcaption").textContent,
});
const found = [...view.options].map((_, at) => {
  view.selectedIndex = at; view.dispatchEvent(new Event("change"));
  return LIMITS.map(limit => { set(field, limit ?? "", "input"); return seen(); });
});
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("store")
    return collect(full_store(root, ("none", "fp8", "int4_awq", "int4_wo"), slo=Slo("given", 10.0), bottleneck=16))


@pytest.fixture(scope="module")
def page(data):
    return render_html(document(data))


def limited(data, load, limit):
    """The same runs as if only this load had been measured, with this limit."""

    def run(each):
        levels = tuple(level for level in each.result.levels if load in (None, level.load))
        return replace(each, result=replace(each.result, levels=levels, slo=Slo("given", limit)))

    workloads = tuple(replace(each, runs=tuple(map(run, each.runs))) for each in data.workloads)
    return replace(data, workloads=workloads)


def test_the_page_chooses_what_python_chooses_at_every_limit(data, page, tmp_path):
    script = RANKS.replace("LIMITS", str(LIMITS).replace("None", "null")) + "answer(found);"
    found = said_by(page, tmp_path, script)
    loads = [None, *(level.load for level in data.workloads[0].runs[0].result.levels)]
    chosen = set()
    for load, of_load in zip(loads, found, strict=True):
        for limit, seen in zip(LIMITS, of_load, strict=True):
            (expected,) = comparison(limited(data, load, limit))
            assert (seen["chosen"], seen["answer"]) == (expected.chosen, expected.reason), (load, limit)
            assert seen["ranks"]["int4_wo"] == "–"
            assert (seen["ranks"].get(expected.chosen) == "1") == bool(expected.chosen)
            assert ("no limit" if limit is None else f"at most {limit:g} ms") in seen["shown"]
            if expected.chosen not in (None, "none"):
                assert seen["tile"].startswith(f"{expected.chosen}: ")
            assert f"{load or 'concurrency 1, 4, 16'}; TP 1" in seen["caption"]
            chosen.add(expected.chosen)
    assert chosen == {None, "int4_awq"}


@pytest.mark.thorough
def test_the_slider_the_field_and_the_button_are_one_limit(page, tmp_path):
    script = """
const [slider, field, none] = ["[type=range]", "[type=number]", "button"].map(
  each => document.querySelector(`.controls ${each}`));
const state = () => [slider.value === slider.max, field.value, slider.getAttribute("aria-valuetext")];
const set = (input, value) => { input.value = value; input.dispatchEvent(new Event("input", {bubbles: true})); };
const seen = [[getComputedStyle(document.querySelector(".controls")).display, ...state()]];
set(slider, slider.max); seen.push(state());
set(slider, 0); seen.push(state());
set(field, "7"); seen.push(state());
set(field, "-1"); seen.push([...state(), field.getAttribute("aria-invalid")]);
none.click(); seen.push(state());
seen.push([slider, field].every(each => each.labels.length && !each.labels[0].hidden));
answer(seen);"""
    first, top, bottom, typed, wrong, again, labelled = said_by(page, tmp_path, script)
    assert first == ["flex", False, "10", "at most 10 ms"]
    assert top == again == [True, "", "no limit"]
    assert bottom[2] == "at most 3.37 ms"
    assert typed == [False, "7", "at most 7 ms"]
    assert wrong == [False, "-1", "at most 7 ms", "true"]
    assert labelled is True


def test_columns_sort_by_keyboard_and_come_back(page, tmp_path):
    """Sizes by their bytes, unknown values last; the third time is the order of the report."""
    script = """
const table = document.querySelector("#accuracy ~ figure table"), heads = [...table.tHead.rows].at(-1).cells;
const column = at => [...table.tBodies[0].rows].map(row => row.cells[at].textContent);
const sorts = at => [1, 2, 3].map(() => { heads[at].querySelector("button").click();
                                          return [heads[at].getAttribute("aria-sort"), ...column(at)]; });
const sizes = document.querySelector(".ranking table");
const engine = [...sizes.tHead.rows].at(-1).cells[9];
engine.querySelector("button").click();
answer({
  loss: sorts(4), names: sorts(0), size: [...sizes.tBodies[0].rows].map(row => row.cells[9].textContent),
  focus: [...document.querySelectorAll("thead th[scope=col]")].every(each => each.firstChild.tagName === "BUTTON"),
  one: table.querySelectorAll("[aria-sort]").length,
});"""
    found = said_by(page, tmp_path, script)
    assert found["loss"] == [
        ["descending", "20.00", "0.50", "0.00", "–"],
        ["ascending", "0.00", "0.50", "20.00", "–"],
        [None, "–", "0.00", "0.50", "20.00"],
    ]
    assert found["names"][1][1:] == ["none", "int4_wo", "int4_awq", "fp8"]
    assert found["size"] == ["8.0 MiB", "5.7 MiB", "4.4 MiB", "4.2 MiB"]
    assert (found["focus"], found["one"]) == (True, 0)


def test_plots_tell_their_values_at_the_pointer_and_by_keys(page, tmp_path):
    script = """
const svg = document.querySelector("#load ~ .plot svg"), points = [...svg.querySelectorAll(".value")];
svg.scrollIntoView();
const tip = document.querySelector(".tip"), box = points[1].getBoundingClientRect();
const at = (x, y) => svg.dispatchEvent(new PointerEvent("pointermove", {clientX: x, clientY: y, bubbles: true}));
const key = name => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key: name, bubbles: true}));
at(box.left + 3, box.top + 3);
const said = [tip.hidden ? null : tip.textContent], place = tip.getBoundingClientRect();
at(1, 1); said.push(tip.hidden);
points[0].focus(); said.push(tip.textContent);
key("ArrowRight"); dispatchEvent(new Event("scroll")); said.push(tip.textContent, document.activeElement === points[1]);
key("Escape"); said.push(tip.hidden);
answer({said, inside: place.left >= 0 && place.right <= innerWidth && place.top >= 0,
        stops: points.filter(each => each.tabIndex === 0).length, titles: svg.querySelectorAll("title").length});"""
    found = said_by(page, tmp_path, script)
    first, second = (
        f"none, concurrency {users}: {rate} output tokens/s, TTFT p50 {ttft} ms, TTFT p99 {p99} ms, {rest}"
        for users, rate, ttft, p99, rest in (
            (1, "337", "7.00", "8.00", "ITL p50 2.25 ms, E2E p95 23.8 ms"),
            (4, "1,005", "10.0", "11.0", "ITL p50 3.00 ms, E2E p95 32.0 ms"),
        )
    )
    assert found["said"] == [second, True, first, second, True, True]
    assert (found["inside"], found["stops"], found["titles"]) == (True, 1, 0)


@pytest.mark.parametrize("width", [390, pytest.param(1280, marks=pytest.mark.thorough)])
def test_the_contents_stay_in_view(page, tmp_path, width):
    script = """
const nav = document.querySelector("nav"), settled = () => dispatchEvent(new Event("scroll"));
const now = () => nav.querySelector("[aria-current]").textContent;
const seen = [now()];
document.getElementById("sizes").scrollIntoView(); settled();
seen.push(now(), Math.round(nav.getBoundingClientRect().top),
          document.getElementById("sizes").getBoundingClientRect().top >= nav.getBoundingClientRect().bottom);
scrollTo(0, document.documentElement.scrollHeight); settled();
const link = nav.querySelector("[aria-current]").getBoundingClientRect();
seen.push(now(), link.left >= 0 && link.right <= innerWidth, document.documentElement.scrollWidth);
answer(seen);"""
    found = said_by(page, tmp_path, script, width=width)
    assert found == ["Summary", "Sizes and memory", 0, True, "Versions and machines", True, width]


@pytest.mark.thorough
def test_without_scripts_all_is_there_but_the_controls(page, tmp_path):
    still = re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    script = """
const shown = selector => [...document.querySelectorAll(selector)].filter(each => each.checkVisibility()).length;
answer([".controls", "button", ".ranking tr", ".ranking .callout"].map(shown));"""
    assert said_by(still, tmp_path, script) == [0, 0, 5, 1]
    assert page.count("<title>none, concurrency 4: 1,005 output tokens/s") == 2


@pytest.mark.thorough
def test_a_sentence_stands_where_no_latency_was_measured(data, tmp_path):
    def untimed(run):
        levels = tuple(
            replace(level, summary=replace(level.summary, ttft_s=Distribution(0))) for level in run.result.levels
        )
        return replace(run, result=replace(run.result, levels=levels, slo=Slo()))

    workloads = tuple(replace(each, runs=tuple(map(untimed, each.runs))) for each in data.workloads)
    script = """
const view = document.querySelector(".controls select");
view.selectedIndex = 1; view.dispatchEvent(new Event("change"));
answer([document.querySelectorAll("input").length, document.querySelector(".ranking").innerText]);"""
    inputs, text = said_by(render_html(document(replace(data, workloads=workloads))), tmp_path, script)
    assert inputs == 0
    assert "There is no slider for a TTFT limit" in text
    assert "at concurrency 1, loss" in text
