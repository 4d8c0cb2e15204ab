"""A checkout of one commit in a scratch folder that runs recorded commands."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.records.cases import REPOSITORY, Case
from scripts.records.documents import Neutral, printed_rows
from scripts.records.outputs import READERS, Found

LIMIT_S = 1800
TOLD_LINES = 15
LIBRARIES = (
    *("torch", "transformers", "nvidia-modelopt", "openvino", "safetensors", "numpy", "scipy", "numba"),
    *("hydra-core", "pydantic", "tritonclient", "protobuf"),
)
ASK = """
import importlib.metadata as metadata, json, os, pipelines, platform, sys
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
facts = {name: version(name) for name in sys.argv[1:]}
facts |= {"python": platform.python_version(), "machine": platform.machine(), "cpus": os.cpu_count()}
print(json.dumps({"package": os.path.dirname(os.path.abspath(pipelines.__file__)), "environment": facts}))
"""
"""Code that prints where the interpreter finds the package, and the versions and facts that determine the bytes.

It imports only the top-level package.
"""


class RecordingError(Exception):
    """An error whose message is all that the user needs to see."""


def full_commit(revision: str) -> str:
    """Return the full hash of a commit of this repository.

    Raises:
        RecordingError: the revision is not a commit.
    """
    command = ["git", "-C", str(REPOSITORY), "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        raise RecordingError(f"'{revision}' is not a commit of {REPOSITORY}.")
    return process.stdout.strip()


@dataclass(frozen=True, slots=True)
class Checkout:
    """The files of a commit and the interpreter that runs them.

    Attributes:
        folder: scratch folder; below it are the commit (`tree`), the artifacts that cases share (`store`) and the
            current folder of the commands (`case`).
        python: the interpreter.
    """

    folder: Path
    python: Path

    @property
    def tree(self) -> Path:
        """The files of the commit."""
        return self.folder / "tree"

    @property
    def neutral(self) -> Neutral:
        """Return a function that replaces this recording's paths in a text."""
        names = {self.tree: "<tree>", self.folder: "<scratch>", self.python: "<python>", REPOSITORY: "<repository>"}
        return Neutral({str(path): name for path, name in names.items()})

    def environment(self) -> dict[str, Any]:
        """Return the versions and machine facts that, besides the code, determine the bytes.

        Raises:
            RecordingError: the interpreter does not import the package from the checkout, so the output of another
                commit would be recorded.
        """
        with self._empty_folder() as folder:
            code, printed, stderr = self._call(["-c", ASK, *LIBRARIES], folder)
        if code:
            raise RecordingError(f"{self.python} cannot import the project's package:\n{_tail(stderr)}")
        facts = json.loads(printed)
        if Path(facts["package"]).resolve().parent != self.tree:
            raise RecordingError(
                f"{self.python} imports the package from {facts['package']}, not from the checkout {self.tree}. "
                "Nothing was recorded. Choose an interpreter that respects PYTHONPATH: --python PATH"
            )
        return dict(facts["environment"])

    def run(self, case: Case) -> Found:
        """Run a case and read its outputs.

        Raises:
            RecordingError: a command ended with an unexpected exit code, an output cannot be read, or a group of the
                case has no output.
        """
        with self._empty_folder() as folder:
            for name, text in case.files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text)
            *before, last = case.commands
            for words in before:
                self._pipelines(words, folder, 0)
            existing = {path for pattern in case.outputs.values() for path in folder.glob(pattern)}
            printed = self._pipelines(last, folder, case.exit_code)
            try:
                records = self._read(case, folder, existing, printed)
            except ValueError as error:
                raise RecordingError(f"  the output cannot be read: {error}") from error
        if missing := [group for group in case.groups if not records.get(group)]:
            raise RecordingError(f"  the commands wrote nothing to record for {', '.join(missing)}")
        return {group: records[group] for group in case.groups}

    def _read(self, case: Case, folder: Path, before: set[Path], printed: str) -> Found:
        records: Found = {"numbers": printed_rows(printed, self.neutral)} if case.reads_plan else {}
        for reader, pattern in case.outputs.items():
            made = sorted(path for path in folder.glob(pattern) if path not in before and path.name[0] != ".")
            for group, documents in READERS[reader](made, folder, self.neutral).items():
                records.setdefault(group, {}).update(documents)
        return records

    def _pipelines(self, words: Sequence[str], folder: Path, expected: int) -> str:
        """Run a command and return what it printed, or its error message where it is refused."""
        code, printed, stderr = self._call(["-m", "pipelines", *words], folder)
        if code != expected:
            command = " ".join(words)
            raise RecordingError(f"  {command}\n  ended with exit code {code}, expected {expected}:\n{_tail(stderr)}")
        return printed or stderr

    def _call(self, words: Sequence[str], folder: Path) -> tuple[int, str, str]:
        """Run a command, return (exit code, stdout, stderr); if this script is ended, the command is killed first."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MAKE"))}
        # One thread, because floating-point sums depend on how they are split.
        environ |= {"PYTHONPATH": str(self.tree), "NO_COLOR": "1", "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [str(self.python), *words], cwd=folder, env=environ, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            printed, stderr = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            raise RecordingError(f"  {' '.join(words)}\n  did not end within {LIMIT_S} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return process.returncode, printed, stderr

    @contextmanager
    def _empty_folder(self) -> Iterator[Path]:
        """Make the commands' current folder, next to `../store`, and remove it afterwards."""
        folder = self.folder / "case"
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder)


@contextmanager
def checked_out(commit: str, python: Path) -> Iterator[Checkout]:
    """Unpack a commit into a scratch folder; git's own worktrees would stay registered if this process is killed."""
    with tempfile.TemporaryDirectory(prefix="same_bytes-") as scratch:
        checkout = Checkout(Path(scratch).resolve(), python)
        checkout.tree.mkdir()
        archive = subprocess.run(
            ["git", "-C", str(REPOSITORY), "archive", "--format=tar", commit], capture_output=True, check=True
        )
        subprocess.run(["tar", "--extract", "--directory", str(checkout.tree)], input=archive.stdout, check=True)
        yield checkout


def _tail(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines()[-TOLD_LINES:])
