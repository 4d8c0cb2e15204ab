"""Speculative decoding on the CPU engine: the same answers in fewer iterations, and how many guesses were right."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openvino as ov
import pytest

from pipelines.domain.errors import UserError
from pipelines.domain.formats import QFormat
from pipelines.domain.progress import SilentProgress
from pipelines.engines.openvino.engine import OpenVinoEngine, generation_config
from pipelines.engines.openvino.pipeline import open_pipeline
from pipelines.engines.openvino.runtime import EngineFolder, OpenVinoOptions
from pipelines.engines.openvino.scheduler import Scheduler
from pipelines.engines.port import BuildLimits, SamplingParams
from scripts.zoo.documents import make_writer, text_of
from scripts.zoo.world import build_world
from tests.contract.engines.conftest import LIMITS, MODELS, Workshop, transformers
from tests.support.scheduled import answers, asked, scheduler

GUESSES = 4


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Beginnings of 8 texts about the world."""
    tokenizer, writer = (
        transformers.AutoTokenizer.from_pretrained(MODELS / "tiny_gemma"),
        make_writer(build_world(), "t"),
    )
    return [tokenizer(text_of(writer.passage(8)))["input_ids"][:40] for _ in range(8)]


@pytest.fixture(scope="module")
def engines(workshop: Workshop) -> tuple[Path, Path]:
    """The bundled Gemma and its draft."""
    target, draft = (workshop.checkpoint(kind, QFormat.NONE) for kind in ("gemma", "gemma_draft"))
    return workshop.engine(target), workshop.engine(draft)


@pytest.fixture(scope="module")
def plain(engines: tuple[Path, Path]) -> Iterator[Scheduler]:
    with scheduler(engines[0]) as running:
        yield running


@pytest.fixture(scope="module")
def drafting(engines: tuple[Path, Path]) -> Iterator[Scheduler]:
    with scheduler(engines[0], draft_dir=engines[1], num_draft_tokens=GUESSES) as running:
        yield running


def test_answers_are_the_same_and_most_guesses_are_right(plain, drafting, prompts) -> None:
    """Eight at once, twice, the second time with reused KV blocks."""
    for _ in range(2):
        requests = [asked(prompt, 60) for prompt in prompts]
        expected, found = answers(plain, requests), answers(drafting, requests)
        assert [one.tokens for one in found] == [one.tokens for one in expected]
        accepted, proposed = (sum(getattr(one.draft, name) for one in found) for name in ("accepted", "proposed"))
        assert 0.5 < accepted / proposed < 1
        # each iteration brings one token and the right guesses; 60 iterations without a draft
        assert all(one.draft.tokens - one.draft.accepted < 40 for one in found)
        assert all(one.draft.proposed == 0 for one in expected)


def test_penalties_log_probabilities_ends_and_stop_words_are_those_without_a_draft(plain, drafting, prompts) -> None:
    """Stop words end an answer in the middle of what an iteration brought."""
    [whole] = answers(plain, [asked(prompts[0], 40)])
    kinds = [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"log_probs": True},
        {"log_probs": True, "streaming": False},
        {"end_id": 1, "min_tokens": 5},
        *({"stop_words": ((whole.tokens[place],),), "log_probs": True} for place in (6, 7, 8, 9)),
        {"stop_words": (tuple(whole.tokens[10:12]),), "streaming": False},
    ]
    requests = [asked(prompts[0], 40, **kind) for kind in kinds]
    for kind, expected, found in zip(kinds, answers(plain, requests), answers(drafting, requests), strict=True):
        assert found.tokens == expected.tokens, kind
        assert found.log_probs == pytest.approx(expected.log_probs, abs=1e-4)


def test_guesses_are_counted_as_openvino_genai_counts_them(engines, drafting, prompts) -> None:
    """Its own `generate` counts all iterations but the one that ends the answer; ours counts that one too."""
    options = OpenVinoOptions(inference_precision="f32", num_threads=1, draft_dir=engines[1], num_draft_tokens=GUESSES)
    pipeline = open_pipeline(EngineFolder.load(engines[0]), options)
    config = generation_config(SamplingParams(61))
    config.num_assistant_tokens = GUESSES
    [its] = pipeline.generate([ov.Tensor(np.array([prompts[1]], dtype=np.int64))], [config])
    [ours] = answers(drafting, [asked(prompts[1], 61)])
    its_count = its.extended_perf_metrics.get_num_accepted_tokens()
    assert its_count > 20
    assert its_count <= ours.draft.accepted <= its_count + GUESSES


def test_an_engine_opened_directly_answers_the_same_with_a_draft(engines, prompts) -> None:
    """16 requests, of which the smallest possible KV cache holds 10 at a time, with no token to spare."""
    requests = [prompt[:40] for prompt in prompts] * 2
    assert {len(prompt) for prompt in requests} == {40}
    small = {"inference_precision": "f32", "num_threads": 1, "kv_cache_bytes": LIMITS.max_seq_len * 4096}
    plain = OpenVinoEngine(OpenVinoOptions(**small))
    drafting = OpenVinoEngine(OpenVinoOptions(**small, draft_dir=engines[1], num_draft_tokens=GUESSES))
    found = []
    for engine in (plain, drafting):
        with engine.open(engines[0]) as session:
            whole = session.generate(requests, SamplingParams(56), SilentProgress())
            stop = frozenset({whole[0].token_ids[30], 0})  # what ends with 0 in it is read again, in case of NaN
            found.append([*whole, *session.generate(requests, SamplingParams(56, stop), SilentProgress())])
    assert found[1] == found[0]
    assert {answer.finish_reason for answer in found[0]} == {"stop", "length"}


def test_an_engine_opened_directly_does_not_sample_with_a_draft(engines) -> None:
    options = OpenVinoOptions(draft_dir=engines[1])
    with (
        OpenVinoEngine(options).open(engines[0]) as session,
        pytest.raises(UserError, match=r"temperature=0\.7 is not possible with a draft model"),
    ):
        session.generate([[2, 5]], SamplingParams(4, temperature=0.7), SilentProgress())


def test_a_draft_of_another_vocabulary_or_shorter_sequences_is_refused(engines, workshop) -> None:
    other = workshop.engine(workshop.checkpoint("llama_draft", QFormat.NONE))
    with pytest.raises(UserError, match=r"vocabulary of 1\d\d\d tokens; the engine's is 1920.*same tokenizer"):
        open_pipeline(EngineFolder.load(engines[0]), OpenVinoOptions(draft_dir=other))
    short = workshop.root / "short-draft"
    limits = BuildLimits(max_batch_size=8, max_input_len=256, max_seq_len=512, max_num_tokens=512)
    OpenVinoEngine().build(workshop.checkpoint("gemma_draft", QFormat.NONE), limits, short, SilentProgress())
    with pytest.raises(UserError, match=rf"max_seq_len=512.*at least the engine's {LIMITS.max_seq_len}"):
        open_pipeline(EngineFolder.load(engines[0]), OpenVinoOptions(draft_dir=short))
