"""`tool_choice` that asks for a call: the engine can write nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai")

from pipelines.serving.process import TritonServer  # noqa: E402 - after the skip
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
        model="tiny_gemma", messages=messages, tools=TOOLS, max_tokens=200, temperature=0, frequency_penalty=2, **given
    )


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


def test_with_auto_the_model_may_write_text(client: Any) -> None:
    assert chat(client, tool_choice="auto").choices[0].message.content
