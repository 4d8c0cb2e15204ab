"""Answers in channels, through the service and OpenAI's own client; the engine is a list of tokens.

What belongs into which field is taken from github.com/openai/harmony (docs/format.md), and from the tests of the
parsers of vLLM (test_qwen3_reasoning_parser.py, test_deepseekr1_reasoning_parser.py; for harmony, messages that are
joined) and TensorRT-LLM (test_reasoning_parser.py).
"""

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from tokenizers import Tokenizer

pytest.importorskip("tritonclient.grpc")
openai = pytest.importorskip("openai")
TestClient = pytest.importorskip("starlette.testclient").TestClient

from pipelines.serving.openai.app import make_app  # noqa: E402 - after the skips
from pipelines.serving.openai.backend import Backend  # noqa: E402
from pipelines.serving.openai.bodies import Limits  # noqa: E402
from pipelines.serving.openai.channels import MARKS, Channels  # noqa: E402
from pipelines.serving.openai.errors import ApiError  # noqa: E402
from pipelines.serving.openai.generation import TokenPart  # noqa: E402
from pipelines.serving.openai.prepare import served  # noqa: E402
from pipelines.serving.repository import read_repository  # noqa: E402
from tests.contract.serving.echo_repository import write_served_echo  # noqa: E402

BUNDLED = Path(__file__).parents[3] / "pipelines/bundled/models/tiny_llama/tokenizer.json"
THINK, THINK_END = Channels.THINK.value
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor %}"
    "{% if tools %}{{ tools }}{% endif %}<|start|>assistant{# <|channel|>final #}"
)
THINKS = "<|channel|>analysis<|message|>2 + 2? Simple.<|end|><|start|>assistant"
ANSWERS = "<|channel|>final<|message|>2 + 2 = 4.<|return|>"
CALLS = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Ulm"}<|call|>'
PREAMBLE = "<|channel|>commentary<|message|>Let me look that up.<|end|><|start|>assistant"
QWEN = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}<tool_call>{{ tools }}{% endif %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% if opened %}<think>\n{% endif %}"
)
"""Like Qwen3's; with `opened`, like DeepSeek R1's."""
OPENED, NOT_AT_ALL = {"opened": True}, {"enable_thinking": False}
GUIDED = {"guided_decoding_backend": "llguidance"}
REPOSITORY = {"label": "echo", "limits": {"max_seq_len": 512}, "settings": GUIDED}
SECTION, REST = "This is a reasoning section", "This is the rest"
HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]


class ScriptedBackend(Backend):
    """Answers every request with the same tokens, one at a time."""

    tokens: tuple[int, ...] = ()
    refusal = ""
    inputs: Mapping[str, Any] = MappingProxyType({})

    async def generate(self, inputs: Any) -> AsyncIterator[TokenPart]:
        self.inputs = {each.name: list(each.values) for each in inputs}
        if self.refusal:
            raise ApiError(400, self.refusal)
        asked = "return_log_probs" in self.inputs
        for token in self.tokens:
            yield TokenPart((token,), (-0.5,) if asked else None, best=(((token, -0.5),),) if asked else None)


class Stand:
    """The service, and what its engine answers next."""

    def __init__(self, client: Any, backend: ScriptedBackend, tokenizer: Tokenizer) -> None:
        self.client, self.backend, self._tokenizer = client, backend, tokenizer

    def ids(self, answer: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(answer, add_special_tokens=False).ids)

    @property
    def special(self) -> set[int]:
        return {token for token, added in self._tokenizer.get_added_tokens_decoder().items() if added.special}

    def chat(self, answer: str, values: Any = None, **given: Any) -> Any:
        self.backend.tokens = self.ids(answer)
        given = {"max_completion_tokens": 200, "extra_body": {"chat_template_kwargs": values or {}}, **given}
        return self.client.chat.completions.create(
            model="echo", messages=[{"role": "user", "content": "2 + 2?"}], **given
        )

    def both(self, answer: str, values: Any = None, *, stream: bool, **given: Any) -> tuple[str, str | None]:
        """Content and reasoning."""
        found = self.chat(answer, values, stream=stream, **given)
        if not stream:
            message = found.choices[0].message
            return message.content, message.reasoning_content
        deltas = [chunk.choices[0].delta for chunk in found]
        reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        return "".join(delta.content or "" for delta in deltas), reasoning or None

    def respond(self, answer: str, **given: Any) -> Any:
        self.backend.tokens = self.ids(answer)
        return self.client.responses.create(model="echo", input="2 + 2?", max_output_tokens=200, **given)

    def spelled(self, text: str) -> str:
        """What a text reads when it is written letter by letter, so that it has no mark."""
        self.backend.tokens = tuple(token for letter in text for token in self.ids(letter))
        answer = self.client.chat.completions.create(model="echo", messages=[{"role": "user", "content": "2"}])
        return str(answer.choices[0].message.content)


@contextmanager
def serving(folder: Path, template: str, special: Sequence[str] = (), added: Sequence[str] = ()) -> Iterator[Stand]:
    repository = write_served_echo(folder)
    (repository / "repository.json").write_text(json.dumps(REPOSITORY))
    folder = repository / "preprocessing" / "1" / "tokenizer"
    tokenizer = Tokenizer.from_file(str(BUNDLED))
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens(list(added))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    if ends := [tokenizer.token_to_id(mark) for mark in ("<|return|>", "<|call|>") if mark in special]:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    backend = ScriptedBackend("127.0.0.1:1")
    load = partial(served, read_repository(repository), "http://127.0.0.1:1/metrics")
    with TestClient(make_app(load, backend, Limits())) as http:
        yield Stand(
            openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=http), backend, tokenizer
        )


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    with serving(tmp_path_factory.mktemp("harmony"), TEMPLATE, MARKS) as stand:
        yield stand


@pytest.fixture(scope="module", params=["tokens", "special tokens", "text"])
def qwen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """Its tags are tokens of their own as in Qwen3's vocabulary, special ones, or several tokens as in OLMo 3's."""
    tags = {"tokens": "added", "special tokens": "special"}
    tokens = {tags[request.param]: [THINK, THINK_END]} if request.param in tags else {}
    with serving(tmp_path_factory.mktemp("think"), QWEN, **tokens) as stand:
        yield stand


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
    assert stand.both(answer, stream=stream) == (content, thoughts)


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


def test_a_call_that_is_cut_has_the_arguments_so_far(stand: Stand) -> None:
    text = CALLS.partition('"}')[0]
    (choice,) = stand.chat(text, tools=TOOLS, max_completion_tokens=len(stand.ids(text))).choices
    (call,) = choice.message.tool_calls
    assert (call.function.arguments, choice.message.content, choice.finish_reason) == ('{"city": "Ulm', None, "length")


def test_thoughts_are_counted(stand: Stand) -> None:
    thought = len(stand.ids("2 + 2? Simple."))
    usage = stand.chat(THINKS + ANSWERS).usage
    assert usage.completion_tokens_details.reasoning_tokens == thought
    assert usage.completion_tokens > 2 * thought
    response = stand.respond(THINKS + ANSWERS)
    assert response.output_text == "2 + 2 = 4."
    assert response.usage.output_tokens_details.reasoning_tokens == thought


def test_a_stop_string_ends_the_answer_and_not_the_thoughts(stand: Stand) -> None:
    (choice,) = stand.chat(THINKS + ANSWERS, stop=" + 2").choices
    assert (choice.message.content, choice.message.reasoning_content) == ("2", "2 + 2? Simple.")
    # the end token alone, and where it ends; with a stop string, the engine would stop in the thoughts
    assert stand.backend.inputs["stop_words_list"] == [*stand.ids("<|call|>"), 1]


def test_a_client_may_see_how_the_answer_is_written(stand: Stand) -> None:
    (choice,) = stand.chat(THINKS + ANSWERS, extra_body={"skip_special_tokens": False}).choices
    assert choice.message.content == (THINKS + ANSWERS).removesuffix("<|return|>")


def test_a_text_that_looks_like_a_mark_is_text(stand: Stand) -> None:
    assert stand.spelled("<|channel|>analysis<|message|>x") == "<|channel|>analysis<|message|>x"


def test_completions_are_the_tokens_text(stand: Stand) -> None:
    stand.chat(THINKS + ANSWERS)
    answer = stand.client.completions.create(model="echo", prompt="2", max_tokens=200)
    assert answer.choices[0].text == "analysis2 + 2? Simple.assistantfinal2 + 2 = 4."


@pytest.mark.parametrize(
    ("answer", "values", "reasoning", "content"),
    [
        (f"<think>{SECTION}</think>{REST}", {}, SECTION, REST),
        (f"<think>{SECTION}</think>", {}, SECTION, ""),
        (f"<think>This\nThat</think>{REST}\nThat", {}, "This\nThat", f"{REST}\nThat"),
        (f"<think>{SECTION}", {}, SECTION, ""),
        (f"\n<think>{SECTION}</think>\n{REST}", {}, SECTION, f"\n{REST}"),
        ("<think>", {}, None, ""),
        ("<think>a</thank></think>b", {}, "a</thank>", "b"),
        ("<think>a</th", {}, "a</th", ""),
        (REST, {}, None, REST),
        ("<th", {}, None, "<th"),
        ("<thing>", {}, None, "<thing>"),
        (f"{SECTION}</think>{REST}", OPENED, SECTION, REST),
        (f"{SECTION}</think>", OPENED, SECTION, ""),
        (f"</think>{REST}", OPENED, None, REST),
        (SECTION, OPENED, SECTION, ""),
        (f"<think>{SECTION}</think>{REST}", OPENED, SECTION, REST),
        (f"<think>{SECTION}", OPENED, SECTION, ""),
        (REST, NOT_AT_ALL, None, REST),
        (f"a </think> b{HERMES}", NOT_AT_ALL, None, f"a </think> b{HERMES}"),
        ("", OPENED, None, ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_between_tags_is_apart_from_the_answer(
    qwen: Stand, answer: str, values: Any, reasoning: str | None, content: str, stream: bool
) -> None:
    special = qwen.ids(THINK_END)[0] in qwen.special and values is NOT_AT_ALL  # left out of texts like every such token
    content = content.replace(THINK_END, "") if special else content
    assert qwen.both(answer, values, stream=stream) == (content, reasoning)


def test_reasoning_that_is_cut_leaves_no_content(qwen: Stand) -> None:
    tokens = len(qwen.ids(f"<think>{SECTION}"))
    (choice,) = qwen.chat(f"<think>{SECTION}", max_completion_tokens=tokens).choices
    assert (choice.message.content, choice.message.reasoning_content, choice.finish_reason) == ("", SECTION, "length")


@pytest.mark.parametrize("end", ["</think>\n\n", ""], ids=["after it", "ending it"])
@pytest.mark.parametrize("stream", [False, True])
def test_calls_follow_reasoning(qwen: Stand, end: str, stream: bool) -> None:
    found = qwen.chat(f"<think>{SECTION}{end}{HERMES}", tools=TOOLS, stream=stream)
    choices = [chunk.choices[0] for chunk in found] if stream else found.choices
    messages = [choice.delta if stream else choice.message for choice in choices]
    (call,) = next(message.tool_calls for message in messages if message.tool_calls)
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Ulm"})
    assert "".join(getattr(message, "reasoning_content", None) or "" for message in messages) == SECTION
    assert ("".join(message.content or "" for message in messages).strip(), choices[-1].finish_reason) == (
        "", "tool_calls"
    )  # fmt: skip


def test_log_probabilities_stop_strings_and_counts_are_of_the_answer(qwen: Stand) -> None:
    answer = f"<think>{SECTION}</think>{REST}"
    found = qwen.chat(answer, logprobs=True, top_logprobs=1, n=2, stop=[" rest", "reasoning"])
    for choice in found.choices:
        assert (choice.message.content, choice.message.reasoning_content) == ("This is the", SECTION)
        assert "".join(each.token for each in choice.logprobs.content).strip() == "This is the"
    assert "stop_words_list" not in qwen.backend.inputs
    counted = found.usage.completion_tokens_details.reasoning_tokens
    assert 2 * len(qwen.ids(SECTION)) <= counted < found.usage.completion_tokens
    response = qwen.respond(answer)
    assert response.output_text == REST
    assert response.usage.output_tokens_details.reasoning_tokens >= len(qwen.ids(SECTION))


def test_a_client_may_see_the_tags(qwen: Stand) -> None:
    answer = f"<think>{SECTION}</think>{REST}"
    (choice,) = qwen.chat(answer, extra_body={"skip_special_tokens": False}).choices
    assert (choice.message.content, hasattr(choice.message, "reasoning_content")) == (answer, False)


MAGISTRAL = (
    "{% for message in messages %}[INST]{{ message.content }}[/INST]{% endfor %}"
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools }}{# [TOOL_CALLS] #}{% endif %}"
)


@pytest.fixture(scope="module")
def magistral(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """All its marks are special tokens, and its template need not have them."""
    marks = (*Channels.MISTRAL.value, "[TOOL_CALLS]", "[ARGS]")
    with serving(tmp_path_factory.mktemp("magistral"), MAGISTRAL, marks) as stand:
        yield stand


@pytest.mark.parametrize("stream", [False, True])
def test_magistrals_marks_are_others(magistral: Stand, stream: bool) -> None:
    assert magistral.both(f"[THINK]{SECTION}[/THINK]{REST}", stream=stream) == (REST, SECTION)
    found = magistral.chat(f'[THINK]{SECTION}[/THINK][TOOL_CALLS]get_weather[ARGS]{{"city": "Ulm"}}', tools=TOOLS)
    message = found.choices[0].message
    assert (message.content or "", message.reasoning_content) == ("", SECTION)
    assert [call.function.arguments for call in message.tool_calls] == ['{"city": "Ulm"}']


def test_a_guide_that_the_engine_refuses_has_its_name_in_the_request(stand: Stand) -> None:
    stand.backend.refusal = "guided_decoding_guide='{}' is not a valid json_schema: Invalid type: objekt"
    schema = {"name": "x", "schema": {"type": "objekt"}}
    chat = {"response_format": {"type": "json_schema", "json_schema": schema}}
    ways: list[tuple[str, Any, Any]] = [
        ("response_format", stand.chat, chat),
        ("response_format", stand.chat, chat | {"stream": True}),
        ("structured_outputs", stand.chat, {"extra_body": {"structured_outputs": {"regex": "["}}}),
        ("tools", stand.chat, {"tools": TOOLS, "tool_choice": "required"}),
        ("tools' with 'response_format", stand.chat, chat | {"tools": TOOLS}),
        ("text.format", stand.respond, {"text": {"format": {"type": "json_schema", **schema}}}),
    ]
    try:
        for param, ask, given in ways:
            with pytest.raises(openai.BadRequestError, match=f"'{param}' = '{{}}' is not a valid json_schema") as error:
                ask("", **given)
            assert error.value.param == (None if " with " in param else param)
    finally:
        stand.backend.refusal = ""
