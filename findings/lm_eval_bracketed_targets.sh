#!/bin/bash
# lm-eval 0.4.13 reads a right answer that looks like a list as several right answers, without a word.
#
# A task with written answers has doc_to_target: "{{answer}}", as many of lm-eval's own tasks do, and the answer of its
# questions is a list in Python's form. Seen on 2026-11-30: the rendered text is evaluated as Python. The expected answer
# itself, "['a','b']", is then judged wrong, and its first element alone, "a", is judged right. With
# doc_to_target: answer, the name of the same column, both are judged as they should be.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet lm_eval==0.4.13 datasets==4.8.5
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

import datasets
from lm_eval.api.task import ConfigurableTask

RIGHT = "['a','b']"
ROWS = [{"question": "list('ab')", "answer": RIGHT}]


def judged(target, answer):
    task = ConfigurableTask(
        config={
            "task": "lists",
            "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(ROWS)},
            "test_split": "test",
            "output_type": "generate_until",
            "generation_kwargs": {"until": ["\n"]},
            "doc_to_text": "{{question}}",
            "doc_to_target": target,
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        }
    )
    return task.process_results(ROWS[0], [answer])["exact_match"]


seen = {(target, answer): judged(target, answer) for target in ("{{answer}}", "answer") for answer in (RIGHT, "a")}
for (target, answer), right in seen.items():
    print(f"lm_eval {version('lm_eval')}, doc_to_target: {target}: expected {RIGHT}, written {answer}: judged {right}")
if list(seen.values()) != [0.0, 1.0, 1.0, 0.0]:
    sys.exit("The behaviour has changed.")
PYTHON
