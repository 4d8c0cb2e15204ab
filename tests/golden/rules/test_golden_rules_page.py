"""docs/rules.md says what the rules say: `make golden` rewrites it, a person reads the difference."""

from __future__ import annotations

import pytest

from pipelines.settings.by_hydra import compose_config, to_raw
from scripts.rules_docs import BASE, FEATURES, PAGE, Composer, page


def test_the_page_of_the_rules_is_up_to_date(request: pytest.FixtureRequest) -> None:
    found = page()
    if request.config.getoption("--rewrite-golden"):
        PAGE.write_text(found, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == found


@pytest.mark.parametrize(
    "words",
    [
        ("speculative=lookahead", "window=sliding"),
        ("reuse=system_prompt", "window=sinks"),
        ("parallel=tp2", "sparsity=sparsegpt_2_4"),
        ("runtime=chunked", "weights=streaming"),
    ],
)
def test_features_are_laid_over_one_another_as_hydra_does_it(words: tuple[str, str]) -> None:
    chosen = [feature for feature in FEATURES if feature.title.strip("`") in words]
    assert len(chosen) == 2
    assert Composer().raw(chosen) == to_raw(compose_config([*BASE, *words]))


def test_every_group_of_features_has_a_row() -> None:
    """A new file of a feature belongs into the table."""
    rows = {group for feature in FEATURES for group in feature.files}
    assert rows == {
        *(
            "runtime",
            "reuse",
            "window",
            "lora",
            "speculative",
            "weights",
            "guided",
            "multimodal",
            "parallel",
            "sparsity",
        ),
    }
