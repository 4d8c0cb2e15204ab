"""NVIDIA NIM in a closed loop: twelve public rows that were fitted, and published numbers of other configurations.

The latter guided the choice of the protocol (docs/decisions/0023-performance-model.md), but none was fitted to.
"""

import numpy as np
import pytest

from scripts.published.cases import PUBLISHED, read_rows
from scripts.published.predict import predict

ROWS = [row for row in read_rows(PUBLISHED) if row["source"] == "nim-docs"]
EIGHT = {
    **ROWS[0], "model": "llama-3.1-8b", "n_gpus": "1", "tp": "1", "framework": "NIM (version not stated)",
    "isl": "2000", "osl": "200",
}  # fmt: skip
"""Llama 3.1 8B, FP8, one H100."""


def predicted(**asked) -> float:
    return predict([{**EIGHT, **{key: str(value) for key, value in asked.items()}}])[0].value


def test_public_rows_are_met():
    """Llama 3.3 70B, 5000/500: ITL and rates within 5 %, TTFT within 12 % but for 5 users (45 %)."""
    errors = {(row["metric"], row["concurrency"]): abs(each.value / float(row["value"]) - 1)
              for row, each in zip(ROWS, predict(ROWS), strict=True)}  # fmt: skip
    assert max(error for (metric, _), error in errors.items() if metric != "ttft_ms") < 0.05
    ttft = {users: error for (metric, users), error in errors.items() if metric == "ttft_ms"}
    assert ttft.pop("5") < 0.45
    assert max(ttft.values()) < 0.12


@pytest.mark.parametrize(
    ("users", "metric", "published", "within"),
    [
        (10, "ttft_ms", 221, 0.15),  # NVIDIA NIM, 8B, FP8, H100, 2000/200
        (25, "ttft_ms", 489.5, 0.25),  # NVIDIA, "Benchmarking LLM inference costs": 70.7 requests/s on 8 GPUs
        (25, "requests_s", 70.7 / 8, 0.2),
    ],
)
def test_a_smaller_model_is_predicted_from_the_larger_one(users, metric, published, within):
    assert predicted(concurrency=users, metric=metric) == pytest.approx(published, rel=within)


def test_one_user_does_not_wait_for_the_front_end():
    """8B, 16 bit, A100, 500 tokens in: 48.3 ms published (NIM Safety Guard 1.10.1)."""
    alone = predicted(gpu="A100-SXM-80GB", precision="bf16", isl=500, osl=10, concurrency=1, metric="ttft_ms")
    assert alone == pytest.approx(48.3, rel=0.2)


def test_requests_wait_for_memory_when_they_do_not_fit():
    """8B, 7000/1000: a bit over 100 requests fit; 150 users wait for seconds (published: 23.7 s, GPU not stated)."""
    fit, over = (predicted(isl=7000, osl=1000, concurrency=users, metric="ttft_ms") for users in (100, 150))
    assert over > 2 * fit
    assert 5e3 < over < 30e3


@pytest.mark.parametrize("users", [1, 25, 250])
def test_rates_are_of_users_that_are_always_busy(users):
    """Users over the time of a request; the public rows keep to it within 0.6 %, less the client's delay."""
    ttft, itl, rate = (predicted(concurrency=users, metric=name) for name in ("ttft_ms", "itl_ms", "requests_s"))
    assert rate * (ttft + 199 * itl) / 1e3 == pytest.approx(users, rel=0.06)


def test_users_of_a_front_end_come_back_in_step():
    """A cohort of 25 waits for one another: the TTFT is far above that of a single prompt."""
    alone, together = (predicted(concurrency=users, metric="ttft_ms") for users in (1, 25))
    assert together > 5 * alone
    assert np.isfinite(together)
