"""docs/develop.md names for each promise of the README the tests that hold it, and the lane where they run."""

import re

import pytest

from tests.conftest import ROOT, WHOLE_FILE_IS_THOROUGH

ROW = re.compile(r"^\| ([^|]*?) ?\| `([^`]+)::(\w+)` \| (test|test-all) \|$", re.MULTILINE)


@pytest.fixture(scope="module")
def rows() -> list[tuple[str, str, str, str]]:
    """Promise, file, test and lane; a row without a promise goes on with that above it."""
    found, promise = [], ""
    for named, *rest in ROW.findall((ROOT / "docs" / "develop.md").read_text(encoding="utf-8")):
        promise = named or promise
        found.append((promise, *rest))
    return found


def test_every_promise_is_held_in_make_test(rows):
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## What it promises\n")[1].split("\n## ")[0]
    promises = re.findall(r"^- \*\*(.+?)\.\*\*", section, re.MULTILINE)
    assert len(promises) > 5
    assert {promise for promise, *_ in rows} == set(promises)
    assert {promise for promise, _, _, lane in rows if lane == "test"} == set(promises)


def test_every_test_that_is_named_exists_in_its_lane(rows):
    wrong = []
    for _, file, name, lane in rows:
        source = (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).is_file() else ""
        decorated = re.search(rf"^((?:@.*\n|[ )].*\n)*)def {name}\(", source, re.MULTILINE)
        thorough = decorated and ("mark.thorough" in decorated[1] or WHOLE_FILE_IS_THOROUGH.search(source))
        if decorated is None or bool(thorough) != (lane == "test-all"):
            wrong.append(f"{file}::{name} in {lane}")
    assert wrong == []
