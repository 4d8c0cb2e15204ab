"""An open engine: scoring with shared prefixes, generation, and what it refuses."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import openvino_genai as genai
import pytest

from pipelines.domain.errors import UserError
from pipelines.domain.formats import KvFormat, QFormat
from pipelines.domain.progress import Advance, SilentProgress
from pipelines.engines.openvino import engine as session_module
from pipelines.engines.openvino.engine import OpenVinoSession
from pipelines.engines.openvino.pipeline import open_pipeline
from pipelines.engines.openvino.runtime import EngineFolder, OpenVinoOptions
from pipelines.engines.port import SamplingParams
from tests.contract.engines.conftest import LIMITS, Workshop
from tests.support.scored_logits import scored_logits

Pair = tuple[list[int], list[int]]
SILENT = SilentProgress()
LLAMA_BLOCK = 2**20 // 8
"""Bytes of a KV block of the bundled Llama at float32: 256 tokens are 2**20, as a test below has it."""


class Counting(SilentProgress):
    """Remembers how far each task came."""

    def __init__(self) -> None:
        self.done = 0.0

    @contextmanager
    def task(self, title: str, total: float | None, unit: str = "") -> Iterator[Advance]:
        def advance(amount: float) -> None:
            self.done += amount

        yield advance


class Counted:
    """A pipeline that writes down how many of its requests are unfinished whenever it makes a step."""

    def __init__(self, pipeline: Any, started: list[int]) -> None:
        self._pipeline, self._started, self._handles = pipeline, started, list[Any]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)

    def add_request(self, *given: Any) -> Any:
        self._handles.append(self._pipeline.add_request(*given))
        return self._handles[-1]

    def step(self) -> None:
        running = genai.GenerationStatus.RUNNING
        self._started.append(sum(handle.get_status() == running for handle in self._handles))
        self._pipeline.step()


@pytest.fixture(scope="module", params=[pytest.param("gemma", marks=pytest.mark.thorough), "llama"])
def session(request: pytest.FixtureRequest, workshop: Workshop) -> Iterator[OpenVinoSession]:
    """A float32 engine of each family."""
    with workshop.open(workshop.float32_checkpoint(request.param)) as opened:
        yield opened


@pytest.fixture(scope="module")
def pairs(session: OpenVinoSession, workshop: Workshop) -> list[Pair]:
    """Quiz questions with four one-token answers, longer answers, a lone token, and one pair inside another."""
    kind = "gemma" if session.folder.config.architecture.startswith("Gemma") else "llama"
    prompts = workshop.tokens(kind)
    made = [(prompt, [answer]) for prompt in prompts[:6] for answer in (40, 41, 42, 43)]
    made += [(prompts[0][:30], prompts[0][30:50]), (prompts[0][:30], prompts[0][30:35]), ([5], [7, 8])]
    greedy = session.generate([prompts[7]], SamplingParams(5), SILENT)[0].token_ids
    return [*made, (prompts[7], greedy), (prompts[7], [*greedy[:4], greedy[4] + 1])]


def by_hand(session: OpenVinoSession, pair: Pair) -> tuple[float, bool]:
    """Score a pair from all logits of its sequence."""
    context, continuation = pair
    logits = scored_logits(session, [*context, *continuation][:-1])[len(context) - 1 :].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    chosen = logprobs[np.arange(len(continuation)), continuation]
    return float(chosen.sum()), logits.argmax(axis=1).tolist() == continuation


def test_shared_prefixes_change_nothing(session: OpenVinoSession, pairs: list[Pair]) -> None:
    """All pairs at once, each alone, and from plain logits: the same to 1e-4, in order; twice the same."""
    together = session.loglikelihood(pairs, SILENT)
    for pair, found in zip(pairs, together, strict=True):
        for expected in (session.loglikelihood([pair], SILENT)[0], by_hand(session, pair)):
            assert found[0] == pytest.approx(expected[0], abs=1e-4)
            assert found[1] is expected[1]
    assert session.loglikelihood(pairs, SILENT) == together


def test_prefixes_of_several_lengths_run_together_and_change_nothing(
    session: OpenVinoSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six prefixes of 40 to 50 tokens, questions of 3 to 9 after each: as few inferences as possible, or many."""
    tokens = [(11 * i) % 1500 + 100 for i in range(900)]
    pairs: list[Pair] = []
    for subject in range(6):
        shots = tokens[100 * subject : 100 * subject + 40 + 2 * subject]
        pairs += [([*shots, *tokens[600 + 31 * i : 603 + 32 * i + subject]], [i, 7 + i]) for i in range(2)]
    scorer = session._scoring()
    shapes: list[tuple[int, ...]] = []
    infer = scorer._infer

    def seen(piece: Any, *given: Any) -> Any:
        shapes.append(piece.shape)
        return infer(piece, *given)

    monkeypatch.setattr(scorer, "_infer", seen)
    expected = [by_hand(session, pair)[0] for pair in pairs]
    shapes.clear()
    found = [score for score, _ in session.loglikelihood(pairs, SILENT)]
    assert found == pytest.approx(expected, abs=1e-4)
    assert shapes == [(6, 50), (8, 8), (4, 10)]
    for at_once in (60, 7):
        monkeypatch.setattr(scorer, "_tokens_at_once", at_once)
        assert [score for score, _ in session.loglikelihood(pairs, SILENT)] == pytest.approx(expected, abs=1e-4)
    monkeypatch.setattr(scorer, "_tokens_at_once", 1024)
    monkeypatch.setattr(scorer, "_max_logits_rows", 5)  # fewer than one inference would give
    assert [score for score, _ in session.loglikelihood(pairs, SILENT)] == pytest.approx(expected, abs=1e-4)


def test_rows_that_share_nothing_fill_several_batches(session: OpenVinoSession) -> None:
    """30 texts of 5 to 34 tokens, eight in a batch."""
    pairs: list[Pair] = [([(37 * i + j) % 1500 + 100 for j in range(5 + i)], [7, 8]) for i in range(30)]
    found = [score for score, _ in session.loglikelihood(pairs, SILENT)]
    assert found == pytest.approx([by_hand(session, pair)[0] for pair in pairs], abs=1e-4)


def test_greedy_continuations_are_recognized(session: OpenVinoSession, pairs: list[Pair]) -> None:
    """What generation produced scores as greedy; with another last token it does not."""
    assert [greedy for _, greedy in session.loglikelihood(pairs[-2:], SILENT)] == [True, False]


def test_progress_counts_pairs(session: OpenVinoSession, pairs: list[Pair]) -> None:
    progress = Counting()
    session.loglikelihood(pairs, progress)
    assert progress.done == len(pairs)


def test_long_contexts_are_cut_into_pieces(session: OpenVinoSession) -> None:
    """1,000 tokens with an answer of 24; and a batch wider than max_num_tokens = 1,024 allows at once."""
    tokens = [(7 * i) % 1500 + 100 for i in range(1024)]
    long = (tokens[:1000], tokens[1000:])
    others = [(tokens[:300] + tokens[i : i + 500], [9]) for i in (301, 402, 503)]
    found = session.loglikelihood([long, *others], SILENT)
    for pair, (score, _) in zip([long, *others], found, strict=True):
        assert score == pytest.approx(by_hand(session, pair)[0], abs=1e-3)  # up to 24 summed terms


def test_stop_tokens_end_and_are_left_out(session: OpenVinoSession, pairs: list[Pair]) -> None:
    """The third greedy token is made a stop token: what came before it is returned."""
    prompt, greedy = pairs[-2]
    stop = greedy[2]
    generation = session.generate([prompt], SamplingParams(5, frozenset({stop})), SILENT)[0]
    assert generation.token_ids == greedy[: greedy.index(stop)]
    assert generation.finish_reason == "stop"


def test_sampling_follows_its_seed(session: OpenVinoSession, pairs: list[Pair]) -> None:
    prompt = pairs[0][0]
    drawn = [
        session.generate([prompt], SamplingParams(12, temperature=1.5, top_p=0.95, seed=seed), SILENT)[0].token_ids
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_more_prompts_than_the_batch_keep_their_order(session: OpenVinoSession, pairs: list[Pair]) -> None:
    """20 requests over max_batch_size = 8; each alone gives the same."""
    prompts, progress = [pairs[4 * (i % 6)][0][: 20 + i] for i in range(20)], Counting()
    together = session.generate(prompts, SamplingParams(8), progress)
    assert progress.done == 20
    assert together[::7] == [session.generate([prompt], SamplingParams(8), SILENT)[0] for prompt in prompts[::7]]


def test_prompts_wait_until_the_kv_cache_has_room_for_them(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of 32 blocks, 9 prompts of 13 blocks each, 400 tokens and 16 to come: two at a time, none pushed out."""
    started: list[int] = []

    def counted(folder: EngineFolder, options: OpenVinoOptions) -> Counted:
        return Counted(open_pipeline(folder, options), started)

    monkeypatch.setattr(session_module, "open_pipeline", counted)
    prompts = [[(7 * i + j) % 1500 + 100 for i in range(400)] for j in range(9)]
    pool = {"kv_cache_bytes": 32 * LLAMA_BLOCK, "enable_prefix_caching": False}
    with workshop.open(workshop.checkpoint("llama", QFormat.NONE), **pool) as session:
        found = session.generate(prompts, SamplingParams(16), SILENT)
        assert [len(each.token_ids) for each in found] == [16] * 9
        assert max(started) == 2
        assert found[::4] == [session.generate([prompt], SamplingParams(16), SILENT)[0] for prompt in prompts[::4]]


class Interrupted(SilentProgress):
    """Ctrl-C while requests run."""

    @contextmanager
    def task(self, title: str, total: float | None, unit: str = "") -> Iterator[Advance]:
        def advance(amount: float) -> None:
            raise KeyboardInterrupt

        yield advance


def test_an_interrupted_generation_leaves_no_request_behind(
    workshop: Workshop, capfd: pytest.CaptureFixture[str]
) -> None:
    with workshop.open(workshop.checkpoint("llama", QFormat.NONE)) as session, pytest.raises(KeyboardInterrupt):
        session.generate([[5, 6, 7]] * 3, SamplingParams(50), Interrupted())
    assert "leaked" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("length", "new_tokens", "message"),
    [
        (0, 1, "A prompt has no tokens"),
        (LIMITS.max_input_len + 1, 1, "513 tokens; the engine was built with max_input_len=512"),
        (500, 525, r"would have 1025 tokens, 525 of them new;.*max_seq_len=1024\. Ask for fewer new tokens, shorten"),
    ],
)
def test_requests_beyond_the_limits_are_refused(
    session: OpenVinoSession, length: int, new_tokens: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        session.generate([[5] * length], SamplingParams(new_tokens), SILENT)


def test_foreign_token_ids_are_refused(session: OpenVinoSession) -> None:
    with pytest.raises(UserError, match="Token id 999999 is not in the vocabulary"):
        session.generate([[5, 999999]], SamplingParams(1), SILENT)


def test_empty_continuations_are_refused(session: OpenVinoSession) -> None:
    with pytest.raises(UserError, match="empty context or continuation"):
        session.loglikelihood([([5], [])], SILENT)


def test_a_kv_cache_too_small_for_one_request_is_refused(workshop: Workshop) -> None:
    with (
        workshop.open(workshop.checkpoint("llama", QFormat.NONE), kv_cache_bytes=2**20) as session,
        pytest.raises(UserError, match=r"kv_cache_bytes=1048576 holds 256 tokens at f32.*max_seq_len=1024"),
    ):
        session.generate([[5]], SamplingParams(1), SILENT)


@pytest.mark.parametrize("kv", [pytest.param(KvFormat.FP8, marks=pytest.mark.thorough), KvFormat.INT8])
def test_generation_with_an_8_bit_kv_cache_runs(kv: KvFormat, workshop: Workshop) -> None:
    """Stored as u8 blocks; the first token comes from the prompt alone and is that of the scoring graph."""
    prompts = workshop.tokens("llama")[:4]
    with workshop.open(workshop.checkpoint("llama", QFormat.NONE, kv)) as session:
        first = [generation.token_ids[0] for generation in session.generate(prompts, SamplingParams(4), SILENT)]
        assert first == [int(scored_logits(session, prompt)[-1].argmax()) for prompt in prompts]
