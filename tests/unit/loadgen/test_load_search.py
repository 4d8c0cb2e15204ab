"""The search of the largest load within the limits."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from pipelines.domain.benchmark import BenchmarkResult, LargestLoad, Slo
from pipelines.loadgen.config import load_faults
from pipelines.loadgen.run import benchmark_table
from pipelines.loadgen.search import LoadSearch, Probe, ProbePlan, fit, judged
from tests.support.load_records import RequestTiming, columns_of
from tests.support.load_settings import benchmark, workload
from tests.support.search_servers import Outcome, Queue, search, servers
from tests.unit.loadgen.test_load_shown import level, result

MS = 1_000_000
LIMIT = {"search": "max_load", "slo": {"ttft_ms": 500}}
FOUND = LargestLoad(
    kind="request_rate",
    attainment=0.95,
    confidence=0.95,
    load=12.31,
    low=11.9,
    high=12.74,
    binding="ttft",
    missed={"ttft": 0.048, "itl": 0.01},
    probes=14,
    requests=9312,
    seconds=412.0,
)


def test_the_interval_holds_the_capacity_of_a_queue() -> None:
    """Fifteen queues whose capacity is exact: open, bursty, closed."""
    outcomes = [(search(server, [k]), capacity) for k, (server, capacity) in enumerate(_queues())]
    inside = [each.answer.low <= capacity <= each.answer.high for each, capacity in outcomes]
    errors = [abs(each.answer.load / capacity - 1) for each, capacity in outcomes]
    assert sum(inside) >= len(inside) - 1
    assert np.median(errors) <= 0.03
    assert max(each.answer.probes for each, _ in outcomes) <= 40


def _queues() -> list[tuple[Queue, float]]:
    return list(servers(15, ("open", "bursty", "closed")))


def test_the_same_requests_say_less_when_bad_ones_come_together() -> None:
    """Ten times as correlated in time, an interval about three times as wide."""
    rng = np.random.default_rng(1)
    wide, narrow = (
        fit(
            [_probe(load, np.repeat(rng.random(4000 // run) > bad, run)) for load, bad in ((9.0, 0.03), (11.0, 0.08))],
            0.95,
        )
        for run in (40, 1)
    )
    assert narrow.dispersion < 1.5
    assert 15 < wide.dispersion < 80
    assert wide.half_width > 3 * narrow.half_width


def _probe(load: float, good: object) -> Probe:
    return Probe(ProbePlan(load, 60, 3, "final"), good, {}, load, 1.0)


class _ClientBound(Queue):
    """A server whose client is the limit from 20 requests/s on."""

    def run(self, load: float, seconds: float, warmup_s: float, rng: np.random.Generator) -> Outcome:
        outcome = super().run(load, seconds, warmup_s, rng)
        return replace(outcome, good=np.zeros(len(outcome.good), dtype=bool)) if load >= 20 else outcome


def test_a_client_that_is_the_limit_fails_no_load() -> None:
    """Each such load is tried twice, and the answer says from where on nothing is known."""
    searching, server = LoadSearch(benchmark(**LIMIT), closed=False), _ClientBound(64, 1.0)
    rng = np.random.default_rng(3)
    while (plan := searching.following()) is not None:
        good = server.run(plan.load, plan.seconds, plan.warmup_s, rng).good
        searching.add(good, {}, rate=plan.load, e2e_s=1.0, client_bound=plan.load >= 20)
    answer = searching.answer()
    assert (answer.load, answer.high) == (None, None)
    assert answer.low is not None
    assert 15 < answer.low < 20
    assert re.fullmatch(
        r"from [\d.]+ on the client was the limit; load from a larger or quieter machine", answer.reason
    )
    bound = [probe.load for probe in searching.probes if probe.client_bound]
    assert len(bound) == 2 * len(set(bound))


def test_a_client_that_held_a_larger_load_is_only_disturbed() -> None:
    """The smaller load is tried until it can be judged, and the search goes on as if nothing had been."""
    searching, server, rng, disturbed = (
        LoadSearch(benchmark(**LIMIT), closed=False),
        Queue(8, 1.0),
        np.random.default_rng(3),
        0,
    )
    while (plan := searching.following()) is not None:
        outcome = server.run(plan.load, plan.seconds, plan.warmup_s, rng)
        bound = 3 < plan.load < 6 and plan.stage == "explore" and disturbed < 4
        disturbed += bound
        searching.add(outcome.good, {}, rate=outcome.rate, e2e_s=outcome.e2e_s, client_bound=bound)
    assert disturbed == 4
    answer, capacity = searching.answer(), server.capacity()
    assert answer.low is not None
    assert answer.high is not None
    assert answer.low <= capacity <= answer.high


def test_a_range_that_holds_no_limit_is_said() -> None:
    """The largest load of the range passes, or the smallest fails."""
    easy = search(Queue(64, 1.0), [1], request_rate=[1, 8]).answer
    assert (easy.low, easy.load, easy.reason) == (8.0, None, "the range ends there")
    hard = search(Queue(4, 1.0, closed=True), [1], concurrency=[64, 128]).answer
    assert (hard.low, hard.load, hard.reason) == (None, None, "even the smallest load tried misses the limits")


def test_too_few_probes_make_a_wide_answer_and_say_so() -> None:
    """Never more probes than allowed."""
    answer = search(Queue(8, 1.0), [1], search_probes=9).answer
    assert answer.probes == 9
    assert answer.reason


def test_requests_are_judged_by_every_limit_in_the_order_due() -> None:
    """Late first token, slow tokens, both, an error, and one outside the window."""
    rows = [(3, 10, 20, None), (0, 90, 95, None), (1, 10, 90, None), (2, 10, 20, "timeout"), (9, 10, 20, None)]
    timings = [
        RequestTiming(k, due * MS, due * MS, (due + first) * MS, (due + end) * MS, 8, 11, error=error)
        for k, (due, first, end, error) in enumerate(rows)
    ]
    good, missed = judged(columns_of(timings), (0, 5 * MS), Slo("given", ttft_ms=50, itl_ms=4))
    assert good.tolist() == [False, False, False, True]
    assert missed == {"ttft": 1, "itl": 1, "errors": 1}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"search": "max_load"}, "search=max_load without a limit: add e.g. benchmark.slo.ttft_ms=500"),
        ({"search_tolerance": 0.2}, r"search_tolerance=0\.2 without a search"),
        (LIMIT | {"num_requests": 5}, "num_requests=5, which a search decides itself"),
        (LIMIT | {"window": "whole"}, "window=whole, which a search decides itself"),
        (LIMIT | {"concurrency": [1, 2, 4]}, r"concurrency=\[1,2,4\]; a search takes the smallest and the largest"),
    ],
)
def test_a_search_refuses_what_it_decides_itself(changes: dict[str, object], words: str) -> None:
    """At the plan, before a server starts."""
    with pytest.raises(ValidationError, match=words):
        benchmark(**changes)


def test_a_load_that_cannot_vary_is_not_searched() -> None:
    """A burst has no rate; an open loop needs none."""
    (fault,) = load_faults(workload(arrival="burst"), benchmark(**LIMIT))
    assert "workload.arrival=burst has none to vary" in str(fault)
    assert load_faults(workload(arrival="poisson"), benchmark(**LIMIT)) == []


def test_the_answer_is_stored_beside_the_levels_and_shown() -> None:
    """Results without a search are as before."""
    plain = result(level())
    assert "search" not in plain.to_json()
    found = replace(plain, slo=Slo("given", ttft_ms=500), search=FOUND)
    assert BenchmarkResult.from_json(json.loads(json.dumps(found.to_json()))).search == FOUND
    text = " ".join(benchmark_table(found).split())
    assert (
        "Largest load with 0.95 of the requests within TTFT 500 ms: 12.3 requests/s (95% interval 11.9 to 12.7). The "
        "limit is TTFT: 4.8 % of the requests near that load missed it. 14 probes, 9,312 requests, 412 s."
    ) in text
