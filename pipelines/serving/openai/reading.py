"""Read bodies from standard input and write requests to standard output: python -m pipelines.serving.openai.reading.

The other end is `reader.py`. The process ends when nothing has arrived for a while, which returns all its memory.
"""

from __future__ import annotations

import argparse
import pickle
import select
import sys
from io import FileIO
from pathlib import Path
from typing import Any

from pipelines.serving.openai.errors import ApiError
from pipelines.serving.openai.limits import Limits
from pipelines.serving.openai.prepare import read_request
from pipelines.serving.openai.reader import LENGTH, Answer
from pipelines.serving.openai.served import ServedModel, served
from pipelines.serving.repository import read_repository

IDLE_S = 20.0


def main() -> None:
    """Answer until nothing more arrives."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.serving.openai.reading", description=__doc__)
    parser.add_argument("--repository", type=Path, required=True)
    parser.add_argument("--chat-template", type=Path)
    parser.add_argument("--max-prompts", type=int, required=True)
    given = parser.parse_args()
    model = served(read_repository(given.repository), "", given.chat_template)
    limits = Limits(prompts=given.max_prompts)
    source, target = FileIO(0), sys.stdout.buffer  # without a buffer, which `select` would not see
    while select.select([source], [], [], IDLE_S)[0]:
        head = _exactly(source, LENGTH.size)
        if not head:
            return
        asked = _exactly(source, LENGTH.unpack(head)[0])
        answer = pickle.dumps(_answer(asked, model, limits))
        target.write(LENGTH.pack(len(answer)) + answer)
        target.flush()


def _answer(asked: bytes, model: ServedModel, limits: Limits) -> Answer:
    way, _, body = asked.partition(b"\n")
    try:
        return True, read_request(way.decode(), body, model, limits)
    except ApiError as error:
        return False, error.arguments()


def _exactly(source: FileIO, size: int) -> bytes:
    """Read so many bytes; fewer only at the end of the input."""
    parts: list[Any] = []
    while size and (part := source.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


if __name__ == "__main__":
    main()
