"""scripts/nightly_history.sh against a real remote: the first night, the next, and what must not be lost."""

import subprocess

import pytest

from tests.conftest import ROOT

SCRIPT = ROOT / "scripts" / "nightly_history.sh"


def git(folder, *words):
    return subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(folder), *words],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip


@pytest.fixture
def checkout(tmp_path):
    """A clone of a remote with one commit of code."""
    git(tmp_path, "init", "--bare", "--initial-branch=main", "remote.git")
    git(tmp_path, "clone", "--quiet", "remote.git", "clone")
    clone = tmp_path / "clone"
    (clone / "code.py").write_text("x = 1\n")
    git(clone, "checkout", "--quiet", "-B", "main")
    git(clone, "add", "-A")
    git(clone, "commit", "--quiet", "-m", "code")
    git(clone, "push", "--quiet", "origin", "HEAD:main")
    return clone


def run(checkout, *words, code=0):
    done = subprocess.run([SCRIPT, *words], cwd=checkout, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def put(checkout, folder, lines, code=0):
    (folder / "settings").mkdir(parents=True, exist_ok=True)
    (folder / "settings" / "d0.json").write_text("{}")
    (folder / "history.jsonl").write_text(lines)
    (folder / "run-host.lock").write_text("")
    return run(checkout, "put", "gpu", str(folder), code=code)


def test_the_first_night_has_no_history(checkout, tmp_path):
    assert "no history of gpu on nightly-history yet" in run(checkout, "get", "gpu", str(tmp_path / "here"))


def test_what_one_night_puts_the_next_gets(checkout, tmp_path):
    put(checkout, tmp_path / "one", '{"a": 1}\n')
    assert run(checkout, "get", "gpu", str(tmp_path / "two")) == "1 lines of history from nightly-history\n"
    assert (tmp_path / "two" / "history.jsonl").read_text() == '{"a": 1}\n'
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == ["history.jsonl", "settings"]
    put(checkout, tmp_path / "two", '{"a": 1}\n{"b": 2}\n')
    assert git(tmp_path / "remote.git", "show", "nightly-history:gpu/history.jsonl") == '{"a": 1}\n{"b": 2}\n'
    assert git(tmp_path / "remote.git", "ls-tree", "--name-only", "nightly-history").split() == ["gpu"]


def test_matrices_do_not_touch_each_other(checkout, tmp_path):
    put(checkout, tmp_path / "gpu", '{"a": 1}\n')
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "history.jsonl").write_text('{"c": 3}\n')
    run(checkout, "put", "cpu", str(tmp_path / "cpu"))
    assert git(tmp_path / "remote.git", "ls-tree", "--name-only", "nightly-history").split() == ["cpu", "gpu"]


def test_a_history_that_lost_lines_is_refused(checkout, tmp_path):
    put(checkout, tmp_path / "one", '{"a": 1}\n{"b": 2}\n')
    assert "does not continue the one on nightly-history" in put(checkout, tmp_path / "two", '{"b": 2}\n', code=1)
    assert git(tmp_path / "remote.git", "show", "nightly-history:gpu/history.jsonl") == '{"a": 1}\n{"b": 2}\n'


def test_nothing_new_is_no_commit(checkout, tmp_path):
    put(checkout, tmp_path / "one", '{"a": 1}\n')
    assert "nothing new" in put(checkout, tmp_path / "one", '{"a": 1}\n')
    assert git(checkout, "worktree", "list").count("\n") == 1  # nothing is left behind


@pytest.mark.parametrize("words", [("get",), ("keep", "gpu", "x"), ("get", "../x", "y")])
def test_wrong_words_print_the_usage(checkout, words):
    assert "scripts/nightly_history.sh get MATRIX FOLDER" in run(checkout, *words, code=2)
