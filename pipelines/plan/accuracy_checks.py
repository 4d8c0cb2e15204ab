"""Say before an evaluation starts that it cannot end with GO, or has nothing to be compared with."""

from __future__ import annotations

from eval.references import all_references, references_of
from eval.spec import TASK_SIZES
from eval.verdict import Criteria, least_for_go
from pipelines.domain.errors import Fault
from pipelines.plan.targets import EVALUATED, Target, has_baseline, has_reference
from pipelines.settings.root import Settings


def unknown_reference(settings: Settings, target: Target) -> list[Fault]:
    """Refuse to compare with a published accuracy where none is known."""
    model, task = settings.model.label, settings.eval.task
    if target not in EVALUATED or settings.eval.baseline != "reference" or references_of(model, task):
        return []
    known = dict.fromkeys(f"{each.model} ({each.task})" for each in all_references())
    return [
        Fault(
            f"eval.baseline=reference, but no published accuracy of {model} on {task} is known.",
            f"Known: {', '.join(known)}.",
            "Use eval.baseline=build, which also gives a verdict.",
        )
    ]


def few_questions(settings: Settings, target: Target) -> list[Fault]:
    """Warn of too few questions for GO, as far as their number is known before they are read."""
    wanted = settings.eval
    subjects, questions = TASK_SIZES.get(wanted.task, (0, 0))
    if not (has_baseline(settings, target) or has_reference(settings, target)) or not subjects:
        return []
    if wanted.dataset_path is not None and wanted.limit is None:
        return []  # a copy of the data set may hold another number
    asked = min(questions, subjects * wanted.limit) if wanted.limit else questions
    criteria = Criteria.of(wanted)
    least = least_for_go(criteria)
    if asked >= least:
        return []
    what = f"eval.limit={wanted.limit}" if wanted.limit else f"eval.task={wanted.task}"
    larger = "Give a larger eval.margin_points, or a larger task."
    return [
        Fault(
            f"{what} asks {asked:,} questions, which are too few for GO even if every answer stays the same.",
            f"With eval.margin_points={wanted.margin_points:g} and eval.false_go={wanted.false_go:g}, GO takes "
            f"{least:,} or more.",
            f"Set eval.limit={-(-least // subjects)} or more." if least <= questions else larger,
        )
    ]
