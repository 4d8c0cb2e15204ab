"""Answers in gpt-oss's channels, through the service and OpenAI's own client; the engine is a list of tokens.

What belongs into which field is taken from github.com/openai/harmony (docs/format.md) and, for messages that are
joined, from vLLM's tests of its parser.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

pytest.importorskip("tritonclient.grpc")
openai = pytest.importorskip("openai")
TestClient = pytest.importorskip("starlette.testclient").TestClient

from pipelines.serving.openai.app import make_app  # noqa: E402 - after the skips
from pipelines.serving.openai.backend import Backend  # noqa: E402
from pipelines.serving.openai.bodies import Limits  # noqa: E402
from pipelines.serving.openai.generation import TokenPart  # noqa: E402
from pipelines.serving.openai.harmony import MARKS  # noqa: E402
from pipelines.serving.openai.prepare import served  # noqa: E402
from pipelines.serving.repository import read_repository  # noqa: E402
from tests.contract.serving.echo_repository import write_served_echo  # noqa: E402

BUNDLED = Path(__file__).parents[3] / "pipelines/bundled/models/tiny_llama/tokenizer.json"
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor %}"
    "{% if tools %}{{ tools }}{% endif %}<|start|>assistant{# <|channel|>final #}"
)
THINKS = "<|channel|>analysis<|message|>2 + 2? Simple.<|end|><|start|>assistant"
ANSWERS = "<|channel|>final<|message|>2 + 2 = 4.<|return|>"
CALLS = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Ulm"}<|call|>'
PREAMBLE = "<|channel|>commentary<|message|>Let me look that up.<|end|><|start|>assistant"
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]


class ScriptedBackend(Backend):
    """Answers every request with the same tokens, one at a time."""

    tokens: tuple[int, ...] = ()

    async def generate(self, inputs: Any) -> AsyncIterator[TokenPart]:
        for token in self.tokens:
            yield TokenPart((token,))


class Stand:
    """The service, and what its engine answers next."""

    def __init__(self, client: Any, backend: ScriptedBackend, tokenizer: Tokenizer) -> None:
        self.client, self._backend, self._tokenizer = client, backend, tokenizer

    def chat(self, answer: str, **given: Any) -> Any:
        self._backend.tokens = tuple(self._tokenizer.encode(answer, add_special_tokens=False).ids)
        return self.client.chat.completions.create(
            model="echo", messages=[{"role": "user", "content": "2 + 2?"}], max_completion_tokens=200, **given
        )

    def respond(self, answer: str, **given: Any) -> Any:
        self._backend.tokens = tuple(self._tokenizer.encode(answer, add_special_tokens=False).ids)
        return self.client.responses.create(model="echo", input="2 + 2?", max_output_tokens=200, **given)

    def spelled(self, text: str) -> str:
        """What a text reads when it is written letter by letter, so that it has no mark."""
        ids = [token for letter in text for token in self._tokenizer.encode(letter, add_special_tokens=False).ids]
        self._backend.tokens = tuple(ids)
        answer = self.client.chat.completions.create(model="echo", messages=[{"role": "user", "content": "2"}])
        return str(answer.choices[0].message.content)


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    repository = write_served_echo(tmp_path_factory.mktemp("harmony"))
    (repository / "repository.json").write_text(json.dumps({"label": "echo", "limits": {"max_seq_len": 512}}))
    folder = repository / "preprocessing" / "1" / "tokenizer"
    tokenizer = Tokenizer.from_file(str(BUNDLED))
    tokenizer.add_special_tokens(list(MARKS))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    ends = [tokenizer.token_to_id(mark) for mark in ("<|return|>", "<|call|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    backend = ScriptedBackend("127.0.0.1:1")
    load = partial(served, read_repository(repository), "http://127.0.0.1:1/metrics")
    with TestClient(make_app(load, backend, Limits())) as http:
        yield Stand(
            openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=http), backend, tokenizer
        )


@pytest.mark.parametrize(
    ("answer", "content", "thoughts"),
    [
        (THINKS + ANSWERS, "2 + 2 = 4.", "2 + 2? Simple."),
        (ANSWERS, "2 + 2 = 4.", None),
        (PREAMBLE + ANSWERS, "Let me look that up.\n2 + 2 = 4.", None),
        (THINKS + THINKS + ANSWERS, "2 + 2 = 4.", "2 + 2? Simple.\n2 + 2? Simple."),
        (THINKS.removesuffix("<|end|><|start|>assistant"), "", "2 + 2? Simple."),
        ("<|channel|>final<|message|>I'm in the middle", "I'm in the middle", None),
        ('{"guided": true}', '{"guided": true}', None),
        (CALLS, '{"city": "Ulm"}', None),
    ],
    ids=[
        "usual",
        "no thoughts",
        "preamble",
        "thoughts twice",
        "cut in thoughts",
        "cut",
        "no channel",
        "no tools given",
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_are_apart_from_the_answer(
    stand: Stand, answer: str, content: str, thoughts: str | None, stream: bool
) -> None:
    found = stand.chat(answer, stream=stream)
    if stream:
        deltas = [chunk.choices[0].delta for chunk in found]
        shown = "".join(delta.content or "" for delta in deltas)
        thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) or None
    else:
        message = found.choices[0].message
        shown, thought = message.content, message.reasoning_content
    assert (shown, thought) == (content, thoughts)


@pytest.mark.parametrize(
    "answer",
    [THINKS + CALLS, CALLS, f" to=functions.get_weather{CALLS.replace(' to=functions.get_weather', '')}"],
    ids=["after thoughts", "at once", "recipient in the role"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_messages_to_functions_are_calls(stand: Stand, answer: str, stream: bool) -> None:
    if answer.startswith(" to="):
        answer = f"<|start|>assistant{answer}"
    found = stand.chat(answer, tools=TOOLS, stream=stream)
    if stream:
        choices = [chunk.choices[0] for chunk in found]
        (call,) = next(each.delta.tool_calls for each in choices if each.delta.tool_calls)
        reason, content = choices[-1].finish_reason, "".join(each.delta.content or "" for each in choices)
    else:
        (choice,) = found.choices
        (call,), reason, content = choice.message.tool_calls, choice.finish_reason, choice.message.content or ""
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Ulm"})
    assert (reason, content) == ("tool_calls", "")


def test_a_broken_call_is_text(stand: Stand) -> None:
    (choice,) = stand.chat(CALLS.replace('"}', ""), tools=TOOLS).choices
    assert (choice.message.content, choice.message.tool_calls) == ('{"city": "Ulm', None)
    assert choice.finish_reason == "stop"


def test_thoughts_are_counted(stand: Stand) -> None:
    thought = len(stand._tokenizer.encode("2 + 2? Simple.", add_special_tokens=False).ids)
    usage = stand.chat(THINKS + ANSWERS).usage
    assert usage.completion_tokens_details.reasoning_tokens == thought
    assert usage.completion_tokens > 2 * thought
    response = stand.respond(THINKS + ANSWERS)
    assert response.output_text == "2 + 2 = 4."
    assert response.usage.output_tokens_details.reasoning_tokens == thought


def test_a_stop_string_ends_the_answer_and_not_the_thoughts(stand: Stand) -> None:
    (choice,) = stand.chat(THINKS + ANSWERS, stop=" + 2").choices
    assert (choice.message.content, choice.message.reasoning_content) == ("2", "2 + 2? Simple.")


def test_a_client_may_see_how_the_answer_is_written(stand: Stand) -> None:
    (choice,) = stand.chat(THINKS + ANSWERS, extra_body={"skip_special_tokens": False}).choices
    assert choice.message.content == (THINKS + ANSWERS).removesuffix("<|return|>")


def test_a_text_that_looks_like_a_mark_is_text(stand: Stand) -> None:
    assert stand.spelled("<|channel|>analysis<|message|>x") == "<|channel|>analysis<|message|>x"


def test_completions_are_the_tokens_text(stand: Stand) -> None:
    stand.chat(THINKS + ANSWERS)
    answer = stand.client.completions.create(model="echo", prompt="2", max_tokens=200)
    assert answer.choices[0].text == "analysis2 + 2? Simple.assistantfinal2 + 2 = 4."
