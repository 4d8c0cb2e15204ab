"""`tool_choice` that asks for a call: the engine can write nothing else."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai")

from pipelines.serving.process import TritonServer  # noqa: E402 - after the skip
from pipelines.settings.model import BUNDLED  # noqa: E402
from tests.conftest import ROOT  # noqa: E402
from tests.contract.serving.test_front_limits import another_front  # noqa: E402

TEMPLATE = (
    "{% for tool in tools or () %}{{ tool.function.name }} {% endfor %}"
    "{{ messages[-1].content }}{# calls are <tool_call>JSON</tool_call> #}"
)
CITY = {"type": "object", "properties": {"city": {"enum": ["Ulm", "Bonn"]}}, "required": ["city"],
        "additionalProperties": False}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": name, "parameters": CITY}} for name in ("weather", "trains")]
NAMED = {"type": "function", "function": {"name": "trains"}}


@pytest.fixture(scope="module")
def client(served: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    template: Path = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TEMPLATE)
    with (
        another_front(served, chat_template=template) as (_, port),
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as found,
    ):
        yield found


def chat(client: Any, **given: Any) -> Any:
    messages = [{"role": "user", "content": "The capital of"}]
    return client.chat.completions.create(
        model="tiny_gemma", messages=messages, tools=TOOLS, temperature=0, frequency_penalty=2,
        **{"max_tokens": 200, **given},
    )  # fmt: skip


@pytest.mark.parametrize(("choice", "names"), [("required", {"weather", "trains"}), (NAMED, {"trains"})])
def test_the_answer_is_a_call(client: Any, choice: object, names: set[str]) -> None:
    answer = chat(client, tool_choice=choice).choices[0]
    (call,) = answer.message.tool_calls
    assert call.function.name in names
    assert json.loads(call.function.arguments)["city"] in ("Ulm", "Bonn")
    assert (answer.message.content, answer.finish_reason) == (None, "tool_calls")


def test_a_streamed_call_comes_whole(client: Any) -> None:
    choices = [chunk.choices[0] for chunk in chat(client, tool_choice=NAMED, stream=True)]
    (call,) = [call for choice in choices for call in choice.delta.tool_calls or ()]
    assert call.function.name == "trains"
    assert "".join(choice.delta.content or "" for choice in choices) == ""


def test_several_calls_come_where_the_client_says_so(client: Any) -> None:
    """The model would rather not end the list; an answer that is cut after 200 tokens may cut the last call."""
    words = json.loads((BUNDLED / "models" / "tiny_gemma" / "tokenizer.json").read_text())["model"]["vocab"]
    endless = {str(number): -100 for word, number in words.items() if "]" in word or word == "<0x5D>"}
    asked = {"tool_choice": "required", "parallel_tool_calls": True, "logit_bias": endless}
    for stream in (False, True):
        if stream:
            choices = [chunk.choices[0] for chunk in chat(client, stream=True, **asked)]
            calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
            assert [call.index for call in calls] == list(range(len(calls)))
            assert not any(choice.delta.content for choice in choices)
        else:
            calls = chat(client, **asked).choices[0].message.tool_calls
        assert len(calls) > 1
        assert len({call.id for call in calls}) == len(calls)
        assert all(json.loads(call.function.arguments)["city"] in ("Ulm", "Bonn") for call in calls[:-1])


@pytest.mark.parametrize(("choice", "names"), [("required", []), (NAMED, ["trains"])])
def test_a_forced_call_that_is_cut_at_once_is_no_text(client: Any, choice: object, names: list[str]) -> None:
    (cut,) = chat(client, tool_choice=choice, max_tokens=1).choices
    assert (cut.message.content or "", cut.finish_reason) == ("", "length")
    assert [(call.function.name, call.function.arguments) for call in cut.message.tool_calls or ()] == [
        (name, "") for name in names
    ]
    chunks = [chunk.choices[0] for chunk in chat(client, tool_choice=choice, stream=True, max_tokens=1)]
    assert not any(chunk.delta.content for chunk in chunks)
    assert [call.function.name for chunk in chunks for call in chunk.delta.tool_calls or ()] == names


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_that_is_cut_has_the_arguments_so_far(client: Any, choice: object) -> None:
    """As OpenAI and vLLM (a named tool) answer; the client reads from the reason that they are not complete."""
    whole = chat(client, tool_choice=choice)
    (call,) = whole.choices[0].message.tool_calls
    most = whole.usage.completion_tokens - 2
    cut = chat(client, tool_choice=choice, max_tokens=most).choices[0]
    (part,) = cut.message.tool_calls
    assert (cut.message.content, cut.finish_reason, part.function.name) == (None, "length", call.function.name)
    assert call.function.arguments.startswith(part.function.arguments)
    chunks = [chunk.choices[0] for chunk in chat(client, tool_choice=choice, stream=True, max_tokens=most)]
    (streamed,) = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert (streamed.function.arguments, chunks[-1].finish_reason) == (part.function.arguments, "length")
    tools = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]
    named = choice if isinstance(choice, str) else {"type": "function", "name": "trains"}
    asked = {"model": "tiny_gemma", "input": "The capital of", "temperature": 0, "max_output_tokens": most}
    answer = client.responses.create(**asked, tools=tools, tool_choice=named)
    (item,) = answer.output
    assert (answer.status, item.type, item.status) == ("incomplete", "function_call", "incomplete")


def test_the_examples_of_the_docs_work_as_they_stand(served: TritonServer) -> None:
    """In a shell, against the model that the page serves; only the port differs."""
    section = (ROOT / "docs" / "serving.md").read_text().partition("## Guided decoding")[2].partition("\n## ")[0]
    assert "    make serve guided=llguidance serving.openai=true\n" in section
    assert "`make serve guided=llguidance serving.openai=true`" in (ROOT / "docs" / "tasks.md").read_text()
    formatted, called = re.findall(r"^    (curl .*?)\n\n", section, re.MULTILINE | re.DOTALL)
    with another_front(served) as (_, port):

        def message(command: str) -> Any:
            command = command.replace("127.0.0.1:9000", f"127.0.0.1:{port}")
            done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
            return json.loads(done.stdout)["choices"][0]["message"]

        assert json.loads(message(formatted)["content"])["river"] in ("Elb", "Rhine")
        (call,) = message(called)["tool_calls"]
    assert call["function"]["name"] == "save"
    assert json.loads(call["function"]["arguments"])["river"] in ("Elb", "Rhine")


def test_with_auto_the_model_may_write_text(client: Any) -> None:
    assert chat(client, tool_choice="auto").choices[0].message.content
