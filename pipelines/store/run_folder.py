"""The folder of one run: its resolved configuration, its overrides and its log."""

import itertools
import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from pipelines.domain.errors import UserError, is_interruption, masked
from pipelines.host.disk import relative_to_cwd
from pipelines.host.files import disk_faults
from pipelines.host.screen import complain, say

CONFIG = "config.yaml"


@contextmanager
def run_folder(name: str, runs: Path, config: str, overrides: Sequence[str]) -> Iterator[Path]:
    """Make `<runs>/<time>-<name>-<pid>/` with the resolved configuration and a log.

    A crash is logged with its traceback, and the path of the log is printed.
    """
    with disk_faults(f"paths.runs='{runs}' cannot be written", "Give another folder: paths.runs=/some/folder"):
        folder = _new_folder(runs.absolute(), name)
        (folder / CONFIG).write_text(config)
        (folder / "overrides.json").write_text(json.dumps(list(overrides)) + "\n")
    handler = _Log(folder / "run.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield folder
    except BaseException as error:
        if isinstance(error, UserError) or is_interruption(error):
            root.error("stopped: %s", str(error) or type(error).__name__)
            raise
        root.error("crashed:\n%s", traceback.format_exc())
        say(f"log: {relative_to_cwd(folder / 'run.log')}")
        raise
    finally:
        root.removeHandler(handler)
        handler.close()


class _Log(logging.FileHandler):
    """A run's log. If the disk is full or gone, lines are lost with one warning; the run continues."""

    _said = False

    def format(self, record: logging.LogRecord) -> str:
        """Render a line without the passwords of addresses."""
        return masked(super().format(record))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Say once that lines are lost; logging itself would print a traceback for each."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._said:
            self._said = True
            place = relative_to_cwd(Path(self.baseFilename))
            complain(f"{place} cannot be written ({error.strerror}); it lacks lines.", "warning")

    def close(self) -> None:
        """Close the file; lines that cannot be written are lost."""
        with suppress(OSError):
            super().close()


def _new_folder(parent: Path, name: str) -> Path:
    """Create a folder that no other run uses, however many runs start at the same time."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    for number in itertools.count():
        folder = parent / f"{stamp}-{name}-{os.getpid()}{f'-{number}' if number else ''}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if not parent.is_dir():
                raise
        else:
            return folder
    raise AssertionError("unreachable: the count has no end")
