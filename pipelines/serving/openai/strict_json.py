"""Parse JSON from clients strictly: name and refuse values that Python's parser accepts but later steps cannot use."""

import json
import math
from typing import Any, NoReturn

from pipelines.serving.openai.errors import ApiError, shortened

MAX_DEPTH = 100
"""Nesting that templates, guides and pickle can follow; schemas of real programs stay below 40."""
MAX_DIGITS = 400
Place = tuple[Any, str | int] | None
"""Where a value lies: the place of its object or list, and its key."""


class _RefusedError(ValueError):
    """The body is no JSON; `param` is the field, if known."""

    def __init__(self, why: str, param: str | None = None) -> None:
        super().__init__(why)
        self.param = param


def parse(text: bytes | str, what: str = "the body", param: str | None = None) -> Any:
    """Parse JSON.

    Raises:
        ApiError: 400, it is not JSON, is nested too deeply, has a name twice, or text or numbers that are none.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_no_number, parse_int=_integer)
        _check(value)
    except RecursionError:
        fault, place = f"it is nested too deeply, beyond {MAX_DEPTH} levels", param
    except _RefusedError as refused:
        fault, place = str(refused), param or refused.param
    except ValueError as error:  # not JSON, or not UTF-8
        fault, place = str(error), param
    else:
        return value
    raise ApiError(400, f"There was an error parsing {what}: {shortened(fault, 300)}.", param=place)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) == len(pairs):
        return members
    seen: set[str] = set()
    twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
    raise _RefusedError(f"{shortened(twice)!a} is given twice in one object", ascii(shortened(twice))[1:-1])


def _no_number(word: str) -> NoReturn:
    raise _RefusedError(f"{word} is not JSON")


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise _RefusedError(f"a number has {len(digits):,} digits, and {MAX_DIGITS} are allowed")
    return int(digits)


def _check(root: Any) -> None:
    """Refuse half of a surrogate pair, which has no UTF-8, infinite numbers, and values nested too deeply."""
    waiting: list[tuple[Any, Place, int]] = [(root, None, 0)]
    while waiting:
        value, place, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise RecursionError
        if isinstance(value, str):
            _check_text(value, place)
        elif isinstance(value, dict):
            for key, each in value.items():
                _check_text(key, place)
                waiting.append((each, (place, key), depth + 1))
        elif isinstance(value, list):
            waiting += [(each, (place, at), depth + 1) for at, each in enumerate(value) if not _harmless(each)]
        elif isinstance(value, float) and not math.isfinite(value):
            raise _RefusedError(f"'{_path(place)}' is a number beyond the range of double precision", _field(place))


def _harmless(value: Any) -> bool:
    """Whether a value needs no check of its own, as most of a long list."""
    return isinstance(value, int) or value is None or (isinstance(value, str) and value.isascii())


def _check_text(text: str, place: Place) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = f"'{_path(place)}'" if place is not None else "it"
        broken = ascii(text[error.start])
        raise _RefusedError(
            f"{where} contains {broken}, half of a surrogate pair: text must be valid Unicode", _field(place)
        ) from None


def _keys(place: Place) -> list[str]:
    keys: list[str] = []
    while place is not None:
        place, key = place
        keys.append(shortened(str(key), 40))
    return keys[::-1]


def _path(place: Place) -> str:
    return shortened(".".join(_keys(place)), 200)


def _field(place: Place) -> str | None:
    return next(iter(_keys(place)), None)
