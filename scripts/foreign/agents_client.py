"""Frameworks for agents, those that are installed here: URL MODEL.

Each is asked what the first pages of its documentation show: a chat, a stream, an answer in a class, one tool, several
calls at once, and /v1/responses where that is its default.
"""

import asyncio
import importlib.util
import sys
from enum import StrEnum
from typing import Any, Literal

from asked import ask
from pydantic import BaseModel, ConfigDict

URL, MODEL = sys.argv[1:]
PROMPT = "The river of Githbrel is"
ENDED = "Question: What is the river of Githbrel?\nA. a\nB. b\nAnswer:"  # the model ends its answer to this
HI = [{"role": "user", "content": PROMPT}]
FEW: dict[str, Any] = {"max_tokens": 60, "temperature": 0}
MANY: dict[str, Any] = {"max_tokens": 900, "temperature": 0}  # a tiny model calls as often as it may


class River(StrEnum):
    """One of two."""

    ELB = "Elb"
    RHINE = "Rhine"


class Found(BaseModel):
    """What was found; its schema has `$defs`, and allows nothing else, which a tiny model would write for ever."""

    model_config = ConfigDict(extra="forbid")

    river: River


def save(river: River) -> str:
    """Save a river."""
    saved.append(River(river))
    return f"saved {river}"


save.__annotations__ = {"river": River, "return": str}  # not every framework resolves names
saved: list[River] = []


def calls_since(before: int, least: int, most: int = 1000) -> str:
    """Say how often `save` was called, and check it."""
    assert least <= len(saved) - before <= most, f"{len(saved) - before} calls"
    return f"{len(saved) - before} calls"


def instructor_asks() -> None:
    import instructor
    import openai

    client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
    options = {"model": MODEL, "messages": HI, "max_retries": 1, **MANY}

    def create(mode: instructor.Mode) -> str:
        return instructor.from_openai(client, mode=mode).create(response_model=Found, **options).river.value

    class Named(BaseModel):
        model_config = ConfigDict(extra="forbid")

        river: Literal["Elb", "Rhine"]  # its streams take no enumeration for what is not whole

    def partial() -> str:
        *_, last = instructor.from_openai(client).create_partial(response_model=Named, **options)
        return last.river

    def several() -> str:
        class All(BaseModel):
            model_config = ConfigDict(extra="forbid")

            first: Found
            second: Found

        rivers = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA).create(response_model=All, **options)
        return f"{rivers.first.river}, {rivers.second.river}"

    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA,
                 instructor.Mode.RESPONSES_TOOLS):  # fmt: skip
        ask(f"instructor: a class by {mode.name}", lambda mode=mode: create(mode))
    ask("instructor: create_partial", partial)
    ask("instructor: a class of classes", several)


def pydantic_ai_asks() -> None:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.direct import model_request_sync
    from pydantic_ai.messages import ModelRequest
    from pydantic_ai.models import ModelRequestParameters
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.tools import ToolDefinition

    provider = OpenAIProvider(base_url=URL, api_key="none")

    async def streamed(agent: Agent) -> str:
        async with agent.run_stream(PROMPT) as answer:
            parts = [part async for part in answer.stream_text(delta=True)]
        assert parts
        return f"{len(parts)} parts"

    def output(model: Any, kind: Any) -> str:
        return Agent(model, output_type=kind, model_settings=FEW, retries=0).run_sync(PROMPT).output.river.value

    def direct(model: Any, parallel: bool) -> str:
        tool = ToolDefinition(name="save", parameters_json_schema=Found.model_json_schema())
        answer = model_request_sync(
            model, [ModelRequest.user_text_prompt(PROMPT)],
            model_settings={**MANY, "tool_choice": "required", "parallel_tool_calls": parallel},
            model_request_parameters=ModelRequestParameters(function_tools=[tool]),
        )  # fmt: skip
        rivers = [River(call.args_as_dict()["river"]) for call in answer.tool_calls]
        assert len(rivers) > 1 if parallel else len(rivers) == 1
        return f"{len(rivers)} calls"

    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind(MODEL, provider=provider)
        agent = Agent(model, instructions="Be concise.", model_settings=FEW)
        what = f"pydantic-ai, {kind.__name__}:"
        ask(f"{what} run_sync", lambda agent=agent: agent.run_sync(PROMPT).output)
        ask(f"{what} run_stream", lambda agent=agent: asyncio.run(streamed(agent)))
        ask(f"{what} output_type", lambda model=model: output(model, Found))
        ask(f"{what} NativeOutput", lambda model=model: output(model, NativeOutput(Found)))
        ask(f"{what} one tool", lambda model=model: direct(model, parallel=False))
        ask(f"{what} several calls", lambda model=model: direct(model, parallel=True))


def openai_agents_asks() -> None:
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
    tool = function_tool(save)

    def client() -> AsyncOpenAI:
        return AsyncOpenAI(base_url=URL, api_key="none", max_retries=0)

    def agent(kind: Any, **more: Any) -> Any:
        settings = ModelSettings(**{**FEW, **more.pop("settings", {})})
        return Agent("rivers", instructions="Be concise.", model=kind(model=MODEL, openai_client=client()),
                     model_settings=settings, **more)  # fmt: skip

    def chat(kind: Any) -> str:
        output = Runner.run_sync(agent(kind), ENDED).final_output
        assert output
        return output

    async def streamed(kind: Any) -> str:
        result = Runner.run_streamed(agent(kind), ENDED)
        kinds = {event.type async for event in result.stream_events()}
        assert {"raw_response_event", "run_item_stream_event"} <= kinds, kinds
        assert result.final_output
        return str(sorted(kinds))

    def structured(kind: Any) -> str:
        return Runner.run_sync(agent(kind, output_type=Found), PROMPT).final_output.river.value

    def one(kind: Any) -> str:
        before = len(saved)
        caller = agent(kind, tools=[tool], settings={"tool_choice": "required", "parallel_tool_calls": False})
        assert Runner.run_sync(caller, ENDED).final_output is not None  # the result goes back, and a text comes
        return calls_since(before, 1, 1)

    def several(kind: Any) -> str:
        before = len(saved)
        caller = agent(kind, tools=[tool], tool_use_behavior="stop_on_first_tool",
                      settings={**MANY, "tool_choice": "required", "parallel_tool_calls": True})  # fmt: skip
        Runner.run_sync(caller, PROMPT)
        return calls_since(before, 2)

    def both(kind: Any) -> str:
        caller = agent(kind, tools=[tool], output_type=Found, tool_use_behavior="stop_on_first_tool")
        answer = Runner.run_sync(caller, PROMPT).final_output
        assert answer in [f"saved {river}" for river in River] or answer.river in River
        return str(answer)

    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        what = f"openai-agents, {kind.__name__}:"
        ask(f"{what} run_sync", lambda kind=kind: chat(kind))
        ask(f"{what} run_streamed", lambda kind=kind: asyncio.run(streamed(kind)))
        ask(f"{what} output_type", lambda kind=kind: structured(kind))
        ask(f"{what} a tool and its result", lambda kind=kind: one(kind))
        ask(f"{what} several calls", lambda kind=kind: several(kind))
        ask(f"{what} tools with an output_type", lambda kind=kind: both(kind))


def llama_index_asks() -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(model=MODEL, api_base=URL, api_key="none", is_chat_model=True, is_function_calling_model=True,
                       should_use_structured_outputs=True, max_retries=0, **MANY)  # fmt: skip
    short = model.model_copy(update={"max_tokens": 16})
    chat = [ChatMessage(role="system", content="Be concise."), ChatMessage(role="user", content=PROMPT)]
    tool = FunctionTool.from_defaults(save)

    def streamed() -> str:
        parts = [part.delta for part in short.stream_chat(chat)]
        assert "".join(filter(None, parts)) == short.chat(chat).message.content
        return f"{len(parts)} parts"

    def calls(parallel: bool) -> str:
        answer = model.chat_with_tools([tool], user_msg=PROMPT, tool_required=True, allow_parallel_tool_calls=parallel)
        calls_made = model.get_tool_calls_from_response(answer)
        assert all(call.tool_kwargs["river"] in list(River) for call in calls_made)
        assert len(calls_made) > 1 if parallel else len(calls_made) == 1
        return f"{len(calls_made)} calls"

    def structured() -> str:
        return model.as_structured_llm(Found).chat(chat).raw.river.value

    def called() -> str:
        before = len(saved)
        model.predict_and_call([tool], user_msg=PROMPT, tool_required=True)
        return calls_since(before, 1, 1)

    ask("LlamaIndex OpenAILike: complete", lambda: short.complete(PROMPT).text)
    ask("LlamaIndex OpenAILike: chat", lambda: short.chat(chat).message.content)
    ask("LlamaIndex OpenAILike: stream_chat", streamed)
    ask("LlamaIndex OpenAILike: as_structured_llm", structured)
    ask("LlamaIndex OpenAILike: a required tool", lambda: calls(parallel=False))
    ask("LlamaIndex OpenAILike: several calls", lambda: calls(parallel=True))
    ask("LlamaIndex OpenAILike: predict_and_call", called)


def haystack_asks() -> None:
    from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import Tool
    from haystack.utils import Secret

    tool = Tool("save", "Save a river", Found.model_json_schema(), save)
    chat = [ChatMessage.from_system("Be concise."), ChatMessage.from_user(PROMPT)]

    def maker(kind: Any = OpenAIChatGenerator, **more: Any) -> Any:
        limits = {"max_output_tokens": 900, "temperature": 0} if kind is OpenAIResponsesChatGenerator else MANY
        settings = {**limits, **more.pop("settings", {})}
        more |= {"api_key": Secret.from_token("none"), "api_base_url": URL, "max_retries": 0}
        return kind(model=MODEL, generation_kwargs=settings, **more)

    def streamed() -> str:
        parts: list[Any] = []
        maker(settings={"max_tokens": 16}, streaming_callback=parts.append).run(chat)
        assert len(parts) > 1
        return f"{len(parts)} parts"

    def structured() -> str:
        (reply,) = maker(settings={"response_format": Found}).run(chat)["replies"]
        return Found.model_validate_json(reply.text).river.value

    def calls(parallel: bool, kind: Any = OpenAIChatGenerator) -> str:
        settings = {"tool_choice": "required", "parallel_tool_calls": parallel}
        (reply,) = maker(kind, settings=settings, tools=[tool]).run(chat)["replies"]
        before = len(saved)
        results = [ChatMessage.from_tool(tool.invoke(**call.arguments), call) for call in reply.tool_calls]
        assert maker(kind).run([*chat, reply, *results, ChatMessage.from_user(ENDED)])["replies"][0].text
        return calls_since(before, 2 if parallel else 1, 1000 if parallel else 1)

    ask("haystack OpenAIChatGenerator: chat", lambda: maker(settings={"max_tokens": 16}).run(chat)["replies"][0].text)
    ask("haystack OpenAIChatGenerator: streaming_callback", streamed)
    ask("haystack OpenAIChatGenerator: response_format", structured)
    ask("haystack OpenAIChatGenerator: a tool and its result", lambda: calls(parallel=False))
    ask("haystack OpenAIChatGenerator: several calls and their results", lambda: calls(parallel=True))
    ask("haystack OpenAIResponsesChatGenerator: a tool and its result",
        lambda: calls(parallel=False, kind=OpenAIResponsesChatGenerator))  # fmt: skip


for package, asks in (
    ("instructor", instructor_asks),
    ("pydantic_ai", pydantic_ai_asks),
    ("agents", openai_agents_asks),
    ("llama_index", llama_index_asks),
    ("haystack", haystack_asks),
):
    if importlib.util.find_spec(package) is not None:
        asks()
