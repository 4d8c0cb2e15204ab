"""What the runtime's features bring on the CPU engine, measured through the scheduler that a server uses.

Ratios of times are medians of several and have to hold in one of three attempts, as the machine may be busy.
"""

import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import openvino as ov
import pytest

from pipelines.domain.formats import QFormat
from pipelines.domain.progress import SilentProgress
from pipelines.engines.openvino.engine import OpenVinoEngine, generation_config
from pipelines.engines.openvino.pipeline import open_pipeline
from pipelines.engines.openvino.runtime import EngineFolder, OpenVinoOptions, kv_block_bytes, kv_blocks
from pipelines.engines.openvino.scheduler import Scheduler
from pipelines.engines.port import BuildLimits, SamplingParams
from tests.contract.engines.conftest import Workshop
from tests.support.scheduled import Channel, answers, asked, scheduler

LONG = BuildLimits(max_batch_size=8, max_input_len=1900, max_seq_len=2048, max_num_tokens=2048)
PIECES = BuildLimits(max_batch_size=8, max_input_len=1900, max_seq_len=2048, max_num_tokens=128)
ATTEMPTS = 3


@pytest.fixture(scope="module")
def build(workshop: Workshop) -> Callable[[BuildLimits], Path]:
    """Builds the bundled Gemma for some limits, once."""

    def engine(limits: BuildLimits) -> Path:
        out = workshop.root / f"features-{limits.max_num_tokens}"

        def make() -> Path:
            OpenVinoEngine().build(workshop.checkpoint("gemma", QFormat.NONE), limits, out, SilentProgress())
            return out

        return workshop.once(("features", limits), make)

    return engine


@pytest.fixture(scope="module")
def text(workshop: Workshop) -> list[int]:
    """2,000 tokens of questions; no KV block of them is like another."""
    return [token for prompt in workshop.tokens("gemma") for token in prompt][:2000]


def best_of(attempts: int, measure: Callable[[], float], wanted: float) -> float:
    """Measure until it is good enough, at most so many times; return the best."""
    best = 0.0
    for _ in range(attempts):
        best = max(best, measure())
        if best >= wanted:
            break
    return best


@pytest.mark.thorough
def test_a_shared_prefix_of_1000_tokens_cuts_ttft_to_a_third(build, text) -> None:
    """The same prefix with and without reuse, in turn; the first request pays for the prefix and does not count."""
    shared, turns = text[:1000], iter(range(1000))

    def ttft(running: Scheduler) -> float:
        found = answers(running, [asked([*shared, 300 + next(turns), 5, 6], 2)])
        return found[0].ttft

    with scheduler(build(LONG)) as reuse, scheduler(build(LONG), enable_prefix_caching=False) as none:
        ttft(reuse), ttft(none)

        def ratio() -> float:
            pairs = [(ttft(none), ttft(reuse)) for _ in range(5)]
            return statistics.median(a for a, _ in pairs) / statistics.median(b for _, b in pairs)

        assert best_of(ATTEMPTS, ratio, 3.0) >= 3.0
        [again] = answers(reuse, [asked([*shared, 9, 5, 6], 40)])
        [fresh] = answers(none, [asked([*shared, 9, 5, 6], 40)])
    assert again.tokens == fresh.tokens
    assert (again.kv.reused, fresh.kv.reused) == (31, 0)  # 31 full blocks of 32 in 1,000 tokens


def longest_gap(running: Scheduler, prompt: list[int]) -> float:
    """Longest pause, in seconds, between tokens of one request while another's prompt is computed."""
    talking, late = Channel(), Channel()
    running.submit([asked([2, 388, 774], 500)], talking)
    while len(talking.moments) < 50:
        assert not talking.ended.wait(0.002)
    running.submit([asked(prompt, 2)], late)
    late.wait()
    began, ended = late.stamps.arrival / 1e9, late.stamps.first_token / 1e9
    moments = np.array(talking.wait().moments)
    inside = moments[(moments > began - 0.05) & (moments < ended + 0.05)]
    return float(np.diff(inside).max())


@pytest.mark.thorough
def test_a_long_prompt_in_pieces_does_not_hold_up_the_others(build, text) -> None:
    """1,800 tokens at once stop everybody for as long as they take; in pieces of 128 nobody waits for more than one."""
    turns = iter(range(1000))
    pieces = {"enable_chunked_context": True, "enable_prefix_caching": False}
    with (
        scheduler(build(LONG), enable_prefix_caching=False) as whole,
        scheduler(build(PIECES), **pieces) as chunked,
    ):

        def ratio() -> float:
            gaps = []
            for running in (whole, chunked):
                gaps.append(statistics.median(longest_gap(running, text[next(turns) :][:1800]) for _ in range(3)))
            return gaps[0] / gaps[1]

        assert best_of(ATTEMPTS, ratio, 3.0) >= 3.0
        [a], [b] = (answers(running, [asked(text[:1800], 20)]) for running in (whole, chunked))
    assert a.tokens == b.tokens


def test_pieces_are_as_long_as_max_num_tokens(build, text) -> None:
    """1,800 tokens in pieces of 128 are 15 iterations; the last one brings the first token."""
    folder = EngineFolder.load(build(PIECES))
    options = OpenVinoOptions(inference_precision="f32", num_threads=1, enable_chunked_context=True)
    pipeline = open_pipeline(folder, options)
    prompt = ov.Tensor(np.array([text[:1800]], dtype=np.int64))
    handle = pipeline.add_request(0, prompt, generation_config(SamplingParams(2)))
    steps = 0
    while not handle.can_read():
        pipeline.step()
        steps += 1
    pipeline.step()
    assert steps == 15


def pool(engine: Path, precision: str, prompts: list[list[int]]) -> tuple[int, list[list[int]]]:
    """Bytes of the KV pool as the engine reports them, and answers of 24 tokens."""
    folder = EngineFolder.load(engine)
    options = OpenVinoOptions(inference_precision="f32", num_threads=1, kv_cache_precision=precision)
    pipeline = open_pipeline(folder, options)
    config = generation_config(SamplingParams(24))
    handles = [
        pipeline.add_request(index, ov.Tensor(np.array([prompt], dtype=np.int64)), config)
        for index, prompt in enumerate(prompts)
    ]
    size = 0
    while pipeline.has_non_finished_requests():
        pipeline.step()
        size = max(size, pipeline.get_metrics().kv_cache_size_in_bytes)
    blocks, expected = kv_blocks(folder, options), kv_block_bytes(folder.config, precision)
    # genai counts the elements of u4, two of which share a byte
    assert size == blocks * expected * (2 if precision == "u4" else 1)
    return size // blocks, [list(handle.read_all()[0].generated_ids) for handle in handles]


def equal_start(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of the tokens before the first different one, averaged over answers."""
    starts = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x)) / len(x)
        for x, y in zip(ours, theirs, strict=True)
    ]
    return statistics.mean(starts)


def test_a_quantized_kv_cache_is_smaller_and_answers_stay(build, workshop) -> None:
    """Per block of 32 tokens: f16 is half of f32; u8 a quarter and scales, 37,888 of 131,072 bytes = 0.289."""
    prompts = workshop.tokens("gemma")[:12]
    wide, expected = pool(build(LONG), "f32", prompts)
    half, f16 = pool(build(LONG), "f16", prompts)
    quarter, u8 = pool(build(LONG), "u8", prompts)
    _, u4 = pool(build(LONG), "u4", prompts)
    assert (half / wide, quarter / wide) == pytest.approx((0.5, 0.289), abs=1e-3)
    assert equal_start(f16, expected) > 0.95
    assert equal_start(u8, expected) > 0.9
    assert equal_start(u4, expected) > 0.2  # 4 bits are felt: 0.46 here


@pytest.mark.thorough
def test_a_window_keeps_the_kv_cache_constant_over_1500_tokens(build) -> None:
    """128 tokens are 4 blocks, and one is being filled; without a window there are 47 in the end."""
    blocks: list[float] = []
    with scheduler(build(LONG), enable_prefix_caching=False, attention_window=128, sink_tokens=4) as running:
        channel = Channel()
        running.submit([asked([2, 388, 774], 1500)], channel)
        pipeline = running._pipelines.of(asked([2], 1))
        while not channel.ended.wait(0.01):
            blocks.append(pipeline.used_blocks)
        windowed = channel.wait()
    with scheduler(build(LONG)) as running:
        [full] = answers(running, [asked([2, 388, 774], 150)])
    assert len(windowed.tokens) == 1500
    assert max(blocks) == pytest.approx(5)
    assert statistics.median(blocks) >= 3.9
    assert windowed.tokens[:90] == full.tokens[:90]  # nothing was dropped yet
    assert windowed.kv.total >= 47  # as many were filled in passing
