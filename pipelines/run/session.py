"""Run a plan in a run folder of its own: log, stages, and the closing lines."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.domain.errors import refuse
from pipelines.host.disk import disk_errors
from pipelines.host.files import write_json
from pipelines.host.screen import ScreenProgress, say, warn, wrapped
from pipelines.plan.plan import Plan
from pipelines.run import console, runner
from pipelines.settings.root import as_yaml
from pipelines.store.run_folder import run_folder
from pipelines.store.store import Store, recover


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run that has ended.

    Attributes:
        exit_code: 4 if a loss of accuracy that was to be judged could not be measured, else 0.
    """

    outcomes: list[runner.StepOutcome]
    exit_code: int


def run_target(plan: Plan, store: Store, overrides: Sequence[str]) -> FinishedRun:
    """Run a plan inside a new run folder and print the result.

    Raises:
        UserError: this machine cannot run it, or a stage found a fault in its input.
    """
    refuse(plan.refusals)
    runs, config = plan.settings.paths.runs, as_yaml(plan.settings)
    with run_folder(plan.command, runs, config, overrides) as folder, disk_errors("The run", store.root):
        for note in (f"engine: {plan.deployment.engine.name} ({plan.reason})", *plan.notes):
            say(wrapped(note))
        warn(*plan.warnings)
        recover(store)
        write_json(folder / "plan.json", console.plan_json(plan))
        outcomes = runner.run(plan, store, overrides, ScreenProgress())
        store.hashes.save()
        say(console.outcome_table(outcomes))
        if compared := next((outcome for outcome in outcomes if outcome.node.id == "fidelity"), None):
            say("\n" + console.fidelity_table(compared, store))
        if table := judged(plan, outcomes):  # after fidelity, which accepts nothing
            say("\n" + table.text)
            file = folder / "accuracy.json"
            try:
                write_json(file, table.rows)
            except OSError as error:  # it has been shown, and can be had again
                warn(f"{file} cannot be written: {error.strerror}. The results themselves are in the store.")
        if (last := outcomes[-1]).node.id == "diagnose":
            say("\n" + console.diagnosis(last))
        elif last.node.id == "benchmark":
            say("\n" + console.measured_table(last))
        say(console.closing(outcomes, folder, more=plan.command == "serve"))
    return FinishedRun(outcomes, table.exit_code if table else 0)


def judged(plan: Plan, outcomes: Sequence[runner.StepOutcome]) -> console.ResultTable | None:
    """Return the verdict on the loss of accuracy, or that there were no questions; None where none was wanted."""
    if any(outcome.node.id == "evaluate" for outcome in outcomes):
        return console.accuracy_table(outcomes, plan.settings.eval)
    if plan.only is None and plan.deployment.is_unasked:
        return console.unasked_table([(plan.settings.model.label, plan.settings.variant.label)])
    return None
