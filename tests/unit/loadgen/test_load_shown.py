"""What a person sees: the table, the line of a level, the live view. All fit 80 columns."""

from dataclasses import replace
from typing import Any

import pytest

from pipelines.domain.benchmark import BenchmarkResult, ClientHealth, LoadPoint, Slo
from pipelines.domain.summary import SECOND, summarise
from pipelines.loadgen.health import read_metrics
from pipelines.loadgen.level import Meter, live_view, plain_view
from pipelines.loadgen.request_stream import SharedCounters
from pipelines.loadgen.run import _together, benchmark_table, level_line
from tests.support.load_records import RequestTiming, columns_of
from tests.support.load_settings import workload

MS = 1_000_000


def level(slo: Slo | None = None, **changes: Any) -> LoadPoint:
    """One request: TTFT 50, then 10 tokens at 5 ms each, in a window of 100 ms."""
    stamps = tuple(range(50 * MS, 96 * MS, 5 * MS))
    timing = RequestTiming(0, 0, 0, stamps[0], stamps[-1], 128, len(stamps), stamps)
    base = LoadPoint(
        arrival="closed",
        concurrency=16,
        request_rate=None,
        summary=summarise(columns_of([timing]), (0, SECOND // 10), slo),
        client=ClientHealth(False, "", {}),
        server={},
        requests_file="requests-1.json.gz",
    )
    return replace(base, **changes)


def result(*levels: LoadPoint, **changes: Any) -> BenchmarkResult:
    plain = BenchmarkResult(
        model="tiny_llama",
        precision="int4_awq",
        engine="openvino",
        tp_size=1,
        world_size=1,
        workload=workload().model_dump(mode="json"),
        protocol={},
        server={},
        machine={},
        versions={},
        measured_at="2026-01-01T00:00:00+00:00",
        slo=Slo(),
        levels=levels,
    )
    return replace(plain, **changes)


def test_the_table_shows_a_level_in_milliseconds() -> None:
    """10 requests/s, 100 tokens/s, TTFT 50, ITL 5, E2E 95."""
    lines = benchmark_table(result(level())).splitlines()
    assert lines[0] == "tiny_llama int4_awq, openvino, TP 1, ISL 128, OSL 10; times in ms"
    assert lines[2].split() == ["16", "10.0", "100", "50.0", "50.0", "5.00", "5.00", "95.0", "0"]


def test_each_of_many_remarks_has_a_mark_of_its_own() -> None:
    """A search has up to 40 loads, each with remarks that state its own figures."""
    loads = [level(notes=(f"Remark {number}.",)) for number in range(60)]
    lines = benchmark_table(result(*loads)).splitlines()
    marks = [line.split()[0] for line in lines if "Remark" in line]
    assert len(set(marks)) == 60
    assert marks[51:54] == ["Z", "(1)", "(2)"]
    assert [line.split()[-1] for line in lines[2:62]] == marks


def test_marks_are_explained_below_the_table_once() -> None:
    """The same remark at two levels has one letter."""
    busy = ClientHealth(True, "a client process filled CPU 1", {})
    first = level(client=busy, notes=("The queue grew.",))
    text = benchmark_table(result(first, level(client=busy), complete=False, reason="interrupted at concurrency 16"))
    assert [line.split()[-1] for line in text.splitlines()[2:4]] == ["ab", "b"]
    assert "a The queue grew." in text
    assert text.count("The client was the limit: a client process filled CPU 1.") == 1
    assert text.endswith("Incomplete: interrupted at concurrency 16.")


def test_goodput_has_a_column_when_there_are_limits() -> None:
    """And the limits are said."""
    slo = Slo("given", ttft_ms=500, itl_ms=4)
    text = benchmark_table(result(level(slo), slo=slo))
    assert "good/s" in text.splitlines()[1]
    assert "requests per second within TTFT 500 ms, ITL 4 ms." in text
    assert text.splitlines()[2].split()[-2:] == ["0.00", "0"]


def test_no_line_is_wider_than_the_terminal() -> None:
    """Long loads, large numbers, long remarks."""
    wide = level(Slo("x", 1), concurrency=None, request_rate=12.5, arrival="constant", notes=("word " * 60,))
    wide = replace(wide, summary=replace(wide.summary, requests_per_s=12345.6, output_tokens_per_s=1234567.8))
    text = benchmark_table(result(wide, slo=Slo("mlperf_llama3_1_405b_interactive", 4500, 80)))
    assert max(map(len, [*text.splitlines(), level_line(wide)])) <= 79


def test_a_run_that_was_cut_short_is_in_no_interval() -> None:
    """Ctrl-C in the third run of a load: the two before it are what was measured."""
    whole, cut = level(), replace(level(), complete=False, reason="interrupted")
    assert _together([whole, whole, cut]).runs == 2
    assert _together([whole, cut]) == whole
    assert _together([cut]) == cut


def test_a_level_in_one_line() -> None:
    """For when it has just finished."""
    assert level_line(level()) == "concurrency 16:  10 req/s  100 tok/s  TTFT 50.0 ms  ITL 5.00 ms"


def test_errors_are_never_what_has_no_room_on_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of the requests failed, and the line said nothing of it."""
    monkeypatch.setenv("COLUMNS", "60")
    failed = replace(level(), summary=replace(level().summary, errors={"server_error": 24}))
    assert level_line(failed) == "concurrency 16:  24 errors  10 req/s  100 tok/s"


def test_lengths_that_were_asked_for_and_not_kept_are_as_measured() -> None:
    """A server that ends its answers after 10 of 64 tokens."""
    assert "ISL 128, OSL 10; times in ms" in benchmark_table(result(level()))
    none = replace(level().summary, isl=replace(level().summary.isl, count=0, min=None, max=None))
    talks = workload(turns=2).model_dump(mode="json")  # whose lengths are always as measured
    assert "ISL 128" in benchmark_table(result(replace(level(), summary=none), workload=talks))
    kept = replace(level().summary, osl=replace(level().summary.osl, min=64, max=64))
    assert "ISL 128, OSL 64; times in ms" in benchmark_table(result(replace(level(), summary=kept)))


def test_a_narrow_terminal_shows_no_half_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """ITL 5 is not ITL 5.00 cut off; it could be 53.1."""
    monkeypatch.setenv("COLUMNS", "60")
    assert level_line(level()) == "concurrency 16:  10 req/s  100 tok/s  TTFT 50.0 ms"


FULL = "finishing  12346 req/s"


def test_the_live_line_fits_and_says_what_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rate over the last two seconds, in flight, TTFT, ITL, errors, time left."""
    clock = [0.0]
    monkeypatch.setattr("pipelines.loadgen.level.monotonic", lambda: clock[0])
    board = SharedCounters(1)
    meter, large = Meter(board), Meter(board)
    clock[0], board.cells[1:] = 2.0, [120, 101, 3, 0, 10_200_000, 100, 351_000, 100, 0]
    assert meter.line("measuring", 2.4) == "50.5 req/s  16 in flight  TTFT 102 ms  ITL 3.51 ms  3 errors  2 s left"
    board.cells[1:] = [10**7, 10**6, 123456, 0, 10**13, 10**6, 10**12, 10**6, 0]
    shown = list[str]()
    clock[0] = 0.0
    show = plain_view("load", shown.append)
    monkeypatch.setenv("COLUMNS", "60")
    clock[0] = 9.0
    show(line := large.line("finishing", 3599.0))
    assert max(map(len, "".join(shown).splitlines())) < 60
    assert " ".join("".join(shown).split()) == " ".join(f"load {line}".split())


def test_without_a_terminal_there_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every five seconds, under the load they belong to."""
    clock, lines = [0.0], list[str]()
    monkeypatch.setattr("pipelines.loadgen.level.monotonic", lambda: clock[0])
    show = plain_view("concurrency 16384", lines.append)
    for clock[0] in (1.0, 5.0, 6.0, 9.9, 10.0):
        show(FULL)
    assert lines == [f"  concurrency 16384\n  {FULL}\n", f"  {FULL}\n"]


def test_the_terminal_view_opens_and_closes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It leaves nothing behind."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with live_view("concurrency 4") as show:
        show(FULL)
    assert capsys.readouterr().out == ""


def test_metrics_of_the_kv_cache_are_read() -> None:
    """Families of TensorRT-LLM's reporter; others are passed over; models add up."""
    page = (
        "# TYPE nv_trt_llm_kv_cache_block_metrics gauge\n"
        'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="a",version="1"} 12\n'
        'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="b",version="1"} 3\n'
        "# TYPE nv_inference_count counter\nnv_inference_count 7\n"
    )
    assert read_metrics(page) == {"kv_cache_block_used": 15}


@pytest.mark.parametrize(
    ("name", "value"),
    [("vllm:prefix_cache_hits_total", 96.0), ("trtllm_prompt_cached_tokens_total", 96.0)],
)
def test_tokens_from_the_kv_cache_are_read(name: str, value: float) -> None:
    """Counters of vLLM and of trtllm-serve, not when they were created."""
    created = f"{name.removesuffix('_total')}_created"
    page = f'# TYPE {name} counter\n{name}{{model_name="m"}} {value}\n'
    page += f'# TYPE {created} gauge\n{created}{{model_name="m"}} 1.7e9\n'
    assert read_metrics(page)["cached_tokens"] == value
