"""What is served equals what the engine says, question by question, through lm-eval and the real server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from eval.answers import AnswerLog
from eval.harness import EvalResult, EvalSpec, evaluate
from eval.server import OpenAiServer
from eval.triton import TritonGrpc
from pipelines.cli.main import main
from pipelines.domain.errors import UserError
from pipelines.domain.progress import SilentProgress
from pipelines.engines.openvino.engine import OpenVinoEngine
from pipelines.serving.frontend import OpenAiFrontend
from pipelines.serving.process import TritonServer
from tests.support.served_gemma import LIMITS, MODEL


def asked(session: Any, task: str, **settings: Any) -> EvalResult:
    spec = EvalSpec(task, max_length=LIMITS.max_seq_len - 2, num_fewshot=1, **settings)
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
    """One question of each subject: the same prompts, the same choices or texts, log probabilities within 1e-3.

    Over OpenAI's interface as over Triton's.
    """
    with OpenVinoEngine().open(served.repository.path.parent / "engine") as session:
        engine = asked(session, task, limit=1)
    assert (server.model, triton.model) == ("tiny_gemma", "ensemble")
    assert engine.accuracy > 0.5
    for ours in (asked(server, task, limit=1), asked(triton, task, limit=1)):
        assert (ours.prompts_sha256, ours.questions) == (engine.prompts_sha256, 12)
        for served_record, engine_record in zip(ours.records, engine.records, strict=True):
            assert served_record.logprobs == pytest.approx(engine_record.logprobs, abs=1e-3)
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
    reply = server._sent("POST", "/completions", request, 1)
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
        ({"logprobs": 5}, "'logprobs' = 5"),
        ({"prompt": []}, "'prompt' has no tokens"),
        ({"prompt": ["a"] * 200}, "200 prompts with n=1 are 200 answers"),
        ({"prompt": [-1]}, "'prompt' has a token id that is not 0 to"),
        ({"prompt": [2] * 300}, "'prompt' has 300 tokens; this model takes 256"),
        ({"prompt": "word " * 3000}, "context_length_exceeded|more than 256 tokens|tokens; this model takes 256"),
    ],
)
def test_what_cannot_be_scored_is_refused(server: OpenAiServer, changed: dict[str, Any], said: str) -> None:
    request = {"model": "tiny_gemma", "prompt": [2, 3], "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
    with pytest.raises(UserError, match=said):
        server._sent("POST", "/completions", request | changed, 1)


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
