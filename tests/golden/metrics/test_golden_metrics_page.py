"""docs/benchmarking.md says what the table of metrics says: `make golden` rewrites it."""

import pytest

from scripts.metrics_docs import PAGE, page


def test_the_metrics_in_the_docs_are_those_of_the_table(request: pytest.FixtureRequest) -> None:
    text = PAGE.read_text(encoding="utf-8")
    if request.config.getoption("--rewrite-golden"):
        PAGE.write_text(page(text), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page(text)


def test_a_page_without_the_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="does not contain the lines '<!-- metrics"):
        page("# Benchmarking\n")
