"""The pictures: what is drawn, in words that are really in them; the same input gives the same bytes."""

import numpy as np
import pytest

from pipelines.document.blocks import Figure
from pipelines.predict.simulate.pictures import MAX_SLOTS, DrawnRun, Point, PolicyCurve, curves_picture, slots_picture
from pipelines.predict.simulator.interface import OfferedLoad, SchedulerLimits
from pipelines.predict.simulator.run import TickCost, simulate

pytestmark = pytest.mark.pictures


def slots(count: int, until: float = 30, policies: tuple[str, ...] = ("static", "inflight")) -> Figure:
    load = OfferedLoad(np.full(30, 8), np.arange(30) % 7 + 1, np.zeros(30))
    runs = [
        DrawnRun(
            name, simulate(SchedulerLimits(name, count), load, TickCost(), iterations=True, backend="numpy"), count
        )
        for name in policies
    ]
    return slots_picture(runs, unit="ticks", until=until, caption="4 slots; all at once")


@pytest.fixture(scope="module")
def drawn() -> Figure:
    return slots(4)


def test_every_kind_of_cell_is_named_and_explained(drawn):
    for text in (
        "Context 1<",
        "Gen<",
        "NoOp<",
        "Context: prompt",
        "Gen: a token",
        "EoS: the last token",
        "time, ticks",
    ):
        assert text in drawn.svg


def test_it_says_what_was_simulated_and_that_it_is_modelled(drawn):
    assert "Simulated: 4 slots; all at once" in drawn.svg
    assert drawn.origin == "modelled"
    assert "static: 30 requests done" in drawn.alt


def test_the_same_run_gives_the_same_picture(drawn):
    assert slots(4).png == drawn.png


def test_more_slots_than_can_be_read_are_named_not_drawn():
    for count, said in ((20, f"(first {MAX_SLOTS} of 20 slots)"), (2048, f"(first {MAX_SLOTS} of 30 slots in use)")):
        assert said in slots(count, policies=("inflight",)).svg  # 30 requests at once


def test_slots_that_were_never_in_use_are_rows_of_a_few_only():
    load = OfferedLoad(np.full(5, 8), np.full(5, 4), np.zeros(5))
    for count, rows, said in ((8, 8, "inflight<"), (2048, 5, "inflight (5 slots in use)<")):
        run = simulate(SchedulerLimits("inflight", count), load, TickCost(), iterations=True, backend="numpy")
        shown = DrawnRun("inflight", run, count)
        assert shown.rows == rows
        assert said in slots_picture([shown], unit="ticks", until=9, caption="").svg


def test_curves_name_their_units_and_loads():
    points = tuple(Point(users, 10.0 * users, 100.0 * users, (0.01, 0.02), None) for users in (1.0, 2.0, 4.0))
    made = curves_picture(
        [PolicyCurve("static", points)], unit="s", rate_unit="s", load="concurrency", caption="a model on a GPU"
    )
    for text in ("output tokens per s", "ms, p50 and p95", "concurrency", "static", ">4<"):
        assert text in made.svg
    assert "static: 400 output tokens per s at 4" in made.alt
