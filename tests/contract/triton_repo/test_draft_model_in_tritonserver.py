"""tensorrt_llm_bls drives a draft and a target model in the real tritonserver; the answer is the target's own.

Target and draft are stand-ins with a next-token function: the target's is of the last two tokens, the draft's agrees
with it except where the last token is a multiple of 5. The target checks `draft_input_ids` as TensorRT-LLM does: it
takes the guesses that are what it would have said and adds one token of its own. Both answer from threads and stop when
they are told to, as the real engines do.
"""

import json
import queue
import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pipelines.serving.config import ServingSettings
from pipelines.serving.locate import why_no_server
from pipelines.serving.process import TritonServer
from tests.support.engine_folders import write_engine, write_tokenizer
from triton_repo.config import TritonSettings
from triton_repo.generate import parse, to_text
from triton_repo.parameters import RepositorySpec
from triton_repo.write import write_repository

grpc = pytest.importorskip("tritonclient.grpc")

SERVING = ServingSettings(drain_timeout_s=5, startup_timeout_s=60)
HEAD = """
import json
import threading
import time
from pathlib import Path
import numpy as np
import triton_python_backend_utils as pb

END = 96
FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
LONG = 100  # tokens of a request that takes its time
def step(ids):
    return (3 * ids[-1] + ids[-2] + 7) % 97

def value(request, name, default):
    tensor = pb.get_input_tensor_by_name(request, name)
    return default if tensor is None or tensor.as_numpy().size == 0 else tensor.as_numpy().reshape(-1)[0]

def given(request, name):
    tensor = pb.get_input_tensor_by_name(request, name)
    return [] if tensor is None else tensor.as_numpy().reshape(-1).tolist()

class Base:
    def initialize(self, args):
        self.log = Path(args["model_repository"]).parent / (args["model_name"] + ".log")
        self.stopped = set()

    def execute(self, requests):
        for request in requests:
            if value(request, "stop", False):
                self.stopped.add(request.request_id())
                self.write({"stop": request.request_id()})
                request.get_response_sender().send(flags=FINAL)
            else:
                threading.Thread(target=self.reply, args=(request, request.get_response_sender())).start()

    def reply(self, request, sender):
        try:
            self.send(request, sender)
        except Exception as fault:
            sender.send(pb.InferenceResponse(error=pb.TritonError(repr(fault))), FINAL)

    def send(self, request, sender):
        prompt, limit = given(request, "input_ids"), int(value(request, "request_output_len", 1))
        assert bool(value(request, "streaming", False)) is False or not given(request, "draft_input_ids")
        new, extra = self.answer(request, list(prompt), limit)
        self.write({"names": [t.name() for t in request.inputs()], "prompt": len(prompt), "limit": limit,
            "guess": given(request, "draft_input_ids"), "new": new,
            "ends": given(request, "retention_token_range_ends"),
            "priorities": given(request, "retention_token_range_priorities"),
            "durations": given(request, "retention_token_range_durations_ms")})
        shown = new if value(request, "exclude_input_in_output", False) else prompt + new
        for piece in [[t] for t in new] if value(request, "streaming", False) else [shown]:
            if limit > LONG:
                time.sleep(0.005)
            if request.request_id() in self.stopped:
                self.write({"stopped": request.request_id()})
                break
            tensors = [pb.Tensor("output_ids", np.array([[piece]], np.int32)),
                pb.Tensor("sequence_length", np.array([[len(piece)]], np.int32)), *extra]
            sender.send(pb.InferenceResponse(tensors))
        sender.send(flags=FINAL)

    def write(self, entry):
        with self.log.open("a") as log:
            log.write(json.dumps(entry) + "\\n")

    def spell(self, request, ids, limit, next_token):
        made = []
        while len(made) < limit:
            made.append(next_token(ids + made))
            if made[-1] == int(value(request, "end_id", -1)) and len(made) >= int(value(request, "min_tokens", 0)):
                break
        return made
"""
TARGET = (
    HEAD
    + """
class TritonPythonModel(Base):
    def answer(self, request, ids, limit):
        guess = given(request, "draft_input_ids")
        assert not guess or limit == len(guess) + 1
        return self.spell(request, ids, limit, step)[: 1 + self.agree(ids, guess) if guess else limit], []

    def agree(self, ids, guess):
        for count, token in enumerate(guess):
            if step(ids + guess[:count]) != token:
                return count
        return len(guess)
"""
)
DRAFT = (
    HEAD
    + """
class TritonPythonModel(Base):
    def answer(self, request, ids, limit):
        logits = np.zeros((1, 1, limit, 4), np.float32)
        logits[0, 0, :, 0] = np.arange(limit)
        extra = [pb.Tensor("generation_logits", logits)] if value(request, "return_generation_logits", False) else []
        return self.spell(request, ids, limit, lambda x: step(x) if x[-1] % 5 else 0), extra
"""
)
PREPROCESSING = (
    HEAD
    + """
class TritonPythonModel:
    def execute(self, requests):
        def one(request):
            ids = [ord(c) % 97 for c in given(request, "QUERY")[0].decode()]
            words = given(request, "STOP_WORDS_DICT")
            stop = [[[int(w) for w in words], [len(words)] + [-1] * (len(words) - 1)]] if words else np.zeros((1, 2, 0))
            tensors = {
                "INPUT_ID": np.array([ids], np.int32), "REQUEST_INPUT_LEN": np.array([[len(ids)]], np.int32),
                "DECODER_INPUT_ID": np.zeros((1, 1), np.int32), "REQUEST_DECODER_INPUT_LEN": np.ones((1, 1), np.int32),
                "BAD_WORDS_IDS": np.zeros((1, 2, 0), np.int32), "STOP_WORDS_IDS": np.array(stop, np.int32),
                "EMBEDDING_BIAS": np.zeros((1, 0), np.float32),
                "REQUEST_OUTPUT_LEN": np.array([[value(request, "REQUEST_OUTPUT_LEN", 1)]], np.int32),
                "OUT_END_ID": np.array([[value(request, "END_ID", END)]], np.int32),
                "OUT_PAD_ID": np.zeros((1, 1), np.int32), "OUT_PROMPT_TABLE_EXTRA_IDS": np.zeros((1, 1), np.uint64),
            }
            return pb.InferenceResponse([pb.Tensor(name, values) for name, values in tensors.items()])
        return [one(request) for request in requests]
"""
)
POSTPROCESSING = (
    HEAD
    + """
class TritonPythonModel:
    def execute(self, requests):
        return [pb.InferenceResponse([pb.Tensor("OUTPUT", np.array(
            [" ".join(map(str, given(request, "TOKENS_BATCH"))).encode()], dtype=object))]) for request in requests]
"""
)
STAND_INS = {
    "preprocessing": PREPROCESSING,
    "tensorrt_llm": TARGET,
    "tensorrt_llm_draft": DRAFT,
    "postprocessing": POSTPROCESSING,
}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A GPU repository with a draft model, whose two engines are the stand-ins."""
    if fault := why_no_server(SERVING):
        pytest.skip(str(fault))
    root = tmp_path_factory.mktemp("draft")
    write_repository(
        root / "repo",
        engine_dir=write_engine(root / "engine", max_draft_len=8),
        tokenizer_dir=write_tokenizer(root / "model"),
        settings=TritonSettings(kv_cache_free_gpu_mem_fraction=0.45, retention_tokens=3, retention_priority=80),
        spec=RepositorySpec("tensorrt_llm", "tiny", "none", num_draft_tokens=4),
        made_from={},
        draft_dir=write_engine(root / "draft"),
    )
    for name, code in STAND_INS.items():
        config = parse((root / "repo" / name / "config.pbtxt").read_text())
        config.backend = "python"
        (root / "repo" / name / "config.pbtxt").write_text(to_text(config))
        (root / "repo" / name / "1" / "model.py").write_text(code)
    with TritonServer(root / "repo", SERVING) as server:
        yield Asker(root / "repo", server.grpc_url)


NUMBERS = ("max_tokens", "num_draft_tokens", "min_tokens", "end_id", "beam_width")


class Asker:
    """Sends one request and collects its responses."""

    def __init__(self, repository: Path, url: str) -> None:
        self.repository, self.url = repository, url
        self.client = grpc.InferenceServerClient(url)

    def __call__(self, text="hello", **inputs):
        self.begin(text, **inputs)
        try:
            return list(self.parts())
        finally:
            self.leave()

    def begin(self, text="hello", **inputs):
        """Send a request."""
        for name in ("tensorrt_llm", "tensorrt_llm_draft"):
            (self.repository / f"{name}.log").unlink(missing_ok=True)
        sent = [self.tensor("text_input", [text.encode()], "BYTES")]
        for name, value in inputs.items():
            kind = "INT32" if name in NUMBERS else "BOOL"
            if name == "stop_words":
                sent.append(self.tensor(name, [word.encode() for word in value], "BYTES"))
            else:
                sent.append(self.tensor(name, [value], kind))
        self.answers: queue.Queue = queue.Queue()
        self.client.start_stream(partial(self.take, self.answers))
        self.client.async_stream_infer("tensorrt_llm_bls", sent, enable_empty_final_response=True)

    def take(self, answers, result, error):
        answers.put((result, error))

    def parts(self):
        """Its responses, as they come."""
        while True:
            result, error = self.answers.get(timeout=60)
            if error is not None:
                raise RuntimeError(str(error))
            if (words := result.as_numpy("text_output")) is not None:
                yield words.reshape(-1)[0].decode(), result
            if result.get_response().parameters["triton_final_response"].bool_param:
                return

    def leave(self):
        """Close the connection; of a request that is not answered yet, the client is gone."""
        self.client.stop_stream(cancel_requests=True)

    def tensor(self, name, values, kind):
        dtype = {"BYTES": object, "INT32": np.int32, "BOOL": bool}[kind]
        made = grpc.InferInput(name, [1, len(values)], kind)
        made.set_data_from_numpy(np.array([values], dtype=dtype))
        return made

    def log(self, name):
        path = self.repository / f"{name}.log"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def ask(served):
    return served


@pytest.mark.parametrize("count", [1, 3, 4, 8])
@pytest.mark.parametrize("tokens", [1, 2, 7, 30])
@pytest.mark.parametrize("prompt", ["hello", "the rivers"])
def test_the_answer_with_drafts_is_the_answer_without(ask, prompt, tokens, count):
    ((alone, _),) = ask(prompt, max_tokens=tokens, end_id=-1)
    assert len(ask.log("tensorrt_llm")) == 1
    ((drafted, _),) = ask(prompt, max_tokens=tokens, end_id=-1, num_draft_tokens=count)
    assert drafted == alone
    assert len(ask.log("tensorrt_llm")) < max(tokens, 2)  # fewer steps of the target than tokens


def test_the_end_token_ends_it_at_the_same_place(ask):
    """End ids that the sequence reaches after some tokens."""
    ((free, _),) = ask(max_tokens=20, end_id=-1)
    for end in free.split()[5:12]:
        ((alone, _),) = ask(max_tokens=20, end_id=int(end))
        ((drafted, _),) = ask(max_tokens=20, end_id=int(end), num_draft_tokens=4)
        assert drafted == alone


def test_pieces_of_a_stream_are_the_rounds(ask):
    """Several tokens may come at once; together they are the answer."""
    ((whole, _),) = ask(max_tokens=12, end_id=-1, num_draft_tokens=4, exclude_input_in_output=True)
    parts = ask(max_tokens=12, end_id=-1, num_draft_tokens=4, stream=True)
    assert " ".join(text for text, _ in parts) == whole
    assert 1 < len(parts) == len(ask.log("tensorrt_llm")) < 12


def test_a_stop_word_ends_the_loop(ask):
    ((whole, _),) = ask(max_tokens=20, end_id=-1, num_draft_tokens=1, exclude_input_in_output=True)
    words = whole.split()
    ((cut, _),) = ask(max_tokens=20, end_id=-1, num_draft_tokens=1, exclude_input_in_output=True, stop_words=[words[5]])
    assert cut.split()[:6] == words[:6]
    assert len(cut.split()) <= 7


def agreement(guess, new):
    """Tokens that are the same from the start."""
    same = [ours == theirs for ours, theirs in zip(guess, new, strict=False)]
    return [*same, False].index(False)


def test_what_was_guessed_and_taken_is_reported(ask):
    ((_, result),) = ask(max_tokens=30, end_id=-1, num_draft_tokens=4, return_perf_metrics=True)
    log = ask.log("tensorrt_llm")
    guessed = sum(len(entry["guess"]) for entry in log)
    taken = sum(agreement(entry["guess"], entry["new"]) for entry in log)
    assert result.as_numpy("total_draft_tokens").item() == guessed > 0
    assert result.as_numpy("total_accepted_draft_tokens").item() == taken > 0
    assert result.as_numpy("acceptance_rate").item() == pytest.approx(taken / guessed)


def test_logits_of_the_draft_travel_only_when_asked_for(ask):
    ask(max_tokens=8, end_id=-1, num_draft_tokens=3, use_draft_logits=True)
    assert any("draft_logits" in entry["names"] for entry in ask.log("tensorrt_llm"))
    ask(max_tokens=8, end_id=-1, num_draft_tokens=3)
    assert not any("draft_logits" in entry["names"] for entry in ask.log("tensorrt_llm"))


def test_the_draft_model_gets_nothing_that_is_the_targets_business(ask):
    ask(max_tokens=8, end_id=-1, num_draft_tokens=3, return_perf_metrics=True, stop_words=["95"])
    (names,) = {tuple(sorted(entry["names"])) for entry in ask.log("tensorrt_llm_draft")}
    assert not {"stop_words_list", "return_perf_metrics", "draft_input_ids", "streaming"} & set(names)
    assert {"min_tokens", "exclude_input_in_output", "end_id"} <= set(names)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"num_draft_tokens": -1}, "num_draft_tokens is -1; it must be at least 1"),
        ({"num_draft_tokens": 3, "beam_width": 2}, "beam_width is 2; with num_draft_tokens it must be 1"),
        ({"num_draft_tokens": 3, "return_log_probs": True}, "return_log_probs does not go with num_draft_tokens"),
    ],
)
def test_what_does_not_go_with_drafts_is_refused(ask, inputs, message):
    with pytest.raises(RuntimeError, match=message):
        ask(max_tokens=4, **inputs)


@pytest.mark.parametrize("drafts", [{}, {"num_draft_tokens": 3}])
def test_the_beginning_of_every_prompt_is_retained(ask, drafts):
    """Of the target's prompt, as configured: 3 tokens, priority 80, for ever."""
    ask("hello", max_tokens=4, end_id=-1, **drafts)
    for entry in ask.log("tensorrt_llm"):
        assert (entry["ends"], entry["priorities"], entry["durations"]) == ([3], [80], [-1])
    ask("hi", max_tokens=2, end_id=-1)
    assert ask.log("tensorrt_llm")[0]["ends"] == [2]  # the prompt is shorter
    assert not any(entry["ends"] for entry in ask.log("tensorrt_llm_draft"))


def test_many_requests_at_once_are_all_answered(ask):
    """Python backend 2.51 loses its heap within a few hundred when responses of nested calls are let go too early."""
    ((expected, _),) = ask(max_tokens=12, end_id=-1)

    def one_client(number):
        asker = Asker(ask.repository, ask.url)
        drafts = {"num_draft_tokens": 3} if number % 2 else {}
        return {asker(max_tokens=12, end_id=-1, **drafts)[0][0] for _ in range(40)}

    with ThreadPoolExecutor(8) as clients:
        assert list(clients.map(one_client, range(8))) == [{expected}] * 8


def until_quiet(count):
    """Wait until a count stays the same for half a second; the count."""
    before = None
    while before != (before := count()):
        time.sleep(0.5)
    return before


@pytest.mark.parametrize("drafts", [{}, pytest.param({"num_draft_tokens": 4}, marks=pytest.mark.thorough)])
def test_a_client_that_goes_ends_the_generation(ask, drafts):
    ask.begin(max_tokens=2000, end_id=-1, stream=True, **drafts)
    next(ask.parts())
    ask.leave()
    rounds = until_quiet(lambda: len(ask.log("tensorrt_llm")))
    assert rounds < 200  # with drafts; it takes 400 at least to make 2000 tokens
    assert any("stop" in entry for entry in ask.log("tensorrt_llm"))
    assert drafts or any("stopped" in entry for entry in ask.log("tensorrt_llm"))
    assert len(ask(max_tokens=7, end_id=-1, exclude_input_in_output=True, **drafts)[0][0].split()) == 7


@pytest.mark.thorough
def test_clients_that_go_at_any_time_leave_the_others_their_answers(ask):
    ((expected, _),) = ask(max_tokens=30, end_id=-1)
    chance = random.Random(7)
    for number in range(50):
        ask.begin(max_tokens=300, end_id=-1, stream=number % 4 < 2, **{"num_draft_tokens": 4} if number % 2 else {})
        time.sleep(chance.uniform(0, 0.15))
        ask.leave()
        if number % 10 == 9:
            assert ask(max_tokens=30, end_id=-1, num_draft_tokens=4)[0][0] == expected
