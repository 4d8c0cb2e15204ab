"""Guides made of several schemas: what they allow, as llguidance reads them; calls and answers told apart."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")

import llguidance

from pipelines.serving.openai.bodies import Limits
from pipelines.serving.openai.errors import ApiError
from pipelines.serving.openai.guides import StructuredOutputs, call_or_answer, call_schema, left_out_by_xgrammar
from pipelines.serving.openai.prepare import ServedModel, read_request
from pipelines.serving.openai.prompts import ChatTemplate
from pipelines.serving.openai.responses import ResponseRequest
from pipelines.serving.openai.tokenizer import ServedTokenizer
from pipelines.serving.openai.tools import ToolFilter, ToolForm
from pipelines.serving.repository import ModelRepository, read_repository
from pipelines.settings.model import BUNDLED

TOKENIZER = (BUNDLED / "models" / "tiny_gemma" / "tokenizer.json").read_text()
CLOSED = {"additionalProperties": False}


def allows(schema: Any, text: str) -> bool:
    """Whether a text is a whole answer under the guide."""
    tokenizer = llguidance.LLTokenizer(TOKENIZER)
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting())


def tool(name: str, definition: Any, reference: str = "#/$defs/R", **more: Any) -> dict[str, Any]:
    parameters = {"$defs": {"R": definition}, "type": "object", "properties": {"r": {"$ref": reference}},
                  "required": ["r"], **CLOSED, **more}  # fmt: skip
    return {"name": name, "parameters": parameters}


def call(name: str, arguments: str) -> str:
    return f'{{"name":"{name}","arguments":{arguments}}}'


def test_references_lead_to_the_tools_own_definitions() -> None:
    """Two tools with the same name for different definitions, a recursive one, and names that pointers escape."""
    nodes = {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"const": True}]}},
        "required": ["next"],
    }
    odd = {"definitions": {"a/ %~": {"const": 3}}, "type": "object", **CLOSED, "required": ["x", "$ref"],
           "properties": {"x": {"$ref": "#/definitions/a~1%20%25~0"}, "$ref": {"const": {"$ref": "#/no"}}}}  # fmt: skip
    inner = {"$defs": {"S": {"const": 5}}, "$ref": "#/$defs/R/$defs/S"}
    schema = call_schema([
        tool("save", {"enum": ["Elb"]}), tool("load", {"enum": ["Rhine"]}), {"name": "node", "parameters": nodes},
        {"name": "odd", "parameters": odd}, tool("deep", inner),
        tool("id", {"const": 1}, "x:y#/$defs/R", **{"$id": "x:y"}),
    ])  # fmt: skip
    for text, right in (
        (call("save", '{"r":"Elb"}'), True),
        (call("save", '{"r":"Rhine"}'), False),
        (call("load", '{"r":"Rhine"}'), True),
        (call("node", '{"next":{"next":true}}'), True),
        (call("node", '{"next":{"name":"node","arguments":{"next":true}}}'), False),
        (call("odd", '{"x":3,"$ref":{"$ref":"#/no"}}'), True),
        (call("deep", '{"r":5}'), True),
        (call("id", '{"r":1}'), True),
        (call("save", "3"), False),
    ):
        assert allows(schema, text) is right, text


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (tool("save", {}, "#/$defs/Q"), r"'\$ref' = '#/\$defs/Q' in the parameters of tool 'save' .* leads to nothing"),
        (tool("save", {}, "https://x/y.json"), r"'\$ref' = 'https://x/y.json' in the parameters of tool 'save'"),
        (tool("save", {"$anchor": "q"}, "#q"), r"'\$ref' = '#q' .* References lead to places in the same schema"),
        (tool("save", {"$id": "z"}), r"'\$id' = 'z' in the parameters of tool 'save' is not supported"),
        (tool("save", {"$dynamicRef": "#n"}), r"'\$dynamicRef' = '#n' in the parameters of tool 'save'"),
        ({"name": "f", "parameters": {"type": "string"}}, "The parameters of a tool are of type object"),
    ],
)
def test_what_a_guide_cannot_follow_is_named(function: Any, said: str) -> None:
    with pytest.raises(ApiError, match=said) as caught:
        call_schema([function])
    assert caught.value.param == "tools"


def test_a_call_and_an_answer_are_never_the_same_text() -> None:
    save = tool("save", {"enum": ["Elb"]})
    open_answer = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    for answer in (open_answer, {"type": "object"}, {"$defs": {"A": open_answer}, "$ref": "#/$defs/A"}):
        schema = call_or_answer([save], answer)
        assert allows(schema, call("save", '{"r":"Elb"}'))
        assert not allows(schema, call("save", '{"r":"Oder"}'))
        assert allows(schema, '{"name":"save"}')
    with pytest.raises(ApiError, match="may not have both 'name' and 'arguments'"):
        call_or_answer([save], {"properties": {"name": {}, "arguments": {}}})


@pytest.mark.parametrize(
    ("text", "shown", "names"),
    [
        (call("save", "{}"), "", ["save"]),
        ('{"name": "Bob"}', '{"name": "Bob"}', []),
        ('{"river": 1}', '{"river": 1}', []),
    ],
)
def test_guided_answers_are_calls_or_text(text: str, shown: str, names: list[str]) -> None:
    found = ToolFilter(ToolForm.GUIDED)
    pushed = "".join(map(found.push, text))
    rest, calls = found.rest(cut=False)
    assert (pushed + rest, [each.name for each in calls]) == (shown, names)


def test_one_call_at_most() -> None:
    found = ToolFilter(ToolForm.HERMES, one=True)
    found.push(f"<tool_call>{call('a', '{}')}</tool_call><tool_call>{call('b', '{}')}</tool_call>")
    assert [each.name for each in found.rest(cut=False)[1]] == ["a"]


@pytest.mark.parametrize("size", [1, 1000])
def test_text_behind_a_call_is_shown(size: int) -> None:
    text = f"Let me see. <tool_call>{call('a', '{}')}</tool_call>\n<tool_call>{call('b', '{}')}</tool_call>\nWait."
    held = ToolFilter(ToolForm.HERMES)
    shown = "".join(held.push(text[at : at + size]) for at in range(0, len(text), size))
    rest, calls = held.rest(cut=False)
    assert (shown + rest, [each.name for each in calls]) == ("Let me see. \n\nWait.", ["a", "b"])


def test_structured_outputs_are_guides_or_refused_by_name() -> None:
    for given, guide in (
        ({"json": {"type": "integer"}}, ("json_schema", '{"type": "integer"}')),
        ({"json": '{"type": "integer"}'}, ("json_schema", '{"type": "integer"}')),
        ({"regex": "a+"}, ("regex", "a+")),
        ({"choice": ["a.b", "c|d"]}, ("regex", r"(?:a\.b)|(?:c\|d)")),
        ({"grammar": 'root ::= "a"'}, ("ebnf_grammar", 'root ::= "a"')),
        ({"json_object": True, "regex": None}, ("json", "")),
    ):
        assert StructuredOutputs.model_validate(given).guide() == guide
    for given, said in (
        ({}, "takes exactly one of json, regex"),
        ({"regex": "a", "grammar": "b"}, "takes exactly one of json, regex"),
        ({"regex": ""}, "not an empty one"),
        ({"choice": []}, "takes 1 to 1024 texts"),
        ({"structural_tag": "{}"}, r"structured_outputs.structural_tag' = '\{\}' is not supported"),
        ({"json": {}, "whitespace_pattern": " "}, "structured_outputs.whitespace_pattern' = ' ' is not supported"),
    ):
        with pytest.raises(ApiError, match=said):
            StructuredOutputs.model_validate(given).guide()


def test_calls_and_their_results_become_a_chat() -> None:
    asked = ResponseRequest.model_validate({
        "model": "m", "parallel_tool_calls": False, "tool_choice": {"type": "function", "name": "f"},
        "tools": [{"type": "function", "name": "f", "parameters": None, "strict": True}],
        "include": ["message.output_text.logprobs", "reasoning.encrypted_content"], "top_logprobs": 2,
        "input": [
            {"role": "user", "content": "a"}, {"type": "message", "role": "assistant", "content": "b", "id": "msg_1"},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "status": "completed"},
            {"type": "function_call", "call_id": "2", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "c"},
        ],
    })  # fmt: skip
    chat = asked.as_chat()
    calls = [{"id": at, "type": "function", "function": {"name": "f", "arguments": "{}"}} for at in ("1", "2")]
    assert chat["messages"] == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "c"},
    ]
    assert chat["tools"] == [{"type": "function", "function": {"name": "f", "strict": True}}]
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert (chat["logprobs"], chat["top_logprobs"], chat["parallel_tool_calls"]) == (True, 2, False)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference.*send the items themselves"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "'input' = .*reasoning.* is not supported"),
        ({"tools": [{"type": "web_search"}]}, "'tools' = .*web_search.* Only functions are"),
        ({"include": ["x"]}, "'include' = 'x' is not supported"),
        ({"top_logprobs": 2}, r"'top_logprobs' needs include="),
        ({"tool_choice": {"type": "allowed_tools"}}, "'tool_choice' = .*allowed_tools.* is not supported"),
        ({"conversation": "c"}, "'conversation' = 'c' .* Nothing is stored here"),
    ],
)
def test_responses_name_what_they_cannot(given: dict[str, Any], said: str) -> None:
    body = json.dumps({"model": "m", "input": "a", **given}).encode()
    with pytest.raises(ApiError, match=said):
        read_request("responses", body, None, None)  # type: ignore[arg-type]


CALL = {ToolForm.HERMES: "<tool_call>{}</tool_call>", ToolForm.MISTRAL: "[TOOL_CALLS] [{}", ToolForm.JSON: "{}"}
NEXT = {ToolForm.HERMES: "\n<tool_call>", ToolForm.MISTRAL: ", {", ToolForm.JSON: "; {"}


@pytest.mark.parametrize("form", CALL)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_where_one_call_is_wanted_the_first_is_the_last(form: ToolForm, size: int) -> None:
    """It is complete when it has ended, not at the braces and brackets inside it."""
    written = CALL[form].replace("{}", '{"name": "f", "arguments": {"a": {"b": "}]</x>"}}}')
    text = ("x " if form is ToolForm.HERMES else "") + written
    one, several = ToolFilter(form, one=True), ToolFilter(form)
    for at in range(0, len(text), size):
        assert not one.done, text[:at]
        one.push(text[at : at + size])
        several.push(text[at : at + size])
    assert (one.done, several.done) == (True, False)
    one.push(NEXT[form])
    rest, (only,) = one.rest(cut=False)
    assert (rest, only.name, json.loads(only.arguments)) == ("", "f", {"a": {"b": "}]</x>"}})


@pytest.mark.parametrize("text", ["<tool_call>{}</tool_call>", '{"city": "Ulm"} ', "[TOOL_CALLS] [{}]"])
def test_what_is_no_call_does_not_end_an_answer(text: str) -> None:
    for form in CALL:
        one = ToolFilter(form, one=True)
        shown = one.push(text)
        assert not one.done
        assert shown + one.rest(cut=False)[0] == text


def test_several_calls_may_be_forced() -> None:
    """Only where the client says so; of a list that was cut, a call counts from its arguments on."""
    schema = call_schema([tool("save", {"enum": ["Elb"]}), tool("load", {"enum": ["Rhine"]})], several=True)
    save, load = call("save", '{"r":"Elb"}'), call("load", '{"r":"Rhine"}')
    for text, right in ((f"[{save}]", True), (f"[{save},{load},{save}]", True), ("[]", False), (save, False)):
        assert allows(schema, text) is right, text
    listed = ToolFilter(ToolForm.GUIDED_LIST)
    assert listed.push(f"[{save}, {load}, {save[:20]}") == ""
    rest, calls = listed.rest(cut=True)
    assert (rest, [each.name for each in calls]) == ("", ["save", "load"])


INTEGER = {"type": "integer"}


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "object", "properties": {"not": INTEGER, "if": {"enum": [{"not": 1}]}}, "required": ["not"]}, None),
        ({"$ref": "#/$defs/a", "description": "d", "$defs": {"a": {**INTEGER, "minimum": 3}}}, None),
        ({"type": "array", "items": INTEGER, "uniqueItems": False, "minItems": 0}, None),
        ({"$ref": "#/$defs/a", "additionalProperties": True, "required": [], "$defs": {"a": INTEGER}}, None),
        ({"type": "array", "items": {**INTEGER, "uniqueItems": True}}, "'uniqueItems'"),
        ({"type": "object", "properties": {"a": {"type": "string", "not": {"const": "no"}}}}, "'not'"),
        ({"anyOf": [INTEGER, {"type": "number", "multipleOf": 0.5}]}, "'multipleOf'"),
        ({"$ref": "#/$defs/a", "minimum": 1, "$defs": {"a": INTEGER}}, "'minimum' beside '$ref'"),
        ({"type": "object", "properties": {"a": INTEGER}, "anyOf": [INTEGER]}, "'properties' beside 'anyOf'"),
        ({"type": "string", "pattern": "^a+$", "minLength": 3}, "'minLength' beside 'pattern'"),
        ({"items": {"minimum": 1}}, "'minimum' without 'type'"),
        ({"allOf": [INTEGER, {"minimum": 3}]}, "'allOf'"),
        ({"allOf": [INTEGER]}, None),
    ],
)
def test_keywords_that_xgrammar_leaves_out_are_found(schema: Any, word: str | None) -> None:
    """findings/xgrammar_accepts_what_schemas_forbid.sh shows that answers do not keep to them."""
    assert left_out_by_xgrammar(schema) == word


NOT_ONE = {"not": {"const": 1}}
SOME_TOOL = [{"type": "function", "function": {"name": "f", "parameters": NOT_ONE}}]
FREE_TOOL = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": NOT_ONE}}},
         "schema of 'response_format' has 'not', which xgrammar leaves out"),
        ({"tools": SOME_TOOL, "tool_choice": "required"}, "schema of 'tools' has 'not', which xgrammar leaves out"),
        ({"tools": FREE_TOOL, "response_format": {"type": "json_object"}},
         "'tools' with 'response_format' needs a format with \"additionalProperties\": false"),
    ],
)  # fmt: skip
def test_a_server_guided_by_xgrammar_refuses_what_its_answers_would_not_keep_to(more: Any, message: str) -> None:
    repository = ModelRepository(
        Path(), (), "m", gpu=True, world_size=1, max_input_len=100, max_seq_len=200, guided="xgrammar"
    )
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}"
    model = ServedModel(ServedTokenizer(BUNDLED / "models" / "tiny_gemma", adds_special=True), repository,
                        ChatTemplate({"default": template}, {}), created=0, metrics_url="", fields={})  # fmt: skip
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **more}).encode()
    with pytest.raises(ApiError, match=message):
        read_request("chat", body, model, Limits())


def test_more_answers_than_the_engine_runs_and_lets_wait_are_refused_for_good(tmp_path: Path) -> None:
    """Unless their prompts are scored, one after the other."""
    (tmp_path / "tensorrt_llm").mkdir()
    (tmp_path / "tensorrt_llm" / "config.pbtxt").touch()
    described = {"label": "m", "limits": {"max_batch_size": 4}, "settings": {"max_queue_size": 2}}
    for flavour, most in (("tensorrt_llm", None), ("openvino", 6)):  # on GPUs there may be several instances
        (tmp_path / "repository.json").write_text(json.dumps({**described, "flavour": flavour}))
        assert read_repository(tmp_path).most_at_once == most
    tokenizer = ServedTokenizer(BUNDLED / "models" / "tiny_gemma", adds_special=True)
    model = ServedModel(
        tokenizer, read_repository(tmp_path), ChatTemplate({}, {}), created=0, metrics_url="", fields={}
    )

    def read(**more: Any) -> Any:
        return read_request("completions", json.dumps({"model": "m", "prompt": "a", **more}).encode(), model, Limits())

    assert len(read(prompt=["a"] * 6).prompts) == 6
    assert len(read(prompt=["a"] * 7, echo=True, logprobs=0, max_tokens=0).prompts) == 7
    with pytest.raises(ApiError, match="7 answers; one request may ask for up to 6") as refused:
        read(n=7)
    assert (refused.value.status, refused.value.param) == (400, "n")
