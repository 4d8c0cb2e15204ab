"""The section on a searched mix: the bits that were asked and spent, a cell for each linear, what the search saw."""

import pytest

from pipelines.document.blocks import Figure, Fold, Terms
from pipelines.report.collect import collect
from pipelines.report.model_card import model_card
from pipelines.report.sections import document
from pipelines.store.store import Store
from tests.support.report_store import add_format, commit

SEARCH = {
    "candidates": ["fp8", "int4_awq"],
    "scoring": "gradient",
    "texts": 128,
    "asked_bits": 6.0,
    "effective_bits": 5.0,
    "choices": [
        {
            "linears": ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"],
            "chosen": "fp8",
            "weights": 1000,
            "scores": {"fp8": 0.05, "int4_awq": 0.5, "none": 0.0},
        },
        {
            "linears": ["model.layers.0.mlp.down_proj"],
            "chosen": "int4_awq",
            "weights": 3000,
            "scores": {"fp8": 0.01, "int4_awq": 0.02, "none": 0.0},
        },
    ],
}
FORMATS = {"layers.0.attention.qkv": "fp8", "layers.0.mlp.proj": "int4_awq"}


@pytest.fixture
def mixed(tmp_path):
    """A store with a searched checkpoint, its engine, and one whose linears are alike."""
    store = Store(tmp_path)
    add_format(store, "none")
    facts = {
        "total_bytes": 4 * 2**20, "source_bytes": 8 * 2**20, "quant_algo": "MIXED_PRECISION",
        "bits_per_weight": 5.21, "formats": FORMATS, "search": SEARCH,
    }  # fmt: skip
    settings = {"qformat": "auto", "kv_cache": "auto", "tp_size": 1, "pp_size": 1}
    checkpoint = commit(
        store, "quantize", "synthetic-auto", facts, {"model": "cd" * 32}, settings, {"config.json": {"a": 1}}
    )
    commit(
        store, "build", "synthetic-auto", {"engine_bytes": 5 * 2**20}, {"checkpoint": checkpoint},
        {"engine": "openvino"}, {"config.json": {"b": 1}},
    )  # fmt: skip
    return store


def section(store):
    return next((each for each in document(collect(store)).sections if each.id == "mix"), None)


@pytest.mark.pictures
def test_the_mix_is_told_in_words_in_a_picture_and_in_numbers(mixed):
    terms, figure, seen = section(mixed).blocks
    assert isinstance(terms, Terms)
    told = dict(terms.items)
    assert told["Effective bits"].startswith("5 per weight of the layers' linears without scales of groups, of at most")
    assert told["Effective bits"].endswith("6; 5.21 stored, scales included")
    assert told["Weights by format"] == "fp8 25 %, int4_awq 75 %"
    assert isinstance(figure, Figure)
    assert figure.alt == "fp8: layers.0.attention.qkv; int4_awq: layers.0.mlp.proj."
    assert figure.png
    assert isinstance(seen, Fold)
    (table,) = seen.blocks
    assert table.rows == (
        ("layers.0.self_attn.q_proj, k_proj", "1,000", "0.05", "0.5", "fp8"),
        ("layers.0.mlp.down_proj", "3,000", "0.01", "0.02", "int4_awq"),
    )


def test_the_model_card_names_the_mix(mixed):
    item = next(item for item in collect(mixed).formats if item.variant == "auto")
    assert "fp8 25 %, int4_awq 75 %" in model_card(item)


def test_formats_that_all_linears_share_have_no_such_section(tmp_path):
    store = Store(tmp_path)
    add_format(store, "int8_sq")
    assert section(store) is None
