"""What is fuzzed: each target takes any bytes, and may only refuse them in the way its users see.

Anything else (a traceback, an endless loop) is a finding.
"""

from __future__ import annotations

import io
import json
import signal
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType

from pydantic import ValidationError

from pipelines.checkpoint.tensors import read_header
from pipelines.domain.errors import UserError
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.rotary import Rotary
from pipelines.host.files import parse_json
from pipelines.predict.performance.read_measured import read_measured
from pipelines.serving.openai import template_process
from pipelines.serving.openai.errors import ApiError
from pipelines.serving.openai.inputs import triton_inputs
from pipelines.serving.openai.schema import ChatRequest, CompletionRequest

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<x>"}]


@cache
def _place() -> Path:
    """Return a folder for the files of this process; it is in memory where the machine has such a place."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory if memory.is_dir() else None))


def config_json(data: bytes) -> None:
    """Read a model's config.json, to build it and to size it."""
    try:
        config = parse_json(data)
    except ValueError:
        return
    if not isinstance(config, dict):
        return
    for buildable in (True, False):
        with suppress(UserError):
            shape = ModelShape.from_hf_config(config, buildable=buildable)
            assert min(shape.head_dim, shape.num_params, shape.num_hidden_layers) > 0
            Rotary.of(config)


def safetensors_header(data: bytes) -> None:
    """Read the header of a safetensors file: the bytes are the file, or its header and the length is right."""
    path = _place() / "model.safetensors"
    for content in (data, len(data).to_bytes(8, "little") + data):
        path.write_bytes(content)
        with suppress(UserError):
            for info in read_header(path).values():
                assert 0 <= info.begin <= info.begin + info.nbytes <= len(content)


def measured_result(data: bytes) -> None:
    """Read the benchmark result of another tool; the first byte chooses the kind of file."""
    path = _place() / ("result.yaml" if data[:1] == b"y" else "result.json")
    path.write_bytes(data.removeprefix(b"y"))
    with suppress(UserError):
        read_measured([path])


def chat_template(data: bytes) -> None:
    """Compile and render a chat template, as the process for it does."""
    if len(data) > 400 or b"**" in data:
        return  # a power of powers is one step of Python's, which only the kernel ends: see the tests of bounds
    source = data.decode(errors="replace")
    taken = io.BytesIO()
    signal.signal(signal.SIGPROF, _stop)
    with suppress(TimeoutError):
        template_process.answer(taken, lambda: template_process.compiled(source).render(messages=MESSAGES))
        content = taken.getvalue()
        assert int.from_bytes(content[:8], "little") == len(content) - 8


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise TimeoutError


def openai_body(data: bytes) -> None:
    """Validate the body of a request and turn it into tensors; the first byte chooses the endpoint."""
    try:
        body = json.loads(data[1:])
    except (ValueError, RecursionError):
        return  # FastAPI answers 422 or 400
    with suppress(ValidationError, ApiError):
        if data[:1] == b"c":
            chat = ChatRequest.model_validate(body)
            chat.refuse_unsupported()
            prompt = "".join(message.plain()["content"] for message in chat.messages)
            triton_inputs(chat, prompt, chat.limit or 1, 0)
        else:
            asked = CompletionRequest.model_validate(body)
            asked.refuse_unsupported()
            for number, prompt in enumerate(asked.prompts()):
                triton_inputs(asked, prompt, asked.max_tokens or 16, number)


TARGETS: dict[str, Callable[[bytes], None]] = {
    each.__name__: each for each in (config_json, safetensors_header, measured_result, chat_template, openai_body)
}
