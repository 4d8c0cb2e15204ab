"""Open loops that no fit has seen: 89 stages of vLLM by inference-sim, and two replayed traces of LLMServingSim."""

import numpy as np
import pytest

from pipelines.predict.performance.models import model_named
from pipelines.predict.performance.performance import PerformanceModel
from scripts.published import judge, stages
from scripts.published.frameworks import framework_named

JUDGED = stages.rows("judge")


@pytest.fixture(scope="module")
def errors() -> judge.Errors:
    found, refused = judge.open_loop(JUDGED)
    assert not refused
    return found


def median(pairs: list[tuple[float, bool]]) -> float:
    return 100 * float(np.median([abs(error) for error, _ in pairs]))


def test_every_stage_is_predicted_better_than_by_its_authors_simulator(errors: judge.Errors) -> None:
    """BLIS on them: E2E 6.7, its P99 9.2, TTFT 17.6, ITL 7.1 % (median)."""
    assert len(JUDGED) == 89
    assert median(errors["stages, E2E"]) <= 5
    assert median(errors["stages, E2E P99"]) <= 8.5
    assert median(errors["stages, TTFT"]) <= 8.5
    assert median(errors["stages, ITL as published"]) <= 5
    assert median(errors["stages, ITL per token asked for"]) <= 5


def test_intervals_hold_at_least_what_they_say(errors: judge.Errors) -> None:
    for name in ("E2E", "TTFT", "ITL as published"):
        assert np.mean([inside for _, inside in errors[f"stages, {name}"]]) >= 0.8


def test_without_the_prefix_cache_the_first_token_would_be_far_off(errors: judge.Errors) -> None:
    some = [row for row in JUDGED if row["workload"] == "codegen"]
    reused, computed = (judge.open_loop(some, reuse=reuse)[0]["stages, TTFT"] for reuse in (True, False))
    assert median(reused) < 15 < 40 < median(computed)


def test_the_front_end_is_what_stages_outside_the_judged_ones_say() -> None:
    """The two that overload the modelled engine say nothing of it."""
    model = PerformanceModel.load()
    left = []
    for row in stages.rows("fit"):
        found = stages.predict(row, model)
        if found["ttft_p99"][0] < 100:
            left.append(1e-3 * (float(row["ttft_mean"]) - found["ttft_mean"][0]) + stages.FRONT_END_S)
    assert len(left) == 4
    assert np.median(left) == pytest.approx(stages.FRONT_END_S, abs=1e-3)


def test_vllm_chooses_batches_ahead_since_the_release_that_says_so() -> None:
    """v0.14.0: "Async scheduling is now enabled by default"."""
    assert framework_named("vLLM 0.14.0").ahead
    assert not framework_named("vLLM 0.13.0").ahead
    assert not framework_named("vLLM (version not stated)").ahead


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", 46.7),
        ("mistralai/Mixtral-8x22B-Instruct-v0.1", 140.6),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", 30.5),
        ("Qwen/Qwen3-235B-A22B", 235.1),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", 107.8),
        ("codellama/CodeLlama-34b-Instruct-hf", 33.7),
        ("mistralai/Mistral-Nemo-Instruct-2407", 12.2),
        ("01-ai/Yi-34B", 34.4),
        ("Qwen/Qwen3-14B", 14.8),
    ],
)
def test_models_are_found_by_their_name_on_the_hub(name: str, billions: float) -> None:
    """Sizes from their model cards; of Scout (109 B), without its vision model and embedding of images."""
    shape = model_named(name)
    assert (shape.linear_params + 2 * shape.head_params) / 1e9 == pytest.approx(billions, rel=0.005)


MIXTURES_OFF = {
    "deepseek-r1": 11,
    "qwen3-235b-a22b": 7,
    "gpt-oss-120b": 11,
    "qwen3-30b-a3b": 8,
    "llama-4-maverick": 8,
}
"""Medians in percent of NVIDIA's full loads that no fit has seen."""


def test_what_was_in_no_fit_is_as_far_off_as_is_said() -> None:
    """Replayed traces, and full loads of mixtures."""
    found, refused = judge.kept_apart()
    assert not refused
    assert all(median(found[f"trace kept apart, {metric}"]) < 15 for metric in ("TTFT", "ITL", "E2E"))
    for name, most in MIXTURES_OFF.items():
        assert median(found[f"full load, {name}"]) < most, name
    held = [inside for name in MIXTURES_OFF for _, inside in found[f"full load, {name}"]]
    assert 0.75 < sum(held) / len(held) < 0.95  # an interval of 80 %
