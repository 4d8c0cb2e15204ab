"""Plain text for a terminal: the plan, what was done, what it cost."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from eval.compare import alone_rows, alone_table, loss_rows, loss_table, published_table, reference_rows
from eval.config import EvalSettings
from eval.diagnose.result import StageDiagnosis, diagnosis_text
from eval.perplexity import PerplexityResult, perplexity_rows, perplexity_table
from eval.results import BASELINE, RESULT, EvalResult, Flips, flips
from eval.verdict import UNMEASURED, WHAT_MEASURES, Criteria, Verdict
from pipelines.document.blocks import render_text
from pipelines.document.show import count
from pipelines.domain.benchmark import RESULT as BENCHMARK
from pipelines.domain.benchmark import BenchmarkResult
from pipelines.domain.units import show_seconds
from pipelines.host.disk import relative_to_cwd
from pipelines.host.screen import labelled, table, wrapped
from pipelines.plan.needs import needs
from pipelines.plan.plan import Plan
from pipelines.run.gpu_commands import gpu_commands
from pipelines.run.runner import StepOutcome
from pipelines.stages.evaluate import Evaluate, EvaluateByTrtllmServe, EvaluateReference, EvaluateServed, baseline_of
from pipelines.stages.fidelity import FidelityServed
from pipelines.store.manifest import read_manifests
from pipelines.store.store import Artifact, Store, subfolders

RESULTS = ("build", "evaluate", "fidelity", "diagnose", "repository", "benchmark")
"""Nodes whose artifacts the last lines of a run name; the others lead to these."""

# Answers that the two engines of a fidelity measurement gave before, if the store has both evaluations.


def stored_flips(measured: Artifact, store: Store) -> Flips | None:
    """Return the flips between evaluations of both engines with the same prompts; None without any.

    Of several pairs it is the one with most questions, and the newest of these.
    """
    engines = measured.manifest["made_from"]["inputs"]
    in_turns = [
        (EvalResult.load(folder / BASELINE), EvalResult.load(folder / RESULT))
        for folder in _evaluated(store, engine=engines["engine"], baseline=engines["reference"])
    ]
    before, after = (
        [EvalResult.load(folder / RESULT) for folder in _evaluated(store, engine=engines[name])]
        for name in ("reference", "engine")
    )
    apart = [(a, b) for b in after for a in before if a.prompts_sha256 == b.prompts_sha256 and a.task == b.task]
    pairs = [*in_turns, *apart]
    return flips(*max(pairs, key=lambda pair: pair[1].questions)) if pairs else None


def _evaluated(store: Store, **digests: str) -> list[Path]:
    """Return the folders of evaluations with these inputs, newest first."""
    whole = read_manifests(subfolders(store.root / "evaluate"), [])
    folders = [
        folder
        for folder, made in whole.items()
        if RESULT in made["files"] and digests.items() <= made["made_from"]["inputs"].items()
    ]
    return sorted(folders, key=lambda folder: (str(whole[folder]["created"]), folder), reverse=True)


@dataclass(frozen=True, slots=True)
class ResultTable:
    """A result in two forms: rows for programs and text for people."""

    rows: list[dict[str, Any]]
    text: str

    @classmethod
    def joined(cls, tables: Sequence[Self]) -> Self:
        """Return the tables below each other."""
        return cls([row for each in tables for row in each.rows], "\n\n".join(each.text for each in tables))

    @property
    def exit_code(self) -> int:
        """Return 4 if a loss of accuracy could not be measured, else 0."""
        return UNMEASURED if any(row.get("verdict") == Verdict.NOT_MEASURED for row in self.rows) else 0


def plan_text(plan: Plan, overrides: Sequence[str] = ()) -> str:
    """Render a plan: what would run, what is cached and why, what fits, and how long it took last time."""
    lines = [wrapped(f"engine: {plan.deployment.engine.name} ({plan.reason})", 8)]
    if plan.deployment.shape is not None:
        lines.append(f"model:  {plan.settings.model.label}, {plan.deployment.shape.num_params / 1e6:,.1f} M parameters")
    lines += [wrapped(note, 8) for note in plan.notes]
    lines += [labelled("warning", str(warning), sys.stdout) for warning in plan.warnings]
    lines.append("")
    width = max(len(step.node.id) for step in plan.steps)
    for step in plan.steps:
        word = {"cached": "cached", "run": "run   ", "waits": "run   "}[step.state]
        lines.append(wrapped(f"{word}  {step.node.id:<{width}}  {step.node.label}", 8))
        if step.state != "cached":
            last = "" if step.last_seconds is None else f"; took {show_seconds(step.last_seconds)} last time"
            lines.append(wrapped(f"{'':<8}why: {step.why}{last}", 13))
    lines.append("")
    todo = [step for step in plan.steps if step.state != "cached"]
    seconds = [step.last_seconds for step in todo if step.last_seconds is not None]
    cost = f"{len(todo)} of {count(len(plan.steps), 'stage')} to run"
    if seconds:
        cost += f"; about {show_seconds(sum(seconds))} (measured last time)"
        cost += f" and {len(todo) - len(seconds)} not yet measured here" if len(todo) > len(seconds) else ""
    lines += ["Nothing to do."] if plan.is_done else [wrapped(f"{cost}.", 8), *needs(plan)]
    lines += [wrapped(f"not run here: {fault}", 8) for fault in plan.missing]
    lines += gpu_commands(plan, overrides)
    return "\n".join(lines) + "\n"


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON."""
    return {
        "engine": plan.deployment.engine.name,
        "reason": plan.reason,
        "warnings": [str(warning) for warning in plan.warnings],
        "not_run_here": [str(fault) for fault in plan.refusals],
        "steps": [
            {
                "id": step.node.id,
                "stage": step.node.stage.name,
                "label": step.node.label,
                "state": step.state,
                "key": step.key,
                "why": step.why,
            }
            for step in plan.steps
        ],
    }


def outcome_table(outcomes: Sequence[StepOutcome]) -> str:
    """Render one row per stage: its outcome, seconds, and most important number."""
    rows = [("stage", "", "took", "result")]
    rows += [
        (
            outcome.node.id,
            outcome.state,
            show_seconds(outcome.seconds) if outcome.state == "made" else "",
            outcome.node.stage.headline(outcome.artifact.facts),
        )
        for outcome in outcomes
    ]
    return "\n".join(table(rows, text_columns=(1, 2, 3)))


def accuracy_table(outcomes: Sequence[StepOutcome], settings: EvalSettings) -> ResultTable:
    """Compare the accuracy of what was built with the baseline, if one was evaluated, and judge the loss."""
    evaluated, variant = {}, ""
    for outcome in outcomes:
        stage = outcome.node.stage
        if isinstance(stage, Evaluate | EvaluateReference | EvaluateServed):
            evaluated[outcome.node.id] = outcome.artifact.path
        if outcome.node.id == "evaluate" and isinstance(stage, Evaluate | EvaluateByTrtllmServe):
            variant = stage.variant
    return comparison([(baseline_of(evaluated, variant), evaluated["evaluate"] / RESULT)], settings)


def unasked_table(labels: Sequence[tuple[str, str]]) -> ResultTable:
    """Say of models and formats that were asked no questions that their loss is not measured."""
    verdict = str(Verdict.NOT_MEASURED)
    rows = [{"model": model, "format": variant, "task": None, "verdict": verdict} for model, variant in labels]
    names = ", ".join(f"{model} {variant}" for model, variant in labels)
    why = f"{verdict}: {names} answered no questions, and fidelity alone accepts no format. {WHAT_MEASURES}"
    return ResultTable(rows, wrapped(why, 0))


def fidelity_table(outcome: StepOutcome, store: Store) -> str:
    """Render how far predictions are from the 16-bit model's, with flips where both answered the same questions."""
    from eval.fidelity import bounds, divergence, fidelity_text  # import NumPy

    if isinstance(outcome.node.stage, FidelityServed):
        served = bounds.BoundsResult.load(outcome.artifact.path / bounds.BoundsResult.FILE)
        return render_text([fidelity_text.bounds_table(served)])
    result = divergence.FidelityResult.load(outcome.artifact.path / divergence.FidelityResult.FILE)
    return fidelity_text.fidelity_text(result, stored_flips(outcome.artifact, store))


def diagnosis(outcome: StepOutcome) -> str:
    """Render a diagnosis: one row per stage, and the outcome in a sentence."""
    return diagnosis_text(StageDiagnosis.load(outcome.artifact.path / StageDiagnosis.FILE))


def measured_table(outcome: StepOutcome) -> str:
    """Render the results of a benchmark, one row per load."""
    from pipelines.loadgen.run import benchmark_table

    return benchmark_table(BenchmarkResult.from_json(json.loads((outcome.artifact.path / BENCHMARK).read_text())))


def comparison(pairs: Sequence[tuple[Path | None, Path]], settings: EvalSettings) -> ResultTable:
    """Compare pairs of results (files of baseline and after) in one table with a verdict on each.

    Results whose baseline was skipped follow in a table of accuracies alone, and perplexities, which have no verdict,
    in one of their own.
    """
    texts = [pair for pair in pairs if (pair[1] / PerplexityResult.FILE).is_file()]
    questions = [pair for pair in pairs if pair not in texts]
    tables = [_accuracies(questions, settings)] if questions or not texts else []
    tables += [_perplexities(texts)] if texts else []
    return ResultTable.joined(tables)


def _perplexities(pairs: Sequence[tuple[Path | None, Path]]) -> ResultTable:
    read = [
        (
            None if before is None or before == after else PerplexityResult.load(before / PerplexityResult.FILE),
            PerplexityResult.load(after / PerplexityResult.FILE),
        )
        for before, after in pairs
    ]
    named = [(f"{result.model} {result.qformat}", baseline, result) for baseline, result in read]
    return ResultTable(perplexity_rows(read), render_text([perplexity_table(named)]))


def _accuracies(pairs: Sequence[tuple[Path | None, Path]], settings: EvalSettings) -> ResultTable:
    if settings.baseline == "reference":
        results = [EvalResult.load(after) for _, after in pairs]
        return ResultTable(reference_rows(results), render_text(published_table([each]) for each in results))
    paired, alone = [], []
    for before, after in pairs:
        result = EvalResult.load(after)
        if before is None:
            alone += alone_rows([result])
        else:
            paired.append((result if before == after else EvalResult.load(before), result))
    rows = loss_rows(paired, Criteria.of(settings))
    tables = [ResultTable(rows, loss_table(rows))] if rows or not alone else []
    return ResultTable.joined([*tables, *([ResultTable(alone, alone_table(alone))] if alone else [])])


def closing(outcomes: Sequence[StepOutcome], folder: Path, *, more: bool = False) -> str:
    """Render the last lines of a run: where the results are."""
    made = any(outcome.state == "made" for outcome in outcomes)
    lines = [] if made or more else ["Nothing to do: every stage is cached."]
    paths = [(o.node.stage.writes, o.artifact.path) for o in outcomes if o.node.id in RESULTS] + [("run", folder)]
    width = max(len(word) for word, _ in paths) + 1
    lines += [f"{word + ':':<{width}} {relative_to_cwd(path)}" for word, path in paths]
    return "\n" + "\n".join(lines)
