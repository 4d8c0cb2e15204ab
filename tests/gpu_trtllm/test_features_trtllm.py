"""TensorRT-LLM's own backend runs what the repository holds for drafts, adapters, guided decoding and retention."""

import json
import re
import urllib.request

import numpy as np
import pytest

from pipelines.serving.config import ServingSettings
from pipelines.serving.process import TritonServer
from tests.support.adapters import write_adapter

PROMPT = "The river of Githbrel is"
MODEL = ["engine=tensorrt_llm", "model=tiny_llama", "quant=none", "build.max_batch_size=8", "triton=one_response"]


def repository(cli, *words):
    before = set((cli.folder / "store" / "repository").glob("*"))
    cli.run("repository", *MODEL, *words)
    (made,) = set((cli.folder / "store" / "repository").glob("*")) - before
    return made


def ask(server, model="tensorrt_llm_bls", **inputs):
    """One answer; an error is the server's own words."""
    body = json.dumps({"text_input": PROMPT, "max_tokens": 24, **inputs}).encode()
    with urllib.request.urlopen(f"{server.http_url}/v2/models/{model}/generate", body, timeout=120) as answer:
        return json.loads(answer.read())


@pytest.fixture(scope="module")
def drafted(cli):
    """The bundled Llama drafts for itself, so that nearly every guess is taken."""
    words = ["speculative=draft_target", "model@speculative.draft=tiny_llama", "triton.retention_tokens=64"]
    with TritonServer(repository(cli, *words), ServingSettings()) as server:
        yield server


@pytest.mark.parametrize("count", [1, 4])
def test_the_answer_with_drafts_is_the_answer_without(drafted, count):
    alone = ask(drafted)["text_output"]
    with_drafts = ask(drafted, num_draft_tokens=count, return_perf_metrics=True)
    assert with_drafts["text_output"] == alone
    assert with_drafts["total_accepted_draft_tokens"] > 0


def test_logits_of_the_draft_are_taken(drafted):
    assert ask(drafted, num_draft_tokens=4, use_draft_logits=True)["text_output"].strip()


def test_a_prompt_is_answered_with_its_beginning_retained(drafted):
    """The backend takes the retention inputs of tensorrt_llm_bls; another answer would be an error."""
    assert ask(drafted)["text_output"] == ask(drafted, model="ensemble")["text_output"]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Two adapters of the bundled Llama: one that changes nothing, one that changes everything."""
    folder, draw = tmp_path_factory.mktemp("adapters"), np.random.default_rng(0)
    shapes = {f"{layer}.self_attn.q_proj": (256, 256) for layer in range(4)}
    for name, size in (("silent", 0.0), ("loud", 1.0)):
        tensors = {}
        for linear, (outputs, inputs) in shapes.items():
            tensors[f"{linear}.lora_A"] = size * draw.normal(size=(4, inputs))
            tensors[f"{linear}.lora_B"] = size * draw.normal(size=(outputs, 4))
        write_adapter(folder / name, tensors, r=4, lora_alpha=8)
    return folder


def test_adapters_are_loaded_at_the_start_and_chosen_by_request(cli, adapters):
    given = f"lora.adapters={{1:{adapters}/silent,2:{adapters}/loud}}"
    made = repository(cli, "lora=adapters", given, "lora.max_rank=8", "quant.dtype=float16")
    with TritonServer(made, ServingSettings()) as server:
        alone = ask(server, model="ensemble")["text_output"]
        assert ask(server, model="ensemble", lora_task_id=1)["text_output"] == alone
        assert ask(server, model="ensemble", lora_task_id=2)["text_output"] != alone


def test_guided_decoding_follows_the_grammar(cli):
    with TritonServer(repository(cli, "guided=xgrammar"), ServingSettings()) as server:
        guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[a-z]+"}
        answer = ask(server, model="ensemble", exclude_input_in_output=True, **guide)["text_output"]
    assert answer.strip().isalpha()
    assert answer == answer.lower()


def test_guided_answers_of_an_engine_follow_their_schema(cli):
    """In the runtime that evaluates; what is cut at max_tokens is the only invalid JSON."""
    words = ["model=tiny_llama", "engine=tensorrt_llm", "quant=none", "eval=json_validity", "eval.limit=2"]
    (line,) = [line for line in cli.run("evaluate", *words).splitlines() if line.startswith("evaluate ")]
    assert float(re.search(r"([\d.]+) % of 24 questions", line)[1]) > 0


def test_a_lookahead_engine_is_evaluated(cli):
    """Its runtime asks for a decoding configuration with every request."""
    words = ["model=tiny_llama", "engine=tensorrt_llm", "quant=none", "speculative=lookahead", "build.max_batch_size=8"]
    cli.run("evaluate", *words, "eval.limit=5")
