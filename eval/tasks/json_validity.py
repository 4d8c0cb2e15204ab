"""Answers as JSON that follows a schema: the share that a program could read."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from eval.dataset import MINI_MMLU, open_questions, read_subjects
from eval.spec import QUESTIONS_PER_SCHEMA, EvalSpec
from eval.task_names import JSON_VALIDITY
from pipelines.domain.errors import UserError

ANSWER_TOKENS = 256
SEED = 1234
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

    Args:
        spec: `guided` decides whether the engine is made to follow the schema.

    Raises:
        UserError: worked examples were asked for.
    """
    from lm_eval.api.group import Group
    from lm_eval.tasks import TaskManager

    if spec.num_fewshot:
        raise UserError(
            f"eval.num_fewshot={spec.num_fewshot} has no effect on eval.task='{JSON_VALIDITY}'.",
            todo="Set eval.num_fewshot=0.",
        )
    questions = _questions(spec.dataset_path or MINI_MMLU)
    means = [{"metric": name, "weight_by_size": True} for name in METRICS]
    group = Group.from_config(
        {"group": JSON_VALIDITY, "task": [], "aggregate_metric_list": means, "metadata": {"version": 1}}
    )
    for name, schema in SCHEMAS.items():
        group.add(_task(name, schema, questions, guided=spec.guided))
    tasks: dict[str, Any] = TaskManager(include_defaults=False).load([group])
    return tasks


def judge_json(doc: Mapping[str, str], results: Sequence[str]) -> dict[str, int]:
    """Return for an answer 0 or 1: whether it is JSON of the schema, and whether it is JSON at all."""
    try:
        found = json.loads(results[0], parse_constant=_refuse)
    except (ValueError, RecursionError):
        return {"follows_schema": 0, "is_json": 0}
    return {"follows_schema": int(_validator(doc["schema"]).is_valid(found)), "is_json": 1}


def _refuse(constant: str) -> None:
    """Refuse NaN and Infinity, which Python reads, but which are no JSON."""
    raise ValueError(constant)


@cache
def _validator(schema: str) -> Any:
    import jsonschema

    return jsonschema.Draft202012Validator(json.loads(schema))


def _questions(data: Path) -> list[str]:
    subjects = sorted(path.name for path in data.iterdir() if path.is_dir())
    return [
        row["question"].strip()
        for splits in read_subjects(data, subjects).values()
        for row in open_questions(splits)["test"]
    ]


def _task(name: str, schema: Schema, questions: Sequence[str], *, guided: bool) -> Any:
    import datasets
    from lm_eval.api.task import ConfigurableTask

    text = json.dumps(schema, separators=(",", ":"))
    asked = random.Random(f"{SEED} {name}").sample(questions, QUESTIONS_PER_SCHEMA)
    rows = [{"prompt": PROMPT.format(schema=text, question=question), "schema": text} for question in asked]
    metric = {"aggregation": "mean", "higher_is_better": True}
    config = {
        "task": f"{JSON_VALIDITY}_{name}",
        "custom_dataset": lambda **_metadata: {"test": datasets.Dataset.from_list(rows)},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{schema}}",
        "generation_kwargs": {
            "until": [STOP],
            "max_gen_toks": ANSWER_TOKENS,
            "do_sample": False,
            **({"json_schema": text} if guided else {}),
        },
        "process_results": judge_json,
        "metric_list": [{"metric": name, **metric} for name in METRICS],
        "num_fewshot": 0,
        "metadata": {"version": 1.0},
    }
    return ConfigurableTask(config=config)
