"""Errors of disks in the user's words, and a log that cannot be written."""

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.domain.errors import UserError
from pipelines.host.disk import disk_error, disk_errors
from pipelines.store.manifest import HashCache
from pipelines.store.run_folder import run_folder
from pipelines.sweep.cells import SweepCell


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.ENOSPC, "Stage x stopped: the disk of /dev/x is full. Free some space"),
        (errno.EDQUOT, "Stage x stopped: the disk of /dev/x is full."),
        (errno.EFBIG, "Stage x stopped: /dev/x would be larger than a file may be here. `ulimit -f` shows the limit"),
        (errno.EROFS, "Stage x stopped: no permission to read or write /dev/x."),
        (errno.EIO, r"Stage x stopped: the disk of /dev/x fails: input/output error (EIO)."),
        (errno.ENOTCONN, "Stage x stopped: the file system of /dev/x is gone (Transport endpoint is not connected)."),
        (errno.ESTALE, "Stage x stopped: the file system of /dev/x is gone (Stale file handle)."),
    ],
)
def test_each_has_its_words(code, said):
    error = disk_error(OSError(code, os.strerror(code), "/dev/x"), "Stage x", Path("/store"))
    assert str(error).startswith(said)


def test_an_error_without_a_file_names_the_store():
    error = disk_error(OSError(errno.EIO, "Input/output error"), "Stage x", Path("/store"))
    assert "the disk of /store fails" in str(error)


def test_of_a_copy_the_file_that_was_written_is_named():
    error = disk_error(OSError(errno.ENOSPC, "full", "/model/a", None, "/store/a"), "Stage x", Path("/store"))
    assert "the disk of /store/a is full" in str(error)


def test_native_libraries_are_understood_by_their_text():
    assert "is full" in str(disk_error(RuntimeError("write: No space left on device"), "Stage x", Path("/s")))


def test_the_reason_of_a_library_that_has_none_is_asked_of_the_disk(tmp_path):
    """In a process of its own, whose files may have 4 KiB."""
    file = tmp_path / "weights.bin"
    ask = f"import pathlib as p; from pipelines.host.disk import why_not_written as w; print(w(p.Path('{file}'), 8192))"
    for limit, said in ((4, "[Errno 27] File too large: "), ("unlimited", "None")):
        shell = f'ulimit -f {limit}; exec {sys.executable} -Bc "{ask}"'
        assert subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True).stdout.startswith(said)
        assert not file.exists()


def test_other_errors_and_our_own_stay_as_they_are():
    assert disk_error(FileNotFoundError(2, "missing"), "Stage x", Path("/s")) is None
    with pytest.raises(UserError, match=r"^the model cannot be read \(Input/output error\)$"), disk_errors("", Path()):
        raise UserError("the model cannot be read (Input/output error)")


class Full:
    """A file on a full disk."""

    def write(self, _text):
        raise OSError(errno.ENOSPC, "No space left on device")

    flush = close = lambda self: self.write("")


def test_a_log_that_cannot_be_written_is_said_once(tmp_path, capsys):
    with run_folder("build", tmp_path / "runs", "", []):
        handler = logging.getLogger().handlers[-1]
        handler.stream.close()
        handler.stream = Full()
        logging.getLogger().error("one")
        logging.getLogger().error("two")
    said = capsys.readouterr().err
    assert " ".join(said.split()).count("cannot be written (No space left on device)") == 1
    assert "Traceback" not in said


def test_hashes_that_cannot_be_read_or_written_are_forgotten(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("x")
    (tmp_path / "hashes.json").mkdir()
    cache = HashCache(tmp_path / "hashes.json")
    assert len(cache.sha256(file)) == 64

    def refuse(*_arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pipelines.store.store.write_json", refuse)
    cache.save()


def test_a_cell_whose_file_is_gone_failed(tmp_path):
    cell = SweepCell(1, "evaluate", (), "quant=fp8", state="running")
    cell.write(tmp_path)
    assert cell.fresh(tmp_path).state == "running"
    cell.file(tmp_path).unlink()
    after = cell.fresh(tmp_path)
    assert (after.state, after.reason) == (
        "failed",
        f"{tmp_path}/cell-1.json was removed while it ran; what it made is in the store",
    )
