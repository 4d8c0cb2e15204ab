"""Answers of a model, kept in a file as they arrive, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class AnswerLog:
    """One line of JSON per answer; a line that a killed run left unfinished is ignored.

    Attributes:
        path: the file; it exists after the first answer.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._answers: dict[str, Any] = {}
        self._torn = False
        if path.is_file():
            self._read()

    def _read(self) -> None:
        text = self.path.read_text(encoding="utf-8", errors="replace")
        self._torn = bool(text) and not text.endswith("\n")
        for line in text.splitlines():
            try:
                key, answer = json.loads(line)
            except (ValueError, TypeError):
                continue
            self._answers[key] = answer

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, request: dict[str, Any]) -> Any:
        """Return the answer to a request; None if it was not answered yet."""
        return self._answers.get(_key(request))

    def add(self, request: dict[str, Any], answer: Any) -> None:
        """Keep an answer; another thread may do so at the same time."""
        self.add_all([(request, answer)])

    def add_all(self, answered: Iterable[tuple[dict[str, Any], Any]]) -> None:
        """Keep the answers to several requests; another thread or process may do so at the same time."""
        new = {_key(request): answer for request, answer in answered}
        lines = "".join(json.dumps([key, answer], ensure_ascii=False) + "\n" for key, answer in new.items())
        with self._lock:
            self._answers |= new
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\n" + lines if self._torn else lines)
            self._torn = False

    def remove(self) -> None:
        """Forget all answers, after the result that they led to was written."""
        self.path.unlink(missing_ok=True)
        self._answers = {}


def _key(request: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
