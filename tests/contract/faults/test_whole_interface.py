"""All fields of the interface through the text models; stop by id, timeouts and lookers while others are served."""

import threading

import numpy as np
import pytest

from pipelines.serving.process import TritonServer
from tests.contract.faults.well_behaved import IDS, PROMPT, References, core, is_idle
from tests.support.eventually import eventually
from tests.support.served_gemma import Client

pytestmark = pytest.mark.thorough

STOP = {"input_ids": [1], "input_lengths": 1, "request_output_len": 1, "stop": True}
EXTRAS = {
    "return_log_probs": True,
    "return_context_logits": True,
    "return_generation_logits": True,
    "return_perf_metrics": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
}


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_every_field_that_is_asked_for_comes_with_the_text(client: Client, model: str) -> None:
    """Seven tokens of prompt and five of answer, a vocabulary of 1,920."""
    part = client.ask(model, text_input=PROMPT, max_tokens=5, end_id=-1, **EXTRAS).parts[0]
    assert part["text_output"][0].decode().startswith(PROMPT)
    assert part["context_logits"].shape == (1, len(IDS), 1920)
    assert part["generation_logits"].shape == (1, 1, 5, 1920)
    assert part["cum_log_probs"].shape == (1, 1)
    assert part["output_log_probs"].shape == (1, 1, 5)
    assert (part["num_input_tokens"].item(), part["num_output_tokens"].item()) == (7, 5)
    stamps = ["arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns"]
    times = [part[name].item() for name in stamps]
    assert 0 < times[0] <= times[1] <= times[2] <= times[3]
    assert {"kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks"} < part.keys()


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_batches_and_answers_are_numbered_with_the_text(client: Client, model: str) -> None:
    batch = np.array([[b"The capital of"], [b"Hello"]], dtype=object)
    two = np.array([[2], [2]], dtype=np.int32)
    options = {"num_return_sequences": two, "top_k": np.array([[9], [9]], dtype=np.int32)}
    answer = client.ask(model, text_input=batch, max_tokens=np.array([[3], [3]], np.int32), **options)
    found = {(part["batch_index"].item(), part["sequence_index"].item()) for part in answer.parts}
    assert found == {(0, 0), (0, 1), (1, 0), (1, 1)}


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_nothing_comes_that_was_not_asked_for(client: Client, model: str) -> None:
    assert set(client.ask(model, text_input=PROMPT, max_tokens=2).parts[0]) == {"text_output"}


def test_an_ensemble_request_is_stopped_by_its_id(client: Client, served: TritonServer) -> None:
    """The id reaches the engine; what was generated until then is the answer.

    Where other processes keep the machine busy, the message may take as long as the 1,000 tokens, so in one of five
    rounds.
    """
    other = Client(served.grpc_url)
    other.ask("tensorrt_llm", **core(tokens=1))  # its connection stands
    for _ in range(5):
        client.send("ensemble", "mine", text_input=PROMPT, max_tokens=1000, end_id=-1, stream=True)
        client.first()
        other.send("tensorrt_llm", "mine", **STOP)
        answer = client.take("mine")["mine"]
        assert not answer.error
        assert eventually(lambda: is_idle(served))
        if len(answer.parts) < 900:
            break
    other.close()
    assert len(answer.parts) < 900


def test_stopping_what_does_not_run_is_no_error(client: Client) -> None:
    client.send("tensorrt_llm", "nobody", **STOP)
    assert not client.take("nobody")["nobody"].error


def test_a_timeout_is_told_to_the_one_who_set_it(served: TritonServer, client: Client) -> None:
    """All slots taken: a request that may wait 1 ms hears that it waited too long, one without a limit is served.

    On a busy machine a slot may be free again by the time that it arrives, so in one of five rounds.
    """
    for _ in range(5):
        busy = Client(served.grpc_url)
        for index in range(8):
            busy.send("tensorrt_llm", f"busy{index}", **core(tokens=1000, streaming=True))
        for _ in range(8):
            busy.first()
        hurried = Client(served.grpc_url)
        hurried.send("tensorrt_llm", "hurried", timeout_us=1000, **core())
        client.send("tensorrt_llm", "patient", **core())
        told = hurried.take("hurried")["hurried"].error
        assert len(client.take("patient")["patient"].tokens) == 8
        hurried.close()
        busy.close(cancel=True)
        assert eventually(lambda: is_idle(served))
        if told:
            break
    assert "timeout" in told


def test_bls_honours_the_timeout_of_its_client(client: Client) -> None:
    """A microsecond is over before the prompt is tokenized."""
    client.send("tensorrt_llm_bls", "hurried", timeout_us=1, text_input=PROMPT, max_tokens=4)
    assert "timeout" in client.take("hurried")["hurried"].error
    assert client.ask("tensorrt_llm_bls", text_input=PROMPT, max_tokens=4).text


def test_streams_of_broken_characters_are_valid_text(client: Client) -> None:
    """Two bytes of a snowman and a letter: what is no character is replaced, in streams as in whole answers."""
    batch = {"text_input": "☃ é 語 €", "max_tokens": 30, "end_id": -1}
    for model in ("ensemble", "tensorrt_llm_bls"):
        whole = client.ask(model, **batch, exclude_input_in_output=True).text
        assert client.ask(model, **batch, stream=True).text == whole


def test_many_connections_that_only_look(served: TritonServer, references: References) -> None:
    """64 threads read health and metadata while others are served."""
    import tritonclient.grpc as grpc

    def look() -> None:
        with grpc.InferenceServerClient(served.grpc_url) as one:
            for _ in range(5):
                assert one.is_server_ready()
                one.get_model_metadata("ensemble")

    threads = [threading.Thread(target=look) for _ in range(64)]
    with references.meanwhile():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
