"""Build lm-eval's tasks with their questions in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eval.dataset import MINI_MMLU, Splits, as_datasets, open_questions, read_subjects
from eval.own import load_own
from eval.spec import EvalSpec
from eval.task_names import JSON_VALIDITY, MMLU, OWN_READER, PASSKEY
from eval.tasks.json_validity import load_json_validity
from eval.tasks.local import load_lm_eval_task
from eval.tasks.passkey import load_passkey
from pipelines.domain.errors import Fault, UserError

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
    if spec.own is not None and spec.dataset_path is not None:
        return load_own(spec.task, spec.dataset_path, spec.own)
    if spec.task == PASSKEY:
        return load_passkey(spec, tokenizer)
    if spec.task == JSON_VALIDITY:
        return load_json_validity(spec)
    from lm_eval.tasks import TaskManager

    shots = OWN_SHOTS if spec.num_fewshot is None else spec.num_fewshot
    index = {name: entry.cfg for name, entry in _task_index(spec.task).items() if entry.cfg}
    subjects = {cfg["dataset_name"] for cfg in _members(index[spec.task], index) if "dataset_name" in cfg}
    data = read_subjects(spec.dataset_path or MINI_MMLU, sorted(subjects))
    _check_examples(data, shots)
    if spec.task == "mini_answers":
        data = {subject: open_questions(splits) for subject, splits in data.items()}
    group = _group(index[spec.task], index, data, shots)
    tasks: dict[str, Any] = TaskManager(include_defaults=False).load([group])
    return tasks


def _members(cfg: Config, index: Mapping[str, Config]) -> Iterator[Config]:
    """Yield the tasks of a group: subgroups are found by name, tasks by their tag."""
    for member in cfg["task"]:
        if member in index:
            yield from _members(index[member], index)
        else:
            yield from (index[name] for name in sorted(index) if index[name].get("tag") == member)


def _task_index(task: str) -> Mapping[str, Any]:
    """Return lm-eval's index of one folder, because indexing all its tasks would take seconds."""
    import lm_eval.tasks

    theirs = Path(lm_eval.tasks.__file__).parent / "mmlu" / "default"
    folder = theirs if task == MMLU else Path(__file__).parent
    index: Mapping[str, Any] = lm_eval.tasks.TaskManager(include_defaults=False, include_path=folder).task_index
    return index


def _check_examples(data: Mapping[str, Splits], num_fewshot: int) -> None:
    faults = [
        Fault(f"eval.num_fewshot={num_fewshot}, but 'dev' of {subject} has {len(splits['dev'])} examples.")
        for subject, splits in data.items()
        if len(splits["dev"]) < num_fewshot
    ]
    if faults:
        raise UserError.of(faults)


def _group(cfg: Config, index: Mapping[str, Config], data: Mapping[str, Splits], num_fewshot: int) -> Any:
    """Build a group with its members: subgroups are found by name, tasks by their tag."""
    from lm_eval.api.group import Group

    group = Group.from_config(cfg)
    for member in cfg["task"]:
        if member in index:
            group.add(_group(index[member], index, data, num_fewshot))
        else:
            for name in sorted(name for name, task in index.items() if task.get("tag") == member):
                group.add(_task(index[name], data, num_fewshot))
    return group


def _task(cfg: Config, data: Mapping[str, Splits], num_fewshot: int) -> Any:
    from lm_eval.api.task import ConfigurableTask

    splits = data[cfg["dataset_name"]]
    config = {key: value for key, value in cfg.items() if key not in ("tag", "dataset_kwargs")}
    config["custom_dataset"] = lambda **_metadata: as_datasets(splits)
    config["num_fewshot"] = num_fewshot
    return ConfigurableTask(config=config)
