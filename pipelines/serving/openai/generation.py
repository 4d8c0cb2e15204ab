"""Generate choices: one Triton request each, cut at stop strings, with a finish reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from pipelines.serving.openai.errors import ApiError
from pipelines.serving.openai.inputs import InputTensor, triton_inputs
from pipelines.serving.openai.schema import Sampling
from pipelines.serving.openai.stops import StopFilter

FinishReason = Literal["stop", "length"]
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class TextPart:
    """One response of the server.

    Attributes:
        text: the new text.
        input_tokens: of the whole prompt; 0 if the server did not count them.
        output_tokens: in this part.
    """

    text: str
    input_tokens: int
    output_tokens: int


class TextSource(Protocol):
    """A source of text for requests; see `pipelines.serving.openai.backend.Backend`."""

    def generate(self, inputs: Sequence[InputTensor]) -> AsyncIterator[TextPart]: ...  # noqa: D102


@dataclass(slots=True)
class Choice:
    """One answer.

    Attributes:
        index: its number in the response.
        prompt: that it answers.
        max_tokens: maximum of output tokens.
        max_seq_len: maximum of prompt and output tokens, as the engine was built; None if unknown.
        number: its number among the answers to the same prompt.
        draws_anew: whether the engine draws anew without a seed.
    """

    index: int
    prompt: str
    max_tokens: int
    max_seq_len: int | None
    number: int = 0
    draws_anew: bool = False
    text: str = ""
    input_tokens: int = 0
    output_tokens: int = 0
    finish_reason: FinishReason | None = field(default=None)

    async def run(self, source: TextSource, asked: Sampling) -> AsyncIterator[str]:
        """Yield the answer's text as it arrives; sets the counts and the finish reason."""
        stops = StopFilter(asked.stops)
        inputs = triton_inputs(asked, self.prompt, self.max_tokens, self.number, draws_anew=self.draws_anew)
        async with aclosing(source.generate(inputs)) as parts:  # type: ignore[type-var]
            async for part in parts:
                self.input_tokens = max(self.input_tokens, part.input_tokens)
                self.output_tokens += part.output_tokens
                if new := stops.push(part.text):
                    yield new
                if stops.stopped:
                    break
        if rest := stops.rest():
            yield rest
        self.finish_reason = self._reason(stopped=stops.stopped)

    async def collect(self, source: TextSource, asked: Sampling) -> Choice:
        """Run to the end and store the text."""
        self.text = "".join([new async for new in self.run(source, asked)])
        return self

    def _reason(self, *, stopped: bool) -> FinishReason:
        """Derive the finish reason from the counts, since Triton does not state it: all allowed tokens means "length".

        A text whose last allowed token happens to be the end token also counts as "length".
        """
        full = self.max_seq_len is not None and self.input_tokens + self.output_tokens >= self.max_seq_len
        return "length" if not stopped and (self.output_tokens >= self.max_tokens or full) else "stop"


async def before(deadline: float, items: AsyncIterator[Item]) -> AsyncIterator[Item]:
    """Pass items on until a time of the event loop's clock; closing this closes the source.

    Raises:
        ApiError: 504, it has come.
    """
    async with aclosing(items):  # type: ignore[type-var]
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    item = await anext(items)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise too_slow() from None
            yield item


def too_slow() -> ApiError:
    """Make the error for a request that has taken all the time that one may take."""
    return ApiError(504, "The request took longer than this server allows (serving.request_timeout_s).",
                    kind="server_error", code="timeout")  # fmt: skip


async def collect_all(choices: Sequence[Choice], source: TextSource, asked: Sampling) -> None:
    """Run all choices at once; if one fails, or we are cancelled, the others are cancelled too."""
    try:
        async with asyncio.TaskGroup() as group:
            for choice in choices:
                group.create_task(choice.collect(source, asked))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def merge(
    choices: Sequence[Choice], source: TextSource, asked: Sampling
) -> AsyncIterator[tuple[Choice, str | None]]:
    """Yield (choice, new text) as it arrives from any of them, and (choice, None) when one has ended."""
    queue: asyncio.Queue[tuple[Choice, str | None] | Exception] = asyncio.Queue(maxsize=64)

    async def follow(choice: Choice) -> None:
        try:
            async for new in choice.run(source, asked):
                await queue.put((choice, new))
            await queue.put((choice, None))
        except Exception as error:  # noqa: BLE001 - raised again below, in the task that reads
            await queue.put(error)

    tasks = [asyncio.create_task(follow(choice)) for choice in choices]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            running -= item[1] is None
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
