"""The session asks TensorRT-LLM's runtime for things it has, and scores what it answers.

The runtime is played by a table of logits whose classes take only the names in `llm_api.json`; the real one is tested
in tests/gpu_trtllm.
"""

import json
import math
import sys
import types
from dataclasses import make_dataclass
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from pipelines.domain.errors import UserError  # noqa: E402
from pipelines.domain.progress import SilentProgress  # noqa: E402
from pipelines.engines.port import JsonGuide, SamplingParams  # noqa: E402
from pipelines.engines.tensorrt_llm.runtime import TensorRtSession  # noqa: E402
from tests.support.engine_folders import write_engine  # noqa: E402

API = json.loads((Path(__file__).parent / "llm_api.json").read_text())
VOCAB, PADDED = 1920, 1984


def with_fields(name, bases=()):
    """A class that takes the reference's names and no others."""
    fields = [(field, object, None) for field in API[name]]
    return make_dataclass(name, fields, bases=bases, kw_only=True)


class Table:
    """After a prompt the token (sum of the prompt) % 7 has the logit 2, all others 0, and padding 50."""

    def __init__(self):
        self.asked = []

    def generate_async(self, prompt, params):
        self.asked.append(tuple(prompt))
        self.params = params
        logits = torch.zeros(1, PADDED, dtype=torch.float16)
        logits[0, sum(prompt) % 7] = 2
        logits[0, VOCAB:] = 50
        tokens = [sum(prompt) % 7] * params.max_tokens
        output = with_fields("CompletionOutput")(token_ids=tokens, finish_reason="length")
        if params.stop_token_ids and tokens[0] in params.stop_token_ids:
            output.token_ids, output.finish_reason = tokens[:1], "stop"
        if params.return_generation_logits:
            output.generation_logits = logits
        return types.SimpleNamespace(result=lambda: types.SimpleNamespace(outputs=[output]))


@pytest.fixture
def table(monkeypatch):
    """The stand-in, where the session looks for the runtime."""
    table = Table()

    class LLM(with_fields("LLM")):
        generate_async = staticmethod(table.generate_async)

        def __init__(self, **given):
            super().__init__(**given)
            table.llm = self

        def shutdown(self):
            table.is_down = True

    package = types.ModuleType("tensorrt_llm")
    params = types.ModuleType("tensorrt_llm.sampling_params")
    params.SamplingParams = with_fields("SamplingParams")
    params.GuidedDecodingParams = with_fields("GuidedDecodingParams")
    engine = types.ModuleType("tensorrt_llm._tensorrt_engine")
    engine.LLM = LLM
    llmapi = types.ModuleType("tensorrt_llm.llmapi")
    llmapi.KvCacheConfig = with_fields("KvCacheConfig")
    llmapi.LookaheadDecodingConfig = with_fields("LookaheadDecodingConfig")
    for module in (package, params, engine, llmapi):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return table


@pytest.fixture
def session(table, tmp_path):
    with TensorRtSession(write_engine(tmp_path, tp_size=2)) as opened:
        yield opened


def test_the_engine_is_loaded_on_its_ranks_without_a_tokenizer(session, table):
    session.generate([[1, 2]], SamplingParams(1), SilentProgress())
    llm = table.llm
    assert (llm.tensor_parallel_size, llm.pipeline_parallel_size) == (2, 1)
    assert (llm.skip_tokenizer_init, llm.gather_generation_logits) == (True, True)
    assert llm.kv_cache_config.enable_block_reuse is True
    session.__exit__(None, None, None)
    assert table.is_down


def test_a_guide_needs_the_tokenizer_and_the_backend(session, table, tmp_path):
    """Xgrammar reads the vocabulary when the engine is loaded, so an engine that is open without it is loaded again."""
    session.generate([[1, 2]], SamplingParams(1), SilentProgress())
    guide = JsonGuide('{"type": "object"}', tmp_path / "tokenizer")
    session.generate([[1, 2]], SamplingParams(1, guide=guide), SilentProgress())
    assert table.is_down
    llm = table.llm
    assert (llm.tokenizer, llm.guided_decoding_backend) == (str(tmp_path / "tokenizer"), "xgrammar")
    assert llm.skip_tokenizer_init is None
    assert table.params.guided_decoding.json == '{"type": "object"}'
    session.generate([[1, 2]], SamplingParams(1), SilentProgress())
    assert table.llm is llm


def test_a_lookahead_engine_is_opened_with_the_decoding_it_requires(table, tmp_path):
    """The C++ runtime ends with "Lookahead decoding config must be provided"; 8 is LOOKAHEAD_DECODING."""
    folder = write_engine(tmp_path, speculative_decoding_mode=8, max_draft_len=83)
    with TensorRtSession(folder) as session:
        session.generate([[1, 2]], SamplingParams(1), SilentProgress())
    given = table.llm.speculative_config
    assert (given.max_window_size, given.max_ngram_size, given.max_verification_set_size) == (7, 7, 7)


@pytest.mark.parametrize(
    ("stated", "told"),
    [
        ({}, None),
        ({"sliding_window": None, "num_hidden_layers": 2}, None),
        ({"sliding_window": 32, "_sliding_window_pattern": 3, "num_hidden_layers": 6}, [32, 32, 128] * 2),
        ({"attention_windows": [64, 8192], "num_hidden_layers": 4}, [64, 128]),
    ],
)
def test_an_engine_is_told_the_windows_that_its_checkpoint_states(table, tmp_path, stated, told):
    """Engines keep to no window by themselves: Gemma 3 and 2 would be scored as another model; 128 is max_seq_len."""
    folder = write_engine(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["pretrained_config"] |= stated
    (folder / "config.json").write_text(json.dumps(config))
    with TensorRtSession(folder) as session:
        session.generate([[1, 2]], SamplingParams(1), SilentProgress())
    assert table.llm.kv_cache_config.max_attention_window == told


def test_other_engines_are_opened_without_it(session, table):
    session.generate([[1, 2]], SamplingParams(1), SilentProgress())
    assert table.llm.speculative_config is None


def test_generation_ends_by_length_or_stop(session):
    """1 + 2 = 3 comes out; as a stop token it is not returned."""
    run = lambda **limits: session.generate([[1, 2]], SamplingParams(3, **limits), SilentProgress())[0]  # noqa: E731
    assert (run().token_ids, run().finish_reason) == ([3, 3, 3], "length")
    stopped = run(stop_token_ids=frozenset({3, 9}))
    assert (stopped.token_ids, stopped.finish_reason) == ([], "stop")
    assert run(temperature=0.7, top_k=5, top_p=0.9, seed=3).finish_reason == "length"


def test_scores_leave_out_the_padding(session, table):
    """Softmax over 1920 logits, one of 2 and 1919 of 0: log(e^2 / (e^2 + 1919)) and log(1 / (e^2 + 1919))."""
    both = math.log(math.e**2 + 1919)
    # after (1, 2) comes 3; after (1, 2, 3) comes 6
    pairs = [([1, 2], [3]), ([1, 2], [5]), ([1, 2], [3, 6]), ([1, 2], [3, 0])]
    scores = session.loglikelihood(pairs, SilentProgress())
    assert [score for score, _ in scores] == pytest.approx([2 - both, -both, 4 - 2 * both, 2 - 2 * both], abs=1e-4)
    assert [greedy for _, greedy in scores] == [True, False, True, False]
    assert table.asked == [(1, 2), (1, 2, 3)]  # each prefix once


def test_batches_bound_the_logits_that_are_held(session, table, monkeypatch):
    monkeypatch.setattr("pipelines.engines.tensorrt_llm.runtime.LOGITS_AT_ONCE", 2 * VOCAB)
    pairs = [([1], [1]), ([2], [1]), ([3], [1]), ([4], [1, 1, 1]), ([5], [1])]
    whole = session.loglikelihood(pairs, SilentProgress())
    assert len(whole) == len(pairs)
    assert whole == [session.loglikelihood([pair], SilentProgress())[0] for pair in pairs]


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (([], [1]), "empty context or continuation"),
        (([1], []), "empty context or continuation"),
        (([1920], [1]), r"Token id 1920 is not in the vocabulary of 1920"),
        (([1] * 128, [1]), r"needs 129 tokens; the engine was built with max_seq_len=128"),
        (([1] * 257, [1]), r"needs 257 tokens; the engine was built with max_num_tokens=256"),
    ],
)
def test_what_the_engine_cannot_take_is_refused(session, pair, message):
    with pytest.raises(UserError, match=message):
        session.loglikelihood([pair], SilentProgress())
