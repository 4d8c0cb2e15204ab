"""Disks that are full, read-only, failing or gone: one sentence, exit code 2, and never a traceback."""

import re
import shutil
import subprocess
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from pipelines.settings.model import BUNDLED
from tests.support.failing_disk import failing_disk

pytestmark = pytest.mark.thorough

MODEL = BUNDLED / "models" / "tiny_llama"
BUILD = ("build", "model=tiny_llama", "quant=int8_wo")


def flat(text: str) -> str:
    assert "Traceback" not in text
    assert "Logging error" not in text
    return re.sub(r"\s+", " ", text)


@contextmanager
def tiny(folder: Path, size: str):
    """A file system with little room."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder: Path) -> None:
    with (folder / "ballast").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


@pytest.fixture
def failing(tmp_path):
    with failing_disk(tmp_path) as disk:
        if disk is None:
            pytest.skip("mounting a FUSE file system needs root and /dev/fuse")
        yield disk


def test_a_plan_on_a_full_store(cli, tmp_path):
    with tiny(tmp_path / "small", "64k") as small:
        (small / "store").mkdir()
        fill(small)
        text = flat(cli.run("plan", *BUILD[1:], f"paths.store={small}/store"))
        assert "stages to run" in text
        assert not (small / "store" / ".hashes.json").exists()


def test_a_plan_on_a_read_only_store_describes_and_a_run_refuses(cli, tmp_path):
    with tiny(tmp_path / "small", "64k") as small:
        (small / "store").mkdir()
        subprocess.run(["mount", "-o", "remount,ro", small], check=True)
        text = flat(cli.run("plan", *BUILD[1:], f"paths.store={small}/store"))
        assert "run quantize tiny_llama-int8_wo" in text
        assert f"warning: paths.store='{small}/store' is not writable." in text
        text = flat(cli.run(*BUILD, f"paths.store={small}/store", code=2))
        assert "is not writable" in text


def test_a_finished_store_is_used_when_it_is_read_only_or_full(cli, tmp_path):
    """Also when the folder of the runs is another, healthy one."""
    cli.run(*BUILD)
    with tiny(tmp_path / "small", "60m") as small:
        shutil.copytree(cli.store, small / "store", copy_function=shutil.copy2)
        fill(small)
        assert "Nothing to do" in cli.run(*BUILD, f"paths.store={small}/store")
        subprocess.run(["mount", "-o", "remount,ro", small], check=True)
        assert "Nothing to do" in cli.run(*BUILD, f"paths.store={small}/store")
        assert "in the last 30 days" in flat(cli.run("prune", f"paths.store={small}/store"))


def test_a_log_on_a_full_disk_costs_lines_and_never_the_run(cli, tmp_path):
    cli.run(*BUILD)
    with tiny(tmp_path / "small", "64k") as small:
        text = cli.run(*BUILD, f"paths.runs={small}/runs")
        assert "Nothing to do" in text
        fill(small)
        text = flat(cli.run(*BUILD, f"paths.runs={small}/runs", code=2))
        assert f"paths.runs='{small}/runs' cannot be written: No space left on device" in text


def test_output_that_goes_to_a_full_disk_is_said_and_does_not_stop_a_run(cli, tmp_path):
    store = tmp_path / "store"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            cli.command(*BUILD, f"paths.store={store}"),
            cwd=cli.folder,
            env=cli.env(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert "Nothing to do" in cli.run(*BUILD, f"paths.store={store}")


def test_a_disk_that_cannot_be_read_is_said_while_planning(cli, tmp_path, failing):
    model = shutil.copytree(MODEL, failing.path / "model")
    failing.fail("read", "open")
    text = flat(cli.run("plan", f"model.path={model}", "quant=int8_wo", code=2))
    assert re.search(r"Input/output error|input/output error \(EIO\)", text)
    assert "model" in text


def test_a_disk_that_cannot_be_written_is_said_with_its_reason(cli, failing):
    store = failing.path / "store"
    store.mkdir()
    failing.fail("write")
    text = flat(cli.run(*BUILD, f"paths.store={store}", code=2))
    assert re.search(r"Stage quantize stopped: the disk of \S+ fails: input/output error \(EIO\)\.", text)
    failing.fail()
    assert "quantize made" in flat(cli.run(*BUILD, f"paths.store={store}"))
    assert list((store / ".drafts").iterdir()) == []


def test_a_disk_that_vanishes_is_said(cli, failing):
    """As when a cable is pulled or a file server goes away, in the middle of a stage."""
    store = failing.path / "store"
    process = cli.start(*BUILD, f"paths.store={store}")
    for line in process.stdout:
        if line.startswith("quantize: "):
            break
    failing.vanish()
    text = flat(process.communicate(timeout=300)[0])
    assert process.returncode == 2, text
    reason = "(Transport endpoint is not connected|Software caused connection abort)"
    assert re.search(rf"is gone \({reason}\)\. Mount it", text)
    text = flat(cli.run("plan", *BUILD[1:], f"paths.store={store}", code=2))
    assert "is gone" in text


def test_make_clean_during_a_run_costs_its_log_only(cli):
    process = cli.start("evaluate", "model=tiny_llama", "quant=int4_wo", "eval.limit=2")
    for line in process.stdout:
        if line.startswith("build: made"):
            break
    shutil.rmtree(cli.folder / "runs")
    text = flat(process.communicate(timeout=300)[0])
    assert process.returncode == 0, text
    assert "accuracy" in text
