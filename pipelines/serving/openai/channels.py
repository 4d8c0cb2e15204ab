"""Channels of a chat's answer: reasoning, what the user sees, and calls of tools.

Harmony (gpt-oss): after the prompt's `<|start|>assistant`, a model writes
`<|channel|>NAME[ to=RECIPIENT]<|message|>TEXT<|end|>`, and further messages after a `<|start|>ROLE` each. The last one
ends with `<|return|>`, or with `<|call|>` if it calls a tool. Messages are told apart by their tokens, so a text that
only looks like a mark is none.

Thinking (Qwen3, QwQ, DeepSeek R1 and others): `<think>REASONING</think>TEXT`, of which the prompt may have the
beginning: `<think>`, or `<think></think>` where the client wants no reasoning. Newer Mistrals (Magistral) write
`[THINK]REASONING[/THINK]TEXT`.

Sources: docs/format.md of github.com/openai/harmony; the chat templates of these models. Several messages of a kind are
joined by a new line, as vLLM does.
"""

import json
import re
from collections.abc import Callable
from enum import Enum

from pipelines.serving.openai.tokenizer import ServedTokenizer, TextStream
from pipelines.serving.openai.tools import HARMONY_CHANNEL, TOOL_CALL, ToolCall, overlap

START, MESSAGE = "<|start|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
MARKS = (START, HARMONY_CHANNEL, MESSAGE, "<|constrain|>", *ENDS)
FUNCTION = re.compile(r"\bto=functions\.(\S+)")


class Channels(Enum):
    """How a model writes them; the marks around its reasoning, where it has one place."""

    HARMONY = None
    THINK = ("<think>", "</think>")
    MISTRAL = ("[THINK]", "[/THINK]")


def channels_of(template: str, token: Callable[[str], int | None]) -> Channels | None:
    """Return how a model writes channels, as its chat template and its vocabulary say; None if it writes none.

    Args:
        template: of chats.
        token: returns the token of a text that is one in the vocabulary.
    """
    if HARMONY_CHANNEL in template and all(token(mark) is not None for mark in MARKS):
        return Channels.HARMONY
    for channels in (Channels.THINK, Channels.MISTRAL):
        if any(mark in template for mark in channels.value) or token(channels.value[1]) is not None:
            return channels
    return None


class ChannelReader:
    """Sorts the tokens of one answer, in place of a `TextStream`.

    Attributes:
        reasoning_tokens: tokens of the reasoning, without marks that are tokens of their own, and without headers.
    """

    def __init__(self) -> None:
        self._reasoning, self.reasoning_tokens = "", 0

    def push(self, token: int) -> str | None:
        """Take a token and return the text for the user that is complete; None if the token is not for the user."""
        raise NotImplementedError

    def rest(self) -> str:
        """Return the text for the user that was held back, once no more tokens arrive."""
        raise NotImplementedError

    def take_reasoning(self) -> str:
        """Return the reasoning that has arrived since the last time."""
        taken, self._reasoning = self._reasoning, ""
        return taken

    def end(self, *, first: bool, cut: bool) -> tuple[tuple[ToolCall, ...], str]:
        """Return the calls, or only the first, once the answer has ended; and as text those that are broken.

        Args:
            first: only the first call.
            cut: whether the answer was cut; the call that it cuts is one, with the arguments so far.
        """
        return (), ""


class ThinkReader(ChannelReader):
    """Reads `<think>REASONING</think>TEXT`; a tag may be one token or several. There is one reasoning, at the start."""

    def __init__(
        self, tokenizer: ServedTokenizer, marks: tuple[str, str], *, prompt: str, calls: bool, skip_special: bool
    ) -> None:
        """Begin after the text of a prompt; with `calls`, one in Hermes' form also ends the reasoning."""
        super().__init__()
        self._start, self._end = marks
        self._text = TextStream(tokenizer, skip_special=skip_special)
        self._tags = {tokenizer.token(tag): tag for tag in marks}
        self._ends = (self._end, TOOL_CALL) if calls else (self._end,)
        self._opened, self._ended = (prompt.rstrip().endswith(mark) for mark in marks)
        self._begun, self._held = False, ""

    def push(self, token: int) -> str | None:
        """See `ChannelReader`."""
        if self._ended:
            return self._text.push(token)
        tag = self._tags.get(token)
        self._held += self._text.push(token) if tag is None else self._text.rest() + tag
        text = self._sorted()
        self.reasoning_tokens += text is None and tag is None
        return text

    def rest(self) -> str:
        """See `ChannelReader`; an answer that was cut in its reasoning has no text."""
        text, self._held = self._held + self._text.rest(), ""
        if self._ended or not self._opened:
            return text
        self._reasoning += text
        return ""

    def _sorted(self) -> str | None:
        """Return the text for the user of what is held; keep what may become a tag."""
        if not self._begun:
            start = self._held.lstrip()
            if self._start.startswith(start) and start != self._start:
                return None if self._opened else ""
            self._begun = True
            if start.startswith(self._start):  # also behind a prompt that ends with it
                self._opened, self._held = True, start.removeprefix(self._start)
            self._ended = not self._opened
        text, self._held = self._held, ""
        if self._ended:
            return text
        place, end = min(((at, end) for end in self._ends if (at := text.find(end)) >= 0), default=(-1, ""))
        self._ended = bool(end)
        if not end:
            place = len(text) - max(overlap(text, end) for end in self._ends)
            self._held = text[place:]
        self._reasoning += text[:place]
        return text[place:].removeprefix(self._end) or None if end else None


class HarmonyReader(ChannelReader):
    """Reads harmony's messages; text that is in no message is for the user, as with guided decoding."""

    def __init__(self, tokenizer: ServedTokenizer, *, calls: bool, skip_special: bool) -> None:
        """Begin after a prompt; with `calls`, messages to functions are calls instead of text."""
        super().__init__()
        self._tokenizer, self._reads_calls = tokenizer, calls
        self._answer = TextStream(tokenizer, skip_special=skip_special)
        self._marks = {tokenizer.token(mark): mark for mark in MARKS}
        self._header: str | None = None  # of a message whose text has not begun yet
        self._text: TextStream | None = None  # of a message that is not for the user
        self._reasons = self._shown = self._begun = False
        self._written: list[tuple[str, list[str]]] = []

    def push(self, token: int) -> str | None:
        """See `ChannelReader`."""
        mark = self._marks.get(token)
        if mark is not None:
            self._pass(mark)
        elif self._header is not None:
            self._header += self._tokenizer.continuation([token])
        elif self._text is not None:
            self.reasoning_tokens += self._reasons
            self._keep(self._text.push(token))
        else:
            joint = "\n" if self._shown and self._begun else ""
            self._shown, self._begun = True, False
            return joint + self._answer.push(token)
        return None

    def rest(self) -> str:
        """See `ChannelReader`."""
        self._close()
        return self._answer.rest()

    def end(self, *, first: bool, cut: bool) -> tuple[tuple[ToolCall, ...], str]:
        """See `ChannelReader`."""
        calls, broken = list[ToolCall](), ""
        for number, (name, parts) in enumerate(self._written, 1):
            arguments = "".join(parts)
            try:
                whole = isinstance(json.loads(arguments or "{}"), dict)
            except (ValueError, RecursionError):
                whole = False
            cuts = cut and number == len(self._written)
            if whole or cuts:
                calls.append(ToolCall(len(calls), name, arguments if cuts else arguments or "{}"))
            else:
                broken += arguments
        return tuple(calls[: 1 if first else None]), broken

    def _pass(self, mark: str) -> None:
        if mark == MESSAGE:
            if self._header is not None:
                self._begin(self._header)
            return
        if mark in (START, HARMONY_CHANNEL):
            self._header = f"{self._header or ''} "
        elif self._header is not None:  # <|constrain|>, whose word would join the name before it
            self._header += " "
        if mark in (START, *ENDS):
            self._close()

    def _begin(self, header: str) -> None:
        self._close()
        self._header, function = None, FUNCTION.search(header)
        if function is not None and self._reads_calls:
            self._written.append((function[1], []))
        elif "analysis" in header.split():
            self._reasons = True
            self._reasoning += "\n" if self.reasoning_tokens else ""
        else:
            self._begun = True
            return
        self._text = TextStream(self._tokenizer, skip_special=True)

    def _close(self) -> None:
        if self._text is not None:
            self._keep(self._text.rest())
        self._text, self._reasons = None, False

    def _keep(self, text: str) -> None:
        if self._reasons:
            self._reasoning += text
        else:
            self._written[-1][1].append(text)
