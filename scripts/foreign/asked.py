"""What a client's program prints: for each question whether it was answered as the client needs, and what came.

This file and its siblings run in the clients' own environments, which have nothing of this project.
"""

import json
import sys
import traceback
from collections.abc import Callable


def ask(question: str, answer: Callable[[], object]) -> None:
    """Ask one thing; an exception, or an assertion that does not hold, is a failure."""
    try:
        result, fine = answer(), True
    except Exception as error:  # noqa: BLE001 - whatever a client raises is what is to be shown
        where = traceback.extract_tb(error.__traceback__)
        mine = next((frame.line for frame in reversed(where) if frame.filename == sys.argv[0]), "")
        result, fine = f"{type(error).__name__}: {error} ({mine})", False
    sys.stdout.write(json.dumps({"asked": question, "fine": fine, "found": str(result)}) + "\n")
    sys.stdout.flush()


def refused(kind: type[Exception], call: Callable[[], object]) -> str:
    """Expect this exception, and return its text."""
    try:
        call()
    except kind as error:
        return str(error)[:160]
    raise AssertionError(f"no {kind.__name__}")
