"""The parts of the CPU model that need no engine: reading requests, choosing tokens, holding back characters."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("openvino_genai")

from pipelines.domain.errors import UserError
from pipelines.engines.openvino.characters import PartialCharacters
from pipelines.engines.openvino.generation_request import GenerationRequest, ModelLimits
from pipelines.engines.openvino.logits_loop import ResponseSender
from pipelines.engines.openvino.request_inputs import read_requests
from pipelines.engines.openvino.sequences import Response, ResponsePart, Sequence, StepOutput
from pipelines.engines.openvino.serving_options import ServingOptions
from pipelines.engines.openvino.serving_stats import KvLedger
from pipelines.engines.openvino.stateful import TokenChooser
from pipelines.settings.model import BUNDLED

MODELS = BUNDLED / "models"
BOUNDS = ModelLimits(vocab_size=10)
SNOWMAN = {7: b"\xe2", 8: b"\x98", 9: b"\x83"}


def request(**values: Any) -> GenerationRequest:
    return GenerationRequest(**{"prompt": np.array([1, 2]), "max_tokens": 4, **values})


class Channel:
    """Keeps what it is given."""

    waits = False

    def __init__(self) -> None:
        self.sent: list[tuple[list[int], bool]] = []
        self.errors: list[str] = []

    def send(self, part: ResponsePart) -> None:
        self.sent.append((part.rows[0], part.last))

    def fail(self, message: str, *, unavailable: bool) -> None:
        self.errors.append(message)

    def is_cancelled(self) -> bool:
        return False


def streamed(channel: Channel, count: int = 1, **values: Any) -> list[Sequence]:
    response = Response(channel, "", 1)
    return [Sequence(request(streaming=True, **values), response, 0, index) for index in range(count)]


@pytest.mark.parametrize(
    ("tokens", "whole"),
    [([], 0), ([1, 2], 2), ([7], 0), ([1, 7, 8], 1), ([7, 8, 9], 3), ([8], 1), ([7, 1], 2), ([7, 8, 9, 7], 3)],
)
def test_tokens_wait_for_the_rest_of_their_character(tokens: list[int], whole: int) -> None:
    """7, 8, 9 are the bytes of a snowman; a lone continuation byte is never completed."""
    assert PartialCharacters(SNOWMAN).whole(tokens) == whole


@pytest.mark.parametrize(("kind", "count"), [("tiny_gemma", 128), ("tiny_llama", 128), ("tiny_qwen", 128)])
def test_only_bytes_beyond_ascii_are_partial(kind: str, count: int) -> None:
    assert len(PartialCharacters.load(MODELS / kind)) >= count - 1


def test_a_sequence_is_sent_in_whole_characters() -> None:
    channel = Channel()
    sequence = streamed(channel)[0]
    sender = ResponseSender(PartialCharacters(SNOWMAN), lambda _: None)
    for tokens in ([1, 7], [8], [9, 2]):
        sender.send(sequence, StepOutput([tokens]))
    sender.send(sequence, StepOutput([[7]], ended=True))
    assert channel.sent == [([1], False), ([7, 8, 9, 2], False), ([7], True)]


def test_the_last_of_several_sequences_closes_the_request() -> None:
    channel = Channel()
    first, second = streamed(channel, 2)
    sender = ResponseSender(PartialCharacters.none(), lambda _: None)
    sender.send(second, StepOutput([[1]], ended=True))
    sender.send(first, StepOutput([[2]], ended=True))
    sender.send(first, StepOutput([[3]], ended=True))
    assert channel.sent == [([1], False), ([2], True)]


def inputs(**values: Any) -> dict[str, Any]:
    return {"input_ids": np.array([[1, 2, 3]]), "request_output_len": np.array([4]), **values}


def test_a_batch_is_read_row_by_row() -> None:
    found = read_requests(
        {
            "input_ids": np.array([[1, 2, 3], [4, 0, 0]]),
            "input_lengths": np.array([3, 1]),
            "request_output_len": np.array([4, 5]),
            "end_id": np.array([9, 8]),
            "stop_words_list": np.array([[[1, 2, 3], [1, 3, -1]], [[0, 0, 0], [-1, -1, -1]]]),
        },
        BOUNDS,
    )
    assert [one.prompt.tolist() for one in found] == [[1, 2, 3], [4]]
    assert [(one.max_tokens, one.end_id) for one in found] == [(4, 9), (5, 8)]
    assert [one.stop_words for one in found] == [((1,), (2, 3)), ()]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"input_ids": np.zeros((1, 0))}, "input_ids is missing or empty"),
        ({"input_ids": np.array([[1, 10]])}, "token id 10"),
        ({"input_ids": np.array([[-1, 1]])}, "token id -1"),
        ({"temperature": np.array([np.inf])}, "temperature=inf"),
        ({"repetition_penalty": np.array([0.0])}, "repetition_penalty=0.0"),
        ({"repetition_penalty": np.array([1e-40])}, "repetition_penalty=1e-40 is not valid. It must be at least 1e-30"),
        ({"frequency_penalty": np.array([3.0])}, "frequency_penalty=3.0"),
        ({"num_return_sequences": np.array([65])}, "num_return_sequences=65"),
        ({"min_tokens": np.array([5])}, "min_tokens=5 is more than request_output_len=4"),
        ({"embedding_bias": np.ones((1, 11))}, "embedding_bias has 11 values"),
        ({"stop_words_list": np.array([[[1, 2], [2, 1]]])}, "stop_words_list has the offset 1 after 2"),
        ({"decoder_input_ids": np.array([[1, 2]])}, "decoder_input_ids"),
        ({"prompt_table_extra_ids": np.array([[0, 7]])}, "prompt_table_extra_ids came without a prompt_embedding_t"),
        ({"prompt_vocab_size": np.array([[4]])}, "prompt_vocab_size came without a prompt_embedding_table"),
        ({"prompt_embedding_table": np.zeros((1, 2, 3))}, "without one: it takes text alone"),
        ({"runtime_top_p_decay": np.array([0.5])}, "runtime_top_p_decay"),
    ],
)
def test_values_nobody_could_honour_are_named(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_requests(inputs(**values), BOUNDS)


TABLE = ModelLimits(vocab_size=10, table_rows=3, hidden_size=2)
ROWS = {"prompt_embedding_table": np.arange(4).reshape(1, 2, 2).astype(np.float16)}


def test_ids_beyond_the_vocabulary_name_rows_of_the_table() -> None:
    found = read_requests(
        inputs(
            input_ids=np.array([[1, 10, 11, 10]]),
            prompt_vocab_size=np.array([[2]]),
            prompt_table_extra_ids=np.array([[0, 7, 7, 7]]),
            **ROWS,
        ),
        TABLE,
    )[0]
    assert found.prompt.tolist() == [1, 10, 11, 10]
    assert found.table is not None
    assert found.table.rows.tolist() == [[0, 1], [2, 3]]
    assert not found.needs_logits


def test_each_prompt_of_a_batch_has_a_table() -> None:
    tables = np.arange(8).reshape(2, 2, 2).astype(np.float16)
    ids = np.array([[1, 10], [1, 11]])
    found = read_requests(inputs(input_ids=ids, prompt_embedding_table=tables), TABLE)
    assert [one.table and one.table.rows.tolist() for one in found] == tables.tolist()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"prompt_embedding_table": np.zeros((1, 2, 3))}, "rows of 3 values. This model's hidden size is 2"),
        ({"prompt_embedding_table": np.zeros((1, 4, 2))}, r"4 rows; .*max_multimodal_len\) 3. Send fewer pictures"),
        ({"prompt_embedding_table": np.full((1, 2, 2), np.nan)}, "NaN or infinite"),
        ({"prompt_vocab_size": np.array([[3]])}, "prompt_vocab_size=3, but prompt_embedding_table has 2 rows"),
        ({"input_ids": np.array([[1, 12]])}, "token id 12. .* up to 11 for the 2 rows of the table"),
        ({"input_ids": np.array([[1, 2]])}, r"no id in input_ids names one of its rows. Row r has the id 10 \+ r"),
        ({"return_context_log_probs": np.array([[1]])}, "rows of the table are no tokens"),
    ],
)
def test_tables_that_fit_nothing_are_named(values: dict[str, Any], said: str) -> None:
    given = {"input_ids": np.array([[1, 10, 11]]), **ROWS, **values}
    with pytest.raises(UserError, match=said):
        read_requests(inputs(**given), TABLE)


def test_neutral_values_change_nothing() -> None:
    neutral = {"prompt_table_extra_ids": np.zeros((1, 3)), "embedding_bias": np.zeros((1, 9))}
    found = read_requests(inputs(**neutral, decoder_input_ids=np.array([[0]])), BOUNDS)[0]
    assert found.bias is None
    assert not found.needs_logits


def test_random_ids_of_load_generators_can_be_folded() -> None:
    found = read_requests(inputs(input_ids=np.array([[1, 25]])), ModelLimits(vocab_size=10, fold_ids=True))[0]
    assert found.prompt.tolist() == [1, 5]


def test_batches_and_streams_need_a_decoupled_model() -> None:
    limits = ModelLimits(vocab_size=10, decoupled=False)
    with pytest.raises(UserError, match="streaming needs several responses"):
        read_requests(inputs(streaming=np.array([True])), limits)
    with pytest.raises(UserError, match="batch of 2 prompts"):
        read_requests(inputs(input_ids=np.ones((2, 3))), limits)


def test_penalties_bias_and_bans_act_on_the_logits() -> None:
    """Logits 5 4 3 2: the ban takes 0; presence takes 2 from 1 after its first time; the bias lifts 3 to 3.5."""
    bias = np.array([0, 0, 0, 1.5], dtype=np.float32)
    chooser = TokenChooser(request(bias=bias, bad_words=((0,),), presence_penalty=2.0), 0)
    logits = np.array([5.0, 4.0, 3.0, 2.0], dtype=np.float32)
    assert [chooser.choose(logits)[0] for _ in range(3)] == [1, 3, 2]


def test_a_word_of_two_tokens_is_banned_only_after_its_first() -> None:
    chooser = TokenChooser(request(bad_words=((2, 0),)), 0)  # the prompt ends with 2
    logits = np.array([5.0, 4.0, 1.0], dtype=np.float32)
    assert [chooser.choose(logits)[0] for _ in range(2)] == [1, 0]


def test_log_probability_is_that_of_the_softmax() -> None:
    token, log_prob = TokenChooser(request(), 0).choose(np.log(np.array([0.25, 0.75], dtype=np.float32)))
    assert (token, log_prob) == (1, pytest.approx(np.log(0.75), abs=1e-6))


def test_log_probability_is_the_models_before_penalties_bias_and_bans() -> None:
    """As in the batched pipeline: a client gets one number for one token, whichever of them answers it."""
    bias = np.array([0, 0, 3], dtype=np.float32)
    changed = request(bias=bias, bad_words=((1,),), repetition_penalty=2.0, presence_penalty=1.0)
    logits = np.log(np.array([0.2, 0.7, 0.1], dtype=np.float32))
    token, log_prob = TokenChooser(changed, 0).choose(logits)
    assert (token, log_prob) == (2, pytest.approx(np.log(0.1), abs=1e-6))


def test_a_temperature_that_float32_cannot_divide_by_is_greedy() -> None:
    """The pipeline of genai divides by it and takes any token."""
    assert not request(top_p=1.0, temperature=1e-40).samples
    assert request(top_p=1.0, temperature=1e-5).samples


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    """0.6 alone reaches 0.5, so nothing else is ever drawn."""
    chooser = TokenChooser(request(top_p=0.5), 3)
    logits = np.log(np.array([0.3, 0.6, 0.1], dtype=np.float32))
    assert {chooser.choose(logits)[0] for _ in range(20)} == {1}


def test_nan_is_an_error() -> None:
    with pytest.raises(ValueError, match="NaN"):
        TokenChooser(request(), 0).choose(np.array([np.nan, 1.0], dtype=np.float32))


def test_the_ledger_knows_full_blocks_of_ended_sequences() -> None:
    """70 tokens: two full blocks; the same prompt reuses both, another start none."""
    ledger = KvLedger(100, reuse=True)
    response = Response(Channel(), "", 1)
    first = Sequence(request(prompt=np.arange(70)), response, 0, 0)
    again = Sequence(request(prompt=np.arange(70)), response, 0, 0)
    other = Sequence(request(prompt=np.arange(1, 71)), response, 0, 0)
    ledger.start(first)
    ledger.end(first)
    ledger.start(again)
    ledger.start(other)
    assert [(one.kv.new, one.kv.reused) for one in (first, again, other)] == [(3, 0), (1, 2), (3, 0)]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("gpt_model_type", "V1", "gpt_model_type='V1'"),
        ("decoding_mode", "medusa", "decoding_mode='medusa'"),
        ("openvino_num_threads", "two", "openvino_num_threads='two'"),
        ("max_tokens_in_paged_kv_cache", "0", "max_tokens_in_paged_kv_cache='0'"),
        ("enable_kv_cache_reuse", "perhaps", "enable_kv_cache_reuse='perhaps'"),
        ("sink_token_length", "-1", "sink_token_length='-1'"),
        ("max_attention_window_size", "64,x", r"max_attention_window_size\.1='x'"),
        ("max_attention_window_size", "128,256", "max_attention_window_size has 128,256: all layers .* share one"),
        ("guided_decoding_backend", "xgrammar", "guided_decoding_backend='xgrammar'"),
    ],
)
def test_parameters_that_cannot_hold_are_refused_at_load(name: str, value: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        ServingOptions.from_model_config({"parameters": {name: {"string_value": value}}}, Path("/repo"))


def test_unfilled_placeholders_are_defaults() -> None:
    parameters = {"max_beam_width": {"string_value": "${max_beam_width}"}, "gpt_model_path": {"string_value": "e"}}
    found = ServingOptions.from_model_config({"parameters": parameters}, Path("/repo"))
    assert found.max_beam_width is None
    assert found.engine_dir == Path("/repo/e")


class Parts(Channel):
    """Keeps whole responses."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[ResponsePart] = []

    def send(self, part: ResponsePart) -> None:
        self.parts.append(part)


def test_a_stream_repeats_log_probabilities_and_context_logits() -> None:
    """TensorRT-LLM sends all so far with every response, which NVIDIA's client relies on; the sum is of all as well."""
    channel = Parts()
    (sequence,) = streamed(channel, log_probs=True, context_logits=True)
    sender = ResponseSender(PartialCharacters.none(), lambda _: None)
    logits = np.ones((2, 10), np.float32)
    sender.send(sequence, StepOutput([[4]], [[-0.5]], [-0.5], context_logits=logits))
    sender.send(sequence, StepOutput([[5, 6]], [[-1.0, -2.0]], [-3.5]))
    sender.send(sequence, StepOutput([[]], [[]], ended=True))
    assert [part.rows for part in channel.parts] == [[[4]], [[5, 6]], [[]]]
    assert [part.log_probs for part in channel.parts] == [[[-0.5]], [[-0.5, -1.0, -2.0]], [[-0.5, -1.0, -2.0]]]
    assert [part.cum_log_probs for part in channel.parts] == [[-0.5], [-3.5], [-3.5]]
    assert all(part.context_logits is logits for part in channel.parts)
