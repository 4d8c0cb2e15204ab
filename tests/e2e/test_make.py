"""The Makefile through a real make: a failure arrives with its exit code, and wrong words run nothing."""

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from pipelines.cli.commands import COMMANDS
from tests.conftest import ROOT


@pytest.fixture
def system(tmp_path):
    """Runs make where only programs of these versions are called python3 and so on."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)

    def run(*words: str, **versions: str) -> tuple[int, str]:
        programs = tmp_path / "programs"
        programs.mkdir()
        for name in ("make", "sh"):
            (programs / name).symlink_to(shutil.which(name))
        for name, version in versions.items():
            script = programs / name.replace("_", ".")
            fits = version.startswith(("3.11.", "3.12."))
            script.write_text(
                f'#!/bin/sh\n[ "$1" = --version ] && echo Python {version} && exit\n'
                f'[ "$1" = -c ] && exit {1 - fits}\necho "{version} $*"\n'
            )
            script.chmod(0o755)
        done = subprocess.run(
            ["make", *words], cwd=tmp_path, env={"PATH": str(programs)}, stdout=-1, stderr=subprocess.STDOUT, text=True
        )
        return done.returncode, done.stdout

    return run


@pytest.mark.parametrize("words", [["plan"], ["setup"], ["help"], ["bulid"], ["setup-edge"]])
def test_a_system_without_the_right_python_is_told_so(system, words):
    """Debian 13 has 3.13, Ubuntu 22.04 has 3.10; pip needs minutes there, and names conflicting dependencies."""
    code, text = system(*words, python3="3.13.5", python3_10="3.10.12")
    assert code == 2
    assert "python3 is Python 3.13.5, and there is no python3.12 or python3.11." in text


def test_the_right_python_is_found_beside_the_system_s(system):
    _, text = system("help", python3="3.10.12", python3_12="3.12.3", python3_11="3.11.2")
    assert text.startswith("3.12.3 -m pipelines --help\n")


@pytest.fixture
def make(tmp_path):
    """Runs make on a copy of the Makefile; a script stands for Python, notes that it ran and ends with CODE."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    script = tmp_path / "python"
    script.write_text('#!/bin/sh\necho "ran $*"\n[ "$CODE" = killed ] && kill -KILL $$\nexit $CODE\n')
    script.chmod(0o755)

    def run(*words: str, code: str = "0", python: str = str(script), **environment: str) -> tuple[int, str]:
        outer = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        done = subprocess.run(
            ["make", f"PYTHON={python}", *words],
            cwd=tmp_path,
            env={**outer, "CODE": code, "PYTHONPATH": str(ROOT), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored when started in the background
        )
        return done.returncode, done.stdout

    return run


def test_an_environment_that_is_ready_is_not_mentioned(make, tmp_path):
    """Make called its sources circular, because any word may be a command's."""
    environment = tmp_path / ".venv" / "bin"
    environment.mkdir(parents=True)
    (tmp_path / "python").rename(environment / "python")
    for name in ("pyproject.toml", "constraints.txt", ".venv/.ready"):
        (tmp_path / name).touch()
    for words in (["config", "quant"], ["plan"], ["help"]):
        found = subprocess.run(
            ["make", *words], cwd=tmp_path, env={"PATH": os.environ["PATH"], "CODE": "0"}, stdout=-1, stderr=-1
        )
        assert (found.returncode, found.stderr) == (0, b"")
        assert b"make: " not in found.stdout


@pytest.mark.parametrize(("code", "word"), [("1", "1"), ("2", "2"), ("3", "3"), ("killed", "137")])
def test_a_failure_is_2_and_the_last_line_names_the_code_of_the_command(make, code, word):
    assert make("nightly", "nightly=gpu") == (0, "ran -m pipelines --from-make nightly\n")
    found, text = make("nightly", "nightly=gpu", code=code)
    assert found == 2
    assert text.startswith("ran -m pipelines --from-make nightly\n")
    assert text.endswith(f"nightly] Error {word}\n")


def test_an_interrupt_ends_make_after_the_command_has_cleaned_up(tmp_path):
    """Ctrl-C reaches both; shells show 130 for a process that SIGINT ended, which Python calls -2."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\ntrap 'sleep 0.5; echo end; exit 130' INT\necho ready\nwhile :; do sleep 0.1; done\n")
    script.chmod(0o755)
    with subprocess.Popen(
        ["make", f"PYTHON={script}", "serve"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as running:
        assert running.stdout.readline() == "ready\n"
        os.killpg(running.pid, signal.SIGINT)
        assert running.communicate(timeout=30)[0] == "end\n"
    assert running.returncode == -signal.SIGINT


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["build", "int4_awq"], "Did you mean quant=int4_awq?"),
        (["build", "quant:fp8"], "Did you mean quant=fp8?"),
        (["build", "evaluate"], "'build' and 'evaluate' are two commands."),
        (["biuld"], "Did you mean 'build'?"),
        (["tset"], "Did you mean 'test'?"),
        (["clean", "int4_awq"], "quant=int4_awq"),
        (["build", "it's"], "'it's' is not a valid override"),
        (["build", "fp9", "build.max_batch_size=3"], "'fp9' is not a valid override"),
    ],
)
def test_wrong_words_are_refused_before_anything_runs(make, words, message, tmp_path):
    (tmp_path / "runs").mkdir()
    code, text = make(*words, python=sys.executable, COLUMNS="200")
    assert code == 2
    assert message in " ".join(text.split())
    assert "rm -rf" not in text
    assert (tmp_path / "runs").is_dir()


@pytest.mark.parametrize("words", [["build", "--quant", "fp8"], ["build", "quant", "=", "fp8"]])
def test_make_itself_refuses_what_it_cannot_read(make, words):
    code, text = make(*words)
    assert code == 2
    assert "ran" not in text


def test_the_makefile_has_every_command(make):
    listed = re.search(r"COMMANDS := ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text())
    assert listed
    assert sorted(listed[1].replace("\\\n", " ").split()) == sorted(COMMANDS)


def test_config_takes_a_group(make):
    code, text = make("config", "doctor", python=sys.executable)
    assert code == 0
    assert "doctor.timeout_s=2.0" in text


def test_help_lists_commands_and_development(make):
    code, text = make(python=sys.executable)
    assert code == 0
    assert "model -> quantized TensorRT-LLM checkpoint -> engine" in text
    assert "make test-gpu" in text


def test_a_real_command_and_its_code(make):
    """A checkpoint that is not there."""
    code, text = make("verify", "verify.path=/nowhere", python=sys.executable)
    assert code == 2
    assert "/nowhere" in text
