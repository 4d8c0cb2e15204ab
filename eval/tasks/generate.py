"""Write the mini_mmlu task files, one per subject and group, from the data: `python -m eval.tasks.generate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eval.dataset import MINI_MMLU
from pipelines.host.files import write_text

FOLDER = Path(__file__).parent
"""Folder of the task files."""


def task_files(data: Path = MINI_MMLU) -> dict[str, dict[str, Any]]:
    """Return the content of every task file by name, structured like lm-eval's `mmlu`."""
    categories: dict[str, str] = json.loads((data / "subjects.json").read_text(encoding="utf-8"))
    groups = sorted(set(categories.values()))
    files = {"_mini_mmlu.yaml": _group("mini_mmlu", [f"mini_mmlu_{group}" for group in groups])}
    for group in groups:
        files[f"_mini_mmlu_{group}.yaml"] = _group(f"mini_mmlu_{group}", [f"mini_mmlu_{group}_tasks"])
    for subject, category in sorted(categories.items()):
        words = subject.replace("_", " ")
        files[f"mini_mmlu_{subject}.yaml"] = {
            "include": "_mini_mmlu_template_yaml",
            "task": f"mini_mmlu_{subject}",
            "task_alias": words,
            "tag": f"mini_mmlu_{category}_tasks",
            "dataset_name": subject,
            "dataset_kwargs": {"subject": subject},
            "description": f"The following are multiple choice questions (with answers) about {words}.\n\n",
        }
    return files


def _group(name: str, members: list[str]) -> dict[str, Any]:
    return {
        "group": name,
        "task": members,
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
        "metadata": {"version": 1},
    }


def write(folder: Path = FOLDER, data: Path = MINI_MMLU) -> None:
    """Replace the generated task files in `folder`."""
    import yaml

    files = task_files(data)
    for old in folder.glob("*mini_mmlu*.yaml"):
        if old.name not in files:
            old.unlink()
    for name, content in files.items():
        write_text(folder / name, yaml.safe_dump(content, sort_keys=False, width=120))


if __name__ == "__main__":
    write()
