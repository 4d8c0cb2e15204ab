"""A number hidden in a long text, at several depths and lengths up to the engine's own maximum, to be written down.

After Mohtashami and Jaggi, *Landmark Attention: Random-Access Infinite Context Length for Transformers*, 2023. The text
is made for the tokenizer and the engine: it is as many tokens long as a prompt may be, a half and a quarter of that.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eval.dataset import MINI_MMLU, open_questions, read_subjects
from eval.spec import PASSKEY_QUESTIONS, EvalSpec
from eval.task_names import PASSKEY
from pipelines.domain.errors import UserError

ANSWER_TOKENS = 16
SHARES = (4, 2, 1)
"""The longest prompt is divided by these."""
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Where the number stands: 0 is the beginning of the text."""
SEED = 1234
OPENING = "A pass key is hidden in this text. Find it and remember it."
HIDDEN = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "\n\nWhat is the pass key? The pass key is"


def load_passkey(spec: EvalSpec, tokenizer: Any) -> dict[str, Any]:
    """Return lm-eval's `TaskDict`: one task per length, named by its tokens, with the answer's number to be equal.

    Args:
        spec: `max_length` is the longest prompt with its answer, `max_prompt` the longest prompt.
        tokenizer: counts tokens.

    Raises:
        UserError: the engine takes too few tokens for any text, or worked examples were asked for.
    """
    from lm_eval.api.group import Group
    from lm_eval.tasks import TaskManager

    if spec.num_fewshot:
        raise UserError(
            f"eval.num_fewshot={spec.num_fewshot} has no effect on eval.task='{PASSKEY}'.",
            todo="Set eval.num_fewshot=0.",
        )
    sentences = _sentences(spec.dataset_path or MINI_MMLU)
    group = Group.from_config({"group": PASSKEY, "task": [], "metadata": {"version": 1}})
    for tokens in _lengths(spec, tokenizer):
        group.add(_task(tokens, passkey_rows(tokens, sentences, tokenizer)))
    tasks: dict[str, Any] = TaskManager(include_defaults=False).load([group])
    return tasks


def _lengths(spec: EvalSpec, tokenizer: Any) -> list[int]:
    longest = min(spec.max_length - ANSWER_TOKENS, spec.max_prompt or spec.max_length)
    least = 2 * SHARES[0] * _count(_prompt([HIDDEN.format(key=10_000)]), tokenizer)
    if longest < least:
        raise UserError(
            f"eval.task='{PASSKEY}' needs an engine for prompts of {least} tokens or more; this one takes {longest}.",
            todo=f"Set build.max_input_len={least} and build.max_seq_len={least + ANSWER_TOKENS}, or more.",
        )
    return [longest // share for share in SHARES]


def _sentences(data: Path) -> list[str]:
    """Return the statements that the bundled questions make: the filler, which both models may know."""
    subjects = sorted(path.name for path in data.iterdir() if path.is_dir())
    rows = [row for splits in read_subjects(data, subjects).values() for row in open_questions(splits)["test"]]
    return [f"{row['question'].strip()} {row['answer']}." for row in rows]


def passkey_rows(tokens: int, sentences: Sequence[str], tokenizer: Any) -> list[dict[str, str]]:
    """Return the questions of one length; the same arguments give the same ones.

    Args:
        tokens: most tokens of a prompt; it has as many whole sentences as fit.
        sentences: what the text is filled with, at random.
        tokenizer: counts tokens.
    """
    draw = random.Random(f"{SEED} {tokens}")
    sizes = {sentence: max(1, _count(f" {sentence}", tokenizer, special=False)) for sentence in sentences}
    return [_row(tokens, DEPTHS[at % len(DEPTHS)], sizes, tokenizer, draw) for at in range(PASSKEY_QUESTIONS)]


def _row(tokens: int, depth: float, sizes: dict[str, int], tokenizer: Any, draw: random.Random) -> dict[str, str]:
    key, names = draw.randrange(10_000, 100_000), list(sizes)
    filler: list[str] = []
    room = tokens - _count(_prompt([HIDDEN.format(key=key)]), tokenizer)
    while (sentence := draw.choice(names)) and room >= sizes[sentence]:
        filler.append(sentence)
        room -= sizes[sentence]
    for text in _shorter(filler, depth, key):
        if _count(text, tokenizer) <= tokens:
            return {"prompt": text, "key": str(key)}
    raise UserError(f"eval.task='{PASSKEY}': no text of {tokens} tokens can be made with this tokenizer.")


def _shorter(filler: list[str], depth: float, key: int) -> Iterator[str]:
    """Yield the prompt, and again with a sentence less each time, since tokens of sentences do not quite add up."""
    for kept in range(len(filler), -1, -1):
        at = round(depth * kept)
        yield _prompt([*filler[:at], HIDDEN.format(key=key), *filler[at:kept]])


def _prompt(sentences: Sequence[str]) -> str:
    return f"{OPENING}\n\n{' '.join(sentences)}{QUESTION}"


def _count(text: str, tokenizer: Any, *, special: bool = True) -> int:
    return len(tokenizer.encode(text, add_special_tokens=special, verbose=False))


def _task(tokens: int, rows: Sequence[dict[str, str]]) -> Any:
    import datasets
    from lm_eval.api.task import ConfigurableTask

    config = {
        "task": f"{PASSKEY}_{tokens}",
        "custom_dataset": lambda **_metadata: {"test": datasets.Dataset.from_list(list(rows))},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{key}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": ANSWER_TOKENS, "do_sample": False},
        "filter_list": [
            {"name": "none", "filter": [{"function": "regex", "regex_pattern": r"(\d+)"}, {"function": "take_first"}]}
        ],
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "num_fewshot": 0,
        "metadata": {"version": 1.0},
    }
    return ConfigurableTask(config=config)
