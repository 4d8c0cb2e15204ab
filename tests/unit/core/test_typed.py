"""Records from JSON: what `asdict` wrote comes back equal, and a wrong value is named by its place."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import pytest

from pipelines.domain.errors import UserError, read_record


@dataclass(frozen=True)
class Part:
    """A record within a record."""

    share: float
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Whole:
    """A record with every shape that results have."""

    number: int
    parts: tuple[Part, ...]
    by_name: Mapping[str, Part]
    best: Part | None = None
    said: str | int = ""


WHOLE = Whole(1, (Part(0.5, ("a", "b")), Part(1.0)), {"x": Part(0.25)}, Part(1.0), 3)


def read(data):
    return read_record(Whole, data, "it.json", what="a whole", todo="Make another.")


def as_json(record):
    return json.loads(json.dumps(asdict(record)))


@pytest.mark.parametrize("record", [WHOLE, Whole(1, (), {})])
def test_what_was_written_comes_back_equal(record):
    assert read(as_json(record)) == record


def test_a_field_with_a_default_may_be_missing():
    assert read({"number": 1, "parts": [{"share": 1.0}], "by_name": {}}) == Whole(1, (Part(1.0),), {})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"other": 1}, r"missing \[\], unknown \['other'\]"),
        ({"number": "1"}, "number='1' is not a whole number"),
        ({"parts": {}}, r"parts=\{\} is not a list"),
        ({"parts": [3]}, r"parts\[0\]: it is not a JSON object"),
        ({"parts": [{"names": []}]}, r"parts\[0\]: missing \['share'\], unknown \[\]"),
        ({"by_name": {"x": {"share": None}}}, "by_name.x.share=None is not a finite number"),
        ({"by_name": []}, r"by_name=\[\] is not an object"),
        ({"best": {"share": 1.0, "extra": 2}}, r"best: missing \[\], unknown \['extra'\]"),
        ({"best": 7}, "best: it is not a JSON object"),
        ({"said": None}, "said=None is not"),
        ({"said": "\ud800"}, "Invalid JSON: "),
        ({"by_name": {"x": {"share": float("nan")}}}, "by_name.x.share=nan is not a finite number"),
    ],
)
def test_a_wrong_value_is_named_by_its_place(change, said):
    with pytest.raises(UserError, match=rf"^it\.json is not a whole: {said}"):
        read(as_json(WHOLE) | change)


@pytest.mark.parametrize("data", [None, [], "text", 3])
def test_what_is_no_object_is_refused(data):
    with pytest.raises(UserError, match="it is not a JSON object"):
        read(data)
