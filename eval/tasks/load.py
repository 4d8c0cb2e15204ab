"""Build lm-eval's tasks with their questions in memory."""

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import lm_eval.tasks
from lm_eval.api.group import Group
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager

from eval.dataset import (
    MINI_MMLU,
    MINI_PICTURES,
    Row,
    Splits,
    as_datasets,
    open_questions,
    picture_questions,
    read_own,
    read_subjects,
)
from eval.spec import (
    JSON_VALIDITY,
    MMLU,
    OWN_READER,
    PASSKEY,
    PASSKEY_QUESTIONS,
    PICTURES,
    QUESTIONS_PER_SCHEMA,
    EvalSpec,
)
from eval.tasks.local import load_lm_eval_task
from pipelines.domain.errors import Fault, UserError, refuse


def grouped(name: str, tasks: Iterable[Mapping[str, Any]], **group: Any) -> dict[str, Any]:
    """Return lm-eval's `TaskDict` of a group of tasks, made from their configurations."""
    tree = Group.from_config({"group": name, "task": [], **group})
    for task in tasks:
        config = {
            "custom_dataset": lambda rows=task["rows"], **_metadata: as_datasets({"test": rows}),
            "test_split": "test",
            "num_fewshot": 0,
            **task,
        }
        del config["rows"]
        tree.add(ConfigurableTask(config=config))
    return _loaded(tree)


def _loaded(group: Group) -> dict[str, Any]:
    tasks: dict[str, Any] = TaskManager(include_defaults=False).load([group])
    return tasks


# A number hidden in a long text, at several depths and lengths up to the engine's own maximum, to be written down.
#
# After Mohtashami and Jaggi, *Landmark Attention: Random-Access Infinite Context Length for Transformers*, 2023. The
# text is made for the tokenizer and the engine: it is as many tokens long as a prompt may be, a half and a quarter of
# that.

ANSWER_TOKENS = 16
SHARES = (4, 2, 1)
"""The longest prompt is divided by these."""
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Where the number stands: 0 is the beginning of the text."""
SEED = 1234
OPENING = "A pass key is hidden in this text. Find it and remember it."
HIDDEN = "The pass key is {key}. Remember it. {key} is the pass key."
FIRST_NUMBER = [{"function": "regex", "regex_pattern": r"(\d+)"}, {"function": "take_first"}]
MEAN = {"aggregation": "mean", "higher_is_better": True}
QUESTION = "\n\nWhat is the pass key? The pass key is"


def load_passkey(spec: EvalSpec, tokenizer: Any) -> dict[str, Any]:
    """Return lm-eval's `TaskDict`: one task per length, named by its tokens, with the answer's number to be equal.

    Args:
        spec: `max_length` is the longest prompt with its answer, `max_prompt` the longest prompt.
        tokenizer: counts tokens.

    Raises:
        UserError: the engine takes too few tokens for any text, or worked examples were asked for.
    """
    _refuse_examples(spec)
    longest = min(spec.max_length - ANSWER_TOKENS, spec.max_prompt or spec.max_length)
    least = 2 * SHARES[0] * _count(_prompt([HIDDEN.format(key=10_000)]), tokenizer)
    if longest < least:
        raise UserError(
            f"eval.task='{PASSKEY}' needs an engine for prompts of {least} tokens or more; this one takes {longest}.",
            todo=f"Set build.max_input_len={least} and build.max_seq_len={least + ANSWER_TOKENS}, or more.",
        )
    sentences = [f"{row['question'].strip()} {row['answer']}." for row in _questions(spec)]  # both models may know them
    tasks = [
        {
            "task": f"{PASSKEY}_{tokens}",
            "rows": passkey_rows(tokens, sentences, tokenizer),
            "output_type": "generate_until",
            "doc_to_text": "{{prompt}}",
            "doc_to_target": "{{key}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": ANSWER_TOKENS, "do_sample": False},
            "filter_list": [{"name": "none", "filter": FIRST_NUMBER}],
            "metric_list": [{"metric": "exact_match", **MEAN}],
            "metadata": {"version": 1.0},
        }
        for tokens in (longest // share for share in SHARES)
    ]
    return grouped(PASSKEY, tasks, metadata={"version": 1})


def _refuse_examples(spec: EvalSpec) -> None:
    if spec.num_fewshot:
        raise UserError(
            f"eval.num_fewshot={spec.num_fewshot} has no effect on eval.task='{spec.task}'.",
            todo="Set eval.num_fewshot=0.",
        )


def _questions(spec: EvalSpec) -> list[Row]:
    """Return the bundled questions, without options."""
    data = spec.dataset_path or MINI_MMLU
    subjects = sorted(path.name for path in data.iterdir() if path.is_dir())
    return [row for splits in read_subjects(data, subjects).values() for row in open_questions(splits)["test"]]


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
    for left in range(len(filler), -1, -1):  # a sentence less each time, since tokens of sentences do not quite add up
        at = round(depth * left)
        text = _prompt([*filler[:at], HIDDEN.format(key=key), *filler[at:left]])
        if _count(text, tokenizer) <= tokens:
            return {"prompt": text, "key": str(key)}
    raise UserError(f"eval.task='{PASSKEY}': no text of {tokens} tokens can be made with this tokenizer.")


def _prompt(sentences: Sequence[str]) -> str:
    return f"{OPENING}\n\n{' '.join(sentences)}{QUESTION}"


def _count(text: str, tokenizer: Any, *, special: bool = True) -> int:
    return len(tokenizer.encode(text, add_special_tokens=special, verbose=False))


# Answers as JSON that follows a schema: the share that a program could read.

JSON_VALIDITY_ANSWER_TOKENS = 256
STOP = "\nQuestion:"
"""Ends what an unguided model goes on with; no JSON has it."""
PROMPT = "Answer with JSON that follows this schema: {schema}\nQuestion: {question}\nJSON:"
METRICS = ("follows_schema", "is_json")
Schema = dict[str, Any]


def _object(optional: Sequence[str] = (), **properties: Schema) -> Schema:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


TEXT: Schema = {"type": "string"}
WORD: Schema = {"type": "string", "maxLength": 20}
SHARE: Schema = {"type": "number", "minimum": 0, "maximum": 1}
FIELDS: Schema = {"enum": ["nature", "society", "arts", "other"]}
SCHEMAS: dict[str, Schema] = {
    "text": _object(answer=TEXT),
    "word": _object(answer=WORD),
    "integer": _object(answer=WORD, letters={"type": "integer", "minimum": 1, "maximum": 40}),
    "number": _object(answer=WORD, confidence=SHARE),
    "boolean": _object(answer=WORD, certain={"type": "boolean"}),
    "choice": _object(answer=WORD, field=FIELDS),
    "pattern": _object(answer=WORD, code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    "any_of": _object(answer={"anyOf": [{"type": "integer"}, WORD, {"type": "null"}]}),
    "optional": _object(("reason", "source"), answer=WORD, reason=WORD, source=WORD),
    "list": _object(answers={"type": "array", "items": WORD, "minItems": 1, "maxItems": 3}),
    "nested": _object(answer=_object(value=WORD, kind=FIELDS), asked=_object(about=WORD)),
    "objects": _object(
        answers={"type": "array", "items": _object(value=WORD, confidence=SHARE), "minItems": 1, "maxItems": 2}
    ),
}
"""Schemas by name, made of what llguidance and xgrammar both heed."""


def load_json_validity(spec: EvalSpec) -> dict[str, Any]:
    """Return lm-eval's `TaskDict`: one task per schema.

    Raises:
        UserError: worked examples were asked for.
    """
    _refuse_examples(spec)
    questions = [row["question"].strip() for row in _questions(spec)]
    tasks = [
        _of_schema(name, json.dumps(schema, separators=(",", ":")), questions, spec) for name, schema in SCHEMAS.items()
    ]
    means = [{"metric": name, "weight_by_size": True} for name in METRICS]
    return grouped(JSON_VALIDITY, tasks, aggregate_metric_list=means, metadata={"version": 1})


def _of_schema(name: str, schema: str, questions: Sequence[str], spec: EvalSpec) -> dict[str, Any]:
    chosen = random.Random(f"{SEED} {name}").sample(questions, QUESTIONS_PER_SCHEMA)
    return {
        "task": f"{JSON_VALIDITY}_{name}",
        "rows": [{"prompt": PROMPT.format(schema=schema, question=question), "schema": schema} for question in chosen],
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{schema}}",
        "generation_kwargs": {
            "until": [STOP],
            "max_gen_toks": JSON_VALIDITY_ANSWER_TOKENS,
            "do_sample": False,
            **({"json_schema": schema} if spec.guided else {}),
        },
        "process_results": judge_json,
        "metric_list": [{"metric": name, **MEAN} for name in METRICS],
        "metadata": {"version": 1.0},
    }


def judge_json(doc: Mapping[str, str], results: Sequence[str]) -> dict[str, int]:
    """Return for an answer 0 or 1: whether it is JSON of the schema, and whether it is JSON at all."""
    try:
        answer = json.loads(results[0], parse_constant=_refuse)
    except (ValueError, RecursionError):
        return {"follows_schema": 0, "is_json": 0}
    return {"follows_schema": int(_validator(doc["schema"]).is_valid(answer)), "is_json": 1}


def _refuse(constant: str) -> None:
    """Refuse NaN and Infinity, which Python reads, but which are no JSON."""
    raise ValueError(constant)


@cache
def _validator(schema: str) -> Any:
    import jsonschema

    return jsonschema.Draft202012Validator(json.loads(schema))


# Questions about pictures.


def load_pictures(spec: EvalSpec) -> dict[str, Any]:
    """Return lm-eval's `TaskDict`: one task per kind of question, each after its picture.

    Raises:
        UserError: there is nothing that sees, worked examples were asked for, or the data are no such questions.
    """
    if spec.vision is None:
        raise UserError(
            f"eval.task='{PICTURES}' asks about pictures, and this model has no vision encoder.",
            todo="Set multimodal=llava with a LLaVA's folder, or model=tiny_llava, or ask a task of text.",
        )
    _refuse_examples(spec)
    tasks = [
        {
            "task": f"{PICTURES}_{subject}",
            "rows": rows,
            "output_type": "multiple_choice",
            "doc_to_text": picture_prompt,
            "doc_to_choice": lambda doc: doc["choices"],
            "doc_to_target": "answer",
            "metric_list": [{"metric": "acc", **MEAN}],
            "metadata": {"version": 1.0},
        }
        for subject, rows in picture_questions(spec.dataset_path or MINI_PICTURES).items()
    ]
    means = [{"metric": "acc", "weight_by_size": True}]
    return grouped(PICTURES, tasks, aggregate_metric_list=means, metadata={"version": 1})


def picture_prompt(doc: Mapping[str, Any]) -> str:
    """Return the prompt of a question about a picture, which stands at its beginning."""
    return f"<image>\n{doc['question']}\nAnswer:"


# The user's own questions.


def _own_tasks(settings: EvalSpec, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield a task for each subject, in MMLU's form without worked examples."""
    for subject in dict.fromkeys(row["subject"] for row in rows):
        about = "" if subject == settings.own_name else f" about {subject}"
        yield {
            "task": f"{settings.task}_{subject}",
            "rows": [row for row in rows if row["subject"] == subject],
            "output_type": "multiple_choice",
            "description": f"The following are multiple choice questions (with answers){about}.\n\n",
            "doc_to_text": _own_prompt,
            "doc_to_choice": lambda doc: list(ascii_uppercase[: len(doc["choices"])]),
            "doc_to_target": "answer",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        }


def _own_prompt(doc: Mapping[str, Any]) -> str:
    lines = [f"{letter}. {text}" for letter, text in zip(ascii_uppercase, doc["choices"], strict=False)]
    return "\n".join([doc["question"], *lines, "Answer:"])


Config = dict[str, Any]
OWN_SHOTS = 5
"""Worked examples of MMLU and the bundled tasks unless others are asked for, as in MMLU's paper."""


def load_tasks(spec: EvalSpec, tokenizer: Any = None) -> dict[str, Any]:
    """Return lm-eval's `TaskDict` of the task: its groups and its tasks, ready to run.

    Args:
        spec: the task and its settings.
        tokenizer: of the model; needed for a task that is made as long as the engine allows.

    Prompts, metric and aggregation are those of the task files (lm-eval's own, but for the bundled tasks). The
    questions of MMLU and of the bundled tasks are read by our own reader, so that a Hub snapshot and a jsonl tree give
    the same, checked rows.

    Raises:
        UserError: the questions are missing or malformed, or there are too few worked examples.
    """
    if spec.task not in OWN_READER:
        return load_lm_eval_task(spec.task, spec)
    if spec.path is not None and spec.dataset_path is not None:
        rows = read_own(spec.dataset_path, spec)
        return grouped(spec.task, _own_tasks(spec, rows), aggregate_metric_list=[{"metric": "acc"}])
    if spec.task == PASSKEY:
        return load_passkey(spec, tokenizer)
    if spec.task == JSON_VALIDITY:
        return load_json_validity(spec)
    if spec.task == PICTURES:
        return load_pictures(spec)
    shots = OWN_SHOTS if spec.num_fewshot is None else spec.num_fewshot
    # the index of one folder, because indexing all tasks of lm-eval would take seconds
    theirs = Path(lm_eval.tasks.__file__).parent / "mmlu" / "default"
    folder = theirs if spec.task == MMLU else Path(__file__).parent
    entries = TaskManager(include_defaults=False, include_path=folder).task_index
    index = {name: entry.cfg for name, entry in entries.items() if entry.cfg}
    subjects = {cfg["dataset_name"] for cfg in index.values() if "dataset_name" in cfg}
    data = read_subjects(spec.dataset_path or MINI_MMLU, sorted(subjects))
    refuse(
        [
            Fault(f"eval.num_fewshot={shots}, but 'dev' of {subject} has {len(splits['dev'])} examples.")
            for subject, splits in data.items()
            if len(splits["dev"]) < shots
        ]
    )
    if spec.task == "mini_answers":
        data = {subject: open_questions(splits) for subject, splits in data.items()}
    return _loaded(_group(index[spec.task], index, data, shots))


def _group(cfg: Config, index: Mapping[str, Config], data: Mapping[str, Splits], num_fewshot: int) -> Any:
    """Build a group with its members: subgroups are found by name, tasks by their tag."""
    group = Group.from_config(cfg)
    for member in cfg["task"]:
        if member in index:
            group.add(_group(index[member], index, data, num_fewshot))
        else:
            for name in sorted(name for name, task in index.items() if task.get("tag") == member):
                group.add(_task(index[name], data, num_fewshot))
    return group


def _task(cfg: Config, data: Mapping[str, Splits], num_fewshot: int) -> Any:
    """Build a task. lm-eval writes the source of its functions into results, so their text stays as it is."""
    splits = data[cfg["dataset_name"]]
    config = {key: value for key, value in cfg.items() if key not in ("tag", "dataset_kwargs")}
    config["custom_dataset"] = lambda **_metadata: as_datasets(splits)
    config["num_fewshot"] = num_fewshot
    return ConfigurableTask(config=config)
