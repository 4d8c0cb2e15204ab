"""Rows that were packed in client processes are the same records in columns and in the stored file."""

import pickle
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipelines.domain.benchmark import Slo
from pipelines.domain.summary import summarise, whole_window
from pipelines.loadgen.health import collected, stored
from pipelines.loadgen.request_stream import ClientReport, PackedRows
from tests.support.load_records import RequestTiming, columns_of, from_columns

START = 10**15
SPANS = st.integers(0, 10**10)


@st.composite
def requests(draw: Any) -> RequestTiming:
    """One request, with a stamp for each response, without any, or failed."""
    due, sent = sorted((draw(SPANS), draw(SPANS)))
    stamps = tuple(sorted(draw(st.lists(st.integers(sent, 2 * 10**10), max_size=4))))
    error = draw(st.sampled_from([None, None, "timeout", "rejected"]))
    end = stamps[-1] if stamps else sent + draw(SPANS)
    first = stamps[0] if stamps else None
    return RequestTiming(0, due, sent, first, end, draw(st.integers(1, 99)), draw(st.integers(0, 99)), stamps, error)


@given(st.lists(requests(), min_size=1, max_size=12), st.randoms(use_true_random=False), st.integers(1, 3))
def test_packed_rows_are_the_same_records(load: list[RequestTiming], random: Any, processes: int) -> None:
    """In whatever order they finish, by however many processes."""
    load = [replace(each, index=place) for place, each in enumerate(load)]
    reports = [ClientReport(PackedRows(), {}, [], 0.0, 0, True) for _ in range(processes)]
    for each in random.sample(load, len(load)):
        first = None if each.first_token_ns is None else each.first_token_ns + START
        times = each.intended_ns + START, each.sent_ns + START, first, each.end_ns + START
        stamps = [stamp + START for stamp in each.chunk_ns]
        rows = reports[each.index % processes].rows
        rows.append((each.index, *times, each.isl, each.osl, stamps, each.error))
    found, plain = collected(pickle.loads(pickle.dumps(reports)), START), columns_of(load)
    for name in ("index", "due", "sent", "first_token", "end", "isl", "osl"):
        np.testing.assert_array_equal(getattr(found, name), getattr(plain, name))
    window, slo = whole_window(plain), Slo("given", 5000, 900)
    assert whole_window(found) == window
    assert summarise(found, window, slo) == summarise(plain, window, slo)
    columns = {name: [*chain.from_iterable(parts)] for name, parts in stored(found)}
    assert from_columns(columns) == load


def test_a_row_takes_eight_bytes_a_number() -> None:
    """Sixteen stamps and eight numbers, also on their way to the directing process."""
    rows = PackedRows()
    for place in range(1000):
        rows.append((place, START, START, START, START, 8, 16, range(START, START + 16), None))
    assert len(pickle.dumps(rows)) < 1000 * 8 * (16 + 8) + 1000
