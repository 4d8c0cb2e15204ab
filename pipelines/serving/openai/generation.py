"""Generate choices: one request to the engine each, its tokens turned into text and cut where the client wants."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, Self, TypeVar

from pipelines.serving.openai.channels import ChannelReader
from pipelines.serving.openai.errors import ApiError
from pipelines.serving.openai.inputs import InputTensor, ServedEngine, engine_inputs
from pipelines.serving.openai.metrics import AnswerClock
from pipelines.serving.openai.schema import Sampling
from pipelines.serving.openai.scoring import Best, best_of
from pipelines.serving.openai.tokenizer import TextStream
from pipelines.serving.openai.tools import ToolCall, ToolFilter, ToolForm, overlap

# Cut a text at a stop string, even if the string arrives in pieces.


class StopFilter:
    """Passes text through, holding back only what may become a stop string.

    The engine stops at tokens, which may begin before the stop string or end after it; OpenAI's answers end before it.
    """

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        """Take the stop strings, and whether the one that ends the text is shown."""
        self._stops, self._keep = tuple(stops), keep
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Add a piece and return the text that can be shown so far."""
        if self.stopped:
            return ""
        text = self._held + text
        places = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.stopped, self._held = True, ""
            place, stop = min(places)
            return text[: place + len(stop) if self._keep else place]
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> str:
        """Return what was held back, once no more text arrives."""
        held, self._held = self._held, ""
        return held


FinishReason = Literal["stop", "length", "tool_calls"]
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class TokenPart:
    """One response of the engine.

    Attributes:
        log_probs: of these; None if not asked for.
        logits: from which they were chosen, [N, V]; None if not asked for.
        best: likeliest tokens at the place of each and their log probabilities, the likeliest first; None if not
            asked for.
        reused_blocks: KV blocks of the prompt that were there already.
        queued_s: seconds that the request waited in the engine; None where it does not say.
    """

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...] | None = None
    logits: Any = None
    best: tuple[Best, ...] | None = None
    reused_blocks: int = 0
    queued_s: float | None = None


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token of an answer and the likeliest tokens at its place.

    Attributes:
        best: likeliest tokens and their log probabilities, the likeliest first.
        start: characters of the answer before it.
    """

    token: int
    log_prob: float
    best: Best
    start: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next part of a stream.

    Attributes:
        scores: of the tokens that began in it.
        reasoning: text of a channel that is not meant for the user.
    """

    text: str
    scores: tuple[TokenScore, ...] = ()
    output_tokens: int = 0
    reasoning: str = ""


class TokenSource(Protocol):
    """A source of tokens for requests; see `pipelines.serving.openai.backend.Backend`."""

    def generate(self, inputs: Sequence[InputTensor]) -> AsyncIterator[TokenPart]: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as it was given, and its tokens.

    Attributes:
        tokens: ids; those of pictures name rows of their features.
        pictures: contents of files, or URLs to take them from.
        features: inputs of the engine that the pictures become.
    """

    tokens: tuple[int, ...]
    text: str
    pictures: tuple[bytes | str, ...] = ()
    features: tuple[InputTensor, ...] = ()


@dataclass(slots=True)
class Completion:
    """One answer.

    Attributes:
        index: its number in the response.
        max_tokens: maximum of output tokens.
        skip_special: whether the text leaves special tokens out.
        number: its number among the answers to the same prompt.
        tools: how the model writes calls of tools; None where the answer is none.
        one_call: whether the answer ends with the first call.
        forced: see `Prepared`.
        channels: sorts the tokens of a model that writes reasoning apart from the answer; None for any other.
        clock: measures it; None measures nothing.
        calls: of tools, instead of text.
        queued_s: seconds that it waited in the engine; None where the engine does not say.
        early_end: whether its last token is an end token that came before `min_tokens`.
    """

    index: int
    prompt: Prompt
    max_tokens: int
    engine: ServedEngine
    skip_special: bool = True
    number: int = 0
    tools: ToolForm | None = None
    one_call: bool = False
    forced: tuple[str, ...] = ()
    channels: ChannelReader | None = None
    clock: AnswerClock | None = None
    calls: tuple[ToolCall, ...] = ()
    text: str = ""
    reasoning: str = ""
    scores: tuple[TokenScore, ...] = ()
    output_tokens: int = 0
    reused_blocks: int = 0
    queued_s: float | None = None
    finish_reason: FinishReason | None = field(default=None)
    early_end: bool = False

    async def run(self, source: TokenSource, sampling: Sampling) -> AsyncIterator[TextDelta]:
        """Yield the answer as it arrives; sets the counts, the calls of tools and the finish reason."""
        try:
            if self.tools is None or self.tools is ToolForm.HARMONY:
                async with aclosing(self._all(source, sampling)) as deltas:  # type: ignore[type-var]
                    async for delta in deltas:
                        yield delta
                self._check_least(sampling)
                return
            calls = ToolFilter(self.tools, one=self.one_call, forced=self.forced, functions=sampling.callable_functions)
            async with aclosing(self._all(source, sampling)) as deltas:  # type: ignore[type-var]
                async for delta in deltas:
                    yield replace(delta, text=calls.push(delta.text))
                    if calls.done:
                        break
            rest, self.calls = calls.rest(cut=self.finish_reason == "length")
            if rest:
                yield TextDelta(rest, output_tokens=self.output_tokens)
            if self.calls and (calls.done or self.finish_reason == "stop"):
                self.finish_reason = "tool_calls"
            self._check_least(sampling)
        finally:
            if self.clock is not None:
                prompt_tokens = 0 if self.number else len(self.prompt.tokens)
                self.clock.ended(prompt_tokens, self.output_tokens, self.finish_reason, self.queued_s)

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the answer that are reasoning; see `ChannelReader`."""
        return 0 if self.channels is None else self.channels.reasoning_tokens

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt whose KV blocks were there already."""
        return min(self.reused_blocks * (self.engine.repository.tokens_per_block or 0), len(self.prompt.tokens))

    async def _all(self, source: TokenSource, sampling: Sampling) -> AsyncIterator[TextDelta]:
        """Yield the answer with its calls as text."""
        output = _OutputFilter(self, sampling)
        stops = () if self.channels is not None else sampling.stops  # the engine would also stop in the reasoning
        inputs = engine_inputs(sampling, self.prompt.tokens, self.max_tokens, self.number, self.engine, stops)
        inputs += self.prompt.features
        clock = self.clock if self.engine.answers_in_parts(sampling) else None
        async with aclosing(source.generate(inputs)) as parts:  # type: ignore[type-var]
            async for part in parts:
                self.reused_blocks = max(self.reused_blocks, part.reused_blocks)
                self.queued_s = self.queued_s if part.queued_s is None else part.queued_s
                made = self.output_tokens
                delta = output.add(part)
                if clock is not None and self.output_tokens > made:
                    clock.token()
                if delta:
                    yield delta
                if output.stopped:
                    break
        if delta := output.rest():
            yield delta
        self.finish_reason = self._reason(stopped=output.stopped)
        if self.channels is not None:
            self.calls, broken = self.channels.end(first=self.one_call, cut=self.finish_reason == "length")
            if broken:
                yield TextDelta(broken, output_tokens=self.output_tokens)
            if self.calls and self.finish_reason == "stop":
                self.finish_reason = "tool_calls"

    def _check_least(self, sampling: Sampling) -> None:
        """Refuse an answer that its guide has ended before `min_tokens`, of which an end token is none.

        Raises:
            ApiError: 400.
        """
        least, made = sampling.min_tokens or 0, self.output_tokens - self.early_end
        if sampling.guide is not None and made < least and (self.early_end or self.finish_reason != "length"):
            message = f"'min_tokens' = {least} cannot be kept: its guide ended the answer after {made}."
            raise ApiError(400, message, param="min_tokens")

    async def collect(self, source: TokenSource, sampling: Sampling) -> Self:
        """Run to the end and store text and scores."""
        deltas = [delta async for delta in self.run(source, sampling)]
        self.text = "".join(delta.text for delta in deltas)
        self.reasoning = "".join(delta.reasoning for delta in deltas)
        self.scores = tuple(score for delta in deltas for score in delta.scores)
        return self

    def _reason(self, *, stopped: bool) -> FinishReason:
        """Derive the finish reason from the counts, since Triton does not state it: all allowed tokens means "length".

        A text whose last allowed token happens to be the end token also counts as "length".
        """
        made = len(self.prompt.tokens) + self.output_tokens
        most = self.engine.repository.max_seq_len
        full = most is not None and made >= most
        return "length" if not stopped and (self.output_tokens >= self.max_tokens or full) else "stop"


class _OutputFilter:
    """The visible part of an answer's tokens: text up to a stop, and the scores of its tokens."""

    def __init__(self, choice: Completion, sampling: Sampling) -> None:
        self._choice, self._sampling = choice, sampling
        tokenizer = choice.engine.tokenizer
        self._text = choice.channels or TextStream(tokenizer, skip_special=choice.skip_special)
        self._stops = StopFilter(sampling.stops, keep=bool(sampling.include_stop_str_in_output))
        self._ends = set(sampling.stop_token_ids or ())
        if not sampling.ignore_eos:
            self._ends.update(tokenizer.end_ids)
        self._length = self._out = 0  # characters that arrived, and that were output
        self._scores: list[TokenScore] = []
        self.stopped = False

    def add(self, part: TokenPart) -> TextDelta | None:
        """Take a response of the engine."""
        text = ""
        for at, token in enumerate(part.tokens):
            self._choice.output_tokens += 1
            if token in self._ends and self._may_stop:
                self._choice.output_tokens -= token not in (self._sampling.stop_token_ids or ())
                self.stopped = True
                break
            self._choice.early_end = token in self._ends
            if (new := self._text.push(token)) is None:
                if not self._length:  # nothing but what may have become text was before it
                    self._scores.clear()
                continue
            if part.log_probs is not None:
                self._scores.append(TokenScore(token, part.log_probs[at], self._best(part, at), self._length))
            text += self._stopped(new)
            if self._stops.stopped:
                self.stopped = True
                break
        return self._delta(text)

    def _best(self, part: TokenPart, at: int) -> Best:
        if part.best is not None:
            return part.best[at]
        if part.logits is None or not self._sampling.scores:
            return ()
        (best,) = best_of(part.logits[at : at + 1], self._sampling.scores)
        return best

    def rest(self) -> TextDelta | None:
        """Take the end of the answer: what was held back, unless a stop string has ended it before."""
        if self._stops.stopped:
            return None
        text = self._stopped(self._text.rest())
        if self._stops.stopped:
            self.stopped = True
            return self._delta(text)
        return self._delta(text + self._stops.rest(), last=True)

    @property
    def _may_stop(self) -> bool:
        return self._choice.output_tokens > (self._sampling.min_tokens or 0)

    def _stopped(self, new: str) -> str:
        """Return the part of new text that can be output."""
        self._length += len(new)
        return self._stops.push(new) if self._may_stop else new

    def _delta(self, text: str, *, last: bool = False) -> TextDelta | None:
        self._out += len(text)
        due = [score for score in self._scores if last or score.start < self._out]
        self._scores = self._scores[len(due) :]
        reasoning = "" if self._choice.channels is None else self._choice.channels.take_reasoning()
        return TextDelta(text, tuple(due), self._choice.output_tokens, reasoning) if text or due or reasoning else None


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


async def collect_all(choices: Sequence[Completion], source: TokenSource, sampling: Sampling) -> None:
    """Run all choices at once; if one fails, or we are cancelled, the others are cancelled too."""
    try:
        async with asyncio.TaskGroup() as group:
            for choice in choices:
                group.create_task(choice.collect(source, sampling))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def merge(
    choices: Sequence[Completion], source: TokenSource, sampling: Sampling
) -> AsyncIterator[tuple[Completion, TextDelta | None]]:
    """Yield (choice, delta) as it arrives from any of them, and (choice, None) when one has ended."""
    if len(choices) == 1:  # as nearly always: neither a task nor a queue, which cost each delta time
        async with aclosing(choices[0].run(source, sampling)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                yield choices[0], delta
        yield choices[0], None
        return
    queue: asyncio.Queue[tuple[Completion, TextDelta | None] | Exception] = asyncio.Queue(maxsize=64)

    async def follow(choice: Completion) -> None:
        try:
            async for new in choice.run(source, sampling):
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
