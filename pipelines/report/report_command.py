"""The command `report`, and the functions that write reports for other commands."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from eval.fidelity.fidelity_text import WITHIN, legend
from eval.verdict import Criteria
from pipelines.document.canvas import ReportPaths, write_document
from pipelines.document.show import NONE, number, percent
from pipelines.domain.benchmark import Summary
from pipelines.domain.errors import UserError
from pipelines.domain.metrics import COMPARED
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.variant import Variant
from pipelines.engines.registry import ENGINES, runs_on_cpu
from pipelines.engines.tuning import tuned
from pipelines.host.disk import check_folders, relative_to_cwd
from pipelines.host.machine import GpuFacts
from pipelines.host.screen import say, table, wrapped
from pipelines.loadgen.config import WorkloadSettings
from pipelines.predict.config import PriceSettings
from pipelines.predict.performance import deployment
from pipelines.predict.performance.gpus import gpu_named, row_of
from pipelines.predict.performance.modelled import run_trial, trial
from pipelines.predict.performance.performance import origin
from pipelines.predict.performance.read_measured import measured_level
from pipelines.report.collect import collect
from pipelines.report.compare import AT_LEAST, Comparison, FormatRow, comparison
from pipelines.report.data import BenchmarkRun, ModelledRun, ReportData, run_label
from pipelines.report.mlflow_runs import log_runs, mlflow_fault
from pipelines.report.model_card import write_model_cards
from pipelines.report.plots_pictures import picture_lines
from pipelines.report.sections import NO_PRICES, document
from pipelines.report.stored import ReportedNumbers, earlier_numbers
from pipelines.settings.compose import load
from pipelines.settings.root import Settings
from pipelines.store.sources import model_source
from pipelines.store.store import Store, recover

# Format the comparison of formats for a terminal.

_RATE, *_TIMES = COMPARED
_TITLES = (
    "format", "acc. %", "loss %", "KL", "MiB", _RATE.narrow, "load",
    *(f"{figure.metric.title} {figure.metric.unit.shown}" for figure in _TIMES), f"SLO {_RATE.narrow}",
)  # fmt: skip


def comparison_text(compared: Sequence[Comparison]) -> str:
    """Return a table per workload with the choice, its reasons and limitations."""
    return "\n\n".join(_text(item) for item in compared)


def _text(item: Comparison) -> str:
    runs = [row.run for row in item.rows if row.run]
    lines = [_TITLES, *map(_cells, item.rows)]
    notes = [
        item.reason,
        *(f"- {variant}: {why}" for variant, why in item.rejected.items()),
        *(f"Note: {note}" for note in item.notes),
        item.tuning,
        f"Measured: {run_label(runs)}; engine {runs[0].result.engine}." if runs else f"Model {item.model}.",
    ]
    if runs:
        notes.append("tok/s: output tokens/s at the peak, TTFT and ITL: medians there; SLO: best load within limits.")
    if any(row.fidelity for row in item.rows):
        notes.append(
            f"KL: mean divergence of the next token's probabilities from the 16-bit model's, nats.{legend(lines)}"
        )
    if any(AT_LEAST in cell for cells in lines for cell in cells):
        notes.append(f"{AT_LEAST}: higher loads do not count, because the load generator was the bottleneck.")
    return "\n".join([*table(lines), "", *(wrapped(text) for text in notes if text)])


def _cells(row: FormatRow) -> tuple[str, ...]:
    size = NONE if row.engine_bytes is None else number(row.engine_bytes / 2**20)
    loss = NONE if row.loss_percent is None else f"{row.loss_percent:.2f}"
    divergence = NONE
    if row.fidelity is not None:  # in at most six characters
        value, mark = row.fidelity.overall.kl_mean, WITHIN if "kl_mean" in row.fidelity.within_noise else ""
        text = f"{value:.2g}" if value >= 0.001 or value == 0 else f"{value:.1e}".replace("e-0", "e-")
        divergence = text + mark
    start = (row.variant, percent(row.accuracy), loss, divergence, size)
    if row.peak is None:
        return (*start, *[NONE] * (len(_TITLES) - len(start)))
    rate, *times = (number(figure.shown(figure.of(row.peak.summary))) for figure in COMPARED)
    slo = row.slo_mark + number(_RATE.of(row.at_slo.summary)) if row.at_slo else NONE
    return (*start, row.peak_mark + rate, row.peak.label, *times, slo)


# Add the performance model's predictions to the measured runs of a report.


def with_models(data: ReportData, settings: Settings, store: Path) -> ReportData:
    """Return the report's data with predictions for the loads of each run for which there is a model.

    Raises:
        UserError: a fit cannot be read.
    """
    fits = deployment.stored_fits(settings)
    on_gpu = any(not runs_on_cpu(run.result.engine) for each in data.workloads for run in each.runs)
    shape = shape_of(settings) if on_gpu and data.models == (settings.model.label,) else None

    workloads = tuple(
        replace(
            each,
            runs=tuple(replace(run, modelled=_modelled_run(run, settings, store, shape, fits)) for run in each.runs),
        )
        for each in data.workloads
    )
    return replace(data, workloads=workloads)


def _modelled_run(
    run: BenchmarkRun, settings: Settings, store: Path, shape: ModelShape | None, fits: Sequence[deployment.FittedModel]
) -> ModelledRun | None:
    result = run.result
    if result.gpus > result.world_size:  # several instances, and how they shared the load is not known
        return None
    pp = result.world_size // result.tp_size
    cpu = deployment.processor(result.machine) if runs_on_cpu(result.engine) else None
    where = {cpu} if cpu else {str(gpu["name"]) for gpu in (result.machine.get("gpus") or ())[:1]}
    model = deployment.fitted_deployment(
        fits, model=result.model, precision=result.precision, engine=result.engine, tp=result.tp_size,
        world=result.world_size, where=where,
    )  # fmt: skip
    engine = ENGINES.get(result.engine)
    gpus = result.machine.get("gpus") or ()
    row = row_of(GpuFacts(gpus[0]["name"], gpus[0]["sm"], gpus[0]["memory_bytes"])) if gpus else None
    form, gpu = Variant.of(result.precision), (gpu_named(row.name) if row else None)
    if model is None and engine is not None and engine.builder and shape and form.formats and gpu:
        with suppress(UserError):  # without a prediction there is nothing to show
            spec = replace(shape, name=result.model)
            sent = settings.model_copy(update={"workload": WorkloadSettings.judged(result.workload, "workload.")})
            sent = tuned(sent, engine, spec, settings.hardware)
            model = deployment.gpu_model(
                sent, spec, gpu, deployment.costs(settings), form=form, tp=result.tp_size, pp=pp
            )
    if model is None:
        return None
    levels: dict[str, Summary] = {}
    for level in result.levels:
        measured = measured_level(result, level, store / run.artifact.place)
        if measured is not None:
            levels[level.requests_file] = run_trial(trial(measured), model.deployment)
    return ModelledRun(levels, origin(model.provenance, model.why)) if levels else None


def shape_of(settings: Settings) -> ModelShape | None:
    """Return the model's shape from disk or from conf/model; None for a model that is not downloaded yet."""
    if settings.model.folder is not None:
        return model_source(settings.model.folder, Store(settings.paths.store).hashes, weights=False)[1]
    return settings.model.shape.to_shape() if settings.model.shape is not None else None


def report(overrides: Sequence[str]) -> int:
    """Write the report of a model from the results in the store."""
    settings = load(overrides)
    if fault := mlflow_fault(settings.report.mlflow):
        raise UserError.of([fault])
    check_folders(settings.report.written, read={"paths.store": settings.paths.store})
    earlier_numbers(settings.report.against)
    store = Store(settings.paths.store)
    recover(store)
    write(settings, store, settings.model.label, None)
    return 0


def write(
    settings: Settings, store: Store, model: str, variants: Sequence[str] | None, *, compared: bool = False
) -> None:
    """Collect results, write the report and the model cards, log them to MLflow, and print the paths, the HTML last.

    Raises:
        UserError: there is nothing to report, or the folder or the store of MLflow cannot be written.
    """
    loss, earlier = settings.report.max_accuracy_loss_percent, earlier_numbers(settings.report.against)
    data = gathered(settings, store, model, variants)
    folder = settings.report.folder / model
    paths = write_report(data, folder, loss, settings.sizing.prices, earlier)
    cards = write_model_cards(data, folder)
    if compared:
        say("\n" + comparison_text(comparison(data, loss)))
    if shown := picture_lines(data):
        say("\nQuestions about pictures, changed answers first:")
    for line in shown:
        say("\n".join(wrapped(part, 4) for part in line.splitlines()))
    say(f"\nreport: {relative_to_cwd(paths.markdown.absolute())}")
    for card in cards.values():
        say(f"model card: {relative_to_cwd(card.absolute())}")
    if settings.report.mlflow is not None:
        files = (paths.markdown, paths.html, *paths.plots, *paths.files)
        for line in log_runs(data, settings.report.mlflow, files, cards):
            say(line)
    say(f"report: {relative_to_cwd(paths.html.absolute())}")


def gathered(settings: Settings, store: Store, model: str, variants: Sequence[str] | None) -> ReportData:
    """Collect a report's data with the predictions for its loads; arguments and errors as of `write`."""
    return with_models(collect(store, model, variants, Criteria.of(settings.eval)), settings, store.root)


def write_report(
    data: ReportData, folder: Path, max_accuracy_loss_percent: float = 1.0, prices: PriceSettings = NO_PRICES,
    earlier: ReportedNumbers | None = None,
) -> ReportPaths:  # fmt: skip
    """Write the report of a store.

    Raises:
        UserError: the folder cannot be written.
    """
    return write_document(document(data, max_accuracy_loss_percent, prices, earlier), folder)
