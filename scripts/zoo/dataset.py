"""Write mini_mmlu to disk in the layout and row format of cais/mmlu."""

import json
from collections.abc import Sequence
from pathlib import Path

from scripts.zoo.documents import write_jsonl
from scripts.zoo.quiz import Question, build_splits
from scripts.zoo.world import Subject

SPLIT_NAMES = ("dev", "validation", "test")

_README = """# mini_mmlu

{test} multiple-choice questions in the format of MMLU about {facts} facts of an synthetic domain, in
{subjects} subjects. Nobody can know the answers except a model trained on that world, such as those in
`pipelines/bundled/models`; any other model scores 25 %.

- `<subject>/{{dev,validation,test}}.jsonl`: rows as in cais/mmlu
  (`question`, `subject`, four `choices`, `answer` = index of the right one).
  `dev` holds the five examples of the prompt; {validation} validation questions.
- `subjects.json`: subject -> MMLU category.
- Every letter is right equally often in each test and validation file. Wrong options are other
  objects of the same relation. The facts shown in `dev` are not asked in `validation` or `test`.
- No validation or test question (same words, same set of options) occurs in the training text
  (`pipelines/bundled/corpus.jsonl` and what `scripts.zoo` trains on). The facts themselves do: that
  is the knowledge being measured.

Made from a seed by `make zoo`; do not edit by hand. Licence: Apache-2.0, as the repository.
"""


def _row(question: Question) -> dict[str, object]:
    return {
        "question": question.question,
        "subject": question.subject,
        "choices": list(question.choices),
        "answer": question.answer,
    }


def write_dataset(world: Sequence[Subject], out_dir: Path) -> None:
    """Write one folder per subject, subjects.json and README.md into ``out_dir``."""
    splits = build_splits(world)
    for subject, split in splits.items():
        for name in SPLIT_NAMES:
            write_jsonl(out_dir / subject / f"{name}.jsonl", [_row(q) for q in getattr(split, name)])
    categories = {subject.name: subject.category for subject in world}
    (out_dir / "subjects.json").write_text(json.dumps(categories, indent=2) + "\n", encoding="utf-8")
    readme = _README.format(
        test=f"{sum(len(split.test) for split in splits.values()):,}",
        validation=sum(len(split.validation) for split in splits.values()),
        facts=sum(len(subject.facts) for subject in world),
        subjects=len(world),
    )
    (out_dir / "README.md").write_text(readme, encoding="utf-8")
