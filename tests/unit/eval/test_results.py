"""EvalResult keeps everything across JSON and refuses what is not one."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from eval.results import EvalResult
from pipelines.domain.errors import UserError


def test_json_round_trip(result, tmp_path: Path) -> None:
    """A saved result reads back equal, tuples and scores without standard error included."""
    before = result([1, 0, 1, 1])
    before = replace(before, overall=replace(before.overall, stderr=None))
    before.save(tmp_path / "eval.json")
    assert EvalResult.load(tmp_path / "eval.json") == before


def test_json_holds_plain_values(result) -> None:
    """`to_json` can be written by any JSON writer."""
    text = json.dumps(result([1, 0]).to_json())
    assert json.loads(text)["records"][0]["logprobs"] == [-1.0, -2.0, -3.0, -4.0]


def test_accuracy_and_questions(result) -> None:
    """3 of 4 right is 0.75."""
    assert (result([1, 0, 1, 1]).accuracy, result([1, 0, 1, 1]).questions) == (0.75, 4)


def test_missing_field_is_named(result) -> None:
    """A field of another version is named, not ignored."""
    data = result([1, 0]).to_json()
    data["accuracy_percent"] = data.pop("overall")
    with pytest.raises(UserError, match=r"missing \['overall'\], unknown \['accuracy_percent'\]"):
        EvalResult.from_json(data)


def test_wrong_record_is_refused(result) -> None:
    """A record without its fields is not an evaluation result."""
    data = result([1, 0]).to_json()
    del data["records"][1]["logprobs"]
    with pytest.raises(UserError, match="logprobs"):
        EvalResult.from_json(data, "eval.json")


def test_missing_file_is_named(tmp_path: Path) -> None:
    """The path that does not exist is in the message."""
    with pytest.raises(UserError, match=r"nowhere\.json"):
        EvalResult.load(tmp_path / "nowhere.json")


def test_broken_file_is_named(tmp_path: Path) -> None:
    """A half-written file is the user's to see."""
    (tmp_path / "half.json").write_text('{"model": ')
    with pytest.raises(UserError, match=r"half\.json is not valid JSON"):
        EvalResult.load(tmp_path / "half.json")


def test_nan_is_never_written(result, tmp_path: Path) -> None:
    """NaN is not JSON; a result holding one must not look saved."""
    broken = replace(result([1, 0]).overall, accuracy=math.nan)
    with pytest.raises(ValueError, match="Out of range float"):
        replace(result([1, 0]), overall=broken).save(tmp_path / "eval.json")
