"""The commands as functions, for notebooks and scripts.

    from pipelines.api import plan, run, evaluate, simulate, size

    answer = size("model=llama_3_8b", "quant=fp8", "hardware=h100_sxm", "sizing.average_rate=53")
    answer                                  # a notebook shows the page that `make size` writes
    answer.record.answer.chosen.fleet.gpus  # the record that the page is made from

Overrides are the words of the command line, `config=FILE` among them. What is invalid raises a
`pipelines.domain.errors.UserError` with the command's own message.
"""

import html
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar, get_args

from pipelines.cli.commands import PROGRAM
from pipelines.cli.main import missing_package, name_as_typed_here, prepare_libraries, split_project_file
from pipelines.cli.words import overrides_of
from pipelines.document.blocks import Block, Callout, Code, Document, Figure, Table, left
from pipelines.document.canvas import render_html
from pipelines.domain.errors import UserError
from pipelines.host.screen import as_typed
from pipelines.plan.candidates import judge_of
from pipelines.plan.plan import Plan
from pipelines.plan.targets import COMPARED, EVALUATED, MEASURED, Target
from pipelines.predict.simulate import files, simulate_command
from pipelines.predict.simulate.loads import Simulated
from pipelines.predict.sizing import document as sizing_document
from pipelines.predict.sizing import size_command
from pipelines.predict.sizing.result import Result
from pipelines.report import report_command
from pipelines.report.sections import document as report_document
from pipelines.run import commands
from pipelines.run.console import ResultTable, outcome_table
from pipelines.run.session import FinishedRun, judged
from pipelines.settings.compose import load
from pipelines.settings.groups import using_project_file
from pipelines.store.store import Store

Record = TypeVar("Record")
MEASURING = {*EVALUATED, *COMPARED, *MEASURED}
"""Targets with results that a report can show."""
PAGE_HEIGHT = 520
"""Of the frame in a notebook, in CSS pixels; its corner can be dragged."""


@dataclass(frozen=True, slots=True, eq=False)
class ShownRecord(Generic[Record]):
    """The result of a function: a record, shown as the command's text in a terminal and as its page in a notebook."""

    record: Record
    text: str
    document: Callable[[], Document]

    def __repr__(self) -> str:
        """Return the text that the command prints."""
        return as_typed(self.text)

    def _repr_html_(self) -> str:
        """Return the page in a frame, which keeps its style; the text if a package of the page is missing."""
        try:
            page = html.escape(as_typed(render_html(self.document())), quote=True)
        except ModuleNotFoundError as error:  # a result of hours is shown nevertheless
            why = UserError.of([missing_package((error.name or "").partition(".")[0])])
            return f"<pre>{html.escape(f'{self!r}{chr(10) * 2}No page: {why}')}</pre>"
        style = f"width:100%;height:{PAGE_HEIGHT}px;border:1px solid #8884;resize:vertical"
        return f'<iframe srcdoc="{page}" style="{style}"></iframe>'


def plan(*overrides: str) -> ShownRecord[Plan]:
    """Plan a deployment: what would run, what is cached and why, what is refused on this machine; write nothing.

    Raises:
        UserError: everything that is wrong, at once.
    """
    with _composing("plan", overrides) as arguments:
        made, _ = commands.planned(load(arguments))
        text = commands.planned_text(made, arguments)
    return ShownRecord(made, text.rstrip(), partial(_plan_page, made, text))


def run(target: Target, *overrides: str) -> ShownRecord[FinishedRun]:
    """Run everything up to a target; finished stages are cached. With `all` the report is written too.

    Args:
        target: "build", "repository", "evaluate", "fidelity", "diagnose", "benchmark" or "all".
        overrides: as on the command line.

    Raises:
        UserError: this machine cannot run it, or a stage found a fault in its input.
        KeyboardInterrupt: Ctrl-C; finished stages and measured loads are kept.
    """
    made, store, finished = _run(target, overrides)
    return ShownRecord(finished, outcome_table(finished.outcomes), partial(_run_page, made, store, finished))


def evaluate(*overrides: str) -> ShownRecord[ResultTable]:
    """Build an engine and evaluate it beside the 16-bit baseline; `record.rows` has the verdict and its bounds.

    Raises:
        UserError: as of `run`.
    """
    made, store, finished = _run("evaluate", overrides)
    table = judged(made, finished.outcomes)
    assert table is not None  # the target evaluates
    return ShownRecord(table, table.text, partial(_run_page, made, store, finished))


def size(*overrides: str) -> ShownRecord[Result | dict[str, Any]]:
    """Size a fleet. The record is the JSON of the answer for several GPUs, a given rate, and measurements.

    Raises:
        UserError: invalid settings, or no fleet that a plan accepts meets the limits.
    """
    with _composing("size", overrides) as arguments:
        sized = size_command.sized_from(arguments, judge_of)
    record, text = sized.record, "\n".join(sized.lines)
    if isinstance(record, Result):
        return ShownRecord(record, text, partial(sizing_document.document, record))
    return ShownRecord(record, text, partial(_text_page, "Sizing", text))


def simulate(*overrides: str) -> ShownRecord[list[Simulated]]:
    """Simulate the policies of batching under the loads; one record per policy and load.

    Raises:
        UserError: everything that is wrong, at once.
    """
    with _composing("simulate", overrides) as arguments:
        simulation = simulate_command.prepared(arguments, judge_of)
        results, settings, case = simulation.run(), simulation.settings, simulation.case
    text = "\n".join([*simulation.heading(), simulation.table(results)])

    def page() -> Document:
        return _text_page("Simulation", text, files.figures_of(settings, case, results))

    return ShownRecord(results, text, page)


@contextmanager
def _composing(command: str, arguments: Sequence[str]) -> Iterator[list[str]]:
    """Check the words as the command line does, and compose with the project file that they name."""
    prepare_libraries()
    name_as_typed_here()
    if wrong := [word for word in arguments if not isinstance(word, str)]:
        raise UserError(
            f"{wrong[0]!r} is not an override: each is a text of its own, 'quant=fp8'; of a list: f(*list)."
        )
    name, others = split_project_file(arguments)
    with nullcontext() if name is None else using_project_file(name):
        try:
            yield overrides_of(command, others)
        except UserError as error:
            error.args = (as_typed(str(error)),)
            raise


def _run(target: Target, overrides: Sequence[str]) -> tuple[Plan, Store, FinishedRun]:
    targets = [each for each in get_args(Target) if each != "serve"]
    if target not in targets:
        todo = f"A server runs until it is stopped: {PROGRAM} serve, in a terminal." if target == "serve" else ""
        raise UserError(f"'{target}' is not a target.", allowed=f"Targets: {', '.join(targets)}.", todo=todo)
    with _composing(target, overrides) as arguments:
        _refuse_half_a_torch()
        made, store, finished = commands.run_to(target, arguments)
        if target in MEASURED and commands.was_interrupted(finished.outcomes):
            raise KeyboardInterrupt  # as everywhere else; what was measured is kept
        if target == "all":
            settings = made.settings
            report_command.write(settings, store, settings.model.label, commands.variants_of(made))
    return made, store, finished


def _refuse_half_a_torch() -> None:
    """Refuse to run where Ctrl-C came while PyTorch loaded: its native part cannot be loaded again in this process."""
    if "torch" not in sys.modules and any(name.startswith("torch.") for name in sys.modules):
        raise UserError(
            "PyTorch was interrupted while it loaded, and this process cannot load it again.",
            todo="Restart the kernel and run the cell again; finished stages are kept.",
        )


def _text_page(title: str, text: str, figures: tuple[Figure, ...] = ()) -> Document:
    return Document(title, "", (), (Code((text,)), *figures), (), kind="Prediction", source="the performance model")


def _run_page(made: Plan, store: Store, finished: FinishedRun) -> Document:
    settings = made.settings
    if made.command in MEASURING and not made.deployment.is_elsewhere:
        data = report_command.gathered(settings, store, settings.model.label, commands.variants_of(made))
        page = report_document(data, settings.report.max_accuracy_loss_percent, settings.sizing.prices)
        return replace(page, files=())  # they lie beside a page that is written
    rows = tuple(
        (each.node.id, each.state, each.node.label, each.node.stage.headline(each.artifact.facts))
        for each in finished.outcomes
    )
    return _page(made.command, made, [Table("Stages", "recorded", left("stage", "", "what", "result"), rows)])


def _plan_page(made: Plan, text: str) -> Document:
    steps = tuple((step.node.id, step.state, step.node.label, step.why) for step in made.steps)
    blocks: list[Block] = [Callout("warning", str(warning)) for warning in made.warnings]
    blocks += [Callout("note", f"Not run here: {fault}") for fault in made.refusals]
    blocks.append(Table("Stages", "", left("stage", "", "what", "why"), steps))
    return _page("plan", made, [*blocks, Code((text,))])


def _page(kind: str, made: Plan, blocks: Sequence[Block]) -> Document:
    settings, engine = made.settings, f"{made.deployment.engine.name} ({made.reason})"
    title = f"{settings.model.label} {settings.variant.label}"
    return Document(title, engine, (), tuple(blocks), (), kind=kind, source="the store's manifests")
