"""Read bodies from standard input and write requests to standard output: python -m pipelines.serving.openai.reading.

The other end is `reader.py`. The kernel ends the process when a body has used its share of processor time.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import pickle
import resource
import signal
import sys
from io import FileIO
from pathlib import Path
from typing import Any

from pipelines.serving.openai.bodies import Limits
from pipelines.serving.openai.errors import ApiError
from pipelines.serving.openai.prepare import ServedModel, read_request, served
from pipelines.serving.openai.reader import CPU_SECONDS, LENGTH, Answer
from pipelines.serving.repository import read_repository


def main() -> None:
    """Answer until nothing more arrives."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.serving.openai.reading", description=__doc__)
    parser.add_argument("--repository", type=Path, required=True)
    parser.add_argument("--chat-template", type=Path)
    parser.add_argument("--max-prompts", type=int, required=True)
    given = parser.parse_args()
    model = served(read_repository(given.repository), "", given.chat_template)
    limits = Limits(prompts=given.max_prompts)
    gc.freeze()  # no later collection walks through the modules and the tokenizer
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it; without it, memory stays with the process
    source, target = FileIO(0), sys.stdout.buffer
    while head := _exactly(source, LENGTH.size):
        asked = _exactly(source, LENGTH.unpack(head)[0])
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        answer = pickle.dumps(_answer(asked, model, limits))
        signal.setitimer(signal.ITIMER_PROF, 0)
        target.write(LENGTH.pack(len(answer)) + answer)
        target.flush()
        del asked, answer
        if trim is not None:
            trim(0)


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
