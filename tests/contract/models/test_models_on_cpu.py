"""What clients of TensorRT-LLM's repository layout send and get back, against the real server."""

import itertools
import json
import re
import time
import urllib.request

import numpy as np
import pytest
from tokenizers import Tokenizer

from pipelines.serving.process import TritonServer
from tests.contract.models.conftest import MODEL, QUEUE, Client

PROMPT = "The capital of"
IDS = [2, 388, 774, 340, 333, 514, 368]
NAMES = ["ensemble", "tensorrt_llm_bls"]
TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def core(ids: list[int] = IDS, tokens: int = 8) -> dict[str, object]:
    """Inputs of tensorrt_llm."""
    return {"input_ids": ids, "input_lengths": len(ids), "request_output_len": tokens}


def metrics(server: TritonServer) -> str:
    with urllib.request.urlopen(server.metrics_url) as page:
        return str(page.read().decode())


def gauge(server: TritonServer, family: str, kind: str) -> float:
    found = re.search(rf'^{family}{{[^}}]*="{kind}"[^}}]*}} (\S+)$', metrics(server), re.MULTILINE)
    assert found
    return float(found.group(1))


@pytest.mark.parametrize("model", NAMES)
def test_pieces_of_a_stream_add_up_to_the_whole_answer(client: Client, model: str) -> None:
    """Continuations keep their leading space; the prompt is part of a whole answer and not of a stream."""
    whole = client.ask(model, text_input=PROMPT, max_tokens=12).text
    streamed = client.ask(model, text_input=PROMPT, max_tokens=12, stream=True)
    bare = client.ask(model, text_input=PROMPT, max_tokens=12, exclude_input_in_output=True).text
    assert len(streamed.parts) > 1
    assert whole == PROMPT + streamed.text == PROMPT + bare


def test_the_first_output_is_output_ids(client: Client) -> None:
    """Benchmark clients read the shape of the first tensor."""
    answer = client.ask("tensorrt_llm", **core())
    assert list(answer.parts[0]) == ["output_ids", "sequence_length"]
    assert answer.parts[0]["output_ids"].shape == (1, 1, len(IDS) + 8)
    assert answer.tokens[: len(IDS)] == IDS


@pytest.mark.parametrize("model", NAMES)
def test_every_prompt_of_a_batch_gets_its_own_answer(client: Client, model: str) -> None:
    texts = [PROMPT, "The mayor of", "Hello"]
    batch = np.array([[text.encode()] for text in texts], dtype=object)
    tokens = np.array([[4], [6], [2]], dtype=np.int32)
    answer = client.ask(model, text_input=batch, max_tokens=tokens)
    found = {int(part["batch_index"][0, 0]): part["text_output"][0].decode() for part in answer.parts}
    alone = [
        client.ask(model, text_input=text, max_tokens=int(n[0])).text for text, n in zip(texts, tokens, strict=True)
    ]
    assert [found[index] for index in range(3)] == alone


def test_a_stop_word_ends_the_answer_and_stays_in_it(client: Client) -> None:
    free = client.ask("tensorrt_llm", **core(tokens=12), exclude_input_in_output=True).tokens
    words = np.array([[[free[2], free[3], 7], [2, 3, -1]]], dtype=np.int32)  # (free[2], free[3]) and (7)
    for streaming in (False, True):
        stopped = client.ask(
            "tensorrt_llm", **core(tokens=12), stop_words_list=words, streaming=streaming, exclude_input_in_output=True
        )
        assert stopped.tokens == free[:4]


def test_the_end_id_ends_the_answer_and_is_left_out(client: Client) -> None:
    free = client.ask("tensorrt_llm", **core(tokens=12), exclude_input_in_output=True).tokens
    ended = client.ask("tensorrt_llm", **core(tokens=12), end_id=free[3], exclude_input_in_output=True)
    assert ended.tokens == free[:3]
    later = client.ask("tensorrt_llm", **core(tokens=12), end_id=free[3], min_tokens=6, exclude_input_in_output=True)
    assert len(later.tokens) >= 6


def test_bad_words_never_come(client: Client) -> None:
    free = client.ask("tensorrt_llm", **core(), exclude_input_in_output=True).tokens
    words = np.array([[[free[0], free[1], free[2]], [1, 3, -1]]], dtype=np.int32)
    banned = client.ask("tensorrt_llm", **core(), bad_words_list=words, exclude_input_in_output=True).tokens
    assert free[0] not in banned
    assert (free[1], free[2]) not in itertools.pairwise(banned)


def test_a_large_bias_decides_every_token(client: Client) -> None:
    word = TOKENIZER.encode("The", add_special_tokens=False).ids
    assert len(word) == 1
    answer = client.ask(
        "ensemble",
        text_input=PROMPT,
        max_tokens=3,
        embedding_bias_words="The",
        embedding_bias_weights=1e4,
        exclude_input_in_output=True,
    )
    assert answer.text == "TheTheThe"


def test_returned_logits_choose_the_returned_tokens(client: Client) -> None:
    """Greedy: the argmax of each generation logit is the token; the last context logit predicts the first one."""
    answer = client.ask(
        "tensorrt_llm", **core(tokens=5), return_context_logits=True, return_generation_logits=True, end_id=-1
    )
    part = answer.parts[0]
    assert part["context_logits"].shape == (1, len(IDS), 1920)
    assert part["generation_logits"].shape == (1, 1, 5, 1920)
    assert part["generation_logits"][0, 0].argmax(axis=-1).tolist() == answer.tokens[len(IDS) :]
    assert np.array_equal(part["context_logits"][0, -1], part["generation_logits"][0, 0, 0])


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("ids", [IDS, IDS[:1]])
def test_log_probabilities_of_a_few_tokens_are_those_of_the_logits(
    client: Client, ids: list[int], streaming: bool
) -> None:
    """Of the prompt's own tokens and of the likeliest ones, which come in order; a stream sends each once."""
    inputs = core(tokens=3) | {"input_ids": ids, "input_lengths": len(ids), "end_id": -1}
    asked = {"return_context_log_probs": 4, "return_top_log_probs": 2, "streaming": streaming}
    whole = client.ask("tensorrt_llm", **inputs, return_context_logits=True, return_generation_logits=True).parts[0]
    parts = [part for part in client.ask("tensorrt_llm", **inputs, **asked).parts if part["output_ids"].size]
    logits = np.concatenate([whole["context_logits"][0], whole["generation_logits"][0, 0, 1:]]).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    first, after = parts[0], len(ids) - 1
    own = expected[np.arange(after), ids[1:]]
    np.testing.assert_allclose(first["context_log_probs"][0], own, atol=1e-5)
    assert sum("context_log_probs" in part for part in parts) == 1
    tokens = np.concatenate([first["context_top_token_ids"][0, :-1, :2], *(part["top_token_ids"][0] for part in parts)])
    found = np.concatenate([first["context_top_log_probs"][0, :-1, :2], *(part["top_log_probs"][0] for part in parts)])
    np.testing.assert_array_equal(tokens, np.argsort(-expected, axis=1, kind="stable")[:, :2])
    np.testing.assert_allclose(found, np.take_along_axis(expected, tokens, axis=1), atol=1e-5)
    assert first["context_top_token_ids"].shape == (1, len(ids), 4)


@pytest.mark.parametrize("name", ["return_top_log_probs", "return_context_log_probs"])
@pytest.mark.parametrize("count", [0, 1001])
def test_more_log_probabilities_than_are_given(client: Client, name: str, count: int) -> None:
    answer = client.ask("tensorrt_llm", **core(), **{name: count})
    assert f"{name}={count} is not valid. It must be from 1 to 1000" in answer.error


@pytest.mark.parametrize("streaming", [False, True])
def test_log_probs_of_all_tokens_add_up(client: Client, streaming: bool) -> None:
    answer = client.ask("tensorrt_llm", **core(), return_log_probs=True, streaming=streaming)
    parts = answer.parts[-1]["output_log_probs"][0, 0].tolist()  # a stream repeats them all
    assert len(parts) == 8
    assert answer.parts[-1]["cum_log_probs"][0, 0] == pytest.approx(sum(parts), rel=1e-5)


def test_a_seed_repeats_and_another_differs(client: Client) -> None:
    def sample(seed: int) -> list[int]:
        options = {"temperature": 3.0, "runtime_top_p": 1.0, "seed": np.array([[seed]], dtype=np.uint64)}
        return client.ask("tensorrt_llm", **core(tokens=16), **options).tokens

    assert sample(1) == sample(1) != sample(2)


def test_temperature_alone_stays_greedy(client: Client) -> None:
    """As in TensorRT-LLM: without top_k and top_p there is nothing to choose from."""
    assert client.ask("tensorrt_llm", **core(), temperature=5.0).tokens == client.ask("tensorrt_llm", **core()).tokens


def test_several_answers_to_a_prompt_carry_their_index(client: Client) -> None:
    answer = client.ask("tensorrt_llm", **core(tokens=16), num_return_sequences=3, runtime_top_k=50, temperature=3.0)
    found = {int(part["sequence_index"][0, 0]): part["output_ids"].tolist() for part in answer.parts}
    assert sorted(found) == [0, 1, 2]
    assert found[0] != found[1] != found[2]


def test_beams_come_together_best_first(client: Client) -> None:
    """One response with all beams; the best beam is at least as likely as the greedy answer."""
    greedy = client.ask("tensorrt_llm", **core(), return_log_probs=True).parts[0]["cum_log_probs"][0, 0]
    part = client.ask("tensorrt_llm", **core(), beam_width=3, return_log_probs=True).parts[0]
    scores = part["cum_log_probs"][0].tolist()
    assert part["output_ids"].shape == (1, 3, len(IDS) + 8)
    assert scores == sorted(scores, reverse=True)
    assert scores[0] >= greedy - 1e-4


def test_perf_metrics_are_in_order(client: Client) -> None:
    part = client.ask("tensorrt_llm", **core(), return_perf_metrics=True, return_num_input_tokens=True).parts[0]
    stamps = ["arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns"]
    times = [int(part[name][0, 0]) for name in stamps]
    assert times == sorted(times)
    assert times[0] > 0
    assert times[2] < times[3], "eight tokens take longer than the first"
    assert part["num_input_tokens"][0, 0] == len(IDS)


def test_a_repeated_prefix_is_reused(client: Client) -> None:
    """80 + 4 tokens, again: two of the three blocks of 32 are full and known."""
    ids = [2, *range(400, 479)]
    for expected in (0, 2):
        part = client.ask("tensorrt_llm", **core(ids, 4), return_perf_metrics=True, end_id=-1).parts[0]
        assert part["kv_cache_reused_blocks"][0, 0] == expected
        assert part["kv_cache_alloc_total_blocks"][0, 0] == 3


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"runtime_top_p": 1.5}, "runtime_top_p=1.5"),
        ({"runtime_top_k": -2}, "runtime_top_k=-2"),
        ({"request_output_len": 0}, "request_output_len=0"),
        ({"request_output_len": -5}, "request_output_len=-5"),
        ({"request_output_len": 1_000_000}, "max_seq_len=1024"),
        ({"input_ids": [2, 5000], "input_lengths": 2}, "token id 5000"),
        ({"input_ids": [5] * 300, "input_lengths": 300}, "max_input_len=256"),
        ({"input_lengths": 9}, "input_lengths=9"),
        ({"beam_width": 4}, "max_beam_width=3"),
        ({"lora_task_id": np.array([[1]], dtype=np.uint64)}, "lora_task_id"),
        ({"retention_decode_priority": 3}, "retention_decode_priority"),
        ({"draft_input_ids": [1, 2]}, "draft_input_ids"),
        ({"guided_decoding_guide_type": "json"}, "guided_decoding_guide_type"),
        ({"stop": True}, ""),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(client: Client, inputs: dict[str, object], said: str) -> None:
    answer = client.ask("tensorrt_llm", **{**core(), **inputs})
    assert said in answer.error
    assert not answer.parts
    assert len(client.ask("tensorrt_llm", **core()).tokens) == len(IDS) + 8


@pytest.mark.parametrize("model", NAMES)
@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"text_input": ""}, "QUERY (text_input) is empty"),
        ({"text_input": b"\xff\xfe"}, "QUERY (text_input) is not valid UTF-8"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"embedding_bias_words": "a"}, "EMBEDDING_BIAS_WEIGHTS"),
    ],
)
def test_bad_text_is_refused_by_name(client: Client, model: str, inputs: dict[str, object], said: str) -> None:
    assert said in client.ask(model, **{"text_input": PROMPT, "max_tokens": 4, **inputs}).error


def test_draft_tokens_without_a_draft_model_are_refused(client: Client) -> None:
    answer = client.ask("tensorrt_llm_bls", text_input=PROMPT, max_tokens=4, num_draft_tokens=3)
    assert "num_draft_tokens" in answer.error


def test_a_request_is_stopped_by_its_id(client: Client, server: TritonServer) -> None:
    client.send("tensorrt_llm", "long", **core(tokens=900), end_id=-1, streaming=True)
    assert client.first()["output_ids"].size
    client.send("tensorrt_llm", "long", **core([1], 0), stop=True)
    assert len(client.take("long")["long"].tokens) < 890
    wait_until_idle(server)


def test_a_closed_stream_frees_its_slot(server: TritonServer) -> None:
    gone = Client(server.grpc_url)
    for index in range(4):
        gone.send("tensorrt_llm", f"gone{index}", **core(tokens=1000), end_id=-1, streaming=True)
    gone.first()
    gone.close(cancel=True)
    wait_until_idle(server)


def wait_until_idle(server: TritonServer) -> None:
    deadline = time.monotonic() + 60
    while gauge(server, "nv_trt_llm_request_metrics", "active"):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_full_queue_refuses_and_the_others_get_their_tokens(client: Client) -> None:
    """4 slots and 8 waiting places for 40 requests sent at once."""
    expected = client.ask("tensorrt_llm", **core(tokens=64), end_id=-1).tokens
    names = [f"r{index:02}" for index in range(40)]
    for name in names:
        client.send("tensorrt_llm", name, **core(tokens=64), end_id=-1)
    served, refused = 0, []
    for _ in names:
        result, error = client._found.get(timeout=30)
        if error is None:
            assert result.as_numpy("output_ids")[0, 0].tolist() == expected
            served += 1
        else:
            refused.append(str(error))
    assert served >= QUEUE
    assert refused
    # the server's own queue, in front of the model's, has the same bound
    assert all("Exceeds maximum queue size" in text for text in refused)


def test_characters_of_several_tokens_stream_whole(client: Client) -> None:
    """The bias makes the model write the bytes of the euro sign; no piece holds a part of it."""
    euro = TOKENIZER.encode("€", add_special_tokens=False).ids
    assert len(euro) == 3
    bias = np.zeros((1, 1920), dtype=np.float32)
    bias[0, euro] = 1e4
    steps = [(first, second) for first in range(3) for second in range(3) if second != (first + 1) % 3]
    banned = [(euro[first], euro[second]) for first, second in steps]
    flat = [token for word in banned for token in word]
    words = np.array([[flat, [2 * n for n in range(1, len(banned) + 1)] + [-1] * len(banned)]], dtype=np.int32)
    ids = [*IDS, *euro]
    answer = client.ask(
        "tensorrt_llm", **core(ids, 6), embedding_bias=bias, bad_words_list=words, streaming=True, end_id=-1
    )
    assert answer.tokens == [*euro, *euro]
    assert all(part["sequence_length"][0, 0] % 3 == 0 for part in answer.parts)


def test_curl_gets_text(server: TritonServer) -> None:
    body = {"text_input": PROMPT, "max_tokens": 6, "bad_words": "", "stop_words": ""}
    answer = json.loads(post(server, "generate", body))
    assert answer["text_output"].startswith(PROMPT)
    lines = post(server, "generate_stream", body | {"stream": True}).split("\n\n")
    pieces = [json.loads(line.removeprefix("data: "))["text_output"] for line in lines if line]
    assert PROMPT + "".join(pieces) == answer["text_output"]


def post(server: TritonServer, what: str, body: dict[str, object]) -> str:
    url = f"{server.http_url}/v2/models/ensemble/{what}"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode())) as answer:
        return str(answer.read().decode())


def test_dashboards_find_their_families(server: TritonServer, client: Client) -> None:
    client.ask("tensorrt_llm", **core())
    page = metrics(server)
    for family, kind in {
        "nv_trt_llm_request_metrics": "scheduled",
        "nv_trt_llm_kv_cache_block_metrics": "reused",
        "nv_trt_llm_inflight_batcher_metrics": "generation_requests",
        "nv_trt_llm_general_metrics": "iteration_counter",
        "nv_trt_llm_runtime_memory_metrics": "cpu",
        "nv_llm_output_token_len_bucket": "total_output_tokens",
    }.items():
        assert re.search(rf'^{family}{{model="tensorrt_llm".*"{kind}".*version="1"', page, re.MULTILINE) or kind in page
