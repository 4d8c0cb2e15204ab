"""LiteLLM's providers for such servers: URL MODEL TRITON_URL."""

import asyncio
import sys

import litellm
from asked import ask, refused
from pydantic import BaseModel, Field

URL, MODEL, TRITON = sys.argv[1:]
PROMPT = "The river of Githbrel is"
HI = [{"role": "user", "content": PROMPT}]
litellm.suppress_debug_info = True
SHARED = {"api_base": URL, "api_key": "none", "max_tokens": 16, "temperature": 0, "num_retries": 0, "timeout": 60}


class River(BaseModel):
    """A river."""

    name: str = Field(max_length=8)


def chat(provider: str) -> str:
    reply = litellm.completion(model=f"{provider}/{MODEL}", messages=HI, **SHARED)
    parts = list(litellm.completion(model=f"{provider}/{MODEL}", messages=HI, stream=True,
                                    stream_options={"include_usage": True}, **SHARED))  # fmt: skip
    streamed = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert streamed == reply.choices[0].message.content
    if provider != "nvidia_nim":  # which does not pass stream_options on, and counts by itself
        assert parts[-1].usage.completion_tokens == reply.usage.completion_tokens
    return f"{reply.usage.completion_tokens} tokens, whole and streamed alike"


def text(provider: str, prompt: object) -> str:
    reply = litellm.text_completion(model=f"{provider}/{MODEL}", prompt=prompt, **SHARED)
    return f"{len(reply.choices)} answers, {reply.usage.completion_tokens} tokens"


def structured() -> str:
    reply = litellm.completion(model=f"hosted_vllm/{MODEL}", messages=HI, response_format=River,
                               **{**SHARED, "max_tokens": 150}, frequency_penalty=2)  # fmt: skip
    return River.model_validate_json(reply.choices[0].message.content)


def triton() -> str:
    reply = litellm.completion(model="triton/ensemble", messages=HI, api_base=f"{TRITON}/v2/models/ensemble/generate",
                               max_tokens=16)  # fmt: skip
    return repr(reply.choices[0].message.content)


def responses() -> str:
    reply = litellm.responses(model=f"openai/{MODEL}", input=PROMPT, api_base=URL, api_key="none", max_output_tokens=16)
    return reply.status


def embeddings() -> str:
    return refused(
        litellm.NotFoundError, lambda: litellm.embedding(f"openai/{MODEL}", ["a"], api_base=URL, api_key="x")
    )


def asynchronous() -> str:
    async def all_of_them() -> int:
        call = litellm.acompletion
        return len(await asyncio.gather(*(call(model=f"openai/{MODEL}", messages=HI, **SHARED) for _ in range(4))))

    return asyncio.run(all_of_them())


for question, answer in (
    *((f"{name}/, chat, whole and streamed", lambda name=name: chat(name))
      for name in ("openai", "hosted_vllm", "nvidia_nim")),
    ("text-completion-openai/, two prompts", lambda: text("text-completion-openai", [PROMPT, PROMPT])),
    ("text-completion-openai/, a prompt of tokens", lambda: text("text-completion-openai", [[5, 6, 7], [8, 9]])),
    ("hosted_vllm/, response_format from a class", structured),
    ("openai/, litellm.responses", responses),
    ("triton/, the generate endpoint", triton),
    ("embeddings: refused", embeddings),
    ("acompletion", asynchronous),
):  # fmt: skip
    ask(question, answer)
