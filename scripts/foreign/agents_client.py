"""Frameworks for agents, those that are installed here: URL MODEL."""

from __future__ import annotations

import importlib.util
import sys
from enum import StrEnum

from asked import ask
from pydantic import BaseModel, ConfigDict

URL, MODEL = sys.argv[1:]
PROMPT = "The river of Githbrel is"


class River(StrEnum):
    """One of two."""

    ELB = "Elb"
    RHINE = "Rhine"


class Found(BaseModel):
    """What was found; its schema has `$defs`, and allows nothing else, which a tiny model would write for ever."""

    model_config = ConfigDict(extra="forbid")

    river: River


def instructor_create() -> object:
    import instructor
    import openai

    client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
    asked = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 200, "temperature": 0}
    found = []
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        answer = instructor.from_openai(client, mode=mode).create(response_model=Found, max_retries=1, **asked)
        assert answer.river in River
        found.append(answer.river.value)
    return found


def pydantic_ai_run() -> object:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=URL, api_key="none")
    few = {"max_tokens": 60, "temperature": 0}
    found = []
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        for output in (Found, NativeOutput(Found)):
            agent = Agent(kind(MODEL, provider=provider), output_type=output, model_settings=few, retries=0)
            answer = agent.run_sync(PROMPT).output
            assert answer.river in River
            found.append(answer.river.value)
    return found


def openai_agents_run() -> object:
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)

    @function_tool
    def save(river: River) -> str:
        """Save a river."""
        return f"saved {river.value}"

    client = AsyncOpenAI(base_url=URL, api_key="none", max_retries=0)
    found = []
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        few = ModelSettings(max_tokens=60, temperature=0, tool_choice="required", parallel_tool_calls=False)
        model = kind(model=MODEL, openai_client=client)
        forced = Agent("rivers", model=model, tools=[save], model_settings=few, tool_use_behavior="stop_on_first_tool")
        output = Runner.run_sync(forced, PROMPT).final_output
        assert output.startswith("saved "), output
        both = Agent("both", model=model, tools=[save], output_type=Found, tool_use_behavior="stop_on_first_tool",
                     model_settings=ModelSettings(max_tokens=60, temperature=0))  # fmt: skip
        answer = Runner.run_sync(both, PROMPT).final_output
        assert answer in ("saved Elb", "saved Rhine") or answer.river in River
        found += [output, answer]
    return found


def llama_index_call() -> object:
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    def save(river: River) -> str:
        """Save a river."""
        return river

    save.__annotations__ = {"river": River, "return": str}  # it does not resolve names
    model = OpenAILike(model=MODEL, api_base=URL, api_key="none", is_chat_model=True, is_function_calling_model=True,
                       max_tokens=60, temperature=0, max_retries=0)  # fmt: skip
    answer = model.chat_with_tools([FunctionTool.from_defaults(save)], user_msg=PROMPT, tool_required=True)
    (call,) = model.get_tool_calls_from_response(answer)
    assert call.tool_kwargs["river"] in list(River)
    return call.tool_kwargs, model.complete(PROMPT).text


def haystack_run() -> object:
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import Tool
    from haystack.utils import Secret

    few = {"max_tokens": 60, "temperature": 0}
    save = Tool("save", "Save a river", Found.model_json_schema(), lambda river: river)
    maker = OpenAIChatGenerator(Secret.from_token("none"), MODEL, api_base_url=URL, max_retries=0, tools=[save],
                                generation_kwargs={**few, "tool_choice": "required"})  # fmt: skip
    (call,) = maker.run([ChatMessage.from_user(PROMPT)])["replies"][0].tool_calls
    assert call.arguments["river"] in list(River)
    return call.arguments


for package, asked, answer in (
    ("instructor", "instructor: tools and JSON schema", instructor_create),
    ("pydantic_ai", "pydantic-ai: tool and native output, chat and responses", pydantic_ai_run),
    ("agents", "openai-agents: forced tools, tools with an output type, responses and chat", openai_agents_run),
    ("llama_index", "LlamaIndex OpenAILike: a required tool, completions", llama_index_call),
    ("haystack", "haystack: a required tool", haystack_run),
):
    if importlib.util.find_spec(package) is not None:
        ask(asked, answer)
