"""OpenAI's parameters, stop strings, templates and errors, without a server."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.serving.config import ServingSettings
from pipelines.serving.openai.answers import token_score
from pipelines.serving.openai.errors import ApiError, from_triton
from pipelines.serving.openai.generation import Completion, Prompt, StopFilter, TokenPart, TokenScore, collect_all
from pipelines.serving.openai.inputs import InputTensor, ServedEngine, engine_inputs
from pipelines.serving.openai.prompts import ChatTemplate
from pipelines.serving.openai.responses import ResponseRequest, in_its_words
from pipelines.serving.openai.schema import ChatRequest, CompletionRequest
from pipelines.serving.openai.tokenizer import ServedTokenizer, TextStream
from pipelines.serving.openai.tools import ToolFilter, ToolForm, form_of
from pipelines.serving.repository import ModelRepository
from pipelines.settings.model import BUNDLED
from tests.conftest import ROOT
from triton_repo.tensors import TENSORRT_LLM, interface

GEMMA = ServedTokenizer(BUNDLED / "models" / "tiny_gemma", adds_special=True)
REPOSITORY = ModelRepository(Path("repository"), (), "m", gpu=False, world_size=1)
ENGINE = ServedEngine(GEMMA, REPOSITORY)
END = 1
F, G = '{"name": "f", "arguments":', '{"name": "g", "parameters":'


def engine_that(**facts: Any) -> ServedEngine:
    return ServedEngine(GEMMA, replace(REPOSITORY, **facts))


def inputs(choice: int = 0, engine: ServedEngine = ENGINE, **asked: object) -> dict[str, InputTensor]:
    request = CompletionRequest(model="m", prompt="p", **asked)
    return {entry.name: entry for entry in engine_inputs(request, (5, 6), 7, choice, engine, request.stops)}


def test_every_parameter_has_its_tensor() -> None:
    found = inputs(
        temperature=0.5, top_p=0.9, top_k=9, seed=5, presence_penalty=1, frequency_penalty=-1, repetition_penalty=1.5,
        stop="x", stop_token_ids=[8, 9], stream=True, logprobs=2, logit_bias={"3": -4},
        response_format={"type": "json_object"},
    )  # fmt: skip
    (word,) = GEMMA.ids("x", special=False)
    bias = found.pop("embedding_bias")
    assert (len(bias.values), bias.values[3], sum(bias.values)) == (GEMMA.size, -4, -4)
    assert found.pop("stop_words_list") == InputTensor("stop_words_list", "INT32", (word, 8, 9, 1, 2, 3), (2, 3))
    assert {name: (entry.datatype, entry.values) for name, entry in found.items()} == {
        "input_ids": ("INT32", (5, 6)),
        "input_lengths": ("INT32", (2,)),
        "request_output_len": ("INT32", (7,)),
        "streaming": ("BOOL", (True,)),
        "exclude_input_in_output": ("BOOL", (True,)),
        "end_id": ("INT32", (END,)),
        "pad_id": ("INT32", (0,)),
        "temperature": ("FP32", (0.5,)),
        "runtime_top_p": ("FP32", (0.9,)),
        "runtime_top_k": ("INT32", (9,)),
        "seed": ("UINT64", (5,)),
        "presence_penalty": ("FP32", (1.0,)),
        "frequency_penalty": ("FP32", (-1.0,)),
        "repetition_penalty": ("FP32", (1.5,)),
        "return_log_probs": ("BOOL", (True,)),
        "return_generation_logits": ("BOOL", (True,)),
        "guided_decoding_guide_type": ("BYTES", ("json",)),
        "guided_decoding_guide": ("BYTES", ("",)),
    }


def test_what_was_cached_is_asked_for_where_it_is_shown() -> None:
    """The engine would return it with every token of a stream."""
    engine = engine_that(tokens_per_block=32)
    streams = {"stream": True, "stream_options": {"include_usage": True}}
    shown = [
        inputs(engine=engine, **asked).keys() & {"return_perf_metrics"} for asked in ({}, {"stream": True}, streams)
    ]
    assert [bool(each) for each in shown] == [True, False, True]
    assert "return_perf_metrics" not in inputs(), "the engine does not say it"
    given = ResponseRequest(model="m", input="a", stream=True).as_chat()
    chat = ChatRequest.model_validate(given)  # /v1/responses shows it in every stream
    assert "return_perf_metrics" in {entry.name for entry in engine_inputs(chat, (5,), 7, 0, engine, ())}


def test_every_tensor_is_one_of_the_engines() -> None:
    """Names, types and dimensions are those of TensorRT-LLM's template."""
    known = {entry.name: entry for entry in interface(TENSORRT_LLM).inputs}
    asked = {
        "stop": "x",
        "logprobs": 2,
        "logit_bias": {"3": 1},
        "min_tokens": 2,
        "presence_penalty": 1,
        "lora_task_id": 1,
    }
    guided = {"response_format": {"type": "json_object"}, "seed": 1, "repetition_penalty": 1.1}
    for each in inputs(engine=engine_that(tokens_per_block=32), **asked, **guided).values():
        assert each.datatype.replace("BYTES", "STRING") == known[each.name].dtype
        assert len(each.shape or (1,)) == len(known[each.name].dims)


def test_what_only_the_service_sees_is_streamed_to_it() -> None:
    assert inputs(stop="x")["streaming"].values == (True,)
    assert inputs(stop_token_ids=[3])["streaming"].values == (False,)
    assert inputs(stop_token_ids=[3], min_tokens=2)["streaming"].values == (True,)
    assert inputs(stop="x", engine=engine_that(decoupled=False))["streaming"].values == (False,)
    assert "stop_words_list" not in inputs(stop="x", min_tokens=2)


@pytest.mark.parametrize("asked", [{"temperature": 0}, {"top_p": 0}])
def test_zero_is_greedy(asked: dict[str, float]) -> None:
    found = inputs(**asked)
    assert found["runtime_top_k"].values == (1,)
    assert not {"temperature", "runtime_top_p", "seed"} & set(found)


def test_answers_draw_from_seeds_of_their_own() -> None:
    """Given ones count up and wrap; made-up ones differ."""
    assert inputs(choice=2, seed=5)["seed"].values == (7,)
    assert inputs(seed=-1)["seed"].values == (2**64 - 1,)
    assert inputs()["seed"].values != inputs()["seed"].values


def test_an_engine_that_draws_anew_gets_a_seed_only_from_the_client() -> None:
    anew = engine_that(draws_anew=True)
    assert "seed" not in inputs(engine=anew)
    assert "temperature" in inputs(engine=anew)
    assert inputs(choice=1, engine=anew, seed=5)["seed"] == InputTensor("seed", "UINT64", (6,))


def push_all(stops: Sequence[str], pieces: Sequence[str]) -> tuple[str, bool]:
    found = StopFilter(stops)
    return "".join(found.push(piece) for piece in pieces) + found.rest(), found.stopped


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), max_size=2), st.integers(1, 4))
def test_pieces_stop_where_the_whole_would(text: str, stops: list[str], size: int) -> None:
    """However the text is cut, it ends before the first stop string, or is complete."""
    places = [text.find(stop) for stop in stops if stop in text]
    shown, stopped = push_all(stops, [text[at : at + size] for at in range(0, len(text), size)])
    if not places:
        assert (shown, stopped) == (text, False)
    else:
        assert stopped
        assert not any(stop in shown for stop in stops)
        assert text.startswith(shown)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    found = StopFilter(["END"])
    assert [found.push("a E"), found.push("x E"), found.push("N"), found.rest()] == ["a ", "Ex ", "", "EN"]


def template(source: str | None) -> ChatTemplate:
    return ChatTemplate({} if source is None else {"default": source}, {"bos_token": "<bos>"})


HI = [{"role": "user", "content": "hi"}]


def test_the_first_token_is_written_once() -> None:
    """By the template: the tokenizer adds none to a rendered chat, but to the same text as a prompt."""
    source = "{{ bos_token }}{% for m in messages %}\n  [{{ m.role }}] {{ m.content }}\n{% endfor %}"
    chat = template(source).render(HI)
    assert chat == "<bos>  [user] hi\n"
    assert GEMMA.ids(chat) == GEMMA.ids(str(chat), special=False) != GEMMA.ids(str(chat))


def test_a_template_cannot_leave_its_sandbox() -> None:
    """It is the model author's program."""
    with pytest.raises(ApiError, match="unsafe"):
        template("{{ ''.__class__.__mro__[1].__subclasses__() }}").render(HI)


def test_a_model_without_template_points_to_completions() -> None:
    with pytest.raises(ApiError, match=r"no chat template.*/v1/completions") as caught:
        template(None).render(HI)
    assert caught.value.status == 400


def test_the_template_of_the_folder_is_found(tmp_path: Path) -> None:
    """A file of its own comes before the configuration; of several named ones, the default."""
    several = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D {{ eos_token }}"}]
    config = {"chat_template": several, "eos_token": {"content": "</s>"}, "bos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.load(tmp_path).render(HI) == "D </s>"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert ChatTemplate.load(tmp_path).render(HI) == "file"


def test_a_template_of_ones_own_comes_first(tmp_path):
    """The plain one that ships joins what was said, for models that were never taught to chat."""
    (tmp_path / "chat_template.jinja").write_text("file")
    said = [{"role": "user", "content": "The river"}, {"role": "user", "content": "of Githbrel is"}]
    plain = ROOT / "conf" / "serving" / "plain.jinja"
    assert ChatTemplate.load(tmp_path, plain).render(said) == "The river of Githbrel is"


def test_a_template_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"'/no/such\.jinja' is not a file"):
        ServingSettings(chat_template="/no/such.jinja")


@pytest.mark.parametrize(
    ("message", "code", "status"),
    [
        ("Exceeds maximum queue size: Maximum queue size of 4 reached.", "UNAVAILABLE", 429),
        ("in ensemble 'ensemble', A prompt has 9 tokens; the engine was built with max_input_len=8.", "INTERNAL", 400),
        ("bad temperature", "INVALID_ARGUMENT", 400),
        ("failed to connect to all addresses", "UNAVAILABLE", 503),
        ("Request for unknown model: 'x' is not found", None, 503),
        ("The engine has failed: no memory", None, 503),
        ("something broke", "INTERNAL", 500),
        ("CUDA error: an illegal memory access", None, 500),
        ("temperature=-1.0 is not valid.", None, 400),
        ("guided_decoding_guide='[assert' is not a valid regex: unclosed", None, 400),
        ("in ensemble 'ensemble', guided_decoding_guide='not ready[' is not a valid regex: unclosed", None, 400),
        ("guided_decoding_guide_type='internal' is unknown.", None, 400),
    ],
)
def test_tritons_errors_become_statuses(message: str, code: str | None, status: int) -> None:
    error = from_triton(message, code)
    assert error.status == status
    assert not error.message.startswith("in ensemble")


def test_parts_of_a_message_are_joined_and_other_media_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (message,) = ChatRequest(model="m", messages=[{"role": "user", "content": parts}]).messages
    assert message.plain() == {"role": "user", "content": "ab"}
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    (message,) = ChatRequest(model="m", messages=[{"role": "user", "content": image}]).messages
    with pytest.raises(ApiError, match="Only text content is supported"):
        message.plain()


def test_what_an_assistant_refused_is_its_text_and_only_pictures_are_refused_as_such() -> None:
    parts = [{"type": "refusal", "refusal": "I can't"}]
    (message,) = ChatRequest(model="m", messages=[{"role": "assistant", "content": parts}]).messages
    assert message.plain() == {"role": "assistant", "content": "I can't"}
    for part in (parts[0], {"type": "input_audio", "input_audio": {}}):
        (message,) = ChatRequest(model="m", messages=[{"role": "user", "content": [part]}]).messages
        with pytest.raises(ApiError, match=rf"'{part['type']}'.* is not supported here\. Send text\.$"):
            message.plain()


A, B = GEMMA.ids("a b", special=False)


class Script:
    """Says what it is told to, or fails; counts how many were cancelled."""

    def __init__(self, parts: Sequence[TokenPart], failing: int = -1) -> None:
        self.parts, self.failing, self.cancelled = parts, failing, 0

    async def generate(self, given: Sequence[InputTensor]) -> AsyncIterator[TokenPart]:
        if given[0].values[0] == self.failing:
            raise ApiError(429, "full")
        try:
            for part in self.parts:
                await asyncio.sleep(0.001)
                yield part
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise


def finish(limit: int, max_seq_len: int | None, *tokens: int, **asked: object) -> Completion:
    choice = Completion(0, Prompt((5, 6, 7), "p"), limit, engine_that(max_seq_len=max_seq_len))
    request = CompletionRequest(model="m", prompt="p", **asked)
    parts = [TokenPart((token,)) for token in tokens or (A, B)]
    asyncio.run(collect_all([choice], Script(parts), request))
    return choice


def test_a_text_ends_for_one_of_two_reasons() -> None:
    """Two tokens came: all that were allowed, less, or all that the model has room for."""
    assert finish(2, None).finish_reason == "length"
    assert finish(3, None).finish_reason == "stop"
    assert finish(3, 5).finish_reason == "length"
    assert (finish(2, None, stop=" b").finish_reason, finish(2, None, stop=" b").text) == ("stop", "a")
    assert (finish(9, None, A, END, B).finish_reason, finish(9, None, A, END, B).text) == ("stop", "a")


def test_an_answer_has_its_least_length_before_anything_ends_it() -> None:
    """As vLLM counts; engines mask the first end token alone."""
    for ends in ({}, {"stop_token_ids": [END], "ignore_eos": True}, {"stop": " b"}):
        last = B if "stop" in ends else END
        assert finish(9, None, A, last, B, last, min_tokens=2, **ends).output_tokens >= 3, ends
        assert finish(9, None, A, A, last, B, min_tokens=2, **ends).text == "aa", ends


def test_an_answer_that_its_guide_ends_before_its_least_length_is_refused() -> None:
    assert finish(9, None, min_tokens=2, guided_regex="a b").text == "a b"
    with pytest.raises(ApiError, match="'min_tokens' = 3 cannot be kept: its guide ended the answer after 2") as short:
        finish(9, None, min_tokens=3, guided_regex="a b")
    assert (short.value.status, short.value.param) == (400, "min_tokens")


@pytest.mark.parametrize(("most", "least"), [(9, 3), (9, 4), (3, 3)])
def test_an_end_token_before_the_least_length_is_not_counted(most: int, least: int) -> None:
    assert finish(9, None, A, B, END, min_tokens=2, guided_regex="a b").output_tokens == 2
    with pytest.raises(ApiError, match=f"= {least} cannot be kept: its guide ended the answer after 2"):
        finish(most, None, A, B, END, min_tokens=least, guided_regex="a b")


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_the_models_own_choice_may_be_shorter_than_min_tokens(stream: bool) -> None:
    """It ends the answer, as elsewhere; a forced one is refused."""
    function = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    asked = {"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": [function], "min_tokens": 200,
             "stream": stream, "parallel_tool_calls": False}  # fmt: skip

    def call(form: ToolForm, text: str, **more: Any) -> Completion:
        choice = Completion(0, Prompt((5,), "p"), 300, ENGINE, tools=form, one_call=True)
        parts = [TokenPart((token,)) for token in GEMMA.ids(text, special=False)]
        asyncio.run(collect_all([choice], Script(parts), ChatRequest(**asked, **more)))
        return choice

    chosen = call(ToolForm.HERMES, f"<tool_call>{F} {{}}}}</tool_call> and more")
    assert ([one.name for one in chosen.calls], chosen.finish_reason) == (["f"], "tool_calls")
    with pytest.raises(ApiError, match="'min_tokens' = 200 cannot be kept: its guide"):
        call(ToolForm.GUIDED, f"{F} {{}}}}", tool_choice="required")


@given(st.text(min_size=1, max_size=60))
def test_tokens_arrive_as_the_whole_text(text: str) -> None:
    """Whatever characters are split over tokens; the judge is the tokenizer's own decoder of all tokens."""
    tokens = GEMMA.ids(text, special=False)
    stream = TextStream(GEMMA, skip_special=True)
    pieces = [stream.push(token) for token in tokens]
    assert "".join(pieces) + stream.rest() == GEMMA.continuation(tokens, skip_special=True)


def test_an_incomplete_character_waits_and_is_not_lost() -> None:
    """A snowman is three byte tokens in this vocabulary."""
    tokens = GEMMA.ids("\u2603", special=False)[-3:]
    stream = TextStream(GEMMA, skip_special=True)
    assert [stream.push(token) for token in tokens] == ["", "", "\u2603"]
    assert (stream.push(tokens[0]), stream.rest()) == ("", "\ufffd")


@pytest.mark.parametrize("name", ["tiny_gemma", "tiny_llama"])
def test_the_bytes_of_tokens_are_those_of_the_text(name: str) -> None:
    """Also where a token is a part of a character, as OpenAI documents `bytes`."""
    tokenizer, text = ServedTokenizer(BUNDLED / "models" / name, adds_special=False), "x\u2603\U0001f600"
    scores = [token_score(tokenizer, TokenScore(token, -1.0, (), 0)) for token in tokenizer.ids(text)]
    assert any("\ufffd" in score["token"] for score in scores)
    assert bytes(byte for score in scores for byte in score["bytes"]).decode().strip() == text


def test_a_guide_may_be_asked_for_in_old_and_new_words() -> None:
    """VLLMModel of guidance does so with every request."""
    asked = {"guided_decoding_backend": "guidance", "guided_grammar": "g", "structured_outputs": {"grammar": "g"}}
    request = CompletionRequest(model="m", prompt="p", **asked)
    request.refuse_unsupported()
    assert request.guide == ("ebnf_grammar", "g")
    with pytest.raises(ApiError, match="'guided_grammar' conflicts with structured_outputs"):
        CompletionRequest(**{**request.model_dump(exclude_unset=True), "guided_grammar": "h"}).refuse_unsupported()
    with pytest.raises(ApiError, match="'guided_regex' conflicts with structured_outputs"):
        CompletionRequest(**{**request.model_dump(exclude_unset=True), "guided_regex": "a+"}).refuse_unsupported()


def test_a_schema_where_hugging_faces_client_puts_it_is_the_format() -> None:
    """It writes a `json_schema` as `json_object` with the schema as its value, whatever the server."""
    asked = {"type": "json_object", "value": {"type": "object", "properties": {"a": {"const": 1}}}}
    guide = CompletionRequest(model="m", prompt="p", response_format=asked).guide
    assert guide == ("json_schema", json.dumps(asked["value"]))
    with pytest.raises(ApiError, match=r"'response_format\.value' = .*const.* json_object"):
        CompletionRequest(model="m", prompt="p", response_format={**asked, "type": "text"}).refuse_unsupported()


def test_when_one_answer_fails_the_others_are_cancelled() -> None:
    source = Script([TokenPart((A,))] * 1000, failing=9)
    choices = [Completion(number, Prompt((token,), "p"), 9, ENGINE) for number, token in enumerate((8, 9))]
    with pytest.raises(ApiError, match="full"):
        asyncio.run(collect_all(choices, source, CompletionRequest(model="m", prompt="p")))


def test_an_error_of_a_chat_has_the_names_of_responses():
    error = ApiError(400, "'messages' has 300 tokens.", kind="x", param="messages", code="context_length_exceeded")
    assert in_its_words(error).body()["error"] == {
        "message": "'input' has 300 tokens.", "type": "x", "param": "input", "code": "context_length_exceeded"
    }  # fmt: skip


NEUTRAL = {
    "n": 1,
    "lora_task_id": 1,
    "stream": False,
    "stop": [],
    "min_tokens": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 2), ("temperature", 0.5), ("n", 2), ("stream", True), ("stop", "a"), ("stop_token_ids", [5]),
        ("min_tokens", 1), ("presence_penalty", 1), ("frequency_penalty", 1), ("repetition_penalty", 2),
        ("logit_bias", {"5": 1}), ("guided_regex", "a"),
    ],
)  # fmt: skip
def test_a_scored_prompt_is_asked_for_with_nothing_that_changes_tokens(name: str, value: object) -> None:
    scored: dict[str, Any] = {"model": "m", "prompt": "p", "echo": True, "logprobs": 1, "max_tokens": 1}
    CompletionRequest(**{**scored, "temperature": 0, **NEUTRAL}).refuse_unsupported()
    with pytest.raises(ApiError, match=f"'{name}' = .* is not supported here. With echo and logprobs") as refused:
        CompletionRequest(**{**scored, "temperature": 0, name: value}).refuse_unsupported()
    assert refused.value.param == name


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        (ToolForm.GUIDED, f'{F} {{"city": "U', [("f", '{"city": "U')]),
        (ToolForm.GUIDED, F, [("f", "")]),
        (ToolForm.GUIDED, '{"name": "f", "arg', []),
        (ToolForm.GUIDED_LIST, f'[{F} {{}}}}, {G} {{"a', [("f", "{}"), ("g", '{"a')]),
        (ToolForm.GUIDED_LIST, f'[{F} {{}}}}, {{"na', [("f", "{}")]),
        (
            ToolForm.HERMES,
            f'<tool_call>\n{F} {{"a": 1}}}}\n</tool_call>\n<tool_call>{G} {{',
            [("f", '{"a": 1}'), ("g", "{")],
        ),
        (ToolForm.MISTRAL, f'[TOOL_CALLS] [{F} {{"a": [', [("f", '{"a": [')]),
        (ToolForm.MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{', [("f", '{"a": 1}'), ("g", "{")]),
        (ToolForm.JSON, f'<|tool_call|>[{F} {{"a": 1}}}}, {G} {{', [("f", '{"a": 1}'), ("g", "{")]),
        (ToolForm.JSON, f'<|python_tag|>{F} {{}}}}; {G} {{"b": ";', [("f", "{}"), ("g", '{"b": ";')]),
        (
            ToolForm.JSON,
            '{"type": "function", "name": "f", "parameters": {"a',
            [("f", '{"a')],
        ),  # as Llama 3.1 often does
        (ToolForm.HERMES, "<tool_call> words", []),
    ],
)
def test_a_cut_answer_calls_with_the_arguments_so_far(form: ToolForm, text: str, calls: list[tuple[str, str]]) -> None:
    held = ToolFilter(form)
    shown = held.push(text)
    rest, found = held.rest(cut=True)
    assert [(call.name, call.arguments) for call in found] == calls
    assert shown + rest == ("" if calls else text)


@pytest.mark.parametrize(
    ("form", "forced", "text", "calls"),
    [
        (ToolForm.GUIDED, ("f",), '{"na', [("f", "")]),
        (ToolForm.GUIDED, ("f",), "", [("f", "")]),
        (ToolForm.GUIDED, ("f", "g"), '{"name": "g", "arg', [("g", "")]),
        (ToolForm.GUIDED, ("f", "g"), '{"name": "g', []),
        (ToolForm.GUIDED_LIST, ("f", "g"), '[{"name":"f"', [("f", "")]),
        (ToolForm.GUIDED_LIST, ("f", "g"), f'[{F} {{}}}}, {{"na', [("f", "{}")]),
        (ToolForm.GUIDED, ("f",), f'{F} {{"city": "U', [("f", '{"city": "U')]),
    ],
)
def test_a_forced_call_that_is_cut_is_never_text(
    form: ToolForm, forced: tuple[str, ...], text: str, calls: list[tuple[str, str]]
) -> None:
    """As OpenAI answers: the form of the guide is not the model's text."""
    held = ToolFilter(form, forced=forced)
    shown = held.push(text)
    rest, found = held.rest(cut=True)
    assert [(call.name, call.arguments) for call in found] == calls
    assert shown + rest == ""


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(
    ("form", "text"),
    [
        (ToolForm.MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": "[é{"}[TOOL_CALLS]g[ARGS]{}'),  # Ministral 3, Mistral Small 3.2
        (ToolForm.MISTRAL, '[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"a": "[é{"}[TOOL_CALLS]g[CALL_ID]b1b2c3d4e[ARGS]{}'),
        (ToolForm.MISTRAL, f'[TOOL_CALLS] [{F} {{"a": "[é{{"}}}}, {G} {{}}}}]'),
        (ToolForm.JSON, f'[{F} {{"a": "[é{{"}}}}, {G} {{}}}}]'),  # Granite 3, whose mark is a special token
        (ToolForm.JSON, f'<|tool_call|>[{F} {{"a": "[é{{"}}}}, {G} {{}}}}]'),
    ],
)
def test_calls_of_each_form_are_read(form: ToolForm, text: str, size: int) -> None:
    held = ToolFilter(form)
    shown = "".join(held.push(text[at : at + size]) for at in range(0, len(text), size))
    rest, calls = held.rest(cut=False)
    assert (shown + rest, [(call.name, call.arguments) for call in calls]) == ("", [("f", '{"a": "[é{"}'), ("g", "{}")])
    assert all(len(call.id) == 9 and call.id.isalnum() for call in calls)  # Mistral's templates refuse others


OR_NULL = {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
KINDS: dict[str, Any] = {
    "a": {"type": "string"},
    "b": {"type": "integer"},
    "c": {"type": ["string", "null"]},
    "d": OR_NULL,
}
CODER = [
    {"name": "f", "parameters": {"type": "object", "properties": {**KINDS, "e": {"type": "boolean"}}}},
    {"name": "g"},
]


def coder(name: str, **values: str) -> str:
    return f"<function={name}>" + "".join(f"\n<parameter={key}>\n{values[key]}\n</parameter>" for key in values)


@pytest.mark.parametrize("one", [False, True])
def test_a_call_of_qwen3_coder_has_values_of_the_kinds_in_the_schema(one: bool) -> None:
    """Its template writes each value as text, JSON or Python's words; a text of digits stays one."""
    text = coder("f", a='7\n{"é', b="7", c="null", d='["x"]', e="True", z="1") + "\n</function>\n</tool_call>"
    text = f"<tool_call>\n{text}\n<tool_call>\n{coder('g')}\n</function>\n</tool_call>"
    held = ToolFilter(ToolForm.HERMES, one=one, functions=CODER)
    shown = "".join(map(held.push, text))
    rest, calls = held.rest(cut=False)
    arguments = {"a": '7\n{"é', "b": 7, "c": None, "d": ["x"], "e": True, "z": "1"}
    assert (held.done, shown + rest, json.loads(calls[0].arguments)) == (one, "", arguments)
    assert [(call.name, call.arguments) for call in calls[1:]] == ([] if one else [("g", "{}")])


@pytest.mark.parametrize("written", ["{}", "null", '""'])
def test_a_call_without_arguments_is_one(written: str) -> None:
    held = ToolFilter(ToolForm.JSON)
    held.push(f'{{"name": "f", "parameters": {written}}}')
    assert [(call.name, call.arguments) for call in held.rest(cut=False)[1]] == [("f", "{}")]


def test_a_cut_call_of_qwen3_coder_has_the_values_so_far() -> None:
    held = ToolFilter(ToolForm.HERMES, functions=CODER)
    whole = coder("f", b="1") + "\n</function>\n</tool_call>"
    held.push(f"<tool_call>\n{whole}\n<tool_call>\n{coder('f', b='2')}\n<parameter=a>\nUl")
    assert [(call.name, call.arguments) for call in held.rest(cut=True)[1]] == [("f", '{"b": 1}'), ("f", '{"b": 2')]
    held.push(f"<tool_call>\n{coder('f', b='3')}\n</function>\n</tool_c")  # only its mark is cut
    assert [(call.name, call.arguments) for call in held.rest(cut=True)[1]] == [("f", '{"b": 3}')]


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, "123", "123"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "1.5", 1.5),
    ],
)
def test_a_value_of_qwen3_coder_is_text_unless_its_schema_names_another_kind(
    schema: dict[str, Any], written: str, value: object
) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}}
    held = ToolFilter(ToolForm.HERMES, functions=[function])
    held.push(f"<tool_call>\n{coder('f', a=written)}\n</function>\n</tool_call>")
    assert json.loads(held.rest(cut=False)[1][0].arguments) == {"a": value}


@pytest.mark.parametrize("form", [ToolForm.JSON, ToolForm.GUIDED])
@pytest.mark.parametrize("begun", [("[", "1"), ("<", "b>"), ("\n", "Run")])
def test_an_answer_that_began_as_text_is_shown_as_it_grows(form: ToolForm, begun: tuple[str, str]) -> None:
    """Also what would be a call at its beginning, wherever tokens end."""
    held, call = ToolFilter(form), f"{F} {{}}}}"
    shown = [held.push(text) for text in (*begun, " it: ", call, "{", "<")]
    assert shown[2:] == [" it: ", call, "{", "<"]
    assert held.rest(cut=False) == ("", ())


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{% if message['role'] == 'system' and 'tools' in message %}<|tool|>{{ message['tools'] }}{% endif %}", None),
        ("{%- if tools %}{{ tools | tojson }}{% endif %}", ToolForm.JSON),
        ("{% if not tools is defined %}{% endif %}[TOOL_CALLS]", ToolForm.MISTRAL),
    ],
)
def test_a_template_knows_tools_if_it_reads_them(template: str, form: ToolForm | None) -> None:
    """Phi-4-mini's has tools only in a message, where nobody puts them: they would be left out of the prompt."""
    assert form_of(template) is form


def test_an_answer_that_ends_with_a_broken_call_is_text() -> None:
    held = ToolFilter(ToolForm.GUIDED)
    text = '{"name": "f", "arguments": {"city": "U'
    assert (held.push(text), held.rest(cut=False)) == ("", (text, ()))
