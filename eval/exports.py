"""Results in the forms that others read: lm-eval's own JSON, and the Hub's `.eval_results`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval.perplexity import PerplexityResult
from eval.results import PLAIN_PROMPTS, EvalResult

LM_EVAL = "lm_eval_results.json"
"""Name of the file in lm-eval's form."""
HUB = ".eval_results"
"""Folder of a model repository in which the Hub looks for results."""


def write_lm_eval(raw: Mapping[str, Any], result: EvalResult | PerplexityResult, folder: Path) -> None:
    """Write what `lm-eval --output_path` writes, without the samples.

    Args:
        raw: results as lm-eval's evaluator returns them.
        result: the same, ours.
        folder: the file is written into it.
    """
    content = {
        **{name: value for name, value in raw.items() if name != "samples"},
        "config": {"model": result.engine, "model_args": {"model": result.model, "format": result.qformat},
                   "limit": result.limit},
        **({name: getattr(result, name) for name in PLAIN_PROMPTS} if isinstance(result, EvalResult) else {}),
        "lm_eval_version": result.lm_eval_version,
        "model_name": result.model,
        "max_length": result.max_length,
    }  # fmt: skip
    (folder / LM_EVAL).write_text(json.dumps(content, indent=2, default=_plain, ensure_ascii=False), encoding="utf-8")


def _plain(value: Any) -> Any:
    """Return a number of numpy as a number, and a function by its name, which is the same in every run."""
    if hasattr(value, "item"):
        return value.item()
    return getattr(value, "__name__", type(value).__name__)


def write_hub(result: EvalResult, dataset: str, revision: str | None, folder: Path) -> None:
    """Write `.eval_results/<task>.yaml`, to be copied into the model's repository on the Hub.

    The value is a fraction, as in lm-eval's results.

    Args:
        result: over all questions of the task.
        dataset: the task's data set on the Hub, org/name.
        revision: its commit; a branch or tag is not a revision to compare with, and is left out.
        folder: the folder `.eval_results` is made in it.
    """
    import yaml

    source: dict[str, Any] = {"id": dataset, "task_id": result.task}
    if revision is not None and len(revision) == 40 and not revision.strip("0123456789abcdef"):
        source["revision"] = revision
    notes = (
        f"lm-eval {result.lm_eval_version}, {result.shots}, {result.metric}, {result.questions} questions; "
        f"format {result.qformat}, computed by {result.engine}"
    )
    (folder / HUB).mkdir()
    text = yaml.safe_dump([{"dataset": source, "value": result.accuracy, "notes": notes}], sort_keys=False, width=120)
    (folder / HUB / f"{result.task}.yaml").write_text(text, encoding="utf-8")
