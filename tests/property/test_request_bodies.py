"""Bodies of requests with anything at any place: each is read, or refused as the client's fault with the field."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelines.serving.openai.bodies import Limits
from pipelines.serving.openai.errors import ApiError
from pipelines.serving.openai.generate import Field
from pipelines.serving.openai.inputs import engine_inputs
from pipelines.serving.openai.prepare import SHIPPED_TEMPLATE, Prepared, ServedModel, read_request
from pipelines.serving.openai.prompts import ChatTemplate
from pipelines.serving.openai.tokenizer import ServedTokenizer
from pipelines.serving.repository import ModelRepository
from pipelines.settings.model import BUNDLED

pytestmark = pytest.mark.thorough

FIELDS = {
    "text_input": Field("BYTES", 1), "max_tokens": Field("INT32", 1), "temperature": Field("FP32", 1),
    "stop_words": Field("BYTES", -1), "seed": Field("UINT64", 1), "stream": Field("BOOL", 1),
    "beam_width": Field("INT32", 1),
}  # fmt: skip
SCHEMA = {"$defs": {"a/b": {"enum": ["x"]}}, "type": "object", "properties": {"p": {"$ref": "#/$defs/a~1b"}}}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": None}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SAMPLING = {
    "model": "m", "n": 1, "stream": True, "stream_options": {"include_usage": True}, "stop": ["x"], "temperature": 0.5,
    "top_p": 0.5, "top_k": 3, "seed": 7, "max_tokens": 5, "min_tokens": 1, "logit_bias": {"5": 1},
    "stop_token_ids": [3], "user": "u", "structured_outputs": {"choice": ["a", "b"]},
}  # fmt: skip
BODIES: dict[str, list[dict[str, Any]]] = {
    "completions": [
        {**SAMPLING, "prompt": "a", "logprobs": 2},
        {"model": "m", "prompt": [[5, 6]], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0},
        {"model": "m", "prompt": [5], "guided_regex": "a+", "best_of": 1, "suffix": ""},
    ],
    "chat": [
        {**SAMPLING, "messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2},
        {
            "model": "m",
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": "b"},
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "parallel_tool_calls": False,
            "reasoning_effort": "low",
            "chat_template_kwargs": {"x": 1},
        },
        {
            "model": "m",
            "messages": [{"role": "user", "content": "a"}],
            "tools": [{"type": "function", "function": FUNCTION}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        },
    ],
    "responses": [
        {"model": "m", "input": "a", "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
        {
            "model": "m",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", "id": "fc_1"},
                {"type": "function_call_output", "call_id": "c1", "output": "b"},
            ],
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": {"type": "function", "name": "f"},
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
            "reasoning": {"effort": "low"},
            "stream": True,
        },
    ],
    "tokenize": [{"prompt": "a", "add_special_tokens": True}, {"messages": [{"role": "user", "content": "a"}]}],
    "detokenize": [{"tokens": [1, 2], "model": "m"}],
    "generate/ensemble": [
        {"text_input": "a", "max_tokens": 3, "id": "x", "parameters": {"temperature": 0.5, "seed": 1}},
        {"text_input": ["a"], "stop_words": ["b"], "stream": False, "beam_width": 1},
    ],
}
RAW = (
    "null", "true", "false", "0", "-0", "-0.0", "1", "-1", "1.0", "1.5", "1e400", "-1e400", "NaN", "Infinity", "1e308",
    "2147483648", "18446744073709551616", "9" * 300, "9" * 4301, '""', '"a"', '"\\ud800"', '"\\u0000"', '"5"', "[]",
    "{}", "[null]",
    "[[]]", "[1, true]", '["a", 1]', '{"\\udc00": 1}', '{"a": 1, "a": 2}', '{"$ref": "#"}', '{"type": "x"}',
    "[" * 90 + "]" * 90, "[" * 5000 + "]" * 5000, '{"a":' * 95 + "1" + "}" * 95, json.dumps("[" * 5000),
)  # fmt: skip
MARK = "the value that is replaced"


@pytest.fixture(scope="module")
def model() -> ServedModel:
    repository = ModelRepository(
        Path(), (), "m", gpu=False, world_size=1, max_input_len=2000, max_seq_len=4000, guided="llguidance"
    )
    return ServedModel(
        ServedTokenizer(BUNDLED / "models" / "tiny_gemma", adds_special=True),
        repository,
        ChatTemplate({"default": SHIPPED_TEMPLATE.read_text()}, {}),
        created=0,
        metrics_url="",
        fields={"ensemble": FIELDS},
    )


def places(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every place in a body, its own included."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(each for key, part in inner for each in places(part, (*path, key)))]


def replaced(body: dict[str, Any], path: tuple[str | int, ...], raw: str) -> bytes:
    """The body as text, with other text at one place."""
    if not path:
        return raw.encode()
    found = copy.deepcopy(body)
    inner: Any = found
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = MARK
    return json.dumps(found).replace(json.dumps(MARK), raw).encode()


def read(way: str, body: bytes, model: ServedModel) -> ApiError | None:
    """Read a body as the service does; whatever is raised beside an ApiError would be a 500."""
    try:
        found = read_request(way, body, model, Limits())
        if isinstance(found, Prepared):
            engine_inputs(found.sampling, found.prompts[0].tokens, found.max_tokens, 0, model, found.sampling.stops)
    except ApiError as error:
        assert 400 <= error.status < 500, error.message  # noqa: PT017 - it may be raised
        json.dumps(error.body(), ensure_ascii=False).encode()
        return error
    return None


def test_the_bodies_themselves_are_fine(model: ServedModel) -> None:
    for way, bodies in BODIES.items():
        for body in bodies:
            assert read(way, json.dumps(body).encode(), model) is None, (way, body)


CASES = [(way, body, path) for way, bodies in BODIES.items() for body in bodies for path in places(body)]


@settings(max_examples=600, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(CASES), st.sampled_from(RAW))
def test_anything_anywhere_is_read_or_refused(model: ServedModel, case: Any, raw: str) -> None:
    way, body, path = case
    read(way, replaced(body, path, raw), model)


@pytest.mark.parametrize("way", BODIES)
def test_what_breaks_parsers_is_refused_with_its_field(model: ServedModel, way: str) -> None:
    """At every first-level field."""
    for body in BODIES[way]:
        for name in body:
            for raw in ("NaN", "1e400", '"\\ud800"', "[" * 5000 + "]" * 5000, "9" * 4301, '{"\\udc00": 1}'):
                error = read(way, replaced(body, (name,), raw), model)
                assert error is not None, (name, raw)
                assert error.status == 400
                if raw in ("1e400", '"\\ud800"', '{"\\udc00": 1}'):
                    assert error.param == name
    strict = {"completions": ("n", "top_k", "seed", "max_tokens"), "chat": ("n", "top_logprobs", "min_tokens")}
    for name in strict.get(way, ()):
        for raw in ("true", "1.0", '"5"', "[]", "{}"):
            error = read(way, replaced(BODIES[way][0], (name,), raw), model)
            assert (error is not None and error.param) == name, (name, raw)


def test_every_optional_parameter_may_be_null(model: ServedModel) -> None:
    for way, bodies in BODIES.items():
        required = {"model", "prompt", "messages", "input", "tokens", "text_input", "echo", "top_logprobs",
                    "max_tokens", "stream", "temperature", "tools", "logprobs", "include"}  # fmt: skip
        for body in bodies:
            for name in body.keys() - required:
                assert read(way, replaced(body, (name,), "null"), model) is None, (way, name)
