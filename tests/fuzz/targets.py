"""What is fuzzed: each target takes any bytes, and may only refuse them in the way its users see.

Anything else (a traceback, an endless loop) is a finding.
"""

import atexit
import io
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from pipelines.checkpoint.tensors import read_header
from pipelines.domain.errors import UserError
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.rotary import Rotary
from pipelines.host.files import parse_json
from pipelines.predict.performance.read_measured import read_measured
from pipelines.serving.openai import template_process
from pipelines.serving.openai.bodies import Limits
from pipelines.serving.openai.errors import ApiError
from pipelines.serving.openai.generate import Field
from pipelines.serving.openai.inputs import engine_inputs
from pipelines.serving.openai.prepare import Prepared, ServedModel, read_request
from pipelines.serving.openai.prompts import ChatTemplate
from pipelines.serving.openai.tokenizer import ServedTokenizer
from pipelines.serving.repository import ModelRepository
from pipelines.settings.model import BUNDLED

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<x>"}]


@cache
def _place() -> Path:
    """Return a folder for the files of this process; it is in memory where the machine has such a place."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory if memory.is_dir() else None))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


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


FIELDS = {
    "text_input": Field("BYTES", 1),
    "max_tokens": Field("INT32", 1),
    "temperature": Field("FP32", 1),
    "seed": Field("UINT64", 1),
    "stream": Field("BOOL", 1),
    "stop_words": Field("BYTES", -1),
    "beam_width": Field("INT32", 1),
}
WAYS = {b"c": "chat", b"g": "generate/ensemble", b"r": "responses", b"t": "tokenize", b"d": "detokenize"}


class _Joined(ChatTemplate):
    """A template that needs no process of its own; templates have a target of their own."""

    def render(self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any] | None = None) -> str:
        return "".join(message["content"] for message in messages)


@cache
def _model() -> ServedModel:
    template = _Joined({}, {})
    repository = ModelRepository(
        Path(), (), "m", gpu=False, world_size=1, max_input_len=100, max_seq_len=200, guided="llguidance"
    )
    tokenizer = ServedTokenizer(BUNDLED / "models" / "tiny_llama", adds_special=True)
    return ServedModel(tokenizer, repository, template, 0, "", {"ensemble": FIELDS})


def openai_body(data: bytes) -> None:
    """Read the body of a request and turn it into tensors; the first byte chooses the endpoint."""
    with suppress(ApiError):
        found = read_request(WAYS.get(data[:1], "completions"), data[1:], _model(), Limits())
        if isinstance(found, Prepared):
            for number, prompt in enumerate(found.prompts):
                engine_inputs(found.sampling, prompt.tokens, found.max_tokens, number, _model(), found.sampling.stops)


TARGETS: dict[str, Callable[[bytes], None]] = {
    each.__name__: each for each in (config_json, safetensors_header, measured_result, chat_template, openai_body)
}
