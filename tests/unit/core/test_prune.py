"""`prune` shows what each artifact costs and removes what nothing needs, never what is in use."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from pipelines.cli.main import main
from pipelines.host.files import link_to
from pipelines.store import space
from pipelines.store.leases import in_use
from pipelines.store.space import freed, remember_link, remove, survey
from pipelines.store.store import Store, recover
from tests.conftest import ROOT

DAY = 24 * 3600


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def make(store, stage, key, *, inputs=(), days=100, content=b"x" * 10_000, link=None):
    """An artifact made from others, last used so many days ago; `link` is a file that it shares."""
    with store.staging(key * 64) as staging:
        (staging / "a.bin").write_bytes(content)
        if link is not None:
            os.link(link, staging / "shared.bin")
        manifest = {
            "key": key * 64, "stage": stage, "label": "m", "created": "2026", "seconds": 1, "facts": {},
            "made_from": {"inputs": {str(n): each.digest for n, each in enumerate(inputs)}},
        }  # fmt: skip
        artifact = store.commit(staging, manifest, "m")
    then = time.time() - days * DAY
    os.utime(artifact.path, (then, then))
    return artifact


def needs(store, keep_days=30):
    return {each.path.parent.name: each.needed for each in survey(store, keep_days).artifacts}


def test_what_was_not_used_for_long_is_not_needed(store):
    make(store, "build", "a", days=31)
    make(store, "evaluate", "b", days=29)
    assert needs(store) == {"build": "", "evaluate": "used in the last 30 days"}
    assert needs(store, 7) == {"build": "", "evaluate": ""}
    assert needs(store, 365) == dict.fromkeys(("build", "evaluate"), "used in the last 365 days")


def test_what_a_kept_artifact_was_made_from_is_kept(store):
    """However many steps lie between."""
    model = make(store, "download", "a", content=b"model")
    checkpoint = make(store, "quantize", "b", inputs=[model], content=b"checkpoint")
    make(store, "build", "c", inputs=[checkpoint], days=1)
    make(store, "evaluate", "d", inputs=[checkpoint])
    found = needs(store)
    assert re.fullmatch(r"build/m-c+ was made from it", found["quantize"])
    assert re.fullmatch(r"quantize/m-b+ was made from it", found["download"])
    assert found["evaluate"] == ""


def test_what_a_run_or_a_server_uses_is_kept(store):
    """A server that reads a repository of the store holds a lease on it, under whatever path."""
    artifact = make(store, "repository", "a", content=b"repository")
    link = store.root.parent / "link"
    link.symlink_to(artifact.path)
    with in_use(link):
        assert re.fullmatch(rf"in use by {os.uname().nodename} {os.getpid()}", needs(store, 0)["repository"])
    assert needs(store, 0) == {"repository": ""}
    assert needs(store) == {"repository": "used in the last 30 days"}  # it was used just now


def test_a_served_repository_is_kept(store, monkeypatch):
    repository = make(store, "repository", "a")
    seen = []

    def serve(_folder, _settings, _progress, **_):
        seen.append(needs(store, 0)["repository"])
        return 0

    monkeypatch.setattr("pipelines.serving.foreground.serve", serve)
    monkeypatch.setattr("pipelines.run.commands._refuse_unfit", lambda _folder, **_: None)
    assert main(["serve", f"serving.repository={repository.path}"]) == 0
    assert seen == [f"in use by {os.uname().nodename} {os.getpid()}"]


def test_what_a_link_of_the_user_leads_to_is_kept(store, tmp_path):
    artifact = make(store, "build", "a")
    link = tmp_path / "engine"
    link.symlink_to(artifact.path)
    remember_link(store, link)
    remember_link(store, link)
    assert needs(store) == {"build": f"linked from {link}"}
    link.unlink()
    assert needs(store) == {"build": ""}


def test_a_link_counts_where_it_and_its_store_are_moved(store, tmp_path):
    (tmp_path / "folder").symlink_to(tmp_path)
    link = tmp_path / "folder" / "engine"
    artifact = make(store, "build", "a")
    remember_link(store, link)
    link_to(artifact.path, link)
    moved = tmp_path.rename(tmp_path.with_name("elsewhere"))
    assert needs(Store(moved / store.root.relative_to(tmp_path))) == {"build": f"linked from {moved / 'engine'}"}


def test_the_store_of_a_night_counts_as_one(store):
    night = Store(store.root / ".nightly" / "host" / "run-1")
    make(night, "build", "a", days=100)
    os.utime(night.root, (1, 1))
    assert needs(store) == {"host": ""}
    with store.leases.hold(night.root):
        assert needs(store)["host"].startswith("in use by")
    assert len(remove(store, survey(store, 0).unneeded)) == 1
    assert not night.root.exists()


def test_kept_answers_are_needed_while_they_are_young(store):
    file = store.root / ".answers" / "0123456789abcdef" / "answers.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text("[]\n")
    assert needs(store) == {".answers": "used in the last 30 days"}
    os.utime(file, (1, 1))
    assert needs(store) == {".answers": ""}
    assert len(remove(store, survey(store, 30).unneeded)) == 1
    assert not file.exists()


def test_a_damaged_artifact_that_was_set_aside_is_not_needed(store):
    """The whole one that was made instead has the same name, and is kept for itself."""
    aside = store.set_aside(make(store, "quantize", "a").path)
    whole = make(store, "quantize", "a", days=0)
    assert aside.name == whole.path.name
    found = {each.path: each.needed for each in survey(store, 30).artifacts}
    assert found == {aside: "", whole.path: "used in the last 30 days"}


def test_shared_files_are_freed_only_with_their_last_name(store):
    engine = make(store, "build", "a", content=os.urandom(50_000))
    make(store, "repository", "b", link=engine.path / "a.bin", content=b"")
    both = {each.path.parent.name: each for each in survey(store, 30).artifacts}
    assert freed([both["build"]]) < 20_000  # its manifest
    assert freed([both["repository"]]) < 20_000
    assert freed(both.values()) > 50_000
    assert both["build"].bytes > 50_000
    assert both["repository"].bytes > 50_000


def test_only_what_nothing_needs_is_removed(store):
    model = make(store, "download", "a", content=b"model")
    used = make(store, "build", "b", inputs=[model], days=1)
    old = make(store, "evaluate", "c")
    assert [each.path for each in remove(store, survey(store, 30).unneeded)] == [old.path]
    assert not old.path.exists()
    assert model.path.exists()
    assert store.find("build", "b" * 64).path == used.path
    assert list((store.root / ".drafts").iterdir()) == []


def test_what_a_run_begins_to_use_meanwhile_is_put_back(store, monkeypatch):
    artifact = make(store, "build", "a")
    unneeded = survey(store, 30).unneeded
    with store.leases.hold(artifact.path):
        assert remove(store, unneeded) == []
    assert store.find("build", "a" * 64).path == artifact.path


def test_the_command_shows_first_and_removes_on_request(store, capsys):
    old = make(store, "build", "a")
    make(store, "evaluate", "b", days=0)
    words = ["prune", f"paths.store={store.root}"]
    assert main(words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"build/m-a{16} [\d.]+ KiB 100 days ago -", shown)
    assert "used in the last 30 days" in shown
    assert re.search(r"Nothing needs 1 of 2 folders\. Removing them frees [\d.]+ KiB of [\d.]+ KiB", shown)
    assert old.path.exists()
    assert main([*words, "store.remove=true"]) == 0
    assert re.search(r"Removed 1 folder: [\d.]+ KiB came back", capsys.readouterr().out)
    assert not old.path.exists()
    assert main(words) == 0
    assert "nothing would be removed" in " ".join(capsys.readouterr().out.split())


def test_the_drafts_of_killed_runs_are_shown_and_reclaimed(store, capsys):
    code = (
        "import os, sys; from pathlib import Path; from pipelines.store.store import Store\n"
        "with Store(Path(sys.argv[1])).staging('k' * 64) as staging:\n"
        "    (staging / 'half').write_bytes(bytes(100_000)); os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, store.root], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    words = ["prune", f"paths.store={store.root}"]
    assert main(words) == 0
    assert "(left by a killed run)" in capsys.readouterr().out
    assert len(list((store.root / ".drafts").iterdir())) == 1
    assert main([*words, "store.remove=true"]) == 0
    assert re.search(r"Removed 1 folder: (9\d|100)\.\d KiB came back", capsys.readouterr().out)
    assert list((store.root / ".drafts").iterdir()) == []


def test_an_empty_store(tmp_path, capsys):
    assert main(["prune", f"paths.store={tmp_path}/none"]) == 0
    assert "It is empty." in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


def test_days_are_not_negative(capsys):
    assert main(["prune", "store.keep_days=-1"]) == 2
    assert "store.keep_days='-1'" in capsys.readouterr().err


def test_a_prune_that_is_killed_leaves_no_half_artifact(store, monkeypatch):
    """What was moved aside lies in a staging folder, which the next run reclaims."""
    make(store, "build", "a")
    unneeded = survey(store, 30).unneeded
    monkeypatch.setattr(space, "_in_use", lambda _store: os.kill(os.getpid(), signal.SIGKILL))
    pid = os.fork()
    if pid == 0:
        remove(store, unneeded)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert store.find("build", "a" * 64) is None
    assert len(list(store.abandoned_staging())) == 1
    recover(store)
    assert list((store.root / ".drafts").iterdir()) == []


def test_a_setting_that_selects_nothing_is_refused(tmp_path, capsys):
    """`make prune quant=fp8 store.remove=true` would remove the other formats too."""
    assert main(["prune", f"paths.store={tmp_path}", "quant=fp8", "store.remove=true"]) == 2
    assert "'quant=fp8' does not select what is pruned: that is the whole store." in " ".join(
        capsys.readouterr().err.split()
    )
