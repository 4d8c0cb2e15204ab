"""What is served equals what the engine says, question by question, through lm-eval and the real server."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval.adapter import load_tokenizer
from eval.answer_cache import AnswerLog
from eval.fidelity.bounds import BoundsResult, KnownTokens, bound_logits, measure_served
from eval.fidelity.divergence import compare_logits
from eval.fidelity.measure import Side, cut, measure
from eval.harness import EvalResult, EvalSpec, evaluate
from eval.server import OpenAiServer, TritonGrpc
from pipelines.cli.main import main
from pipelines.domain.errors import UserError
from pipelines.domain.progress import SilentProgress
from pipelines.engines.openvino.engine import OpenVinoEngine
from pipelines.engines.port import LogitsSession
from pipelines.serving.frontend import OpenAiFrontend
from pipelines.serving.process import TritonServer
from tests.support.served_gemma import COMPUTES, LIMITS, MODEL

ROUNDING = 1e-3
"""How far log probabilities may be apart in float32."""


def asked(session: Any, task: str, **settings: Any) -> EvalResult:
    shots = 0 if task == "json_validity" else 1
    spec = EvalSpec(task=task, max_length=LIMITS.max_seq_len - 2, num_fewshot=shots, **settings)
    return evaluate(session, MODEL, spec, SilentProgress(), model="tiny_gemma", qformat="none", engine="any")


@pytest.fixture
def server(served: TritonServer, openai_service: OpenAiFrontend, tmp_path: Path) -> OpenAiServer:
    made = OpenAiServer(served.openai_url, "", AnswerLog(tmp_path / "answers.jsonl"), concurrency=4)
    made.choose_model()
    return made


@pytest.fixture
def triton(served: TritonServer, tmp_path: Path) -> TritonGrpc:
    made = TritonGrpc(f"grpc://{served.grpc_url}", "", AnswerLog(tmp_path / "triton.jsonl"), concurrency=4)
    made.choose_model()
    return made


@pytest.mark.parametrize("task", ["mini_mmlu", "mini_answers"])
def test_the_server_answers_as_its_engine(
    served: TritonServer, server: OpenAiServer, triton: TritonGrpc, task: str
) -> None:
    """One question of each subject: the same prompts, the same choices or texts, over OpenAI's interface and Triton's.

    The log probabilities are equal but for the rounding of another batch.
    """
    with OpenVinoEngine(COMPUTES).open(served.repository.path.parent / "engine") as session:
        engine = asked(session, task, limit=1)
    assert (server.model, triton.model) == ("tiny_gemma", "ensemble")
    assert engine.accuracy > 0.5
    for ours in (asked(server, task, limit=1), asked(triton, task, limit=1)):
        assert (ours.prompts_sha256, ours.questions) == (engine.prompts_sha256, 12)
        for served_record, engine_record in zip(ours.records, engine.records, strict=True):
            assert served_record.logprobs == pytest.approx(engine_record.logprobs, abs=ROUNDING)
            assert (served_record.choice, served_record.correct) == (engine_record.choice, engine_record.correct)


def test_the_server_follows_schemas_as_its_engine(
    served: TritonServer, server: OpenAiServer, triton: TritonGrpc
) -> None:
    """By `response_format` over OpenAI's interface, by the guide's tensors over Triton's.

    Two schemas make prompts longer than this engine takes; a text that was cut is tokenized anew, to other tokens.
    """
    settings = {"limit": 1, "guided": True, "max_prompt": LIMITS.max_input_len}
    with OpenVinoEngine(COMPUTES).open(served.repository.path.parent / "engine") as session:
        engine = asked(session, "json_validity", **settings)
    assert engine.accuracy > 0
    for ours in (asked(server, "json_validity", **settings), asked(triton, "json_validity", **settings)):
        assert (ours.prompts_sha256, ours.truncated) == (engine.prompts_sha256, 2)
        for served_record, engine_record in zip(ours.records, engine.records, strict=True):
            if engine_record.subject in {"nested", "objects"}:
                continue
            assert (served_record.choice, served_record.correct) == (engine_record.choice, engine_record.correct)


def test_a_triton_that_is_not_there(tmp_path: Path) -> None:
    nobody = TritonGrpc("grpc://127.0.0.1:9", "", AnswerLog(tmp_path / "a"), attempts=1)
    with pytest.raises(UserError, match=r"grpc://127\.0\.0\.1:9 did not answer in 1 attempt: the server is not ready"):
        nobody.choose_model()


def test_triton_says_what_is_wrong(triton: TritonGrpc) -> None:
    """Not sent again: it would be refused again."""
    with pytest.raises(UserError, match=r"grpc://.* refused a request: .*(300|256)"):
        triton.loglikelihood([([2] * 299, [3])], SilentProgress())


def test_lm_evals_own_client_reads_our_log_probabilities(served: TritonServer, server: OpenAiServer) -> None:
    """`lm-eval --model local-completions` takes its numbers from the same response, and they are ours."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    prompt = [2, 40, 41, 42, 43]
    request = LocalCompletionsAPI._create_payload(type("Named", (), {"model": "tiny_gemma"}), prompt, generate=False)
    reply = server.send("POST", "/completions", request, 1)
    ours = server.loglikelihood([(prompt[:3], prompt[3:])], SilentProgress())
    assert LocalCompletionsAPI.parse_logprobs(reply, ctxlens=[3]) == [pytest.approx(ours[0], abs=1e-6)]
    found = reply["choices"][0]["logprobs"]
    assert [len(found[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [6] * 4
    assert found["token_logprobs"][0] is None
    assert reply["usage"] == {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"max_tokens": 5}, "'max_tokens' = 5 is not supported"),
        ({"temperature": 1}, "'temperature' = 1"),
        ({"logprobs": 21}, "'logprobs' = 21 .* 0 to 20 are"),
        ({"logprobs": -1}, "'logprobs' = -1"),
        ({"logprobs": None, "return_tokens_as_token_ids": True}, "'return_tokens_as_token_ids' = True"),
        ({"prompt": []}, "'prompt' is empty"),
        ({"prompt": ["a"] * 200}, "200 prompts with n=1 are 200 answers"),
        ({"prompt": [-1]}, "'prompt' has a token id that is not 0 to"),
        ({"prompt": [2] * 300}, "'prompt' has 300 tokens; this model takes 256"),
        ({"prompt": "word " * 3000}, "context_length_exceeded|more than 256 tokens|tokens; this model takes 256"),
    ],
)
def test_what_cannot_be_scored_is_refused(server: OpenAiServer, changed: dict[str, Any], said: str) -> None:
    request = {"model": "tiny_gemma", "prompt": [2, 3], "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
    with pytest.raises(UserError, match=said):
        server.send("POST", "/completions", request | changed, 1)


def test_the_service_gives_as_many_likely_tokens_as_asked(server: OpenAiServer) -> None:
    """The 20 likeliest by id contain the 1; by text, tokens with one text become one."""
    request = {"model": "tiny_gemma", "prompt": [2, 40, 41], "max_tokens": 1, "temperature": 0, "echo": True}
    replies = [
        server.send("POST", "/completions", request | more, 1)["choices"][0]["logprobs"]
        for more in (
            {"logprobs": 1, "return_tokens_as_token_ids": True},
            {"logprobs": 20, "return_tokens_as_token_ids": True},
            {"logprobs": 20},
            {"logprobs": 0},
        )
    ]
    one, twenty, texts, none = replies
    assert one["tokens"][:3] == ["token_id:2", "token_id:40", "token_id:41"]
    assert none["top_logprobs"] is None
    for place in (1, 2, 3):
        best = twenty["top_logprobs"][place]
        assert len(best) == 20
        assert one["top_logprobs"][place].items() <= best.items()
        assert max(best.values()) == next(iter(one["top_logprobs"][place].values()))
        assert set(texts["top_logprobs"][place].values()) <= set(best.values())
    assert all(each["token_logprobs"] == one["token_logprobs"] for each in replies)


def test_bounds_of_the_server_hold_for_its_engine(served: TritonServer, server: OpenAiServer, tmp_path: Path) -> None:
    """The same engine is read as both sides: its own divergence is exact, and the bounds of another's are below it."""
    tokenizer = load_tokenizer(MODEL)
    text = cut(
        "user", lambda: ["The river is wide. A baker makes bread."] * 30, tokenizer, length=64, tokens=189, observed=0
    )
    with OpenVinoEngine(COMPUTES).open(served.repository.path.parent / "engine") as session:
        assert isinstance(session, LogitsSession)
        side = Side("tiny_gemma", session)
        names = {"model": "tiny_gemma", "url": server.url, "served_model": server.model}
        found = measure_served(side, server, [text], 20, SilentProgress(), **names)
        names = {"model": "tiny_gemma", "qformat": "none", "engine": "openvino", "reference": "tiny_gemma"}
        exact = measure(side, side, [text], tmp_path, SilentProgress(), **names, greedy=None, layers=None).overall
        forcing = session.teacher_forcing()
        ours = next(forcing.logits(forcing.hidden([text.rows[0][:-1]], 63), 63))[0]
    answer = server.answers.get(
        {"model": "tiny_gemma", "prompt": list(text.rows[0]), "max_tokens": 1, "temperature": 0, "logprobs": 20,
         "echo": True, "return_tokens_as_token_ids": True}
    )  # fmt: skip
    assert found.overall.tokens == exact.tokens == text.tokens
    assert 0 <= found.overall.kl_mean_at_least <= ROUNDING
    assert found.overall.top1_agreement >= 1 - 2 / text.tokens
    assert found.overall.perplexity == pytest.approx(exact.reference_perplexity, rel=ROUNDING)
    assert found.overall.reference_perplexity == pytest.approx(exact.reference_perplexity, rel=1e-6)
    # another 16-bit model, whose logits are the engine's at half the temperature: its exact divergence is known
    targets = np.array(text.rows[0][1:])
    known = KnownTokens(*(np.array(answer[name]) for name in ("ids", "logprobs")), targets, np.array(answer["own"]))
    bounded, whole = bound_logits(2 * ours, known), compare_logits(2 * ours, ours.copy(), targets)
    assert (bounded.kl_at_least <= whole.kl + ROUNDING).all()
    assert bounded.kl_at_least.mean() > 0.5 * whole.kl.mean()
    assert (bounded.same_top == whole.same_top).mean() >= 1 - 2 / text.tokens
    assert bounded.other_nll == pytest.approx(whole.other_nll, abs=ROUNDING)


def test_the_command_writes_the_result_and_forgets_the_answers(
    served: TritonServer,
    openai_service: OpenAiFrontend,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`make evaluate eval.url=...` builds nothing; the answers are kept only until there is a result."""
    monkeypatch.chdir(tmp_path)
    words = ["evaluate", f"eval.url={served.openai_url}", "model=tiny_gemma", "eval=mini_answers", "eval.limit=1"]
    assert main([*words, "eval.num_fewshot=1", f"build.max_seq_len={LIMITS.max_seq_len}"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"tiny_gemma +served +12 +\d", shown)
    assert "There is no baseline" in shown
    (found,) = (tmp_path / "artifacts").rglob("evaluation.json")
    result = EvalResult.load(found)
    assert (result.questions, result.qformat, result.engine) == (12, "served", "server")
    assert (found.parent / "lm_eval_results.json").is_file()
    assert not list((tmp_path / "artifacts").glob("build/*"))
    assert list((tmp_path / "runs" / ".answers").iterdir()) == []


def test_fidelity_of_a_server_ends_with_bounds(
    served: TritonServer,
    openai_service: OpenAiFrontend,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`make fidelity eval.url=...` builds the 16-bit model alone, and shows no bound as the divergence itself."""
    monkeypatch.chdir(tmp_path)
    words = ["fidelity", f"eval.url={served.openai_url}", "model=tiny_gemma", "fidelity.tokens=100"]
    assert main([*words, "fidelity.window=51", "fidelity.top_logprobs=5"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"bundled +100( +>= \S+){4} +\d+\.\d\d +[01]\.\d{4}", shown)
    assert "There is no upper bound" in " ".join(shown.split())
    (found,) = (tmp_path / "artifacts").rglob("bounds.json")
    result = BoundsResult.from_json(json.loads(found.read_text()), str(found))
    assert (result.overall.tokens, result.top_logprobs, result.window) == (100, 5, 51)
    assert result.overall.kl_mean_at_least < 1e-3
    assert 0.98 <= result.overall.top1_agreement <= 1
    assert result.overall.perplexity_ratio == pytest.approx(1, abs=0.02)
    assert not list((tmp_path / "artifacts").rglob("fidelity.json"))
    assert list((tmp_path / "runs" / ".answers").iterdir()) == []
