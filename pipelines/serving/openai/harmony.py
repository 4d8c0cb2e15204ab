"""Channels of gpt-oss's answers (harmony): reasoning, what the user sees, and calls of tools.

After the prompt's `<|start|>assistant`, a model writes `<|channel|>NAME[ to=RECIPIENT]<|message|>TEXT<|end|>`, and
further messages after a `<|start|>ROLE` each. The last one ends with `<|return|>`, or with `<|call|>` if it calls a
tool. Messages are told apart by their tokens, so a text that only looks like a mark is none.

Source: docs/format.md of github.com/openai/harmony. Several messages of a kind are joined by a new line, as vLLM does.
"""

from __future__ import annotations

import json
import re

from pipelines.serving.openai.tokenizer import ServedTokenizer, TextStream
from pipelines.serving.openai.tools import HARMONY_CHANNEL, ToolCall

START, MESSAGE = "<|start|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
MARKS = (START, HARMONY_CHANNEL, MESSAGE, "<|constrain|>", *ENDS)
FUNCTION = re.compile(r"\bto=functions\.(\S+)")


def has_marks(tokenizer: ServedTokenizer) -> bool:
    """Return whether the vocabulary has every mark."""
    return all(tokenizer.token(mark) is not None for mark in MARKS)


class HarmonyReader:
    """Sorts the tokens of one answer; text that is in no message is for the user, as with guided decoding.

    Attributes:
        reasoning_tokens: tokens of the analysis channel, without marks and headers.
    """

    def __init__(self, tokenizer: ServedTokenizer, *, calls: bool) -> None:
        """Begin after a prompt; with `calls`, messages to functions are calls instead of text."""
        self._tokenizer, self._reads_calls = tokenizer, calls
        self._marks = {tokenizer.token(mark): mark for mark in MARKS}
        self._header: str | None = None  # of a message whose text has not begun yet
        self._text: TextStream | None = None  # of a message that is not for the user
        self._reasons = self._shown = self._begun = False
        self._written: list[tuple[str, list[str]]] = []
        self._reasoning, self.reasoning_tokens = "", 0

    def push(self, token: int) -> str | None:
        """Take a token.

        Returns:
            what precedes its text for the user, a new line after an earlier message; None if it is not for the user.
        """
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
            return joint
        return None

    def take_reasoning(self) -> str:
        """Return the text of the analysis channel that has arrived since the last time."""
        taken, self._reasoning = self._reasoning, ""
        return taken

    def end(self, *, first: bool) -> tuple[tuple[ToolCall, ...], str]:
        """Return the calls, or only the first, once the answer has ended; and as text those that are broken."""
        if self._text is not None:
            self._keep(self._text.rest())
        calls, broken = list[ToolCall](), ""
        for name, parts in self._written:
            arguments = "".join(parts)
            try:
                whole = isinstance(json.loads(arguments or "{}"), dict)
            except (ValueError, RecursionError):
                whole = False
            if whole:
                calls.append(ToolCall(len(calls), name, arguments or "{}"))
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
