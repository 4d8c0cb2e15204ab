"""The search of the largest load on 200 simulated servers of known capacity: error, intervals, probes and seconds."""

from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest

from tests.support.search_servers import Searched, Server, search, servers

pytestmark = pytest.mark.thorough


def _searched(item: tuple[int, Server, float]) -> tuple[Searched, float]:
    number, server, capacity = item
    return search(server, [number, 99]), capacity


def test_intervals_cover_as_often_as_they_say() -> None:
    """0.93 to 0.97 hold the capacity, at most 0.05 begin above it, the median error is at most 3 %."""
    made = [(number, *each) for number, each in enumerate(servers(200))]
    with ProcessPoolExecutor(2) as pool:
        outcomes = list(pool.map(_searched, made))
    answers, truth = [each.answer for each, _ in outcomes], np.array([capacity for _, capacity in outcomes])
    load, low, high = (
        np.array([default if (value := getattr(answer, name)) is None else value for answer in answers])
        for name, default in (("load", 0.0), ("low", 0.0), ("high", np.inf))
    )
    assert np.median(np.abs(load / truth - 1)) <= 0.03
    assert 0.93 <= np.mean((low <= truth) & (truth <= high)) <= 0.97
    assert np.mean(low > truth) <= 0.05
    assert np.median([answer.probes for answer in answers]) <= 24
    assert np.median([each.seconds for each, _ in outcomes]) <= 1500
