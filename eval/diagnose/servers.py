"""Clients of the served models: those of a Triton server one by one, and an OpenAI-compatible service."""

import asyncio
import json
import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eval.answer_cache import AnswerLog
from eval.server import OpenAiServer
from pipelines.checkpoint.tokenizer import RenderedChat, chat_templates
from pipelines.domain.errors import UserError
from pipelines.domain.progress import Progress
from pipelines.engines.port import LogitsSession, SamplingParams
from pipelines.host.files import parse_json
from pipelines.serving.openai.errors import ApiError
from pipelines.serving.openai.inputs import InputTensor, text_inputs, word_list
from pipelines.serving.openai.prompts import NoPromptError, Renderer

if TYPE_CHECKING:
    from pipelines.compress.traced import TracedModel

Array = np.ndarray[Any, Any]

# Inputs of every stage: a few seeded prompts of different lengths, and messages if there is a template.

WORDS = (1, 6, 12, 24, 40)
"""Words of the prompts: a batch of different lengths, the first as short as possible."""
TEXTS = 64
"""Texts that prompts are taken from."""
LONGEST, MOST_WORDS = 2560, 2**13 - 1
"""Tokens of the long prompt, or what the engine takes if that is less; and its words at most."""
MESSAGES = ("Hello!", "Where does the river begin?")


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt.

    Attributes:
        name: in messages, e.g. "prompt of 12 words".
        text: what is sent to a server that takes no messages, and adds special tokens; empty if none gives these ids.
        ids: token ids, with the special tokens that the tokenizer adds; of a chat, with those of its template alone.
        messages: of a chat; None for a plain prompt.
    """

    name: str
    text: str
    ids: tuple[int, ...]
    messages: tuple[Mapping[str, str], ...] | None = None


def make_items(tokenizer: Any, texts: Path, seed: int, longest: int, model: Path, template: Path | None) -> list[Item]:
    """Choose prompts from a file of texts: one of each length in `WORDS`, a long one, and chats.

    Raises:
        UserError: the chat template gives no prompt.
    """
    lines = texts.read_text(encoding="utf-8").splitlines()
    drawn = random.Random(seed).sample(lines, min(len(lines), TEXTS))
    split = [parse_json(line)["text"].split() for line in drawn]
    long_enough = [next((each for each in split[at:] if len(each) >= n), split[at]) for at, n in enumerate(WORDS)]
    prompts = [" ".join(each[:count]) for each, count in zip(long_enough, WORDS, strict=True)]
    items = [_item(f"prompt of {len(text.split())} words", text, tokenizer) for text in prompts]
    long = _longest_prefix([word for each in split * 40 for word in each], tokenizer, min(longest, LONGEST))
    return [*items, _item("long prompt", long, tokenizer), *_chats(tokenizer, model, template)]


def _ids(text: str, tokenizer: Any) -> tuple[int, ...]:
    """Return the token ids of a prompt; the template of a chat has written its special tokens."""
    return tuple(tokenizer(text, add_special_tokens=not isinstance(text, RenderedChat), verbose=False)["input_ids"])


def _item(name: str, text: str, tokenizer: Any) -> Item:
    return Item(name, text, _ids(text, tokenizer))


def _longest_prefix(words: Sequence[str], tokenizer: Any, most: int) -> str:
    """Return as many of the first words as have at most so many tokens."""
    sizes = range(1, min(len(words), MOST_WORDS) + 1)
    return " ".join(words[: bisect_right(sizes, most, key=lambda n: len(_ids(" ".join(words[:n]), tokenizer)))])


def _chats(tokenizer: Any, model: Path, template: Path | None) -> list[Item]:
    templates, tokens = chat_templates(model, template)
    if "default" not in templates:
        return []
    renderer, chats = Renderer(templates["default"], tokens), []
    for text in MESSAGES:
        messages = ({"role": "user", "content": text},)
        try:
            rendered = RenderedChat(renderer.render(messages, {}))
        except NoPromptError as fault:
            raise UserError(
                f"The model's chat template {fault}.", todo="Correct it, or give another: serving.chat_template=FILE"
            ) from None
        ids, texts = _ids(rendered, tokenizer), (str(rendered), rendered.removeprefix(tokenizer.bos_token or ""))
        sent = next((each for each in texts if _ids(each, tokenizer) == ids), "")
        chats.append(Item(f"chat {json.dumps(text)}", sent, ids, messages))
    return chats


# Expected answers, and why an answer may differ.


@dataclass
class LastStage:
    """The last stage before the servers."""

    session: LogitsSession | None
    model: "TracedModel"
    new_tokens: int
    stop: frozenset[int]
    progress: Progress

    def answers(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the greedy continuation of each prompt, without the token that ends it."""
        if self.session is None:
            return self.model.greedy(prompts, self.new_tokens, self.stop)
        limits = SamplingParams(self.new_tokens, stop_token_ids=self.stop)
        with self.session as session:
            return [list(each.token_ids) for each in session.generate(prompts, limits, self.progress)]

    def nearly_equal(self, ids: Sequence[int]) -> bool:
        """Return whether the two likeliest next tokens differ by no more than the noise of the arithmetic."""
        if self.session is None:
            row = self.model.logits([ids])[0][-1]
            spread = float(np.abs(row).max()) * 2.0**-7  # of bfloat16
        else:
            one, two = (whole_logits(self.session.teacher_forcing(varied=varied), ids) for varied in (False, True))
            row, spread = one[-1], 2 * float(np.abs(one - two).max())
        best, second = np.sort(row)[-1:-3:-1]
        return bool(best - second <= spread)


def whole_logits(forcing: Any, ids: Sequence[int]) -> Array:
    """Return the logits after every token of one sequence [T, V]."""
    hidden = forcing.hidden([list(ids)], len(ids))
    return np.concatenate([np.array(logits[0]) for logits in forcing.logits(hidden, len(ids))])


@dataclass
class RightAnswers:
    """Expected answers of a server."""

    items: Sequence[Item]
    source: LastStage
    new_tokens: int
    tokenizer: Any
    ends: tuple[int, ...]
    before: str

    @cached_property
    def answers(self) -> list[list[int]]:
        """Token ids of the answer to each item."""
        return self.source.answers([item.ids for item in self.items])

    def text(self, item: Item, answer: Sequence[int], *, skip: bool = True) -> str:
        """Return an answer as text, with the space in front of it."""
        whole = self.tokenizer.decode([*item.ids, *answer], skip_special_tokens=skip)
        prompt = self.tokenizer.decode(list(item.ids), skip_special_tokens=skip)
        return str(whole)[len(prompt) :]

    def of_texts(self) -> "RightAnswers":
        """Return what is expected of a server that takes no messages."""
        items = [item for item in self.items if item.text]
        return self if len(items) == len(self.items) else replace(self, items=items)

    def within_noise(self, item: Item, right: Sequence[int], answered: Sequence[int]) -> bool:
        """Return whether two answers part where two tokens are nearly equally likely."""
        at = next((n for n, pair in enumerate(zip(right, answered, strict=False)) if pair[0] != pair[1]), None)
        return at is not None and self.source.nearly_equal([*item.ids, *right[:at]])

    def ended_early(self, answer: Sequence[int]) -> bool:
        """Return whether the token that ends answers ended it."""
        return len(answer) < self.new_tokens


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer as text, with the counts that came with it."""

    text: str
    prompt_tokens: int | None
    answer_tokens: int | None


TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Servers:
    """Where the servers are.

    Attributes:
        triton: host:port of Triton's gRPC; None without.
        openai: URL up to and with /v1; None without.
        model: its name on the OpenAI-compatible server; empty for the only one.
        whole: whether the Triton models behind the one for text can be asked as well.
    """

    triton: str | None
    openai: str | None
    model: str = ""
    text_model: str = "ensemble"
    whole: bool = True


class TritonModels:
    """The models of a Triton server."""

    def __init__(self, url: str, text_model: str) -> None:
        self._url, self.text_model = url, text_model

    def ask(self, model: str, inputs: Sequence[Any], outputs: Sequence[str] = ()) -> dict[str, Any]:
        """Send one request and return the tensors of its responses, of each name the last.

        Raises:
            UserError: the server refuses it or does not respond.
        """
        from pipelines.serving.openai.backend import Backend

        async def responses() -> dict[str, Any]:
            tensors: dict[str, Any] = {}
            async with (
                asyncio.timeout(TIMEOUT_S),
                Backend(self._url) as backend,
                aclosing(backend.stream(model, inputs, outputs)) as results,  # type: ignore[type-var]
            ):
                async for result in results:
                    tensors |= {each.name: result.as_numpy(each.name) for each in result.get_response().outputs}
            return tensors

        try:
            return asyncio.run(responses())
        except ApiError as error:
            raise UserError(f"The Triton model '{model}' at {self._url} refused a request: {error.message}") from None
        except TimeoutError:
            raise UserError(f"The Triton model '{model}' at {self._url} did not answer in {TIMEOUT_S:g} s.") from None

    def continued(self, ids: Sequence[int], expected: RightAnswers) -> list[int]:
        """Return the token ids that `tensorrt_llm` continues a prompt with, without the one that ends it."""
        inputs = [
            InputTensor("input_ids", "INT32", tuple(ids)),
            InputTensor("input_lengths", "INT32", (len(ids),)),
            InputTensor("request_output_len", "INT32", (expected.new_tokens,)),
            InputTensor("exclude_input_in_output", "BOOL", (True,)),
            *(InputTensor("end_id", "INT32", (token,)) for token in expected.ends[:1]),
        ]
        if more := expected.ends[1:]:
            inputs.append(word_list("stop_words_list", [[token] for token in more]))
        tensors = self.ask("tensorrt_llm", inputs, ("output_ids", "sequence_length"))
        answer: list[int] = tensors["output_ids"].reshape(-1).tolist()
        if "sequence_length" in tensors:
            answer = answer[: int(tensors["sequence_length"].reshape(-1)[0])]
        return answer[:-1] if answer and answer[-1] in expected.ends else answer

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text that `postprocessing` makes of token ids."""
        inputs = [
            InputTensor("TOKENS_BATCH", "INT32", ids, (1, len(ids))),  # [1, 1, tokens]: one prompt with one beam
            InputTensor("SEQUENCE_LENGTH", "INT32", (len(ids),)),
        ]
        return b"".join(self.ask("postprocessing", inputs)["OUTPUT"].reshape(-1).tolist()).decode(errors="replace")

    def written(self, item: Item, expected: RightAnswers, stop: str | None = None) -> Reply:
        """Return what the model for text answers."""
        inputs = text_inputs(item.text, expected.new_tokens, (stop,) if stop else ())
        tensors = self.ask(self.text_model, inputs)
        text = b"".join(tensors["text_output"].reshape(-1).tolist()).decode(errors="replace")
        return Reply(text, _first(tensors, "num_input_tokens"), _first(tensors, "num_output_tokens"))


def _first(tensors: Mapping[str, Any], name: str) -> int | None:
    values = tensors.get(name)
    return None if values is None or values.size == 0 else int(values.reshape(-1)[0])


class OpenAiService:
    """An OpenAI-compatible server."""

    def __init__(self, url: str, model: str) -> None:
        self._server = OpenAiServer(url, model, AnswerLog(None), attempts=1, timeout_s=TIMEOUT_S)
        self._server.choose_model()
        self.text_model = "completions"

    def written(self, item: Item, expected: RightAnswers, stop: str | None = None) -> Reply:
        """Return what it answers to a prompt, or to messages."""
        body: dict[str, Any] = {"model": self._server.model, "max_tokens": expected.new_tokens, "temperature": 0}
        body |= {"stop": stop} if stop else {}
        if item.messages is None:
            reply = self._server.send("POST", "/completions", {**body, "prompt": item.text})
            text = reply["choices"][0]["text"]
        else:
            body["messages"] = [dict(each) for each in item.messages]
            reply = self._server.send("POST", "/chat/completions", body)
            text = reply["choices"][0]["message"]["content"]
        usage = reply.get("usage") or {}
        return Reply(str(text or ""), usage.get("prompt_tokens"), usage.get("completion_tokens"))
