"""Render one chat template, in a process of its own.

A template comes with the model and is code: it may loop for ever or fill the memory, in an expression that Python
evaluates in one step. The kernel ends this process when it has used its share of processor time, and refuses it more
memory; the service starts another one. Messages in both directions are a length and that many bytes.
"""

import json
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_SECONDS = 0.5
"""Processor time for one prompt; ordinary templates take a few milliseconds for a hundred messages."""
MEMORY_BYTES = 512 * 2**20
"""Address space beyond what the interpreter itself takes."""
LENGTH_BYTES = 8
RENDERED, REFUSED, TOO_LARGE = b"+", b"-", b"!"
"""First byte of an answer: the prompt follows, or why there is none; or memory ran out."""


def main() -> None:
    """Compile the template that is sent first, then render prompts until there are no more messages."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the service ends this process by closing its input
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    taken = sys.stdout.buffer
    _bound_memory()
    requests = _requests(sys.stdin.buffer)
    if not (first := next(requests, b"")):
        return
    setup = json.loads(first)
    template: Any = None

    def compile_it() -> str:
        nonlocal template
        template = compiled(setup["source"])
        return ""

    answer(taken, compile_it)
    for request in requests:
        # Transformers gives every template the first two, so that "is not none" means the same
        values = {"tools": None, "documents": None, "add_generation_prompt": True, **json.loads(request)}
        values = {**setup["tokens"], **values}
        answer(taken, partial(template.render, values))


def _requests(stream: BinaryIO) -> Iterator[bytes]:
    while len(length := stream.read(LENGTH_BYTES)) == LENGTH_BYTES:
        yield stream.read(int.from_bytes(length, "little"))


def _bound_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def answer(taken: BinaryIO, work: Callable[[], str]) -> None:
    """Do the work within its time limit, and send the result."""
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        kind, text = RENDERED, work()
        content = text.encode()
    except MemoryError:
        kind, content = TOO_LARGE, b""
    except Exception as error:  # noqa: BLE001 - whatever the Python raises that jinja2 writes for a template
        kind, content = REFUSED, str(error)[:1000].encode(errors="replace")
    signal.setitimer(signal.ITIMER_PROF, 0)
    taken.write((len(kind) + len(content)).to_bytes(LENGTH_BYTES, "little") + kind + content)
    taken.flush()


def compiled(source: str) -> Any:
    """Compile the template as Transformers does, with its functions and whitespace rules.

    Source: https://huggingface.co/docs/transformers/chat_templating_writing
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlocks]
    )
    environment.filters["tojson"] = _json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


class GenerationBlocks(Extension):
    """`{% generation %}`, which marks the assistant's words for training and changes nothing in a prompt."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2's own extensions have it

    def parse(self, parser: Parser) -> nodes.Node:
        """Read a block up to its end."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Callable[[], str]) -> str:
        return caller()


def _json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=None if separators is None else tuple(separators),
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


if __name__ == "__main__":
    main()
