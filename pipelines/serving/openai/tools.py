"""Calls of tools in a model's answer, in the forms that templates teach: Hermes and Qwen, Mistral, gpt-oss, Llama 3."""

import json
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Json = dict[str, Any]


class ToolForm(StrEnum):
    """How a model writes calls.

    HERMES: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, also after text. Qwen3-Coder
        writes `<function=NAME><parameter=NAME>VALUE</parameter>...</function>` instead of the object.
    MISTRAL: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, newer ones `[TOOL_CALLS]NAME[ARGS]{...}` each.
    HARMONY: messages to functions, which `channels.HarmonyReader` reads from the tokens.
    JSON: the whole answer is `{"name": ..., "parameters": {...}}`, several separated by semicolons; or, as Granite
        writes, a list of calls.
    GUIDED: the whole answer is `{"name": ..., "arguments": {...}}`, as `guides.call_schema` has it, or no call.
    GUIDED_LIST: the whole answer is an array of such calls.
    """

    HERMES = "hermes"
    MISTRAL = "mistral"
    HARMONY = "harmony"
    JSON = "json"
    GUIDED = "guided"
    GUIDED_LIST = "guided_list"


GUIDED_FORMS = (ToolForm.GUIDED, ToolForm.GUIDED_LIST)
HARMONY_CHANNEL, TOOL_CALL = "<|channel|>", "<tool_call>"
MARKS = {ToolForm.HERMES: TOOL_CALL, ToolForm.MISTRAL: "[TOOL_CALLS]", ToolForm.HARMONY: HARMONY_CHANNEL}
HERMES_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
CODER_CALL = re.compile(r"\s*<function=([^>\s]+)>(.*?)(</function>.*)?", re.DOTALL)
CODER_VALUE = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
PYTHON_WORDS = {"True": True, "False": False, "None": None}
NEWER_CALL = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]|(?=\{))(.*)", re.DOTALL)
"""Mistral's, behind its mark."""
TAGS = ("<|python_tag|>", "<|tool_call|>")
"""What Llama 3 and Granite may write before calls."""
CUT_CALL = re.compile(
    r"""(?:[\s\[,;}]|</?tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>|<\|tool_call\|>)*"""
    r"""\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(\{.*|$)""",
    re.DOTALL,
)
"""What stands between calls, and the next call up to its arguments."""
BEGUN_CALL = re.compile(r'[\s\[]*\{\s*"name"\s*:\s*"([^"\\]+)"')
GUIDED_CALL, LONGEST_BEGINNING = '{"name":', 200


def form_of(template: str | None) -> ToolForm | None:
    """Return the form that a chat template teaches; None if it knows no tools."""
    if template is None or not re.search(r"""(?<![\w.'"])tools(?![\w'"])""", template):  # no key of a message
        return None
    return next((form for form, mark in MARKS.items() if mark in template), ToolForm.JSON)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call."""

    index: int
    name: str
    arguments: str
    id: str = field(default_factory=lambda: secrets.token_hex(5)[:9])  # Mistral's templates refuse other lengths

    def whole(self) -> Json:
        """Return the call in a complete response."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }

    def delta(self) -> Json:
        """Return the call in a stream, where it comes in one piece."""
        return {"index": self.index, **self.whole()}


class ToolFilter:
    """Passes the text before a call through, and holds back what may be one until the answer has ended.

    Attributes:
        done: whether one call is all that is wanted, and it is complete; the answer need not go on.
    """

    def __init__(
        self, form: ToolForm, *, one: bool = False, forced: Sequence[str] = (), functions: Sequence[Json] = ()
    ) -> None:
        """Take the form, whether one call is all that is wanted, and the tools: those that are forced, and all."""
        self._form, self._held, self._holding, self._one = form, "", form is ToolForm.GUIDED_LIST, one
        self._forced, self._is_text, self._functions = forced, False, functions
        self.done = False

    def push(self, text: str) -> str:
        """Add text and return what can be shown so far."""
        self._held += text
        visible = "" if self._holding else self._shown()
        if self._held and self._one and not {"}", ">"}.isdisjoint(text):  # which end a call
            self.done = bool(_first_call(self._form, self._held, self._functions))
        return visible

    def _shown(self) -> str:
        if self._form in (ToolForm.GUIDED, ToolForm.JSON):  # the answer as a whole is calls, or none of it
            self._is_text = self._is_text or not _may_be_calls(self._form, self._held)
            return self._all() if self._is_text else ""
        mark = MARKS[self._form]
        place = self._held.find(mark)
        self._holding = place >= 0
        if not self._holding:
            place = len(self._held) - overlap(self._held, mark)
        text, self._held = self._held[:place], self._held[place:]
        return text

    def rest(self, *, cut: bool) -> tuple[str, tuple[ToolCall, ...]]:
        """Return the calls, or what was held back where it is none; the last call of a cut answer may be cut, too."""
        held = self._all()
        if self._one:
            held = _first_call(self._form, held, self._functions) or held
        found = _cut_calls("".join(_parts(self._form, held, self._functions, cut=True))) if cut else []
        found = found or [(name, _written(arguments)) for name, arguments in _calls(self._form, held, self._functions)]
        if cut and self._forced and not found:  # what there is of the form is no text of the model
            begun = BEGUN_CALL.match(held)
            names = self._forced if len(self._forced) == 1 else begun.groups() if begun else ()
            held, found = "", [(name, "") for name in names]
        calls = tuple(ToolCall(index, *call) for index, call in enumerate(found[: 1 if self._one else None]))
        behind = HERMES_CALL.sub("", held) if self._form is ToolForm.HERMES else ""
        return (behind if behind.strip() else "", calls) if calls else (held, ())

    def _all(self) -> str:
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that `stop` begins with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


def _may_be_calls(form: ToolForm, text: str) -> bool:
    """Whether an answer that begins so may be calls; in a guided one, the name comes first."""
    if form is ToolForm.JSON:
        begun = text.lstrip()
        inner = begun.removeprefix("[").lstrip()
        return not inner or inner.startswith("{") or any(begun.startswith(tag) or tag.startswith(begun) for tag in TAGS)
    begun = re.sub(r"\s", "", text[:LONGEST_BEGINNING])
    return begun.startswith(GUIDED_CALL) or GUIDED_CALL.startswith(begun)


def _first_call(form: ToolForm, text: str, functions: Sequence[Json]) -> str:
    """Return the first call alone, in the same form; nothing if it is broken or not complete."""
    if form is ToolForm.HERMES:
        first, end, _ = text.partition("</tool_call>")
        first = first + end if end else ""
    else:
        mark = MARKS.get(form, "")
        begun = _parts(form, text, functions)[0].lstrip().removeprefix("[").lstrip()
        try:
            _, size = json.JSONDecoder().raw_decode(begun)
        except (ValueError, RecursionError):
            return ""
        first = mark + begun[:size]
    return first if _calls(form, first, functions) else ""


def _parts(form: ToolForm, text: str, functions: Sequence[Json], *, cut: bool = False) -> list[str]:
    """Return the JSON of calls; what is cut is not complete."""
    if form is ToolForm.HERMES:
        return [_from_coder(part, functions) for part in HERMES_CALL.findall(text)]
    if form is ToolForm.MISTRAL:
        return _older(text, "" if cut else "}")
    if form in GUIDED_FORMS:
        return [text]
    for tag in TAGS:
        text = text.replace(tag, "")
    return _joined(text.split(";"))


def _from_coder(text: str, functions: Sequence[Json]) -> str:
    """Return a call as an object, also one that Qwen3-Coder wrote; the end is missing if it is not complete."""
    if (call := CODER_CALL.fullmatch(text)) is None:
        return text
    parameters = next((each.get("parameters") for each in functions if each.get("name") == call[1]), None) or {}
    schemas = parameters["properties"] if isinstance(parameters.get("properties"), dict) else {}
    arguments = {name: _value(value, schemas.get(name)) for name, value in CODER_VALUE.findall(call[2])}
    written = _written({"name": call[1], "arguments": arguments})
    return written if call[3] else written.removesuffix("}}")


def _value(text: str, schema: Any) -> Any:
    """Return what a value stands for: JSON or Python's words where the schema names a kind but text, else the text."""
    whole = schema if isinstance(schema, dict) else {}
    branches = [each for key in ("anyOf", "oneOf") if isinstance(whole.get(key), list) for each in whole[key]]
    kinds = str([each.get("type") for each in (whole, *branches) if isinstance(each, dict)])
    null = "'null'" in kinds and text in ("null", "None")
    if not null and ("'string'" in kinds or "'" not in kinds):
        return text
    try:
        return PYTHON_WORDS[text] if text in PYTHON_WORDS else json.loads(text, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return text


def _no_json(word: str) -> Any:
    raise ValueError(f"{word} is Python's, not JSON")


def _older(text: str, end: str) -> list[str]:
    """Return Mistral's calls as lists of objects, which they were before they became `NAME[ARGS]{...}`."""
    mark = MARKS[ToolForm.MISTRAL]
    written = text.partition(mark)[2]
    if NEWER_CALL.match(written) is None:
        return [written]
    return [NEWER_CALL.sub(rf'{{"name": "\1", "arguments": \2{end}', part) for part in written.split(mark)]


def _calls(form: ToolForm, text: str, functions: Sequence[Json]) -> list[tuple[str, Json]]:
    """Return name and arguments of each call; nothing if one of them is broken."""
    try:
        parsed = [json.loads(part) for part in _parts(form, text, functions) if part.strip()]
    except (ValueError, RecursionError):
        return []
    entries = [entry for part in parsed for entry in (part if isinstance(part, list) else [part])]
    if not all(isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in entries):
        return []
    if form in GUIDED_FORMS and not all("arguments" in entry for entry in entries):
        return []
    calls = [(entry["name"], entry.get("arguments", entry.get("parameters")) or {}) for entry in entries]
    return calls if all(isinstance(arguments, dict) for _, arguments in calls) else []


def _written(arguments: Json) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _cut_calls(text: str) -> list[tuple[str, str]]:
    """Return name and arguments of each call of an answer that was cut; those of the last may end anywhere."""
    calls = list[tuple[str, str]]()
    while (call := CUT_CALL.match(text)) is not None:
        name, arguments = call[1], call[2]
        try:
            whole, size = json.JSONDecoder().raw_decode(arguments)
        except (ValueError, RecursionError):
            return [*calls, (name, arguments)]
        calls.append((name, _written(whole)))
        text = arguments[size:]
    return calls


def _joined(parts: Iterable[str]) -> list[str]:
    """Join parts that a semicolon inside a string has taken apart."""
    joined: list[str] = []
    for part in parts:
        if joined and not _is_json(joined[-1]):
            joined[-1] += ";" + part
        else:
            joined.append(part)
    return joined


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
