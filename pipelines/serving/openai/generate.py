"""The responses of Triton's generate endpoints."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from pipelines.serving.openai.answers import event
from pipelines.serving.openai.backend import Backend
from pipelines.serving.openai.errors import ApiError
from pipelines.serving.openai.fields import Fields

Json = dict[str, Any]


async def answers(backend: Backend, name: str, asked: Fields) -> AsyncIterator[Json]:
    """Yield the responses of a model in the form of Triton's generate endpoints."""
    own = {"id": asked.id} if asked.id else {}
    async with aclosing(backend.stream(name, asked.inputs, request_id=asked.id)) as results:  # type: ignore[type-var]
        async for result in results:
            yield own | _answer(result)


async def generate_events(responses: AsyncIterator[Json]) -> AsyncIterator[str]:
    """Yield the server-sent events of a streamed response; an error after the first one ends the stream."""
    begun = False
    async with aclosing(responses):  # type: ignore[type-var]
        try:
            async for response in responses:
                yield event(response)
                begun = True
        except ApiError as error:
            if not begun:
                raise
            yield event({"error": error.message})


async def only_answer(responses: AsyncIterator[Json]) -> Json:
    """Return the one response of a request that does not stream.

    Raises:
        ApiError: 400, there are several, or none.
    """
    async with aclosing(responses):  # type: ignore[type-var]
        found = [response async for response in _first_two(responses)]
    if len(found) != 1:
        counted = "several responses" if found else "no response"
        raise ApiError(400, f"The model gave {counted}; use generate_stream for a request with stream=true.")
    return found[0]


async def _first_two(responses: AsyncIterator[Json]) -> AsyncIterator[Json]:
    count = 0
    async for response in responses:
        yield response
        count += 1
        if count == 2:
            return


def _answer(result: Any) -> Json:
    response = result.get_response()
    made: Json = {"model_name": response.model_name, "model_version": response.model_version}
    for output in response.outputs:
        array = result.as_numpy(output.name)
        values = [] if array is None else [_plain(value) for value in array.reshape(-1).tolist()]
        made[output.name] = values[0] if len(values) == 1 else values
    return made


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return None if isinstance(value, float) and not math.isfinite(value) else value
