"""SmolLM2-135M-Instruct: the engine against Transformers and lm-eval, every format, serving."""

import itertools
import math
import re
import signal
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest

from pipelines.domain.progress import SilentProgress
from tests.real.conftest import Real
from tests.real.prepare import ARC, MMLU, MODEL, PASSAGES

IN_GROUPS = ["quant.group_size=64"]  # 128 does not divide 576
FORMATS: dict[str, list[str]] = {
    "none": [], "fp8": [], "int8_sq": [], "int4_awq": IN_GROUPS, "int4_gptq": IN_GROUPS, "int4_wo": [], "nvfp4": [],
}  # fmt: skip
ARC_EASY = ["eval=lm_eval", "eval.task=arc_easy", f"eval.dataset_path={ARC}", "eval.num_fewshot=0"]
REAL_MMLU = ["eval=mmlu", f"eval.dataset_path={MMLU}", "eval.limit=9", "eval.num_fewshot=0", "eval.sequential=false"]
TEXT = ["eval.fidelity=true", f"fidelity.path={PASSAGES}", "fidelity.tokens=4096"]
CALIBRATED = "calibration.size=32"  # 16,384 tokens, as the whole lane is to take less than half an hour
EXACT = ["engine.openvino.inference_precision=f32"]
VERDICT = re.compile(r"\b(NO-GO|GO|UNDECIDED|NOT MEASURED)\b")
QUESTIONS = 40


def passages(number: int) -> list[str]:
    with PASSAGES.open(encoding="utf-8") as lines:
        return list(itertools.islice((line.strip() for line in lines if line.strip()), number))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from eval.adapter import load_tokenizer

    return load_tokenizer(MODEL)


def test_the_engine_computes_as_transformers(real: Real, tokenizer: Any) -> None:
    """Log probabilities of passages, token by token, both in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    from pipelines.engines.openvino.engine import OpenVinoEngine
    from pipelines.engines.openvino.runtime import OpenVinoOptions

    real.run("build", "quant=none")
    (engine,) = real.store.glob("build/*-none-*")
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    pairs = [(ids[:1], ids[1:]) for ids in (tokenizer.encode(text)[:128] for text in passages(8))]
    single = [([*first, *rest[:at]], [rest[at]]) for first, rest in pairs for at in range(0, len(rest), 7)]
    with OpenVinoEngine(OpenVinoOptions(inference_precision="f32")).open(engine) as session:
        ours = [score for score, _ in session.loglikelihood(single, SilentProgress())]
    theirs = []
    for first, rest in pairs:
        with torch.no_grad():
            scores = model(torch.tensor([[*first, *rest]])).logits[0].double().log_softmax(-1)
        theirs += [float(scores[at, rest[at]]) for at in range(0, len(rest), 7)]
    assert np.abs(np.array(ours) - np.array(theirs)).max() < 5e-4


def test_the_engine_chooses_as_lm_evals_own_model(real: Real) -> None:
    """`hf` of lm-eval scores the same questions of ARC-Easy."""
    from datasets import load_dataset
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    real.run("evaluate", "quant=none", *ARC_EASY, *EXACT, f"eval.limit={QUESTIONS}", "eval.baseline=skip")
    records = real.results("evaluation.json", task="arc_easy", qformat="none", limit=QUESTIONS)["records"]
    rows = load_dataset("parquet", data_files=str(ARC / "ARC-Easy" / "test-*.parquet"), split="train")
    hf = HFLM(pretrained=str(MODEL), dtype="float32", device="cpu", batch_size=8)
    assert len(records) == QUESTIONS
    asked = [
        Instance("loglikelihood", {}, (f"Question: {row['question']}\nAnswer:", f" {choice}"), 0)
        for row in (rows[record["index"]] for record in records)
        for choice in row["choices"]["text"]
    ]
    scores = iter([score for score, _ in hf.loglikelihood(asked, disable_tqdm=True)])
    for record in records:
        theirs = list(itertools.islice(scores, len(record["logprobs"])))
        assert record["logprobs"] == pytest.approx(theirs, abs=2e-3)
        assert np.argmax(record["logprobs"]) == np.argmax(theirs)


@pytest.mark.parametrize("quant", FORMATS)
def test_a_format(real: Real, quant: str) -> None:
    """Fidelity on passages of Wikipedia, 513 questions of MMLU, 570 of ARC-Easy; a row of the table."""
    words = [f"quant={quant}", *FORMATS[quant], CALIBRATED]
    easy = real.run("evaluate", *words, *ARC_EASY, *(TEXT if quant != "none" else []))
    text = real.run("evaluate", *words, *REAL_MMLU)
    mmlu, arc = (real.results("evaluation.json", task=task, qformat=quant, limit=limit)
                 for task, limit in (("mmlu", 9), ("arc_easy", None)))  # fmt: skip
    (engine,) = real.store.glob(f"build/*-{quant}-*")
    size = sum(file.stat().st_size for file in engine.iterdir() if file.suffix == ".bin") / 2**20
    close = ("–", "–", "–")
    if quant != "none":
        figures = real.results("fidelity.json", qformat=quant)["overall"]
        ratio = figures["perplexity"] / figures["reference_perplexity"]
        assert 0 < figures["kl_mean"] < 3
        assert 0.3 < figures["top1_agreement"] < 1
        close = (f"{figures['kl_mean']:.3f}", f"{figures['top1_agreement']:.1%}"[:-1], f"{ratio:.3f}")
    judged = ("–", "–") if quant == "none" else (verdict(text), verdict(easy))  # the baseline is not judged
    real.rows[quant] = (quant, f"{size:.0f}", *close, *scored(mmlu), judged[0], *scored(arc), judged[1])
    correct = sum(record["correct"] for record in arc["records"])
    assert binomtest(correct, len(arc["records"]), 0.25, alternative="greater").pvalue < 1e-6


def scored(result: dict[str, Any]) -> tuple[str, str]:
    """Return the accuracy and its exact interval."""
    right, asked = sum(record["correct"] for record in result["records"]), len(result["records"])
    interval = binomtest(right, asked).proportion_ci(0.95, "exact")
    return f"{right / asked:.1%}"[:-1], f"{interval.low * 100:.1f} to {interval.high * 100:.1f}"


def verdict(text: str) -> str:
    found = VERDICT.findall(text)
    return found[-1] if found else "–"


def test_int4_needs_its_method(real: Real) -> None:
    """The formats in the order that their papers have."""
    kl = {
        quant: real.results("fidelity.json", qformat=quant)["overall"]["kl_mean"]
        for quant in FORMATS
        if quant != "none"
    }
    assert kl["fp8"] < kl["int8_sq"] < kl["int4_wo"]
    assert kl["int4_awq"] < kl["int4_wo"]
    assert kl["int4_gptq"] < kl["int4_wo"]


def test_it_is_served(real: Real, tokenizer: Any) -> None:
    """Chat ends at the end token and knows its capitals; log probabilities of a prompt are the engine's."""
    import openai

    process = real.start("serve", "quant=int8_sq", CALIBRATED, "serving.openai=true")
    try:
        text = ""
        assert process.stdout
        for line in process.stdout:
            text += line
            if line.startswith("END"):
                break
        address = re.search(r"(http://[\d.:]+/v1)", text)
        assert address, text
        client = openai.OpenAI(base_url=address[1], api_key="none")
        name = client.models.list().data[0].id
        question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
        chat = client.chat.completions.create(
            model=name, messages=question, temperature=0, max_tokens=64, logprobs=True, top_logprobs=5
        )
        assert "Paris" in chat.choices[0].message.content
        assert chat.choices[0].finish_reason == "stop"
        assert "<|im_" not in chat.choices[0].message.content
        places = chat.choices[0].logprobs.content
        assert all(len(place.top_logprobs) == 5 and place.logprob <= 1e-6 for place in places)
        ids = tokenizer.encode(passages(1)[0])[:300]
        echoed = client.completions.create(model=name, prompt=ids, echo=True, logprobs=5, max_tokens=1, temperature=0)
        scores = echoed.choices[0].logprobs.token_logprobs[1:-1]
        assert len(scores) == len(ids) - 1
        assert 1 < math.exp(-float(np.mean(scores))) < 60
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
