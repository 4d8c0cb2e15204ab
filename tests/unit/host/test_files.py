"""Files and folders are replaced as a whole: old or new, never half, and nothing is left beside them."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pipelines.host.files import link_to, replacing, write_bytes, write_json, write_text


def can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def python(code: str, *arguments: object, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [*prefix, sys.executable, "-c", code, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_content_is_written_and_nothing_else(tmp_path):
    assert write_bytes(tmp_path / "b", b"\x00\xff").read_bytes() == b"\x00\xff"
    assert write_text(tmp_path / "t", "€\r\n").read_bytes() == b"\xe2\x82\xac\r\n"
    assert write_json(tmp_path / "j", {"b": 1, "a": [2]}).read_text() == '{\n "a": [\n  2\n ],\n "b": 1\n}\n'
    assert write_json(tmp_path / "k", {"b": 1, "a": 2}, sort_keys=False).read_text() == '{\n "b": 1,\n "a": 2\n}\n'
    assert names(tmp_path) == ["b", "j", "k", "t"]


def test_missing_parents_are_made(tmp_path):
    assert write_text(tmp_path / "a" / "b" / "c", "x").read_text() == "x"


def test_a_value_without_json_leaves_the_old_file(tmp_path):
    write_json(tmp_path / "j", 1)
    with pytest.raises(TypeError, match="PosixPath"):
        write_json(tmp_path / "j", tmp_path)
    assert (tmp_path / "j").read_text() == "1\n"
    assert names(tmp_path) == ["j"]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit, OSError])
def test_whatever_stops_the_block_leaves_the_old_folder(tmp_path, stop):
    write_text(tmp_path / "d" / "old", "old")

    def stopped():
        with replacing(tmp_path / "d") as fresh:
            write_text(fresh / "new", "new")
            raise stop

    with pytest.raises(stop):
        stopped()
    assert names(tmp_path) == ["d", "d/old"]


def test_a_folder_takes_the_place_of_a_folder(tmp_path):
    write_text(tmp_path / "d" / "old", "old")
    with replacing(tmp_path / "d") as fresh:
        write_text(fresh / "sub" / "new", "new")
    assert names(tmp_path) == ["d", "d/sub", "d/sub/new"]


def test_the_old_folder_is_put_back_when_the_new_one_cannot_take_its_place(tmp_path, monkeypatch):
    target, rename = tmp_path / "d", Path.rename
    write_text(target / "old", "old")

    def refuse(self: Path, to: Path) -> Path:
        if to == target and not self.name.endswith(".old"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="Input/output error"), replacing(target) as fresh:
        write_text(fresh / "new", "new")
    assert names(tmp_path) == ["d", "d/old"]


@pytest.mark.skipif(not can_mount(), reason="this system does not let its users mount a tmpfs")
def test_a_full_disk_leaves_the_old_file_and_no_remains(tmp_path):
    code = """
import errno, os, subprocess, sys
from pathlib import Path
from pipelines.host.files import write_bytes
disk = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", disk], check=True)
write_bytes(disk / "file", b"old")
try:
    write_bytes(disk / "file", bytes(1_000_000))
except OSError as error:
    print(errno.errorcode[error.errno])
print(sorted(path.name for path in disk.iterdir()), (disk / "file").read_bytes())
"""
    done = python(code, tmp_path, prefix=("unshare", "-rm"))
    assert (done.stdout, done.stderr) == ("ENOSPC\n['file'] b'old'\n", "")


def test_a_write_that_breaks_off_leaves_the_old_file_and_no_remains(tmp_path):
    """The limit on a file's size lets a first part through, as a disk does that fills up."""
    code = """
import errno, resource, sys
from pathlib import Path
from pipelines.host.files import write_bytes
file = write_bytes(Path(sys.argv[1]) / "file", b"old")
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    write_bytes(file, bytes(1_000_000))
except OSError as error:
    print(errno.errorcode[error.errno], error.filename)
"""
    done = python(code, tmp_path)
    assert (done.stdout, done.stderr) == (f"EFBIG {tmp_path / 'file'}\n", "")
    assert names(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_a_killed_writer_leaves_the_old_file_and_the_next_one_succeeds(tmp_path):
    code = """
import os, signal, sys
from pathlib import Path
from pipelines.host.files import replacing
with replacing(Path(sys.argv[1]) / "file") as fresh:
    fresh.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    file = write_text(tmp_path / "file", "old")
    assert python(code, tmp_path).returncode == -signal.SIGKILL
    assert file.read_text() == "old"
    assert write_text(file, "new").read_text() == "new"


def test_writers_beside_each_other_never_mix(tmp_path):
    file = write_text(tmp_path / "file", "0" * 100_000)
    threads = [
        threading.Thread(target=lambda digit=digit: [write_text(file, digit * 100_000) for _ in range(20)])
        for digit in "123"
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert len(set(file.read_text())) == 1
    assert names(tmp_path) == ["file"]


def test_a_link_leads_to_its_folder_wherever_both_are_moved(tmp_path):
    """As in a container, where the folder of both has another path."""
    here, there = tmp_path / "here", tmp_path / "there"
    for name in ("one", "two"):
        (here / "store" / name).mkdir(parents=True)
    link_to(here / "store" / "one", here / "links" / "engine")
    link_to(here / "store" / "two", here / "links" / "engine")
    assert names(here / "links") == ["engine"]
    here.rename(there)
    assert (there / "links" / "engine").resolve() == there / "store" / "two"


def test_a_link_in_a_folder_that_is_a_link_leads_to_its_folder(tmp_path):
    (tmp_path / "store" / "one").mkdir(parents=True)
    (tmp_path / "disk" / "of" / "mine").mkdir(parents=True)
    (tmp_path / "mine").symlink_to(tmp_path / "disk" / "of" / "mine")
    link_to(tmp_path / "store" / "one", tmp_path / "mine" / "engine")
    assert (tmp_path / "mine" / "engine").resolve() == tmp_path / "store" / "one"
