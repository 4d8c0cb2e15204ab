"""A decoded weight is judged by the best codes of its format, and what was done to it is recognized."""

import numpy as np
import pytest

from eval.diagnose.arithmetic import Suspect, best_codes, compare, explain
from pipelines.domain.formats import FLOAT_WEIGHTS, FP4_WEIGHTS, FP8_WEIGHTS, INT4_WEIGHTS, INT8_WEIGHTS, WeightKind

GROUP = {INT4_WEIGHTS: 32, FP4_WEIGHTS: 16}
KINDS = (FP8_WEIGHTS, INT8_WEIGHTS, INT4_WEIGHTS, FP4_WEIGHTS)
ERRORS = {FP8_WEIGHTS: (0.01, 0.04), INT8_WEIGHTS: (0.003, 0.02), INT4_WEIGHTS: (0.05, 0.15), FP4_WEIGHTS: (0.06, 0.15)}
"""Relative errors of normally distributed weights: between a third of a step's share and the largest step."""


def weight(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(64, 128)).astype(np.float32)


def coded(kind: WeightKind, values: np.ndarray) -> np.ndarray:
    return best_codes(values, kind, GROUP.get(kind, 0))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_error_of_a_format_is_not_suspicious(kind):
    source = weight()
    found = compare(source, coded(kind, source), coded(kind, source))
    low, high = ERRORS[kind]
    assert low < found.error < high
    assert not found.suspicious


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("factor", [0.95, 1.05])
def test_five_percent_are_suspicious_in_every_format(kind, factor):
    source = weight()
    found = coded(kind, source) * np.float32(factor)
    assert compare(source, found, coded(kind, source)).suspicious
    size = f"{factor:.3g}" if factor > 1 else f"{1 / factor:.3g}"
    said = explain(Suspect(source, found, coded(kind, source)), [])
    assert size[:3] in said
    assert ("too large" if factor > 1 else "too small") in said


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("axis", "what"), [(0, "input"), (1, "output")])
def test_a_channel_of_zeros_has_no_factor(axis, what):
    """The factors of the other channels are named."""
    source = weight()
    source.swapaxes(0, axis)[:, 3] = 0
    factors = np.linspace(0.5, 4, source.shape[1 - axis], dtype=np.float32)
    found = source * np.expand_dims(factors, axis)
    said = explain(Suspect(source, found, source), [])
    assert said == f"each {what} channel has a wrong factor, between 0.5 and 4"


def test_a_value_that_is_not_finite_is_suspicious():
    found = weight()
    found[3, 4] = np.nan
    assert compare(weight(), found, weight()).suspicious


def test_one_wrong_row_of_many_is_suspicious():
    found = weight()
    found[7] = found[8]
    assert compare(weight(), found, weight()).suspicious
    assert best_codes(weight(), FLOAT_WEIGHTS, 0) is not None


ORDERS = {
    "each two neighbouring rows are exchanged": np.arange(64) ^ 1,
    "its rows are 2 blocks in reverse order": np.r_[32:64, 0:32],
    "2 of its rows are in another order, the first at 5": np.r_[0:5, 40, 6:40, 5, 41:64],
}


@pytest.mark.parametrize("kind", [FLOAT_WEIGHTS, *KINDS], ids=lambda kind: kind.name)
@pytest.mark.parametrize("words", ORDERS)
def test_rows_in_another_order_are_recognized(kind, words):
    source = weight()
    expected = coded(kind, source)
    assert words in explain(Suspect(source, expected[ORDERS[words]], expected), [])


def test_heads_in_another_order_are_recognized():
    source = weight()
    order = np.r_[16:32, 0:16, 32:64]
    assert "the heads are in another order: [1, 0, 2, 3]" in explain(
        Suspect(source, source[order], source, heads=4), []
    )
    turned = Suspect(source.T, source.T[:, order], source.T, heads=4, columns_are_heads=True)
    assert "the heads are in another order" in explain(turned, [])


def test_another_tensor_is_recognized_by_its_values():
    source, other = weight(), weight(1)
    suspect = Suspect(source, coded(INT8_WEIGHTS, other), coded(INT8_WEIGHTS, source))
    assert explain(suspect, [("layer 3", weight(2)), ("layer 2", other)]) == "it holds layer 2"


def test_what_nothing_explains_is_said_to_be_damaged():
    assert "damaged" in explain(Suspect(weight(), weight(9), weight()), [])


@pytest.mark.parametrize("kind", [FLOAT_WEIGHTS, *KINDS], ids=lambda kind: kind.name)
@pytest.mark.parametrize("place", [(slice(None), 3), (7, slice(None))], ids=["column", "row"])
def test_a_channel_of_the_other_sign_is_suspicious(kind, place):
    """However little it adds to the error of the whole weight."""
    source = weight()
    source[place] *= 0.3
    found = coded(kind, source)
    assert not compare(source, found, coded(kind, source)).suspicious
    found = found.copy()
    found[place] *= -1
    assert compare(source, found, coded(kind, source)).suspicious
    if kind is INT4_WEIGHTS and place[1] == 3:  # solving may turn a weight
        assert not compare(source, found, coded(kind, source), rounded_alone=False).suspicious
