"""Traces: real traffic in the columns of whoever wrote it."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.domain.errors import UserError
from pipelines.loadgen.trace import Trace, known_times, read_trace
from tests.support.load_settings import workload

OURS = '{"time": 1, "isl": 3, "osl": 4}\n'
SESSION: dict[str, Any] = {
    "id": "s1", "models": ["m"], "block_size": 64, "hash_id_scope": "local",
    "requests": [
        {"t": 2.0, "type": "n", "model": "m", "in": 100, "out": 10, "hash_ids": [1, 2]},
        {"t": 10.0, "type": "subagent", "agent_id": "a", "requests": [
            {"t": 0.5, "type": "s", "model": "m", "in": 7, "out": 3}, {"t": 3, "type": "n", "in": 8, "out": 3},
        ]},
        {"t": 11.0, "type": "s", "model": "m", "in": 9, "out": 9},
    ],
}  # fmt: skip


def turn(session: str | None, isl: int = 3, **when: Any) -> str:
    """A line of Mooncake's format."""
    named = {} if session is None else {"session_id": session}
    return json.dumps(named | when | {"input_length": isl, "output_length": 4}) + "\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where the trace is."""
    return tmp_path / "trace"


def read(file: Path, text: str, **settings: Any) -> Trace:
    """Write a trace and read it."""
    file.write_text(text)
    return read_trace(workload(trace=file, **settings))


def rows(trace: Trace) -> list[tuple[float, int, int]]:
    """Seconds, input and output tokens of each request."""
    return [(at / 1e9, isl, osl) for at, isl, osl in zip(trace.offset_ns, trace.isl, trace.osl, strict=True)]


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ('{"time": 5, "isl": 8, "osl": 2}\n\n{"time": 6.5, "isl": 9, "osl": 3}', {}),
        ("time,isl,osl\n5,8,2\n6.5,9,3\n", {}),
        ("\ufeffosl, time ,isl,who\r\n2,5,8,a\r\n3,6.5,9,b\r\n", {}),
        (
            '{"timestamp": 0, "input_length": 8, "output_length": 2, "hash_ids": [0, 1]}\n'
            '{"timestamp": 1500, "input_length": 9, "output_length": 3, "hash_ids": [0, 2]}',
            {},
        ),
        (
            '{"session_id": "a", "created_time": 100.5, "input_tokens": 8, "output_tokens": 2}\n'
            '{"session_id": "a", "created_time": 1600.5, "input_tokens": 9, "output_tokens": 3}',
            {},
        ),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            "2023-11-16 23:59:59.0000000,8,2\n2023-11-17 00:00:00.5000000,9,3\n",
            {},
        ),
        ("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,g,8,2,9,A\n6.5,g,9,3,9,A\n", {}),
        ("startTime,prompt_tokens,completion_tokens\n2026-01-02T03:04:05Z,8,2\n2026-01-02T04:04:06.5+01:00,9,3\n", {}),
        (
            '{"timestamp": 1700000000, "usage": {"prompt_tokens": 8, "completion_tokens": 2}}\n'
            '{"timestamp": 1700000001.5, "usage": {"prompt_tokens": 9, "completion_tokens": 3}}',
            {},
        ),
        (
            '{"timestamp": 1700000000000, "prompt_tokens": "8", "completion_tokens": 2.0}\n'
            '{"timestamp": 1700000001500, "prompt_tokens": 9, "completion_tokens": 3}',
            {},
        ),
        ("at,in_tokens,osl\n5000,8,2\n6500,9,3\n", {"columns": {"time": "at", "isl": "in_tokens", "unit": "ms"}}),
        (
            '{"at": 5, "tokens": {"in": 8, "out": 2}}\n{"at": 6.5, "tokens": {"in": 9, "out": 3}}',
            {"columns": {"time": "at", "isl": "tokens.in", "osl": "tokens.out", "unit": "s"}},
        ),
    ],
    ids=[
        "ours", "ours as CSV", "CSV of a spreadsheet", "Mooncake", "Dynamo", "Azure", "BurstGPT", "a log with dates",
        "a log with usage", "ms since 1970", "own columns", "own columns inside others",
    ],
)  # fmt: skip
def test_a_trace_is_read_in_the_columns_of_its_format(file: Path, text: str, settings: dict[str, Any]) -> None:
    """Two requests, 1.5 s apart."""
    assert rows(read(file, text, **settings)) == [(0.0, 8, 2), (1.5, 9, 3)]


@pytest.mark.parametrize("indent", [None, 1])
def test_a_session_has_the_requests_of_its_subagents(file: Path, indent: int | None) -> None:
    """Those of the subagent begin at 10 s, before which none of their own times is."""
    trace = read(file, json.dumps(SESSION, indent=indent))
    assert rows(trace) == [(0.0, 100, 10), (8.5, 7, 3), (9.0, 9, 9), (11.0, 8, 3)]
    assert trace.notes == ("hash_ids are not used: prompts share what workload.shared_prefix_share says",)


def test_times_from_the_start_of_the_session_stay(file: Path) -> None:
    """A subagent's requests may count from there as well."""
    inner = [{"t": 10.5, "in": 7, "out": 3}]
    requests = [SESSION["requests"][0], {"t": 10.0, "type": "subagent", "requests": inner}]
    assert [at for at, *_ in rows(read(file, json.dumps(SESSION | {"requests": requests})))] == [0.0, 8.5]


def test_a_trace_starts_at_zero_in_order_of_time(file: Path) -> None:
    """Twice as fast halves the times; what was out of order is told."""
    trace = read(file, '{"time": 12, "prompt": "hi", "osl": 4}\n{"time": 10, "isl": 8, "osl": 2}\n', trace_speed=2)
    assert rows(trace) == [(0.0, 8, 2), (1.0, 0, 4)]
    assert trace.prompts == {1: "hi"}
    assert trace.notes == ("1 line was earlier than the one before: sorted by time",)


@pytest.mark.parametrize("name", ["delay", "delay_ms"])
def test_a_turn_with_a_delay_is_behind_the_turn_whose_answer_it_waits_for(file: Path, name: str) -> None:
    """Sessions may be mixed; a later turn with a time of its own begins anew. Twice as fast halves delays, too."""
    mixed = [
        turn("b", 1, timestamp=3000), turn("a", 2, timestamp=1000), turn("b", 3, **{name: 400}),
        turn(None, 4, timestamp=2000), turn("a", 5, **{name: 0}), turn("b", 6, **{name: 600}),
        turn("a", 7, timestamp=4000), turn("a", 8, **{name: 200}),
    ]  # fmt: skip
    trace = read(file, "".join(mixed), trace_speed=2)
    assert [(at, isl) for at, isl, _ in rows(trace)] == [
        (0.0, 2), (0.0, 5), (0.5, 4), (1.0, 1), (0.2, 3), (0.3, 6), (1.5, 7), (0.1, 8)
    ]  # fmt: skip
    assert trace.waiting == {1, 4, 5, 7}
    assert trace.notes[-1] == "4 of 8 requests are turns with a delay: each begins so long after the answer before"


def test_delays_are_read_in_columns_of_ones_own(file: Path) -> None:
    """As times, in the unit of times."""
    columns = {"time": "at", "session": "who", "delay": "pause", "unit": "ms"}
    trace = read(file, "at,who,pause,isl,osl\n7,a,,8,2\n,a,1500,9,3\n", columns=columns)
    assert (rows(trace), trace.waiting) == ([(0.0, 8, 2), (1.5, 9, 3)], {1})


def test_what_needs_all_times_names_the_turns_without(file: Path) -> None:
    """A model cannot know when a server's answers end."""
    read(file, turn("a", timestamp=0) + turn("a", delay=1))
    with pytest.raises(UserError, match=r"has 1 turn with a delay after the answer before, .* Do it"):
        known_times(workload(trace=file), "Do it.")
    read(file, turn("a", timestamp=0) + turn("a", timestamp=1))
    assert [*known_times(workload(trace=file), "")] == [0, 10**6]


def test_a_changed_file_is_read_again(file: Path) -> None:
    """Reading it once for lengths, rate and day does not mean reading it once for ever."""
    assert len(read(file, OURS).osl) == 1
    assert len(read(file, OURS * 3).osl) == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("time,isl,osl\n", "is empty"),
        ("nonsense", "has no columns that are known; it has nonsense. Known: ours: time, isl, osl; Mooncake"),
        ("time,isl\n1,2\n", "has no columns that are known; it has time, isl"),
        (OURS + "nonsense", "line 2 is not JSON"),
        (OURS + "7", "line 2 is no JSON object"),
        (OURS + '{"time": 1, "osl": 4}', "line 2, column isl is empty. It is a whole number from 1"),
        (OURS + '{"time": 1, "isl": 3, "prompt": "both", "osl": 4}', "line 2 has isl and prompt; one of them"),
        (
            OURS + '{"time": "noon", "isl": 3, "osl": 4}',
            "line 2, column time: 'noon' is not a time. It is a number",
        ),
        (OURS + '{"time": true, "isl": 3, "osl": 4}', "line 2, column time: 'True' is not a time"),
        (OURS + '{"time": NaN, "isl": 3, "osl": 4}', "line 2, column time: 'nan' is not a time"),
        (OURS + '{"time": 1, "isl": 3, "osl": 0}', "line 2, column osl: '0' is not .* that failed"),
        (OURS + '{"time": 1, "isl": 3.5, "osl": 1}', "line 2, column isl: '3.5' is not a number of tokens"),
        (OURS + '{"time": 1, "prompt": ["a"], "osl": 1}', "line 2, column prompt: .* is not a prompt"),
        ('time,prompt,osl\n1,"two\nlines",2\n2,one,-1\n', "line 4, column osl: '-1' is not a number of tokens"),
        ("time,isl,osl\n1,2\n", "line 2 has 2 values, and the header 3"),
        ("time,isl,osl\n0,1,1\n1e300,1,1\n", "lasts 1e\\+300 s. At most 1,000,000,000 s. Give the unit"),
        ('{"requests": [1]}', "request 1 is no JSON object"),
        (json.dumps(SESSION) + "\n" + json.dumps(SESSION), "line 2 begins another session; when it starts is not in"),
        (
            turn("a", timestamp=0) + turn("b", delay=5),
            "line 2, column delay: there is no answer before it in its session .* Give the first turn of each session "
            "a timestamp, and each turn its session_id",
        ),
        (turn("b", delay=5), "line 1, column delay: there is no answer before it in its session"),
        (turn(None, timestamp=0) + turn(None, delay=5), "line 2, column delay: there is no answer before it"),
        (turn("a", timestamp=0) + turn("a", delay=-1), "line 2, column delay: '-1' is not a delay. It is a number"),
        (turn("a", timestamp=0) + turn("a", delay="soon"), "line 2, column delay: 'soon' is not a delay"),
        (turn("a", timestamp=0) + turn("a", timestamp=9, delay=1), "line 2 has timestamp and delay; one of them is"),
        (turn("a", timestamp=0) + turn("a"), "line 2, column timestamp is empty"),
        (turn("a", timestamp=0) + turn("a", delay=1e16), "lasts 1e\\+13 s"),
        (
            '{"timestamp": 1700000000, "input_tokens": 3, "output_tokens": 4}',
            "the unit of 1700000000 is ms by the format, and looks like s since 1970.*columns={unit: s}",
        ),
        (
            '{"timestamp": 5, "prompt_tokens": 3, "completion_tokens": 4}',
            "the unit of 5 is not known. One of s, ms",
        ),
    ],
)
def test_what_cannot_be_read_is_named(file: Path, text: str, words: str) -> None:
    """With file, line and column, and what is allowed."""
    with pytest.raises(UserError, match=f"workload.trace={file}.*{words}"):
        read(file, text)


def test_a_column_that_is_not_there_is_named(file: Path) -> None:
    """With those that are."""
    with pytest.raises(UserError, match="has no column ts; it has time, isl, osl"):
        read(file, "time,isl,osl\n1,2,3\n", columns={"time": "ts"})


def test_a_missing_trace_is_refused(tmp_path: Path) -> None:
    """There is nothing to send."""
    with pytest.raises(UserError, match="missing cannot be read"):
        read_trace(workload(trace=tmp_path / "missing"))


def test_a_trace_alone_is_the_load(file: Path) -> None:
    """Nobody chose the closed loop; an arrival that is chosen is not replaced."""
    assert (workload(trace=file).arrival, workload(trace=file).name) == ("trace", "trace")


def test_results_without_columns_are_those_of_earlier_versions(file: Path) -> None:
    """Their keys are compared with stored ones."""
    assert "columns" not in workload(trace=file).model_dump(mode="json")
    assert workload(trace=file, columns={"time": "at"}).model_dump()["columns"] == {"time": "at"}
