"""The history survives kills and several writers, and never loses a line."""

import json
import multiprocessing
import resource
import subprocess
import sys

import pytest

from pipelines.domain.errors import UserError
from pipelines.nightly import nightly_command
from pipelines.nightly.accuracy import Record, pack_bits, unpack_bits
from pipelines.nightly.sentences import FILE, History
from pipelines.settings.compose import load as load_settings
from pipelines.store.manifest import sealed
from tests.conftest import ROOT
from tests.support.nights import load, night


def test_what_is_appended_is_read(tmp_path):
    history = History(tmp_path / "new" / "folder")
    history.append(night(0))
    history.append(night(1, 900.0))
    assert history.read().records == (night(0), night(1, 900.0))
    assert history.read().notes == ()


def test_an_empty_history_is_no_error(tmp_path):
    assert History(tmp_path).read().records == ()


def test_a_torn_last_line_is_skipped_with_a_note_and_nothing_after_it_is_lost(tmp_path):
    history = History(tmp_path)
    history.append(night(0))
    whole = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole + whole[:100])
    assert history.read().notes == (f"Line 2 of {FILE} was torn when its writer was killed and was skipped.",)
    history.append(night(1))
    assert [record.commit for record in history.read().records] == [night(0).commit, night(1).commit]
    assert (tmp_path / FILE).read_bytes().startswith(whole + whole[:100] + b"\n")  # appended to, never rewritten


@pytest.mark.parametrize(
    ("key", "changed", "why"),
    [
        ('"status": "done"', '"status": "dome"', "it does not match its own checksum"),
        ('"checksum"', '"sum"', "it has no checksum"),
    ],
)
def test_a_line_that_was_changed_is_named_and_skipped(tmp_path, key, changed, why):
    history = History(tmp_path)
    for number in range(3):
        history.append(night(number))
    lines = (tmp_path / FILE).read_text().splitlines(keepends=True)
    lines[1] = lines[1].replace(key, changed)
    (tmp_path / FILE).write_text("".join(lines))
    assert history.read().records == (night(0), night(2))
    assert f"Line 2 of history.jsonl cannot be read: {why}" in history.read().notes[0]


def test_a_line_of_another_schema_is_named(tmp_path):
    line = night(0).to_json() | {"schema": 2}
    (tmp_path / FILE).write_text(json.dumps(sealed(line)) + "\n")
    assert "has schema 2; this version reads 1" in History(tmp_path).read().notes[0]


def test_a_line_with_a_field_nobody_knows_is_named(tmp_path):
    (tmp_path / FILE).write_text(json.dumps(sealed(night(0).to_json() | {"spede": 1})) + "\n")
    assert "unknown field 'spede'" in History(tmp_path).read().notes[0]


def append_many(folder, first):
    for number in range(first, first + 25):
        History(folder).append(night(number))


def test_two_writers_do_not_mix_their_lines(tmp_path):
    writers = [multiprocessing.get_context("fork").Process(target=append_many, args=(tmp_path, n)) for n in (0, 100)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    read = History(tmp_path).read()
    assert read.notes == ()
    assert sorted(int(record.commit[:12]) for record in read.records) == [*range(25), *range(100, 125)]


def test_a_line_that_does_not_fit_on_the_disk_is_refused_and_leaves_nothing(tmp_path):
    """The system wrote a part of it, and that was taken for the whole."""
    history = History(tmp_path)
    history.append(night(0))
    size = history.file.stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, limits[1]))
    try:
        with pytest.raises(UserError, match="cannot be written: File too large"):
            history.append(night(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert history.read().notes == ()
    assert history.file.stat().st_size == size


def test_a_second_run_on_the_same_host_is_refused(tmp_path):
    hold = (
        "import sys; from pathlib import Path; from pipelines.nightly.sentences import History\n"
        f"with History(Path({str(tmp_path)!r})).only_run('here'): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="Another nightly run measures on here"), History(tmp_path).only_run("here"):
            pass
        other.kill()
    with History(tmp_path).only_run("here"):  # the system freed it
        pass


def test_a_second_run_in_the_same_store_is_refused_whatever_its_history(tmp_path, monkeypatch):
    """It removed the store of the run that was still measuring."""

    def run(history):
        nightly_command.measure(load_settings([f"paths.store={tmp_path}", f"nightly.history={tmp_path / history}"]), [])

    monkeypatch.setattr(nightly_command, "_begin", lambda *_: run("second"))
    with pytest.raises(UserError, match=f"Another nightly run measures on .* with the store {tmp_path}"):
        run("first")


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"nightly\.history='.*/file' cannot be written"):
        History(tmp_path / "file").append(night(0))


def test_settings_are_kept_once(tmp_path):
    history = History(tmp_path)
    history.keep_settings("d0", {"build.max_batch_size": 8})
    history.keep_settings("d0", {"build.max_batch_size": 8})
    assert history.settings("d0") == {"build.max_batch_size": 8}
    assert history.settings("d1") is None


@pytest.mark.parametrize("count", [1, 7, 8, 9, 60])
def test_answers_are_packed_without_loss(count):
    right = [place % 3 != 1 for place in range(count)]
    assert unpack_bits(pack_bits(right), count) == right


def test_of_repeated_measurements_the_median_counts():
    record = night(0, measurements=[[load(900.0)], [load(1000.0)], [load(990.0)]])
    assert record.metrics["output_tokens_per_s at concurrency 8"] == 990.0


@pytest.mark.parametrize("mark", [{"client_limited": True}, {"complete": False}])
def test_a_load_that_says_nothing_of_the_server_has_no_rates(mark):
    metrics = night(0, measurements=[[load(**mark)]]).metrics
    assert "output_tokens_per_s at concurrency 8" not in metrics
    assert metrics["error_share at concurrency 8"] == 0.0


def test_a_record_is_plain_json():
    assert Record.from_json(json.loads(json.dumps(night(3).to_json()))) == night(3)
