"""Prompts as chats are those of lm-eval's own `hf` model, token for token, and what cannot be rendered is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from eval.adapter import ChatPrompts, load_tokenizer
from eval.harness import evaluate
from eval.results import EvalResult
from eval.spec import EvalSpec
from pipelines.domain.errors import UserError
from pipelines.domain.progress import SilentProgress
from pipelines.engines.port import Generation, SamplingParams
from pipelines.serving.openai.channels import MARKS
from pipelines.settings.model import BUNDLED

SYSTEM = (
    "{% if messages[0].role == 'system' %}[S] {{ messages[0].content }}\n{% set messages = messages[1:] %}{% endif %}"
)
TURNS = (
    "{% for m in messages %}<turn>{{ m.role }}\n{{ m.content | trim }}</turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}{{ 'tools' if tools is not none }}"
)
TEMPLATES = {
    "with BOS": "{{ bos_token }}" + SYSTEM + TURNS,
    "without BOS": SYSTEM + TURNS,
    "no system": "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    + TURNS,
}


@pytest.fixture
def model(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """tiny_gemma with a chat template, and another token that ends a turn."""
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED / "models" / "tiny_gemma", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATES[getattr(request, "param", "with BOS")])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    return folder


@dataclass
class Recording:
    """A session that answers always the same and keeps what it was asked."""

    pairs: list[tuple[list[int], list[int]]] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    limits: SamplingParams | None = None
    answer: Sequence[int] = (5,)

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_error: object) -> None:
        return None

    def loglikelihood(self, pairs: Sequence[Any], _progress: object) -> list[tuple[float, bool]]:
        self.pairs += [(list(context), list(continuation)) for context, continuation in pairs]
        return [(-1.0, False)] * len(pairs)

    def generate(self, prompts: Sequence[Any], limits: SamplingParams, _progress: object) -> list[Generation]:
        self.prompts += [list(prompt) for prompt in prompts]
        self.limits = limits
        return [Generation([*self.answer], "stop")] * len(prompts)


def asked(model: Path, task: str, answer: Sequence[int] = (5,), **settings: Any) -> tuple[Recording, EvalResult]:
    session = Recording(answer=answer)
    spec = EvalSpec(task=task, max_length=1536, num_fewshot=2, limit=1, **settings)
    result = evaluate(session, model, spec, SilentProgress(), model="m", qformat="none", engine="e")
    assert isinstance(result, EvalResult)
    return session, result


def theirs(model: Path, task: str, **settings: Any) -> Any:
    """What lm-eval's `hf` model is given for the same questions, as token ids."""
    import lm_eval.evaluator
    from lm_eval.models.huggingface import HFLM

    from eval.tasks.load import load_tasks

    found: list[Any] = []

    class Seen(HFLM):  # type: ignore[misc]  # lm-eval ships no types
        def _loglikelihood_tokens(self, requests: Any, **_settings: Any) -> list[tuple[float, bool]]:
            found.extend((context, continuation) for _, context, continuation in requests)
            return [(-1.0, False)] * len(requests)

        def _model_generate(self, context: Any, **_settings: Any) -> Any:
            found.append(context[0].tolist())
            return context

    # a rendered chat has its special tokens, as in apply_chat_template(tokenize=True)
    lm = Seen(pretrained=str(model), device="cpu", batch_size=1, max_length=1536, add_bos_token=False)
    tasks = load_tasks(EvalSpec(task=task, max_length=1536, num_fewshot=2, limit=1))
    lm_eval.evaluator.evaluate(lm=lm, task_dict=tasks, limit=1, bootstrap_iters=1, apply_chat_template=True, **settings)
    return found


@pytest.mark.parametrize(
    ("model", "turns"),
    [*((template, True) for template in TEMPLATES), ("without BOS", False)],
    indirect=["model"],
)
def test_token_for_token_as_lm_evals_hf_model(model: Path, *, turns: bool) -> None:
    """Choices and written answers, worked examples as turns and in one message; BOS is never doubled."""
    template = (model / "chat_template.jinja").read_text()
    refuses = "raise_exception" in template
    settings: dict[str, Any] = {"fewshot_as_multiturn": turns, "system_instruction": None if refuses else "Be brief."}
    session, result = asked(model, "mini_mmlu", apply_chat_template=True, **settings)
    assert session.pairs == theirs(model, "mini_mmlu", **settings)
    written, _ = asked(model, "mini_answers", apply_chat_template=True, **settings)
    assert sorted(written.prompts) == sorted(theirs(model, "mini_answers", **settings))
    for prompt in (*(context for context, _ in session.pairs), *written.prompts):
        assert prompt.count(2) == prompt[:1].count(2) == ("bos_token" in template)
    assert result.shots.startswith("2-shot, chat template" + ("" if turns else " (examples in one turn)"))


def test_system_instruction_without_a_template_is_plain_text(model: Path) -> None:
    """As in lm-eval, it stands before the task's description."""
    plain, _ = asked(model, "mini_mmlu")
    session, result = asked(model, "mini_mmlu", system_instruction="Be brief.")
    text = load_tokenizer(model).decode(session.pairs[0][0])
    assert text.startswith("<bos>Be brief.\n\nThe following are")
    assert session.pairs != plain.pairs
    assert result.shots == "2-shot, system instruction"


def test_written_answers_end_with_a_turn(model: Path) -> None:
    """Instruct models end a turn with a token of generation_config.json that is not the tokenizer's EOS."""
    session, _ = asked(model, "mini_answers", apply_chat_template=True, fewshot_as_multiturn=True)
    assert session.limits is not None
    assert session.limits.stop_token_ids == {1, 7}


def test_reasoning_that_special_tokens_mark_is_no_part_of_an_answer(model: Path) -> None:
    """Magistral's, which are left out of the text."""
    vocabulary = Tokenizer.from_file(str(model / "tokenizer.json"))
    vocabulary.add_special_tokens(["[THINK]", "[/THINK]"])
    vocabulary.save(str(model / "tokenizer.json"))
    written = vocabulary.encode("[THINK]no\nno[/THINK]\nyes\nno", add_special_tokens=False).ids
    _, result = asked(model, "mini_answers", written, apply_chat_template=True)
    assert {record.choice for record in result.records} == {"yes"}


@pytest.mark.parametrize("thinks", [True, False])
def test_reasoning_is_no_part_of_an_answer(model: Path, thinks: bool) -> None:
    """As with lm-eval's `think_end_token`; stop strings (here a new line) end what follows it."""
    if thinks:
        template = model / "chat_template.jinja"
        template.write_text(template.read_text() + "{# <think> #}")
    written = load_tokenizer(model).encode("<think>no\nno</think>\nyes\nno", add_special_tokens=False)
    _, result = asked(model, "mini_answers", written, apply_chat_template=True)
    assert {record.choice for record in result.records} == {"yes" if thinks else "<think>no"}


@pytest.mark.parametrize(
    ("answer", "judged"),
    [
        ("<|channel|>analysis<|message|>no\nno<|end|><|start|>assistant<|channel|>final<|message|>yes\nno", "yes"),
        ("<|channel|>analysis<|message|>no", "analysisno"),  # cut before an answer
    ],
)
def test_the_analysis_of_harmony_is_no_part_of_an_answer(model: Path, answer: str, judged: str) -> None:
    template = model / "chat_template.jinja"
    template.write_text(template.read_text() + "{# <|channel|> #}")
    vocabulary = Tokenizer.from_file(str(model / "tokenizer.json"))
    vocabulary.add_special_tokens(list(MARKS))
    vocabulary.save(str(model / "tokenizer.json"))
    _, result = asked(
        model, "mini_answers", vocabulary.encode(answer, add_special_tokens=False).ids, apply_chat_template=True
    )
    assert {record.choice for record in result.records} == {judged}


def test_an_answer_that_is_begun_is_continued_as_transformers_does(model: Path) -> None:
    """lm-eval's `gen_prefix`: the last message is the beginning of the answer."""
    tokenizer = load_tokenizer(model)
    prompts = ChatPrompts(model, SilentProgress())
    for begun in ("The answer is", "The answer is "):
        messages = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": begun}]
        right = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=False, continue_final_message=True
        )
        assert prompts.render(messages, answers=False) == right


@pytest.mark.parametrize("model", ["no system"], indirect=True)
def test_a_system_instruction_that_the_template_refuses(model: Path) -> None:
    """lm-eval drops it with a warning; an instruction of the user's own must not be lost."""
    with pytest.raises(UserError, match=r"eval\.system_instruction has no effect: .* no system"):
        asked(model, "mini_mmlu", apply_chat_template=True, system_instruction="Be brief.")


def test_a_template_that_loops_is_stopped(model: Path) -> None:
    """It is code that came with the model, and runs in a process with a share of processor time."""
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (model / "chat_template.jinja").write_text(loop)
    with pytest.raises(UserError, match=r"chat template was stopped: it took more than 0\.5 s"):
        asked(model, "mini_mmlu", apply_chat_template=True)


def test_no_template(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    with pytest.raises(
        UserError, match=r"eval\.apply_chat_template=true, but the tokenizer at '.*' has no chat template"
    ):
        asked(model, "mini_mmlu", apply_chat_template=True)
