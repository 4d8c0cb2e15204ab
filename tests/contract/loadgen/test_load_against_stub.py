"""The load generator with all its processes against a server whose behaviour is known exactly."""

import gzip
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipelines.domain.benchmark import RESULT, BenchmarkResult
from pipelines.domain.errors import UserError
from pipelines.loadgen import config as load_settings
from pipelines.loadgen import run
from pipelines.loadgen.client_processes import ClientProcesses
from pipelines.loadgen.run import run_benchmark
from tests.support.load_records import RequestTiming, from_columns
from tests.support.load_settings import ROOT, TINY_LLAMA, benchmark, workload
from tests.support.stub_triton import Running, running
from tests.support.yardstick import oversleeping

QUICK = {"warmup_s": 0.2, "duration_s": 0.8}
SHORT = {"isl": 16, "osl": 4}


def measure(
    url: str, folder: Path, work: dict[str, Any] | None = None, model: str = "ensemble", **how: Any
) -> BenchmarkResult:
    """A short benchmark; the result as it was written."""
    others = url.startswith("http") or model != "ensemble"
    result = run_benchmark(
        url,
        workload(**SHORT | (work or {})),
        benchmark(**QUICK | how | {"model_name": model} | ({"url": url} if others else {})),
        labels={"model": "stub", "precision": "none"},
        tokenizer_dir=TINY_LLAMA,
        out_dir=folder,
        metrics_url=how.get("metrics_url"),
    )
    assert BenchmarkResult.from_json(json.loads((folder / RESULT).read_text())) == result
    return result


def records(folder: Path, number: int = 1) -> list[RequestTiming]:
    """One level's requests."""
    with gzip.open(folder / f"requests-{number}.json.gz", "rt") as file:
        return from_columns(json.load(file))


def test_a_closed_loop_keeps_its_concurrency_and_measures_the_servers_times(tmp_path: Path) -> None:
    """First token after 30 ms, then 3 x 10 ms: 4 users make at most 4 / 60 ms = 66.7 requests/s.

    Upper limits are the server's own times: on a busy machine it answers late, and the client has to say so. What the
    client adds is its way through the same machine, which also wakes a thread here late.
    """
    with running("--ttft-ms", "30", "--itl-ms", "10") as server:
        with oversleeping() as overslept_s:
            (level,) = measure(server.url, tmp_path, concurrency=4).levels
        served = server.stamps()
    summary = level.summary
    assert summary.ttft_s.min >= 0.0295  # type: ignore[operator]
    assert summary.itl_s.max >= 0.0095  # type: ignore[operator]
    added_ms = [
        ((t.first_token_ns - t.sent_ns - first + arrived) / 1e6, (t.end_ns - t.first_token_ns - last + first) / 1e6)
        for t in records(tmp_path)
        if t.first_token_ns is not None
        for arrived, first, last in [served[t.index]]
    ]
    assert min(added for added, _ in added_ms) > 0
    limit_ms = 4 + 2e3 * max(overslept_s)
    assert all(min(column) < limit_ms for column in zip(*added_ms, strict=True))
    changes = sorted((at, step) for t in records(tmp_path) for at, step in ((t.sent_ns, 1), (t.end_ns, -1)))
    assert max(accumulate(step for _, step in changes)) == 4
    assert summary.requests_per_s * summary.e2e_s.mean > 2  # type: ignore[operator]
    assert summary.requests_per_s < 66.8
    assert summary.osl.min == summary.osl.max == 4
    assert summary.isl.min == summary.isl.max == 16
    assert level.server["statistics"]["ensemble"]["succeeded"] >= summary.requests > 0
    assert level.complete


def test_tokens_that_travel_together_are_all_counted(tmp_path: Path) -> None:
    """Of 6 asked for, responses of 2, 3, 4, 5 and 1 tokens: counts that rise are not sums."""
    with running("--joined") as server:
        (level,) = measure(server.url, tmp_path, {"osl": 6}, concurrency=2).levels
    assert level.summary.osl.min == level.summary.osl.max == 15
    assert len(records(tmp_path)[0].chunk_ns) == 5


def test_an_open_loop_keeps_its_schedule_whatever_the_server_does(tmp_path: Path) -> None:
    """20 per second at a server that does 10: the queue is measured from when requests were due, and said."""
    with running("--ttft-ms", "100", "--slots", "1") as server:
        work = {"arrival": "constant"}
        (level,) = measure(server.url, tmp_path, work, request_rate=20, duration_s=1.6).levels
    times = [t.intended_ns for t in records(tmp_path)]
    assert times == [k * 50_000_000 for k in range(1, len(times) + 1)]
    assert level.summary.ttft_s.max > 0.5  # type: ignore[operator]
    assert any("The queue grew" in note for note in level.notes)


@pytest.mark.parametrize(("warmup_s", "said"), [(0.2, True), (1.5, False)])
def test_answers_that_take_longer_than_the_warm_up_are_said(tmp_path: Path, warmup_s: float, said: bool) -> None:
    """Answers of 1 s: without as much warm-up, none ends in the first 0.8 s of the window, at 20 served per second."""
    with running("--ttft-ms", "250", "--itl-ms", "250") as server:
        how = {"request_rate": 20, "duration_s": 2.0, "warmup_s": warmup_s}
        (level,) = measure(server.url, tmp_path, {"arrival": "constant"}, **how).levels
    notes = [note for note in level.notes if "Requests took longer than the warm-up of 0.2 s" in note]
    assert len(notes) == said
    assert all("Set benchmark.warmup_s=2 or more." in note for note in notes)


@pytest.fixture(scope="module")
def quick() -> Iterator[str]:
    """The address of a server that answers after 5 ms, for tests that ask nothing else of it."""
    with running("--ttft-ms", "5") as server:
        yield server.url


def test_two_processes_measure_one_load(quick: str, tmp_path: Path) -> None:
    """Every index once, on one clock."""
    result = measure(quick, tmp_path, {"arrival": "poisson"}, request_rate=60, processes=2)
    rows = records(tmp_path)
    assert [t.index for t in rows] == list(range(len(rows)))
    assert [t.intended_ns for t in rows] == sorted(t.intended_ns for t in rows)
    assert result.levels[0].client.facts["processes"] == 2


def test_a_whole_window_has_exactly_the_number_asked_for(quick: str, tmp_path: Path) -> None:
    """From the first request to the last response, start burst inside, and the protocol says so."""
    how = {"window": "whole", "duration_s": None, "num_requests": 21, "concurrency": 4}
    result = measure(quick, tmp_path, **how)
    assert result.levels[0].summary.requests == len(records(tmp_path)) == 21
    assert result.protocol["start_burst_in_window"] is True


def test_a_steady_window_ends_with_the_number_asked_for(quick: str, tmp_path: Path) -> None:
    """Requests of the warm-up and those still under way are not in it."""
    result = measure(quick, tmp_path, duration_s=None, num_requests=21, concurrency=4)
    assert result.levels[0].summary.requests == 21 < len(records(tmp_path))
    assert result.protocol["start_burst_in_window"] is False


@pytest.mark.parametrize(("enough", "seconds"), [(20, (0.5, 1.9)), (10_000, (2.0, 2.6))])
def test_a_window_goes_on_until_there_are_enough_requests(
    enough: int, seconds: tuple[float, float], quick: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With duration_s=auto, between a shortest and a longest time."""
    for module in (load_settings, run):
        monkeypatch.setattr(module, "AUTO_SECONDS", (0.5, 2.0))
        monkeypatch.setattr(module, "AUTO_REQUESTS", enough)
    result = measure(quick, tmp_path, duration_s="auto", concurrency=1)
    begin, end = json.loads(gzip.decompress((tmp_path / "requests-1.json.gz").read_bytes()))["window_ns"]
    assert seconds[0] <= (end - begin) / 1e9 <= seconds[1]
    assert result.levels[0].summary.requests >= min(enough, 30)
    assert (result.protocol["most_duration_s"], result.protocol["enough_requests"]) == (2.0, enough)


def test_a_server_that_closes_its_index_is_measured(tmp_path: Path) -> None:
    with running("--restricted") as server:
        result = measure(server.url, tmp_path, concurrency=2)
    assert result.server["model_versions"] == {"ensemble": "1"}


def test_without_streaming_there_is_no_ttft(tmp_path: Path) -> None:
    """Only E2E; output tokens still counted."""
    with running("--ttft-ms", "5", "--not-decoupled") as server:
        (level,) = measure(server.url, tmp_path, concurrency=2, streaming=False).levels
    assert (level.summary.ttft_s.count, level.summary.itl_s.count) == (0, 0)
    assert level.summary.osl.min == 4


def test_a_server_that_refuses_some_is_measured_with_its_errors(tmp_path: Path) -> None:
    """Two at a time allowed, four users: rejected ones are counted by kind, the others measured."""
    with running("--ttft-ms", "20", "--max-active", "2") as server:
        (level,) = measure(server.url, tmp_path, concurrency=4).levels
    assert level.summary.errors["rejected"] > 0
    assert level.summary.requests > 0
    assert any("Exceeds maximum queue size" in note for note in level.notes)


def test_a_request_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    """One at a time, 200 ms each: of two users one waits 400 ms, above the limit of 300 ms."""
    with running("--ttft-ms", "200", "--slots", "1") as server:
        (level,) = measure(server.url, tmp_path, concurrency=2, timeout_s=0.3, min_requests=3).levels
    assert set(level.summary.errors) == {"timeout"}
    assert any(t.ok for t in records(tmp_path))
    slow = [t.end_ns - t.sent_ns for t in records(tmp_path) if t.error]
    assert 0.3e9 <= min(slow) <= max(slow) < 0.45e9


def test_a_server_that_answers_nothing_in_time_is_said(tmp_path: Path) -> None:
    """700 ms against a limit of 200 ms."""
    with (
        running("--ttft-ms", "700") as server,
        pytest.raises(UserError, match=r"failed \(timeout\): not finished within 0.2 s \(benchmark.timeout_s\)"),
    ):
        measure(server.url, tmp_path, concurrency=2, timeout_s=0.2, min_requests=1, duration_s=0.2)


def test_a_search_tries_loads_around_what_the_server_can_do(tmp_path: Path) -> None:
    """4 slots of 60 ms: the 16th user waits for three others, so TTFT is 210 ms at least, whatever the machine does."""
    how = {"search": "max_load", "search_probes": 8, "slo": {"ttft_ms": 100}, "warmup_s": 0.1, "duration_s": 0.6}
    with running("--ttft-ms", "30", "--itl-ms", "10", "--slots", "4") as server:
        result = measure(server.url, tmp_path, concurrency=[1, 64], **how)
    users = [level.concurrency for level in result.levels]
    assert users[0] == 1
    assert result.search is not None
    assert result.search.probes == len(users) <= 8
    assert {level.summary.goodput_per_s for level in result.levels if (level.concurrency or 0) >= 20} <= {0.0}
    assert (result.search.low or 1) < 20
    assert len(records(tmp_path, len(users))) >= 10


@pytest.mark.thorough
def test_a_queue_that_certainly_grows_without_bound_ends_the_load(tmp_path: Path) -> None:
    """80 per second at a server that does 40, for a minute: the queue leaves what chance explains after about 4 s."""
    with running("--ttft-ms", "25", "--slots", "1") as server:
        work = {"arrival": "poisson", "osl": 1}
        (level,) = measure(server.url, tmp_path, work, request_rate=80, duration_s=60).levels
    assert level.complete
    assert level.summary.window_s < 30
    assert any("queue grew without bound" in note for note in level.notes)


@pytest.mark.thorough
def test_a_server_that_dies_leaves_what_was_measured(tmp_path: Path) -> None:
    """The level is cut short with the reason; the level after it is not tried."""

    def die() -> None:
        wait_for_requests(server)
        server.process.kill()

    with running("--ttft-ms", "10") as server:
        threading.Thread(target=die).start()
        result = measure(server.url, tmp_path, concurrency=[2, 3, 4], duration_s=60)
    assert not result.complete
    assert "the server stopped answering" in result.reason
    (level,) = result.levels
    assert (level.complete, level.summary.requests > 10) == (False, True)
    assert level.summary.errors["connection"] > 0


@pytest.mark.parametrize(
    ("options", "how", "words"),
    [
        (["--not-decoupled"], {}, "'ensemble' is not decoupled.*streaming=false"),
        (["--without-input", "max_tokens"], {}, "has no input 'max_tokens'"),
        (["--without-input", "stream"], {}, "has no input 'stream'"),
        ([], {"model": "ensembel"}, "'ensembel' is not a model .* It has broken, ensemble. Did you mean 'ensemble'"),
        (["--restricted"], {"model": "ensembel"}, "'ensembel' is not ready .* Ready are ensemble. Did you mean"),
        (["--restricted"], {"model": "broken"}, "'broken' is not ready on .*, or not a model. Ready are ensemble.$"),
        ([], {"model": "broken"}, r"'broken' on .* is not ready: UNAVAILABLE \(no engine\)"),
        (["--refuse", "prompt too long"], {}, r"All \d+ requests at concurrency 1 failed \(invalid\): prompt too long"),
    ],
)
def test_what_cannot_be_measured_is_said_at_once(
    tmp_path: Path, options: list[str], how: dict[str, Any], words: str
) -> None:
    """Before any load, or with the server's own words."""
    with running(*options) as server, pytest.raises(UserError, match=words):
        measure(server.url, tmp_path, **how)


def wait_for_requests(server: Running) -> None:
    """Until the warm-up of 0.2 s is over and the window has some: at 10 ms each, 200 take a second or two."""
    while len(server.stamps()) < 200:
        time.sleep(0.05)


def test_no_server_is_said_at_once(tmp_path: Path) -> None:
    """With the address and the usual mistake."""
    with pytest.raises(UserError, match=r"No Triton server responds at 127.0.0.1:9 .*8001"):
        measure("127.0.0.1:9", tmp_path)


SCRIPT = """
import sys
from pathlib import Path
from tests.contract.loadgen.test_load_against_stub import measure
if __name__ == "__main__":
    result = measure(sys.argv[1], Path(sys.argv[2]), concurrency=[1, 2], duration_s=float(sys.argv[3]))
    print(result.complete, result.reason)
"""


def start(tmp_path: Path, url: str, seconds: float) -> subprocess.Popen[str]:
    """A benchmark in a process of its own, as a person starts it."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), url, str(tmp_path), str(seconds)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    """SIGINT to the whole process group, as a terminal sends it, in the middle of the window."""
    with running("--ttft-ms", "10") as server, start(tmp_path, server.url, 60) as process:
        wait_for_requests(server)
        os.killpg(process.pid, signal.SIGINT)
        words, _ = process.communicate(timeout=60)
    assert words.strip() == "False interrupted at concurrency 1"
    result = BenchmarkResult.from_json(json.loads((tmp_path / RESULT).read_text()))
    assert result.levels[0].summary.requests > 10
    assert len(records(tmp_path)) > 10


def test_a_client_process_that_dies_ends_the_load_at_once() -> None:
    """The others would go on for as long as the load lasts, and what they measure is another load."""
    with ClientProcesses(2) as clients:
        victim, _ = multiprocessing.active_children()
        victim.kill()
        victim.join()
        with pytest.raises(UserError, match="A client process of the load generator ended with code -9"):
            clients.finished(0)
        with pytest.raises(UserError, match="A client process of the load generator ended with code -9"):
            clients.abort()


def test_a_script_that_measures_is_not_run_again_by_the_clients(tmp_path: Path) -> None:
    """Scripts that call `pipelines.api` seldom begin with `if __name__ == "__main__"`."""
    script = tmp_path / "script.py"
    script.write_text(
        "from pipelines.loadgen.client_processes import ClientProcesses\n"
        "with ClientProcesses(1) as clients:\n    print(clients.size)\n"
    )
    done = subprocess.run([sys.executable, script], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert (done.stdout, done.returncode) == ("1\n", 0), done.stderr


def test_kill_loses_only_the_level_that_ran(tmp_path: Path) -> None:
    """And leaves no client process behind."""
    with running("--ttft-ms", "10") as server, start(tmp_path, server.url, 1) as process:
        while not (tmp_path / RESULT).exists():
            time.sleep(0.02)
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.kill()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    (level,) = BenchmarkResult.from_json(json.loads((tmp_path / RESULT).read_text())).levels
    assert level.concurrency == 1
    assert len(records(tmp_path)) > 10
