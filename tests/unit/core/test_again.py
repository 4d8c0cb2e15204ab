"""A command that has nothing to do is repeated only while everything it depends on is as it was."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from pathlib import Path

import pytest

from pipelines.run import again, commands
from pipelines.settings.groups import CONF
from pipelines.settings.model import BUNDLED

MODEL = BUNDLED / "models" / "tiny_llama"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a model and the engine built from it."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "model").mkdir()
    for file in MODEL.iterdir():
        (folder / "model" / file.name).write_bytes(file.read_bytes())
    (folder / "programs").mkdir()
    before = Path.cwd()
    os.chdir(folder)
    try:
        commands._run("build", WORDS)
    finally:
        os.chdir(before)
    return folder


WORDS = ["model.path=model", "quant=int8_wo"]


@pytest.fixture
def user(made, monkeypatch):
    """A user in that folder, who has just asked for the engine again, so that it is known what that depends on.

    This process began long before the files, as no command does; so let it begin now.
    """
    monkeypatch.chdir(made)
    monkeypatch.setattr(again, "PASSING", again.PASSING | {"PYTEST_CURRENT_TEST"})
    monkeypatch.setenv("PATH", str(made / "programs"), prepend=os.pathsep)
    monkeypatch.setattr(again, "_started_ns", lambda: time.time_ns() + 1_000_000_000)
    again.build(WORDS)
    monkeypatch.setattr(commands, "plan_for", lambda *_: pytest.fail("planned again"))
    assert repeats()
    return made


def repeats(words=WORDS, target="build"):
    return again.Attempt(target, words).repeated()


def known(folder):
    newest = max((folder / "artifacts" / again.AGAIN).iterdir(), key=lambda path: path.stat().st_mtime_ns)
    return newest, json.loads(newest.read_text())


def test_the_same_is_said_and_left(user, capsys):
    assert repeats()
    first, second = sorted((user / "runs").iterdir(), key=lambda path: path.stat().st_mtime_ns)[-2:]
    said = capsys.readouterr().out.split("engine: openvino")[-1]
    assert "Nothing to do: every stage is cached." in said
    assert said.splitlines()[-1] == f"run:    runs/{second.name}"
    names = {"config.yaml", "overrides.json", "plan.json", "run.log"}
    assert {path.name for path in second.iterdir()} == names
    for name in names - {"run.log"}:
        assert (first / name).read_text() == (second / name).read_text()
    logs = [re.sub(r"(?m)^[\d-]+ [\d:,]+ ", "", (run / "run.log").read_text()) for run in (first, second)]
    assert logs[0] == logs[1].replace(second.name, first.name)
    assert "Nothing to do" in logs[1]


def test_every_source_and_setting_counts(user):
    _, about = known(user)
    names = set(about["facts"])
    loaded = [sys.modules[name].__file__ for name in sys.modules if name.startswith(("pipelines.", "pydantic."))]
    assert {path for path in loaded if path} <= names
    assert {str(CONF / name) for name in ("config.yaml", "build/default.yaml", "quant/int8_wo.yaml")} <= names
    assert {str(user / "model" / file.name) for file in MODEL.iterdir() if file.suffix != ".md"} <= names
    assert f"{user}/model/" in names
    assert {str(path) for path in (user / "artifacts").glob("*/*/*")} <= names
    assert "/sys/fs/cgroup/memory.max" in names
    assert not [name for name in names if name.startswith((f"{user}/runs/", f"{user}/artifacts/.leases"))]
    assert 29 * 24 * 3600 < about["until"] - time.time() <= 30 * 24 * 3600


def rewritten(path):
    """Other bytes of the same length, and the time of modification set back."""
    stat = path.stat()
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def weights(folder):
    (path,) = (folder / "artifacts" / "build").glob("*/openvino_model.bin")
    return path


def installed(folder):
    program = folder / "programs" / "nvidia-smi"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)


CHANGES = {
    "a weight of the model": lambda user: rewritten(user / "model" / "model.safetensors"),
    "the model's configuration": lambda user: (user / "model" / "config.json").touch(),
    "a file that the model did not have": lambda user: (user / "model" / "chat_template.jinja").write_text("{{ x }}"),
    "a byte of the engine": lambda user: rewritten(weights(user)),
    "a file of the engine that is gone": lambda user: weights(user).unlink(),
    "the engine itself": lambda user: shutil.rmtree(weights(user).parent),
    "hashes that were forgotten": lambda user: (user / "artifacts" / ".hashes.json").unlink(),
    "a driver": installed,
    "what a killed run left": lambda user: (user / "artifacts" / ".drafts" / "0123456789abcdef.00").mkdir(parents=True),
    "the words": lambda _: ["model.path=model", "quant=int8_wo", "build.max_batch_size=7"],
    "the place of the store": lambda _: [*WORDS, "paths.store=elsewhere"],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(user, change):
    assert repeats()
    kept = user.with_name("kept")
    shutil.copytree(user, kept, symlinks=True)
    try:
        words = CHANGES[change](user) or WORDS
        assert not repeats(words if isinstance(words, list) else WORDS)
    finally:
        for name in ("model", "programs", "artifacts"):
            shutil.rmtree(user / name)
            shutil.move(kept / name, user / name)
        shutil.rmtree(kept)


def test_other_surroundings_are_noticed(user, monkeypatch):
    with monkeypatch.context() as other:
        other.setenv("HF_HUB_OFFLINE", "not before")
        assert not repeats()
    with monkeypatch.context() as other:
        other.setenv("COLUMNS", "40")
        assert not repeats()
    with monkeypatch.context() as other:
        other.chdir(user / "model")
        assert not repeats()
    with monkeypatch.context() as other:
        other.setattr(os, "sched_getaffinity", lambda _: {0})
        assert not repeats()
    with monkeypatch.context() as other:
        other.setattr(again, "_content", lambda _: "another limit")
        assert not repeats()
    with monkeypatch.context() as other:
        month_later = time.time() + 30 * 24 * 3600
        other.setattr(time, "time", lambda: month_later)
        assert not repeats()
    assert not repeats(target="repository")
    with monkeypatch.context() as other:
        other.setenv("MAKEFLAGS", " -- quant=int8_wo")
        other.setenv("_", "/usr/bin/make")
        assert repeats()


def test_a_damaged_file_says_nothing(user):
    file, _ = known(user)
    file.write_text(file.read_text().replace("every stage is cached", "every stage is damned"))
    assert not repeats()
    file.write_text("{")
    assert not repeats()


def test_what_changed_meanwhile_is_not_known(user, monkeypatch):
    shutil.rmtree(user / "artifacts" / again.AGAIN)
    monkeypatch.undo()
    monkeypatch.chdir(user)
    again.build(WORDS)
    assert not (user / "artifacts" / again.AGAIN).exists()


def test_what_another_program_said_is_not_known(user):
    watch = again.Overheard()
    watch.hear("subprocess.Popen", ("nvidia-smi", [], None, None))
    assert watch.asked_outside


def test_only_the_newest_are_kept(user, monkeypatch):
    folder = user / "artifacts" / again.AGAIN
    for number in range(again.MOST + 5):
        (folder / f"{number}.json").write_text("{}")
        os.utime(folder / f"{number}.json", (number, number))
    monkeypatch.undo()
    monkeypatch.chdir(user)
    monkeypatch.setattr(again, "_started_ns", lambda: time.time_ns() + 1_000_000_000)
    again.build([*WORDS, "store.keep_days=3"])
    assert len(list(folder.iterdir())) == again.MOST
    assert not (folder / "0.json").exists()
