"""Evaluate: an engine in, its accuracy on each question out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.domain.formats import QFormat
from pipelines.domain.progress import Progress
from pipelines.engines.registry import describe, open_engine
from pipelines.settings.engine import EngineOptions, EvalSettings

RESULT = "evaluation.json"


def baseline_of(evaluated: Mapping[str, Path], variant: str) -> Path | None:
    """Return the folder of the baseline's evaluation, which is its own for the uncompressed model.

    Args:
        evaluated: folders of a run's evaluations by the id of their node.
        variant: compression that the run evaluated.

    Returns:
        None if the baseline was skipped.
    """
    own = evaluated["evaluate"] if variant == QFormat.NONE else None
    return evaluated.get("baseline.evaluate", own)


@dataclass(frozen=True)
class Evaluate:
    """Engine folder, tokenizer folder and questions in, `evaluation.json` out.

    Attributes:
        engine: by name, see `pipelines.engines.registry`.
        options: the engine's own settings; None where it has none.
        eval: task, shots, limit.
        model: label for the result.
        variant: compression label for the result.
        libraries: of the engine and of the harness.
        needs: packages.
    """

    engine: str
    options: EngineOptions | None
    eval: EvalSettings
    model: str
    variant: str
    libraries: tuple[str, ...]
    needs: tuple[str, ...]
    name = "evaluate"
    version = "1"
    measures = False

    def identity(self) -> dict[str, Any]:
        """Return task and arithmetic, and the labels, because they appear in the result."""
        arithmetic = self.options.model_dump(include=set(self.options.DECIDE_SCORES)) if self.options else {}
        return {
            "engine": self.engine,
            **arithmetic,
            **self.eval.model_dump(include={"task", "num_fewshot", "limit"}),
            "model": self.model,
            "variant": self.variant,
        }

    def run(self, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> dict[str, Any]:
        """Load the engine and ask it every question."""
        from eval.harness import evaluate
        from eval.spec import EvalSpec

        limits = json.loads((inputs["engine"] / "config.json").read_text())["build_config"]
        spec = EvalSpec(
            task=self.eval.task,
            max_length=_longest(self.engine, limits),
            num_fewshot=self.eval.num_fewshot,
            limit=self.eval.limit,
            dataset_path=inputs["dataset"],
        )
        engine = open_engine(self.engine, **(self.options.model_dump() if self.options else {}))
        with engine.open(inputs["engine"]) as session:
            result = evaluate(
                session, inputs["model"], spec, progress, model=self.model, qformat=self.variant, engine=self.engine
            )
        result.save(out_dir / RESULT)
        return {
            "accuracy": result.overall.accuracy,
            "stderr": result.overall.stderr,
            "questions": result.overall.questions,
            "truncated": result.truncated,
        }


def _longest(engine: str, limits: Mapping[str, int]) -> int:
    """Return the tokens that a prompt and its answer may have; some runtimes compute a prompt in one iteration."""
    longest = limits["max_seq_len"] - (limits.get("max_draft_len") or 0)
    return longest if describe(engine).chunks_scored_prompts else min(longest, limits["max_num_tokens"])
