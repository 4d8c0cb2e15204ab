"""docs/rules.md says what the rules say: `make golden` rewrites it, a person reads the difference."""

import pytest

from scripts.rules_docs import FEATURES, PAGE, page


def test_the_page_of_the_rules_is_up_to_date(request: pytest.FixtureRequest) -> None:
    found = page()
    if request.config.getoption("--rewrite-golden"):
        PAGE.write_text(found, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == found


def test_every_group_of_features_has_a_row() -> None:
    """A new file of a feature belongs into the table."""
    rows = {group for feature in FEATURES for group in feature.groups}
    assert rows == {
        *("quant", "kv_cache", "runtime", "reuse", "window", "lora", "speculative", "weights", "guided", "multimodal"),
        *("parallel", "sparsity"),
    }
