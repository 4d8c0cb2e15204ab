"""Errors a user can act on. Everything else is a crash and keeps its traceback."""

from __future__ import annotations

import errno
import json
import re
import reprlib
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast

if TYPE_CHECKING:
    from pathlib import Path

    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails


def is_interruption(error: BaseException) -> bool:
    """Return whether this is a Ctrl-C, or what pydantic or Python's rmtree make of one that arrives in them."""
    removing = isinstance(error, OSError) and error.errno == errno.EBADF  # rmtree closes a folder twice
    by_pydantic = type(error).__name__ in ("PydanticSerializationError", "SchemaError")
    if by_pydantic and str(error).endswith("KeyboardInterrupt: "):
        return True  # where a model is in a model, and while a class is made, the cause is lost
    return KeyboardInterrupt in map(type, (error, error.__cause__, error.__context__ if removing else None))


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with the user's input or machine.

    Attributes:
        message: what failed and what was given, as one sentence.
        allowed: what would be accepted, or empty.
        todo: the change that makes it work, or empty.
        command: words of a command that helps, or empty; shown last and never wrapped, so that it can be pasted.
    """

    message: str
    allowed: str = ""
    todo: str = ""
    command: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Everything but the command, as one paragraph."""
        return " ".join(part for part in (self.message, self.allowed, self.todo) if part)

    def __str__(self) -> str:
        return f"{self.text} {shlex.join(self.command)}" if self.command else self.text


class UserError(Exception):
    """A fault in the input or the machine; shown without traceback, exit code 2."""

    def __init__(self, message: str, *, allowed: str = "", todo: str = "", command: Sequence[str] = ()) -> None:
        self.faults: tuple[Fault, ...] = (Fault(message, allowed, todo, tuple(command)),)
        super().__init__(str(self.faults[0]))

    @classmethod
    def of(cls, faults: Sequence[Fault]) -> Self:
        """Combine several faults in one error, so that all are reported at once."""
        error = cls(faults[0].message, allowed=faults[0].allowed, todo=faults[0].todo)
        error.faults = tuple(faults)
        error.args = ("\n".join(str(fault) for fault in faults),)
        return error


def refuse(faults: Iterable[Fault]) -> None:
    """Raise all faults as one error, if there are any."""
    if found := list(faults):
        raise UserError.of(found)


class ContinuableError(UserError):
    """A fault during a run; finished work is kept, and the same command resumes."""


@contextmanager
def collecting(faults: list[Fault]) -> Iterator[None]:
    """Append the faults of a UserError to a list and continue, so that all can be reported at once."""
    try:
        yield
    except UserError as error:
        faults.extend(error.faults)


MOST_MEANINGS = 4
"""A longer list of what a word may mean is no help."""


def meanings(text: str, names: Iterable[str]) -> list[str]:
    """List the known words that a mistaken one may mean, the nearest first, whatever its case.

    Words that begin like it are nearer than others (b200 is b200_sxm, not gb200), then those of which it is a part (awq
    is int4_awq), then the one with the most similar letters.
    """
    by_case = {name.casefold(): name for name in reversed(list(names))}
    word = text.casefold()
    if word in by_case or not word:
        return [by_case[word]] if word else []
    longer = [name for name in by_case if name.startswith(word)]
    longer = longer or [name for name in by_case if word in re.split(r"[\W_]+", name)]
    near = get_close_matches(word, longer or by_case, n=MOST_MEANINGS if longer else 1, cutoff=0 if longer else 0.5)
    return [by_case[name] for name in near]


def did_you_mean(text: str, names: Iterable[str]) -> str:
    """Return "Did you mean 'x' or 'y'?" for what a mistaken word may mean, or an empty string."""
    return as_question(meanings(text, names))


def as_question(meant: Sequence[str]) -> str:
    """Ask whether one of these was meant; an empty string for none."""
    *others, last = [f"'{name}'" for name in meant] or [""]
    return f"Did you mean {', '.join(others)}{' or ' if others else ''}{last}?" if meant else ""


_IN_ADDRESS = re.compile(r"""(?<=://)(?:[^/\s'"<>]*|[^/\s:@'"<>]+:(?!\d+/)[^\s@'"<>]*)(?=@)""")
_SECRET = "token|key|password|passwd|pwd|secret|credential|signature|sig|auth"
_IN_QUERY = re.compile(rf"""([?&][\w.-]*(?:{_SECRET})[\w.-]*=)[^&\s'"<>#]+""", re.IGNORECASE)


def masked(text: str) -> str:
    """Hide user names, passwords and tokens in addresses: http://***@host/?token=***."""
    if "://" not in text:
        return text
    return _IN_QUERY.sub(r"\1***", _IN_ADDRESS.sub("***", text))


def stated_reason(body: bytes) -> str:
    """Return the reason that the body of an HTTP error states, as OpenAI's interface, FastAPI or plain text do."""
    reason: Any = body.decode(errors="replace")
    try:
        reason = json.loads(body)
        while isinstance(reason, dict):
            reason = next((reason[key] for key in ("error", "message", "detail") if reason.get(key)), str(reason))
    except ValueError:
        pass
    return str(reason).strip()


# Records read from JSON, checked by pydantic against the types that their classes declare.

Record = TypeVar("Record")


def read_record(kind: type[Record], data: Any, source: str, *, what: str, todo: str) -> Record:
    """Return the dataclass that `dataclasses.asdict` made JSON values of.

    Numbers must be finite, because JSON has no others: this project never wrote a file with `1e999` or `NaN`.

    Args:
        kind: the dataclass; records in it are built too.
        data: values from JSON.
        source: where they are from, for messages.
        what: the record in words: "a fidelity result".
        todo: how to make another one.

    Raises:
        UserError: a field is missing, unknown, or of another type.
    """
    from pydantic import ValidationError

    try:
        record: Record = _adapter(cast("Any", kind)).validate_json(json.dumps([data]))[0]
    except ValidationError as error:
        raise UserError(f"{source} is not {what}: {_reason(error.errors())}.", todo=todo) from None
    return record


class JsonFile:
    """A frozen dataclass that is stored as one JSON file.

    Attributes:
        WHAT: the record in words: "a fidelity result".
    """

    __slots__ = ()
    FILE: ClassVar[str]
    WHAT: ClassVar[str]
    TODO: ClassVar[str]
    INDENT: ClassVar[int | None] = None

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain JSON values."""
        return asdict(cast("Any", self))

    def save(self, path: Path) -> None:
        """Write the file."""
        path.write_text(json.dumps(self.to_json(), indent=self.INDENT, allow_nan=False), encoding="utf-8")

    @classmethod
    def from_json(cls, data: Any, source: str = "it") -> Self:
        """Invert `to_json`.

        Raises:
            UserError: a field is missing, unknown or malformed.
        """
        return read_record(cls, data, source, what=cls.WHAT, todo=cls.TODO)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file that `save` wrote.

        Raises:
            UserError: the file is missing or is not such a record.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"There is no {cls.WHAT.partition(' ')[2]} at {path}.") from None
        except ValueError as error:
            raise UserError(f"{path} is not valid JSON: {error}.") from None
        return cls.from_json(data, str(path))


@cache
def _adapter(kind: Any) -> TypeAdapter[list[Any]]:
    # of a list, because pydantic takes a configuration for no dataclass that has none itself
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(list[kind], config=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))


def _reason(errors: list[ErrorDetails]) -> str:
    """Return the first error in words; names that are missing or unknown in one record are one error."""
    first, *place = errors[0], *errors[0]["loc"][1:]
    if first["type"] == "json_invalid":  # half a surrogate pair, or brackets without end
        return str(first["msg"])
    if first["type"] in ("missing", "unexpected_keyword_argument"):
        beside = [each for each in errors if each["loc"][:-1] == first["loc"][:-1]]
        names = {kind: sorted(each["loc"][-1] for each in beside if each["type"] == kind) for kind in _NAMES_WRONG}
        return _at(place[:-1]) + ", ".join(f"{word} {names[kind]}" for kind, word in _NAMES_WRONG.items())
    if first["type"] == "dataclass_type":
        return f"{_at(place)}it is not a JSON object"
    if place[-1] in ("int", "str"):  # the first type of a union
        place.pop()
    value = repr(first["input"])
    value = value if len(value) <= 60 else value[:57] + "..."
    return f"{_path(place)}={value} is not {_WANTED.get(first['type']) or first['ctx']['expected']}"


_NAMES_WRONG = {"missing": "missing", "unexpected_keyword_argument": "unknown"}
_WANTED = {
    "bool_type": "true or false", "dict_type": "an object", "finite_number": "a finite number",
    "float_type": "a finite number", "int_type": "a whole number", "none_required": "null", "string_type": "text",
    "tuple_type": "a list",
}  # fmt: skip


def _at(place: list[Any]) -> str:
    return f"{_path(place)}: " if place else ""


def _path(place: list[Any]) -> str:
    return "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in place).removeprefix(".")


# Read numbers from a Hugging Face config.json. It comes with the model, so nothing in it is trusted.

LARGEST = 2**24
"""Largest size of any kind: 16,777,216 tokens of context, above that of every published model."""
LARGEST_BY_NAME = {
    "num_hidden_layers": 10_000,
    "sliding_window_pattern": 10_000,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
}
MOST_SHOWN = 80
"""Characters of a value in a message; one from a file may be megabytes long."""
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxlong, _SHORT.maxother = 3, 60, 60, 60
REALS: Mapping[str, tuple[float, float]] = {
    "rms_norm_eps": (0.0, 1.0),
    "rope_theta": (0.0, 1e12),
    "partial_rotary_factor": (0.0, 1.0),
    "original_max_position_embeddings": (0.0, LARGEST),
    "rope_local_base_freq": (0.0, 1e12),
    **dict.fromkeys(("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"), (0.0, 1e6)),
    **dict.fromkeys(("embedding_multiplier", "attention_multiplier", "residual_multiplier"), (0.0, 1e6)),
    "logits_scaling": (0.0, 1e6),
}
"""Numbers that an engine computes with: they must be above the first and at most the second."""
ROPE_REALS: Mapping[str, tuple[float, float]] = {
    "rope_theta": (0.0, 1e12),
    "partial_rotary_factor": (0.0, 1.0),
    "factor": (0.0, 1e6),
    "low_freq_factor": (0.0, 1e6),
    "high_freq_factor": (0.0, 1e6),
    "original_max_position_embeddings": (0.0, LARGEST),
    **dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"), (0.0, 1e6)),
}
"""The same inside rope_scaling (Transformers 4) or rope_parameters (Transformers 5)."""


def shown(value: object) -> str:
    """Return a value from a file for a message: short, without control characters, text in quotes."""
    text = _SHORT.repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


class ConfigNumbers:
    """Typed access to a config.json that collects every fault, so that all are reported at once."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config, self._source = config, source
        self._faults: list[Fault] = []

    @property
    def fine(self) -> bool:
        """Whether nothing is at fault so far."""
        return not self._faults

    def size(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Return a size; the default if it is absent or null, and 1 in place of one that is at fault."""
        value = self.config.get(name)
        if value is None:
            if default is None:
                self.fault(f"has no '{name}'; it is not a complete model configuration.")
                return 1
            return default
        most = LARGEST_BY_NAME.get(name, LARGEST)
        if type(value) is not int or not least <= value <= most:
            self.fault(f"has {name}={shown(value)}.", f"It must be a whole number from {least} to {most:,}.")
            return 1
        return value

    def has(self, *names: str) -> bool:
        """Return whether one of these is stated."""
        return any(self.config.get(name) is not None for name in names)

    def switch(self, name: str) -> bool:
        """Return a truth value; false if it is absent or null."""
        value = self.config.get(name)
        if value is not None and not isinstance(value, bool):
            self.fault(f"has {name}={shown(value)}.", "It must be true or false.")
        return bool(value)

    def items(self, name: str) -> list[Any]:
        """Return a list; empty if it is absent or null."""
        value = self.config.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            self.fault(f"has {name}={shown(value)}.", "It must be a list.")
            return []
        return value

    def architecture(self) -> str:
        """Return the first name in `architectures`; empty if there is none."""
        names = self.config.get("architectures")
        if names is None or names == []:
            return ""
        if not isinstance(names, list) or not isinstance(names[0], str):
            self.fault(f"has architectures={shown(names)}.", "It must be a list of names.")
            return ""
        return str(names[0])

    def check_reals(self) -> None:
        """Check the numbers that are not sizes, and the block that scales positions."""
        self._reals(self.config, REALS, "")
        for name in ("rope_scaling", "rope_parameters"):
            block = self.config.get(name)
            if block is not None:
                self.block(name, block)

    def block(self, name: str, block: object) -> bool:
        """Check the numbers of one block that scales positions, and return whether it is one."""
        if not isinstance(block, Mapping):
            self.fault(f"has {name}={shown(block)}.", "It must be a JSON object.")
            return False
        self._reals(block, ROPE_REALS, f"{name}.")
        for key in ("rope_type", "type"):
            if not isinstance(block.get(key, ""), str):
                self.fault(f"has {name}.{key}={shown(block[key])}.", "It must be the name of a type.")
        return True

    def _reals(self, block: Mapping[str, Any], bounds: Mapping[str, tuple[float, float]], prefix: str) -> None:
        for name, (above, most) in bounds.items():
            value = block.get(name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and above < value <= most):
                allowed = f"It must be a number above {above:g} and at most {most:g}."
                self.fault(f"has {prefix}{name}={shown(value)}.", allowed)

    def fault(self, message: str, allowed: str = "") -> None:
        """Note something wrong with the file."""
        self._faults.append(Fault(f"{self._source} {message}", allowed))

    def refuse(self) -> None:
        """Raise the collected faults.

        Raises:
            UserError: every fault at once.
        """
        if self._faults:
            raise UserError.of(self._faults)


def yaml_fault(error: BaseException) -> str:
    """Return on one line what PyYAML found wrong in a text, and where; the caller names the file."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is not None and problem:
        return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
    return " ".join(str(error).replace('in "<unicode string>",', "at").split())
