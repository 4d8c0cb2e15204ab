"""The openai client: URL MODEL."""

import asyncio
import json
import sys
import time
from typing import Any, Literal

import openai
from asked import ask, refused
from pydantic import BaseModel, Field, RootModel

URL, MODEL = sys.argv[1:]
PROMPT = "The river of Githbrel is"
HI = [{"role": "user", "content": PROMPT}]
client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0, timeout=60)
FIXED: dict[str, Any] = {"ignore_eos": True, "min_tokens": 24}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}  # or it writes arguments for ever
TOOL = {"type": "function", "function": {"name": "rivers", "parameters": NOTHING}}


QUESTION = "Question: What is the river of Githbrel?\nA. a\nB. b\nAnswer:"  # the model ends its answer to this
CALM: dict[str, Any] = {"temperature": 0, "frequency_penalty": 2, "max_tokens": 150}  # or it writes spaces for ever


class River(BaseModel):
    """What is asked for in JSON."""

    name: str = Field(max_length=8)


class Letter(RootModel[Literal["A", "B"]]):
    """A JSON text without room for spaces."""


def models() -> str:
    model = client.models.list().data[0]
    assert client.models.retrieve(MODEL).id == model.id == MODEL
    return model.id


def completion() -> str:
    reply = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0, extra_body=FIXED)
    assert reply.usage.completion_tokens == 24
    assert reply.choices[0].finish_reason == "length"
    return reply.choices[0].text


def streamed_completion() -> str:
    """As many chunks with text as tokens, or nearly: characters may span tokens."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.completions.create(
            model=MODEL, prompt=[PROMPT, PROMPT], n=2, max_tokens=24, temperature=0, stream=True,
            stream_options=options, extra_body=FIXED,
        )
    )  # fmt: skip
    assert chunks[-1].usage.completion_tokens == 4 * 24
    parts = [sum(1 for chunk in chunks if chunk.choices and chunk.choices[0].index == at) for at in range(4)]
    assert all(chunk.usage for chunk in chunks)
    return f"{parts} chunks of 4 answers, usage in each, {chunks[-1].usage.completion_tokens} tokens"


def chat() -> str:
    reply = client.chat.completions.create(model=MODEL, messages=HI, max_completion_tokens=24, extra_body=FIXED, seed=7)
    again = client.chat.completions.create(model=MODEL, messages=HI, max_completion_tokens=24, extra_body=FIXED, seed=7)
    assert reply.choices[0].message.content == again.choices[0].message.content
    assert reply.usage.completion_tokens == 24
    return f"{reply.usage.prompt_tokens} + {reply.usage.completion_tokens} tokens, the same twice with a seed"


def chat_stream_helper() -> str:
    """`client.chat.completions.stream` assembles the chunks itself."""
    messages = [{"role": "user", "content": QUESTION}]
    with client.chat.completions.stream(model=MODEL, messages=messages, max_tokens=150, temperature=0,
                                        stream_options={"include_usage": True}) as stream:  # fmt: skip
        kinds = {event.type for event in stream}
        whole = stream.get_final_completion()
    assert whole.usage.completion_tokens > 0
    assert "content.delta" in kinds
    return f"events {sorted(kinds)}"


def log_probs() -> str:
    reply = client.chat.completions.create(model=MODEL, messages=HI, max_tokens=4, logprobs=True, top_logprobs=3)
    scores = reply.choices[0].logprobs.content
    assert all(len(each.top_logprobs) == 3 for each in scores)
    return f"{len(scores)} tokens, 3 likeliest each"


def parsed() -> str:
    """`client.chat.completions.parse` sends a strict JSON schema."""
    reply = client.chat.completions.parse(model=MODEL, messages=HI, response_format=River, **CALM)
    assert isinstance(reply.choices[0].message.parsed, River)
    return reply.choices[0].message.content


def json_object() -> str:
    kind = {"type": "json_object"}
    choice = client.chat.completions.create(model=MODEL, messages=HI, response_format=kind, **CALM).choices[0]
    if choice.finish_reason == "stop":
        json.loads(choice.message.content)
    return f"{choice.finish_reason}: {choice.message.content!r}"


def tools() -> str:
    options = {"model": MODEL, "messages": HI, "max_tokens": 200, "temperature": 0, "tools": [TOOL]}
    reply = client.chat.completions.create(tool_choice="required", parallel_tool_calls=False, **options)
    (call,) = reply.choices[0].message.tool_calls
    return f"{call.function.name}({call.function.arguments})"


def several_calls() -> str:
    """As many as a list of calls may have; a tiny model does not end it."""
    options = {
        "model": MODEL,
        "max_tokens": 900,
        "temperature": 0,
        "tool_choice": "required",
        "parallel_tool_calls": True,
    }
    calls = client.chat.completions.create(messages=HI, tools=[TOOL], **options).choices[0].message.tool_calls
    assert len(calls) > 1
    assert len({call.id for call in calls}) == len(calls)
    results = [{"role": "tool", "tool_call_id": call.id, "content": "saved"} for call in calls]
    back = [*HI, {"role": "assistant", "tool_calls": [call.model_dump() for call in calls]}, *results]
    assert client.chat.completions.create(model=MODEL, messages=back, tools=[TOOL], max_tokens=8).usage.prompt_tokens
    return f"{len(calls)} calls"


def responses() -> str:
    reply = client.responses.create(model=MODEL, input=PROMPT, max_output_tokens=24)
    assert reply.output_text
    return f"{reply.status}, {reply.usage.output_tokens} tokens"


def responses_stream() -> str:
    with client.responses.stream(model=MODEL, input=QUESTION, max_output_tokens=150, temperature=0) as stream:
        kinds = [event.type for event in stream]
        whole = stream.get_final_response()
    assert whole.output_text
    return f"{len(kinds)} events, {kinds[0]} to {kinds[-1]}"


def responses_parse() -> str:
    reply = client.responses.parse(model=MODEL, input=PROMPT, max_output_tokens=8, text_format=Letter)
    assert reply.output_parsed.root in "AB"
    return reply.output_text


def unknown() -> str:
    """Whatever its value."""
    call = lambda value: lambda: client.completions.create(model=MODEL, prompt="a", extra_body={"wings": value})  # noqa: E731
    return str({refused(openai.BadRequestError, call(value)) for value in (None, False, 0, "", 2)})


def errors() -> str:
    refused(openai.NotFoundError, lambda: client.completions.create(model="gpt-5", prompt="a"))
    refused(openai.BadRequestError, lambda: client.completions.create(model=MODEL, prompt="a " * 5000))
    return refused(openai.NotFoundError, lambda: client.embeddings.create(model=MODEL, input="a"))


def timeout() -> str:
    """A client whose patience ends, then the next request on the same connections."""
    short = client.with_options(timeout=0.05)
    refused(openai.APITimeoutError, lambda: short.completions.create(model=MODEL, prompt=PROMPT, max_tokens=100))
    begun = time.monotonic()
    client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1)
    assert time.monotonic() - begun < 5
    return "the next request is answered"


def async_client() -> str:
    async def all_of_them() -> int:
        async with openai.AsyncOpenAI(base_url=URL, api_key="none", max_retries=0, timeout=60) as many:
            call = many.chat.completions.create
            replies = await asyncio.gather(*(call(model=MODEL, messages=HI, max_tokens=24, extra_body=FIXED)
                                           for _ in range(8)))  # fmt: skip
            return sum(each.usage.completion_tokens for each in replies)

    assert asyncio.run(all_of_them()) == 8 * 24
    return "8 at a time"


for question, answer in (
    ("models.list, models.retrieve", models),
    ("completions with ignore_eos and min_tokens", completion),
    ("completions, streamed, 2 prompts with n=2, include_usage and continuous_usage_stats", streamed_completion),
    ("chat with a seed", chat),
    ("chat.completions.stream", chat_stream_helper),
    ("chat with top_logprobs", log_probs),
    ("chat.completions.parse (response_format json_schema)", parsed),
    ("response_format json_object", json_object),
    ("a required tool, parallel_tool_calls=false", tools),
    ("required tools, parallel_tool_calls=true, and their results", several_calls),
    ("responses.create", responses),
    ("responses.stream", responses_stream),
    ("responses.parse", responses_parse),
    ("an unknown parameter, null included: refused", unknown),
    ("another model, too long a prompt, embeddings: refused", errors),
    ("a timeout of the client", timeout),
    ("AsyncOpenAI", async_client),
):
    ask(question, answer)
