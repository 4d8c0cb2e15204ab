"""Bodies as OpenAI's clients and the frameworks around them send them: taken as they are meant, or refused by field."""

import json
import re
from typing import Any

import pytest

pytest.importorskip("fastapi")

from pipelines.serving.openai.errors import ApiError
from pipelines.serving.openai.prepare import read_request
from pipelines.serving.openai.prompts import ChatTemplate
from pipelines.serving.openai.responses import ResponseForm, ResponseRequest
from pipelines.serving.openai.schema import ChatRequest

HI = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"river": {"enum": ["Elb"]}}, "required": ["river"]}
SAVE, DROP = ({"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("save", "drop"))
FLAT_SAVE, FLAT_DROP = ({"type": "function", **tool["function"], "strict": True} for tool in (SAVE, DROP))
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
    {"type": "function", "function": {"name": "drop"}}]}}  # fmt: skip
FLAT_ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "drop"}]}


def as_chat(way: str, **given: Any) -> ChatRequest:
    """The chat that a body asks for, checked."""
    if way == "responses":
        given = ResponseRequest.model_validate({"model": "m", "input": "hi", **given}).as_chat()
    chat = ChatRequest.model_validate({"model": "m", "messages": HI, **given})
    chat.refuse_unsupported()
    return chat


@pytest.mark.parametrize(
    ("way", "given"),
    [
        ("chat", {"prompt_cache_options": {"mode": "implicit"}, "moderation": None, "verbosity": "medium"}),
        ("chat", {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "function_call": "none"}),
        (
            "chat",
            {"metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "x", "user": "u"},
        ),
        ("responses", {"prompt_cache_options": {"mode": "explicit"}, "moderation": None, "image": None}),
        ("responses", {"reasoning": {"effort": None, "summary": "auto", "generate_summary": None, "context": None}}),
        ("responses", {"max_tool_calls": 3, "access_programs": None, "context_management": None, "background": False}),
        (
            "responses",
            {"tools": [FLAT_SAVE | {"defer_loading": False, "allowed_callers": None, "output_schema": None}]},
        ),
        ("responses", {"previous_response_id": None, "include": [], "text": {"verbosity": "medium"}, "store": True}),
    ],
)
def test_what_changes_no_answer_is_taken(way: str, given: dict[str, Any]) -> None:
    plain = as_chat(way)
    chat = as_chat(way, **given)
    assert (chat.guide, chat.calls_tools, chat.limit) == (plain.guide, bool(given.get("tools")), plain.limit)


@pytest.mark.parametrize(
    ("way", "given", "said"),
    [
        ("responses", {"response_format": {"type": "json_object"}}, "Unknown parameter: 'response_format'"),
        ("responses", {"moderation": {"model": "x"}}, "'moderation' = .*'x'.* is not supported"),
        ("responses", {"reasoning": {"summary": "detailed"}}, "reasoning.summary: Input should be 'none' or 'auto'"),
        ("responses", {"tools": [FLAT_SAVE], "tool_choice": FLAT_ALLOWED}, r"'tool_choice' = \['drop'\] is not"),
        ("responses", {"tools": [FLAT_SAVE], "tool_choice": {**FLAT_ALLOWED, "tools": ["save"]}}, "= 'save' is not"),
        ("responses", {"tools": [FLAT_SAVE | {"defer_loading": True}]}, "A tool has 'defer_loading' = True"),
        ("responses", {"truncation": "auto"}, "'truncation' = 'auto' is not supported here"),
    ],
)
def test_what_would_change_an_answer_is_refused_by_its_name(way: str, given: dict[str, Any], said: str) -> None:
    body = json.dumps({"model": "m", "input": "hi", **given}).encode()
    with pytest.raises(ApiError, match=said):
        read_request(way, body, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("way", "given", "said"),
    [
        ("completions", {"prompt": 5}, "prompt: Input should be a valid string or a valid list, not 5."),
        ("completions", {"prompt": ["a", [1]]}, "prompt.1: Input should be a valid string, not [1]."),
        (
            "completions",
            {"prompt": [None]},
            "prompt.0: Input should be a valid string or a valid integer or a valid list, not None.",
        ),
        ("completions", {"stop": ["a", 5]}, "stop.1: Input should be a valid string, not 5."),
        ("completions", {"temperature": 3}, "temperature: Input should be less than or equal to 2, not 3."),
        (
            "completions",
            {"repetition_penalty": 1e-40},
            "repetition_penalty: Input should be greater than or equal to 0.000001, not 1e-40.",
        ),
        ("completions", {"logprobs": "1"}, "logprobs: Input should be a valid integer or a valid boolean, not '1'."),
        (
            "chat",
            {"messages": [{"role": "user", "content": [5]}]},
            "messages.0.content.0: Input should be an object, not 5.",
        ),
        ("chat", {"messages": [5]}, "messages.0: Input should be an object, not 5."),
        (
            "chat",
            {"tool_choice": "x"},
            "tool_choice: Input should be 'none', 'auto' or 'required' or an object, not 'x'.",
        ),
        ("chat", {"tool_choice": {"type": "function"}}, "tool_choice.function: Field required."),
    ],
)
def test_a_value_of_no_kind_that_fits_is_told_all_kinds_and_its_place(
    way: str, given: dict[str, Any], said: str
) -> None:
    """Of several kinds, the one that the value is of counts."""
    body = json.dumps(
        {"model": "m", **({"prompt": "a"} if way == "completions" else {"messages": HI}), **given}
    ).encode()
    with pytest.raises(ApiError, match=f"^{re.escape(said)}$"):
        read_request(way, body, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"guided_json": "{"}, "There was an error parsing 'guided_json': "),
        ({"guided_json": "5"}, "'guided_json' is no JSON schema"),
        ({"guided_choice": []}, "'guided_choice' takes 1 to 1024 texts"),
        ({"guided_regex": ""}, "'guided_regex' is empty."),
        ({"structured_outputs": {"json": "{"}}, "There was an error parsing 'structured_outputs.json': "),
        ({"structured_outputs": {"regex": ""}}, "'structured_outputs' takes exactly one of json, regex"),
        ({"tool_choice": "required"}, "'tool_choice' = 'required' is not supported here. It needs tools."),
    ],
)
def test_a_guide_is_refused_by_the_name_that_was_given(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ApiError, match=f"^{re.escape(said)}"):
        as_chat("chat", **given)


@pytest.mark.parametrize(
    ("way", "tools", "choice"),
    [("chat", [SAVE, DROP], ALLOWED), ("responses", [FLAT_SAVE, FLAT_DROP], FLAT_ALLOWED)],
)
def test_allowed_tools_are_all_there_are(way: str, tools: Any, choice: Any) -> None:
    chat = as_chat(way, tools=tools, tool_choice=choice)
    assert [tool["function"]["name"] for tool in chat.tools or ()] == ["drop"]
    assert chat.must_call
    assert chat.guide is not None
    assert '"save"' not in chat.guide[1]


@pytest.mark.parametrize(("parallel", "several"), [(None, False), (False, False), (True, True)])
def test_several_calls_are_forced_only_where_the_client_says_so(parallel: bool | None, several: bool) -> None:
    """A client that says nothing often takes one call only."""
    for way, tool in (("chat", SAVE), ("responses", FLAT_SAVE)):
        chat = as_chat(way, tools=[tool], tool_choice="required", parallel_tool_calls=parallel)
        assert chat.may_call_several is several
        assert chat.guide is not None
        assert (json.loads(chat.guide[1])["type"] == "array") is several
    named = {"type": "function", "function": {"name": "save"}}
    assert not as_chat("chat", tools=[SAVE], tool_choice=named, parallel_tool_calls=parallel).may_call_several


def test_a_developers_words_are_the_systems_where_a_template_knows_no_developers() -> None:
    """Qwen's template leaves out every role that it does not know."""
    each = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    messages = [{"role": "developer", "content": "Be brief."}, *HI]
    assert ChatTemplate({"default": each}, {}).render(messages) == "system: Be brief. user: hi "
    knowing = each + "{# or developer #}"
    assert ChatTemplate({"default": knowing}, {}).render(messages) == "developer: Be brief. user: hi "


def test_a_response_has_its_metadata() -> None:
    asked = ResponseRequest.model_validate({"model": "m", "input": "hi", "metadata": {"a": "b"}})
    assert ResponseForm(asked)._response("in_progress", None, [])["metadata"] == {"a": "b"}
