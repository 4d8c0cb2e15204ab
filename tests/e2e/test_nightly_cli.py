"""`nightly` as a user has it: stopped, killed, gone on with, twice, and with a regression in its history."""

import json
import re
import signal

import pytest

from pipelines.nightly.sentences import FILE
from pipelines.store.manifest import sealed

pytestmark = pytest.mark.thorough

SMALL = [
    "model=tiny_gemma", "quant=none,int8_wo,nvfp4", "workload=fixed", "workload.isl=16", "workload.osl=8",
    "eval.limit=2", "build.max_batch_size=8", "benchmark.concurrency=[2]", "benchmark.duration_s=0.5",
    "benchmark.warmup_s=0.1", "benchmark.min_requests=3",
]  # fmt: skip


def lines(folder):
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def stop_at(cli, mark, number):
    """Start a night, send it a signal when it prints the mark, and return what it printed."""
    process = cli.start("nightly", *SMALL)
    said = []
    for line in process.stdout:
        said.append(line)
        if mark in line:
            process.send_signal(number)
    process.wait(timeout=120)
    return process.returncode, "".join(said)


@pytest.fixture(scope="module")
def nights(cli):
    """Two nights; the first is stopped in its first cell and killed in its second."""
    code, said = stop_at(cli, "[1/3]", signal.SIGINT)
    assert code == 130, said
    code, said = stop_at(cli, "[2/3]", signal.SIGKILL)
    assert code == -signal.SIGKILL, said
    first = cli.run("nightly", *SMALL)
    return first, cli.run("nightly", *SMALL)


def test_a_stopped_night_goes_on_where_it_was(nights, cli):
    first, second = nights
    assert "1 of 3 cells are done" in first
    assert "[1/3]" not in first
    assert "cells are done" not in second
    records = lines(cli.folder / "nightly" / "cpu")
    assert [record["cell"] for record in records] == [f"tiny_gemma {q} fixed" for q in ("none", "int8_wo", "nvfp4")] * 2
    assert len({record["run"] for record in records}) == 2


def test_every_line_says_what_was_measured_and_with_what(nights, cli):
    for record in lines(cli.folder / "nightly" / "cpu"):
        if record["status"] == "not possible":
            assert "nvfp4" in record["reason"]
            continue
        (load,) = record["measurements"][0]
        six = record["model"], record["precision"], load["isl"], load["osl"], load["concurrency"], record["tp_size"]
        assert six == ("tiny_gemma", record["overrides"][1].removeprefix("quant="), 16, 8, 2, 1)
        assert record["accuracy"]["questions"] == sum(count for count, _ in record["accuracy"]["subjects"].values()) > 0
        assert record["seconds"]["build"] > 0
        assert record["sizes"]["engine_bytes"] > 2**20
        assert {"openvino", "torch", "lm-eval", "tritonclient"} <= record["versions"].keys()
        assert (cli.folder / "nightly" / "cpu" / "settings" / f"{record['settings_digest']}.json").is_file()


def test_two_nights_of_the_same_are_no_regression(nights, cli):
    assert "2 cells measured; 1 not possible;" in nights[1]
    assert "nothing got worse" in re.sub(r"\s+", " ", nights[1])
    assert (cli.folder / "reports" / "nightly-cpu" / "report.html").is_file()


def test_every_night_builds_anew_and_keeps_no_artifact_of_the_last(nights, cli):
    assert [path.name for path in (cli.store / ".nightly").glob("*/*")] == [
        lines(cli.folder / "nightly" / "cpu")[-1]["run"]
    ]
    assert not (cli.store / "build").exists()


def test_a_regression_in_the_history_is_named_and_ends_with_3(nights, cli, tmp_path):
    """Six nights before with an engine half as large."""
    records = lines(cli.folder / "nightly" / "cpu")
    bad = next(record for record in records if record["cell"] == "tiny_gemma int8_wo fixed")
    planted = []
    for night in range(6):
        old = json.loads(json.dumps(bad)) | {"run": f"20200101T00000{night}Z-h-1", "commit": f"{night}" * 40}
        old["sizes"]["engine_bytes"] //= 2
        planted.append(sealed(old | {"at": f"2020-01-0{night + 1}T00:00:00+00:00"}))
    (tmp_path / FILE).write_text("".join(json.dumps(record) + "\n" for record in [*planted, *records]))
    words = ["nightly.measure=false", f"nightly.history={tmp_path}"]
    text = re.sub(r"\s+", " ", cli.run("nightly", *words, code=3))
    assert "REGRESSION tiny_gemma int8_wo fixed: engine size" in text
    assert "(+100.0 %)" in text
    assert f"Since {bad['commit'][:12]}" in text
    assert f"last good {'5' * 12}" in text
    accepted = f"{{cell:'*int8_wo*',metric:'*',since:'{bad['at'][:10]}',reason:'as wanted'}}"
    cli.run("nightly", *words, f"nightly.expect.accepted=[{accepted}]")


def test_a_cell_that_takes_too_long_has_failed_and_does_not_stop_the_others(nights, cli, tmp_path):
    words = ["quant=none,int8_wo", "nightly.timeout_s=0.2", f"nightly.history={tmp_path}"]
    text = re.sub(r"\s+", " ", cli.run("nightly", *SMALL, *words, code=1))
    both = "tiny_gemma none fixed, tiny_gemma int8_wo fixed"
    assert f"FAILED {both}: took longer than nightly.timeout_s=0.2; stopped" in text


def test_no_history_is_named(cli, tmp_path):
    text = cli.run("nightly", "nightly.measure=false", f"nightly.history={tmp_path}", code=2)
    assert f"nightly.history='{tmp_path}' contains no result" in re.sub(r"\s+", " ", text)
