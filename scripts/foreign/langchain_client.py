"""LangChain's ChatOpenAI and OpenAI: URL MODEL."""

import asyncio
import sys

from asked import ask
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict, Field

URL, MODEL = sys.argv[1:]
PROMPT = "The river of Githbrel is"
SHARED = {"base_url": URL, "api_key": "none", "model": MODEL, "max_retries": 0, "timeout": 60}
chat = ChatOpenAI(**SHARED, max_tokens=16, temperature=0)
texts = OpenAI(**SHARED, max_tokens=16, temperature=0)


class River(BaseModel):
    """A river."""

    model_config = ConfigDict(extra="forbid")  # or a tiny model writes more for ever

    name: str = Field(max_length=8)


def invoke() -> str:
    reply = chat.invoke([SystemMessage("You know rivers."), HumanMessage(PROMPT), AIMessage("Yes?"), HumanMessage("?")])
    assert reply.usage_metadata["output_tokens"] <= 16
    return reply.usage_metadata


def stream() -> str:
    parts = list(ChatOpenAI(**SHARED, max_tokens=16, temperature=0, stream_usage=True).stream(PROMPT))
    whole = sum(parts[1:], parts[0])
    assert whole.content == chat.invoke(PROMPT).content
    return f"{len(parts)} parts, {whole.usage_metadata['output_tokens']} tokens"


def batch() -> str:
    replies = chat.batch([PROMPT] * 4)
    assert len({each.content for each in replies}) == 1
    return "4 prompts"


def structured() -> object:
    maker = ChatOpenAI(**SHARED, max_tokens=150, temperature=0, frequency_penalty=2)
    river = maker.with_structured_output(River).invoke(PROMPT + " Answer in JSON.")
    assert isinstance(river, River)
    return river


def log_probs() -> str:
    reply = chat.bind(logprobs=True, top_logprobs=2).invoke(PROMPT)
    assert len(reply.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2
    return "2 likeliest of each"


def tools() -> str:
    more = ChatOpenAI(**SHARED, max_tokens=100, temperature=0)
    river = more.with_structured_output(River, method="function_calling").invoke(PROMPT)
    assert isinstance(river, River)
    return river


def bound_tools() -> str:
    """One call, then several, and what they gave back."""
    more = ChatOpenAI(**SHARED, max_tokens=900, temperature=0)
    one = more.bind_tools([River], tool_choice="required", parallel_tool_calls=False).invoke(PROMPT)
    several = more.bind_tools([River], tool_choice="required", parallel_tool_calls=True).invoke(PROMPT)
    assert len(one.tool_calls) == 1 < len(several.tool_calls)
    results = [ToolMessage("saved", tool_call_id=call["id"]) for call in several.tool_calls]
    assert chat.invoke([HumanMessage(PROMPT), several, *results, HumanMessage("?")]).usage_metadata
    return f"1 and {len(several.tool_calls)} calls"


def responses() -> str:
    model = ChatOpenAI(**SHARED, max_tokens=16, use_responses_api=True, temperature=0)
    parts = list(model.stream(PROMPT))
    assert model.invoke(PROMPT).text
    return f"{len(parts)} parts"


def text() -> str:
    assert texts.invoke(PROMPT) == "".join(texts.stream(PROMPT))
    assert len(texts.generate([PROMPT] * 3, n=1).generations) == 3
    return texts.invoke(PROMPT)


def asynchronous() -> str:
    async def all_of_them() -> int:
        return len(await asyncio.gather(*(chat.ainvoke(PROMPT) for _ in range(4))))

    return asyncio.run(all_of_them())


for question, answer in (
    ("ChatOpenAI.invoke, with a conversation", invoke),
    ("ChatOpenAI.stream with stream_usage", stream),
    ("ChatOpenAI.batch", batch),
    ("with_structured_output (json_schema)", structured),
    ("log probabilities", log_probs),
    ("with_structured_output (function_calling)", tools),
    ("bind_tools: one call, several, and their results", bound_tools),
    ("use_responses_api", responses),
    ("OpenAI (completions): invoke, stream, generate", text),
    ("ainvoke", asynchronous),
):
    ask(question, answer)
