"""Measure the effect of the CPU engine's runtime features on the bundled Gemma.

    python -m scripts.bench_features [PART ...]      parts: reuse chunks kv drafts adapters window

Runs on one thread, through the scheduler that the served repository uses. Latencies are medians of 7 runs, rates the
best of 7, because background load can only slow a run down; the variants of a comparison are measured alternately.
Needs the packages of `make setup` and the test helpers of this repository.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from eval.adapter import load_tokenizer
from pipelines.compress.config import CalibrationSettings, QuantSettings
from pipelines.compress.quantizing import quantize
from pipelines.compress.specs import QuantSpec
from pipelines.domain.formats import QFormat
from pipelines.domain.progress import SilentProgress
from pipelines.engines.openvino.engine import OpenVinoEngine
from pipelines.engines.openvino.lora import LoraAdapter
from pipelines.engines.openvino.runtime import EngineFolder, kv_block_bytes
from pipelines.engines.openvino.scheduler import Scheduler
from pipelines.engines.openvino.serving_stats import resident_bytes
from pipelines.engines.port import BuildLimits
from pipelines.settings.model import BUNDLED
from scripts.zoo.documents import corpus_texts, make_writer, text_of
from scripts.zoo.world import build_world
from tests.support.scheduled import Channel, answers, asked, scheduler

REPEATS = 7
LIMITS = {"max_batch_size": 32, "max_input_len": 1900, "max_seq_len": 2048, "max_num_tokens": 2048}


def engine(root: Path, model: str, **limits: int) -> Path:
    """Build the 16-bit engine of a bundled model."""
    name = f"{model}-{limits.get('max_num_tokens', 0)}"
    checkpoint = root / f"checkpoint-{model}"
    if not checkpoint.exists():
        spec = QuantSpec(QuantSettings(qformat=QFormat.NONE))
        quantize(BUNDLED / "models" / model, checkpoint, spec, (), CalibrationSettings())
    OpenVinoEngine().build(checkpoint, BuildLimits(**{**LIMITS, **limits}), root / name, SilentProgress())
    return root / name


def median(measure: Callable[[], float]) -> float:
    """Return the median of `REPEATS` measurements, after one warm-up that is discarded."""
    measure()
    return statistics.median(measure() for _ in range(REPEATS))


def say(*words: object) -> None:
    """Print a line."""
    sys.stdout.write(" ".join(str(word) for word in words) + "\n")
    sys.stdout.flush()


def reuse(path: Path, tokens: list[int]) -> None:
    """Measure the TTFT of prompts that share 1,000 tokens."""
    ttft = {}
    for on in (False, True):
        turns = iter(range(1000))
        with scheduler(path, enable_prefix_caching=on) as running:
            ttft[on] = median(
                lambda running=running, turns=turns: (
                    answers(running, [asked([*tokens[:1000], 300 + next(turns), 5], 2)])[0].ttft
                )
            )
    say(f"reuse     TTFT, 1,000 shared tokens: {1e3 * ttft[False]:.1f} ms without, {1e3 * ttft[True]:.1f} ms with")


def gap(running: Scheduler, prompt: list[int]) -> float:
    """Return the longest pause between tokens of one request while another request's prompt is computed, in seconds."""
    talking, late = Channel(), Channel()
    running.submit([asked([2, 388, 774], 400)], talking)
    while len(talking.moments) < 50:
        time.sleep(0.001)
    running.submit([asked(prompt, 2)], late)
    late.wait()
    began, ended = late.stamps.arrival / 1e9, late.stamps.first_token / 1e9
    moments = np.array(talking.wait().moments)
    return float(np.diff(moments[(moments > began - 0.05) & (moments < ended + 0.05)]).max())


def chunks(whole: Path, pieces: Path, tokens: list[int]) -> None:
    """Measure the longest pause of another request while a prompt of 1,800 tokens is computed."""
    gaps, waits = {}, {}
    for path in (whole, pieces):
        turns = iter(range(1000))
        with scheduler(path, enable_prefix_caching=False, enable_chunked_context=True) as running:
            gaps[path] = median(lambda running=running, turns=turns: gap(running, tokens[next(turns) :][:1800]))
            waits[path] = median(lambda running=running: answers(running, [asked(tokens[:1800], 2)])[0].ttft)
    say(
        f"chunks    longest pause of another request during a prompt of 1,800 tokens: {1e3 * gaps[whole]:.1f} ms in"
        f" one piece, {1e3 * gaps[pieces]:.1f} ms in chunks of 128; TTFT of that prompt alone"
        f" {1e3 * waits[whole]:.0f} ms and {1e3 * waits[pieces]:.0f} ms"
    )


def kv(path: Path, tokens: list[int]) -> None:
    """Measure resident memory and the share of identical answers for each KV cache type."""
    folder = EngineFolder.load(path)
    prompts = [tokens[start : start + 1800] for start in range(0, 40)]
    reference: list[list[int]] = []
    for precision in ("f32", "f16", "u8", "u4"):
        with scheduler(path, kv_cache_precision=precision, kv_cache_bytes=2**30) as running:
            short = answers(running, [asked(prompt[:200], 64) for prompt in prompts])
            before = resident_bytes()
            many = [[int(t) for t in np.random.default_rng(i).integers(300, 1900, 1800)] for i in range(32)]
            answers(running, [asked(prompt, 1) for prompt in many])
            used = (resident_bytes() - before) / (len(many) * 1800)
        texts = [one.tokens for one in short]
        reference = reference or texts
        same = statistics.mean(
            next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), 64) / 64
            for x, y in zip(texts, reference, strict=True)
        )
        per_token = kv_block_bytes(folder.config, precision) / 32
        say(
            f"kv {precision:<6} {per_token:.0f} bytes/token ({used:.0f} resident), 64 greedy tokens identical to f32"
            f" for {100 * same:.0f} % of 40 prompts"
        )


def speeds(cases: Sequence[tuple[Scheduler, list[Any]]]) -> list[tuple[float, list[Channel]]]:
    """Return each case's output tokens per second and its last answers; the cases are measured alternately."""
    rates: list[list[float]] = [[] for _ in cases]
    replies: list[list[Channel]] = [[] for _ in cases]
    for repeat in range(REPEATS + 1):
        for index, (running, requests) in enumerate(cases):
            started = time.perf_counter()
            replies[index] = answers(running, requests)
            if repeat:
                seconds = time.perf_counter() - started
                rates[index].append(sum(len(one.tokens) for one in replies[index]) / seconds)
    return [(max(rate), answer) for rate, answer in zip(rates, replies, strict=True)]


def drafts(path: Path, draft: Path, prompts: list[list[int]]) -> None:
    """Measure tokens per second with and without a draft model."""
    guesses = (2, 4, 8)
    with ExitStack() as stack:
        plain = stack.enter_context(scheduler(path))
        drafting = [stack.enter_context(scheduler(path, draft_dir=draft, num_draft_tokens=count)) for count in guesses]
        for count in (1, 4, 16):
            requests = [asked(prompt, 128, streaming=False) for prompt in prompts[:count]]
            (base, expected), *others = speeds([(running, requests) for running in (plain, *drafting)])
            for most, (rate, made) in zip(guesses, others, strict=True):
                assert [one.tokens for one in made] == [one.tokens for one in expected]
                right = sum(one.draft.accepted for one in made) / sum(one.draft.proposed for one in made)
                say(
                    f"draft     {count:>2} requests, {most} guesses: {rate:,.0f} tokens/s, {base:,.0f} without"
                    f" ({rate / base:.2f}x); {100 * right:.0f} % accepted,"
                    f" {statistics.mean(one.draft.tokens - one.draft.accepted for one in made):.0f} iterations of the"
                    " model for 128 tokens"
                )


def adapters(path: Path, prompts: list[list[int]]) -> None:
    """Measure memory and tokens per second with LoRA adapters."""
    both = {i + 1: LoraAdapter.read(BUNDLED / "adapters" / name) for i, name in enumerate(("next_letter", "in_words"))}
    kinds: tuple[tuple[int | None, ...], ...] = ((None,), (1,), (None, 1, 2))
    with ExitStack() as stack:
        plain = stack.enter_context(scheduler(path))
        before = resident_bytes()
        loaded = stack.enter_context(scheduler(path, both))
        each = (resident_bytes() - before) / 3
        cases = [(plain, kinds[0]), *((loaded, tasks) for tasks in kinds)]
        measured = speeds(
            [
                (
                    running,
                    [
                        asked(prompt, 128, streaming=False, lora_task_id=tasks[i % len(tasks)])
                        for i, prompt in enumerate(prompts[:12])
                    ],
                )
                for running, tasks in cases
            ]
        )
    say(f"lora      {each / 2**20:.0f} MiB for each additional copy of the model; {path.name}")
    for (running, tasks), (rate, _) in zip(cases, measured, strict=True):
        say(f"lora      {0 if running is plain else 2} loaded, 12 requests for {tasks}: {rate:,.0f} tokens/s")


def window(path: Path) -> None:
    """Measure KV blocks and tokens per second over 1,900 tokens."""
    for size in (None, 128, 512):
        values = {} if size is None else {"attention_window": size, "sink_tokens": 4}
        with scheduler(path, enable_prefix_caching=False, **values) as running:
            pipeline, most = running._pipelines.of(asked([2], 1)), 0.0
            channel, started = Channel(), time.perf_counter()
            running.submit([asked([2, 388, 774], 1900)], channel)
            while not channel.ended.wait(0.01):
                most = max(most, pipeline.used_blocks)
            seconds = time.perf_counter() - started
        say(
            f"window    {size or 'none':>4}: at most {most:.0f} KV blocks over 1,900 tokens,"
            f" {1900 / seconds:,.0f} tokens/s"
        )


def main() -> None:
    """Measure the parts given on the command line, or all of them."""
    tokenizer = load_tokenizer(BUNDLED / "models" / "tiny_gemma")
    world = build_world()
    tokens = [token for text in corpus_texts(world)[:120] for token in tokenizer(text)["input_ids"]]
    writer = make_writer(world, "bench")
    prompts = [tokenizer(text_of(writer.passage(8)))["input_ids"][:40] for _ in range(16)]
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        whole, pieces = engine(root, "tiny_gemma"), engine(root, "tiny_gemma", max_num_tokens=128)
        draft = engine(root, "tiny_gemma_draft")
        parts = {
            "reuse": lambda: reuse(whole, tokens),
            "chunks": lambda: chunks(whole, pieces, tokens),
            "kv": lambda: kv(whole, tokens),
            "drafts": lambda: drafts(whole, draft, prompts),
            "adapters": lambda: adapters(whole, prompts),
            "window": lambda: window(whole),
        }
        for name in sys.argv[1:] or parts:
            parts[name]()


if __name__ == "__main__":
    main()
