"""Write the task files of the bundled tasks, one per subject and group: `python -m scripts.bundled_tasks`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import eval.tasks
from eval.dataset import MINI_MMLU
from pipelines.host.files import write_text

FOLDER = Path(eval.tasks.__file__).parent
"""Folder of the task files."""


@dataclass(frozen=True, slots=True)
class Bundled:
    """A bundled task: one lm-eval task per subject, in groups as those of lm-eval's `mmlu`.

    Attributes:
        name: of the task, also of its template file.
        metric: whose mean is the accuracy of a group.
        description: first line of a prompt; `{}` is the subject.
    """

    name: str
    metric: str
    description: str


BUNDLED = (
    Bundled("mini_mmlu", "acc", "The following are multiple choice questions (with answers) about {}.\n\n"),
    Bundled("mini_answers", "exact_match", ""),
)
"""The bundled tasks: choose the letter of the answer, and write the answer itself."""


def task_files(data: Path = MINI_MMLU) -> dict[str, dict[str, Any]]:
    """Return the content of every task file by name, structured like lm-eval's `mmlu`."""
    categories: dict[str, str] = json.loads((data / "subjects.json").read_text(encoding="utf-8"))
    return {name: content for task in BUNDLED for name, content in _files_of(task, categories).items()}


def _files_of(task: Bundled, categories: dict[str, str]) -> dict[str, dict[str, Any]]:
    groups = sorted(set(categories.values()))
    files = {f"_{task.name}.yaml": _group(task, task.name, [f"{task.name}_{group}" for group in groups])}
    for group in groups:
        name = f"{task.name}_{group}"
        files[f"_{name}.yaml"] = _group(task, name, [f"{name}_tasks"])
    for subject, category in sorted(categories.items()):
        words = subject.replace("_", " ")
        files[f"{task.name}_{subject}.yaml"] = {
            "include": f"_{task.name}_template_yaml",
            "task": f"{task.name}_{subject}",
            "task_alias": words,
            "tag": f"{task.name}_{category}_tasks",
            "dataset_name": subject,
            "dataset_kwargs": {"subject": subject},
            "description": task.description.format(words),
        }
    return files


def _group(task: Bundled, name: str, members: list[str]) -> dict[str, Any]:
    return {
        "group": name,
        "task": members,
        "aggregate_metric_list": [{"metric": task.metric, "weight_by_size": True}],
        "metadata": {"version": 1},
    }


def write(folder: Path = FOLDER, data: Path = MINI_MMLU) -> None:
    """Replace the generated task files in `folder`."""
    import yaml

    files = task_files(data)
    for old in folder.glob("*mini_*.yaml"):
        if old.name not in files:
            old.unlink()
    for name, content in files.items():
        write_text(folder / name, yaml.safe_dump(content, sort_keys=False, width=120))


if __name__ == "__main__":
    write()
