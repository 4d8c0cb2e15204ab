"""The simulator's page in a real browser: the same numbers as in Python, phone width, both themes, keys, no network."""

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from pipelines.document.canvas import DARK, LIGHT
from pipelines.predict.simulate.files import page
from pipelines.predict.simulate.outcome import SimulatedLevel, measure
from pipelines.predict.simulator.interface import REFUSALS, OfferedLoad, SchedulerLimits, SimulatedRun
from pipelines.predict.simulator.run import TickCost, simulate
from tests.support.chromium import DARK_THEME, LIGHT_THEME, needs_chromium, said_by
from tests.support.simulated_records import cells_over_time

pytestmark = [pytest.mark.thorough, needs_chromium]
WORKED = json.loads((Path(__file__).parents[2] / "reference" / "seed_cases.json").read_text())["simulator_tick_model"][
    "cases"
]
BURST = [{"arrival": 0, "isl": 128, "osl": 10}] * 100


def mixed(seed: int, count: int, rate: float | None, longest: int = 20) -> list[dict[str, float]]:
    """Answers of all lengths, at once or at random."""
    random, now, load = Random(seed), 0.0, []
    for _ in range(count):
        now += random.expovariate(rate) if rate else 0.0
        load.append({"arrival": now, "isl": random.randint(1, 300), "osl": random.randint(1, longest)})
    return load


def case(policy: str, load: list[dict[str, float]], **other: Any) -> dict[str, Any]:
    engine = {"policy": policy, "slots": 4, "prefill": 2, "decode": 1, "chunks": 1, "max_num_tokens": None}
    until = other.pop("until", 1e6)
    return {"engine": engine | other, "load": load, "until": until}


CASES = {
    "worked: static": case("static", BURST, until=100),
    "worked: in-flight": case("inflight", BURST, until=100),
    "worked: one prefill": case("one_prefill", BURST, until=100),
    "worked: one prefill in two": case("one_prefill", BURST, chunks=2, until=100),
    **{f"{policy}, mixed": case(policy, mixed(1, 150, None)) for policy in ("static", "inflight", "one_prefill")},
    **{
        f"{policy}, at random": case(policy, mixed(2, 150, 0.2), slots=7, prefill=3.5, decode=1.25)
        for policy in ("static", "inflight", "one_prefill")
    },
    "in pieces": case("inflight", mixed(3, 120, 0.4), chunks=3, prefill=7),
    "static in pieces, cut": case("static", mixed(4, 120, None), chunks=4, prefill=2.2, until=77.5),
    "chunked": case("inflight_chunked", mixed(5, 120, 0.3), max_num_tokens=68),
    "chunked, little room": case("inflight_chunked", mixed(6, 80, None), slots=16, max_num_tokens=17, prefill=5),
    "chunked, no limit": case("inflight_chunked", mixed(7, 80, None), chunks=2),
    "budget for whole prompts": case("inflight", mixed(8, 80, None), slots=9, max_num_tokens=200),
    "fast decode": case("inflight", mixed(9, 60, 2.0), slots=1, prefill=0.3, decode=0.2),
    "nothing for long": case("static", [{"arrival": 40.25, "isl": 5, "osl": 1}, {"arrival": 90, "isl": 5, "osl": 3}]),
}


def in_python(wanted: dict[str, Any]) -> SimulatedRun:
    engine, load = wanted["engine"], wanted["load"]
    columns = (np.array([each[name] for each in load]) for name in ("isl", "osl", "arrival"))
    limits = SchedulerLimits(engine["policy"], engine["slots"], engine["max_num_tokens"])
    cost = TickCost(engine["prefill"], engine["decode"], engine["chunks"])
    return simulate(limits, OfferedLoad(*columns), cost, until=wanted["until"], iterations=True, backend="numpy")


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> dict[str, Any]:
    """All cases at once: starting a browser takes longer than simulating."""
    script = f"""
const found = {{}};
for (const [name, {{engine, load, until}}] of Object.entries({json.dumps(CASES)})) {{
  const run = simulate(engine, load, until);
  found[name] = {{run, counters: counters(run)}};
}}
answer(found);"""
    return said_by(page(), tmp_path_factory.mktemp("cases"), script)


def numbers(values: Any) -> list[float | None]:
    return [None if value != value else value for value in np.asarray(values).tolist()]


@pytest.mark.parametrize("name", CASES)
def test_every_step_is_the_same_as_in_python(browser, name):
    found, run = browser[name]["run"], in_python(CASES[name])
    rows, table = run.requests, run.iterations
    assert run.end == found["end"]
    assert numbers(rows.first_token) == [each["first"] for each in found["requests"]]
    assert numbers(rows.end) == [each["end"] for each in found["requests"]]
    assert numbers(rows.admitted) == [each["admitted"] for each in found["requests"]]
    assert rows.produced.tolist() == [each["produced"] for each in found["requests"]]
    assert table.start.tolist() == [each["start"] for each in found["iterations"]]
    assert table.seconds.tolist() == [each["ticks"] for each in found["iterations"]]
    assert table.queue.tolist() == [each["queue"] for each in found["iterations"]]
    assert [REFUSALS[int(code)] for code in table.refused] == [each["refused"] for each in found["iterations"]]
    cut = len(table.start) if np.isfinite(rows.end).all() else -1  # of a cut run nobody knows which token is the last
    cells = cells_over_time(run, CASES[name]["engine"]["slots"])
    assert cells[:cut].tolist() == [each["cells"] for each in found["iterations"]][:cut]


@pytest.mark.parametrize("name", CASES)
def test_the_counters_are_those_of_the_table(browser, name):
    found, run, engine = browser[name]["counters"], in_python(CASES[name]), CASES[name]["engine"]
    limits = SchedulerLimits(engine["policy"], engine["slots"], engine["max_num_tokens"])
    rows = run.requests
    load = OfferedLoad(rows.isl, rows.osl, rows.arrival)
    outcome = measure(run, limits, SimulatedLevel(load, None, 0, len(rows.arrival), True, "all"), 0.0)
    assert (found["done"], found["queue"]) == (outcome.requests, outcome.queue_end)
    same = {
        "ttft": outcome.ttft.mean,
        "e2e": outcome.e2e.mean,
        "itl": outcome.itl.mean,
        "requests_per_1k": 1000 * outcome.requests_rate,
        "tokens_per_1k": 1000 * outcome.tokens_rate,
        "slot_use": 100 * outcome.busy / outcome.slots,
    }
    assert {key: found[key] for key in same} == pytest.approx(same, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "number"),
    [("worked: static", 0), ("worked: in-flight", 0), ("worked: one prefill", 1), ("worked: one prefill in two", 2)],
)
def test_the_worked_examples_come_out(browser, name, number):
    found, wanted = browser[name]["counters"], WORKED[number]
    assert found["done"] == wanted["done"]
    assert found["ttft"] == pytest.approx(wanted["ttft"])
    assert found["e2e"] == pytest.approx(wanted["e2e"], abs=5e-5)
    assert (found["requests_per_1k"], found["tokens_per_1k"]) == (wanted["req_per_1k"], wanted["tok_per_1k"])


LOOK = """
document.body.offsetHeight;
const style = getComputedStyle(document.body);
const read = key => [...document.querySelectorAll(`td[data-counter=${key}]`)].map(each => each.dataset.value);
"""


def test_the_page_shows_the_run_it_was_made_for(tmp_path):
    load = mixed(10, 40, None)
    controls = {"slots": 3, "left": "static", "right": "inflight", "until": 1e5}
    made = page(controls, load)
    found = said_by(
        made,
        tmp_path,
        LOOK
        + """
const first = state.now, panel = (byId("left").clientWidth - LEFT) / 12;
byId("end").click();
answer({done: read("done"), end: [state.runs.left.end, state.runs.right.end], opens: 0 < first && first <= panel});""",
    )
    ends = [in_python(case(policy, load, slots=3)).end for policy in ("static", "inflight")]
    assert found == {"done": ["40", "40"], "end": ends, "opens": True}


@pytest.mark.parametrize("width", [400, 1280])
def test_the_animation_comes_first_and_the_form_is_folded(tmp_path, width):
    script = (
        LOOK
        + """
const box = id => { const {top, bottom} = byId(id).getBoundingClientRect(); return {top, bottom}; };
const form = () => [byId("settings").open, byId("controls").checkVisibility()], folded = form();
const seen = {left: box("left"), right: box("right"), play: box("play")};
byId("settings").querySelector("summary").click();
answer({...seen, folded, unfolded: form()});"""
    )
    found = said_by(page(), tmp_path, script, width=width)
    assert found["folded"] == [False, False]
    assert found["unfolded"] == [True, True]
    assert found["left"]["top"] < 200
    assert found["right"]["bottom"] < found["play"]["top"]
    assert found["play"]["bottom"] < 800  # the height of the frame


def test_the_controls_show_how_the_requests_of_the_run_arrive(tmp_path):
    controls = {"requests": 40, "arrival": "random", "rate": 22}
    script = LOOK + "answer([fields.arrival.value, fields.rate.value, fields.rate.disabled]);"
    assert said_by(page(controls, mixed(12, 40, 0.22)), tmp_path, script) == ["random", "22", False]


def test_a_run_beyond_the_ranges_of_the_controls_is_shown(tmp_path):
    """The folded form would hide the fault, and the page would be empty."""
    controls = {"requests": 40, "arrival": "random", "rate": 1e5, "until": 2e5, "isl": 20000, "prefill": 500}
    script = LOOK + 'byId("end").click(); answer([byId("fault").textContent, read("done"), fields.rate.value]);'
    found = said_by(page(controls, mixed(13, 40, 1000.0)), tmp_path, script)
    assert found == ["", ["40", "40"], "100000"]


def test_queues_of_both_sides_have_the_same_scale(tmp_path):
    """The same policy twice would look the same; a policy with a shorter queue must look shorter."""
    script = (
        LOOK
        + """
const high = id => {
  const canvas = byId(id), scale = devicePixelRatio || 1, slots = fields.slots.valueAsNumber * (ROW + GAP);
  const pen = canvas.getContext("2d"), top = Math.round((slots + 4 + LABEL) * scale), x = canvas.width - 3;
  const dots = pen.getImageData(x, top, 1, Math.round((QUEUE - 14 - LABEL) * scale)).data;
  return [...dots].filter((_, at) => at % 4 === 3 && dots[at] > 0).length;
};
go(120.5);  // the right edge of both canvases
const queue = read("queue").map(Number);
answer({queue, high: [high("left"), high("right")]});"""
    )
    controls = {"arrival": "random", "rate": 60, "requests": 100, "until": 300}
    found = said_by(page(controls), tmp_path, script)
    (static, inflight), (left, right) = found["queue"], found["high"]
    assert static > inflight > 0
    assert left / right == pytest.approx(static / inflight, rel=0.25)


def test_a_changed_length_draws_new_requests_and_the_button_brings_back_the_given_ones(tmp_path):
    script = (
        LOOK
        + """
const set = (name, value) => {
  fields[name].value = value;
  fields[name].dispatchEvent(new Event("input", {bubbles: true}));
};
const seen = [state.runs.left.requests.map(each => each.osl)];
set("mean", 3); set("spread", 0);
seen.push(state.runs.left.requests.map(each => each.osl));
byId("given").click();
seen.push(state.runs.left.requests.map(each => each.osl), byId("given-note").hidden);
answer(seen);"""
    )
    given, drawn, again, hidden = said_by(page({"requests": 5}, mixed(11, 5, None)), tmp_path, script)
    assert drawn == [3] * 5
    assert given == again == [each["osl"] for each in mixed(11, 5, None)]
    assert hidden is False


def test_it_is_played_stepped_and_jumped_with_the_keyboard(tmp_path):
    script = (
        LOOK
        + """
const press = key => document.body.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
const seen = [];
press("Home"); seen.push(state.now);
press("ArrowRight"); seen.push(state.now);
press("ArrowRight"); seen.push(state.now);
press("ArrowLeft"); seen.push(state.now);
press(" "); seen.push(state.playing, byId("play").textContent);
const before = state.now;
frame(performance.now() + 100); seen.push(state.now > before);
press(" "); seen.push(state.playing, byId("play").textContent);
press("End"); seen.push(state.now === Number(byId("time").max));
const controls = [...document.querySelectorAll("input, select, button")].filter(each => !each.disabled);
seen.push(controls.filter(each => each.tabIndex < 0).length);
seen.push(controls.filter(each => each.tagName !== "BUTTON" && !each.labels.length).length);
answer(seen);"""
    )
    found = said_by(page(), tmp_path, script)
    # 4 prompts of 2 ticks are one iteration of 8 ticks; then decode steps of one.
    assert found == [0, 8, 9, 8, True, "Pause", True, False, "Play", True, 0, 0]


def test_a_value_out_of_range_is_named_and_the_last_run_stays(tmp_path):
    script = (
        LOOK
        + """
const done = read("done");
fields.slots.value = 0; fields.slots.dispatchEvent(new Event("input", {bubbles: true}));
const same = String(read("done")) === String(done);
answer([byId("fault").textContent, fields.slots.getAttribute("aria-invalid"), same]);"""
    )
    fault, invalid, same = said_by(page(), tmp_path, script)
    assert fault.startswith("Slots")
    assert (invalid, same) == ("true", True)


@pytest.mark.parametrize(("theme", "colours"), [(LIGHT_THEME, LIGHT), (DARK_THEME, DARK)], ids=["light", "dark"])
def test_a_phone_shows_it_without_scrolling_sideways(tmp_path, theme, colours):
    script = (
        LOOK
        + """
const pen = byId("left").getContext("2d"), {width, height} = byId("left");
const dots = pen.getImageData(0, 0, width, height).data, seen = new Set();
for (let at = 0; at < dots.length; at += 4) {
  if (dots[at + 3] === 255) seen.add(`${dots[at]}, ${dots[at + 1]}, ${dots[at + 2]}`);
}
answer({
  inner: innerWidth, scroll: document.documentElement.scrollWidth, paper: style.backgroundColor, ink: style.color,
  fetched: performance.getEntriesByType("resource").length, painted: [...seen],
});"""
    )
    found = said_by(page(), tmp_path, script, theme, width=400)

    def rgb(role: str) -> str:
        return ", ".join(str(int(colours[role][at : at + 2], 16)) for at in (1, 3, 5))

    assert (found["inner"], found["fetched"]) == (400, 0)
    assert found["scroll"] <= 400
    assert (found["paper"], found["ink"]) == (f"rgb({rgb('paper')})", f"rgb({rgb('ink')})")
    assert {rgb(role) for role in ("wait", "work", "s3")} <= set(found["painted"])
