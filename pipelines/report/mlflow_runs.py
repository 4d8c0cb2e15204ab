"""Results as runs of MLflow, in the store that `report.mlflow` names: the only module that imports mlflow.

One run per format and result: what was logged before is not logged again. Nothing is sent anywhere but to that store.
"""

import hashlib
import importlib.util
import json
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eval.compare import verdict_sentence
from pipelines.document.show import flat
from pipelines.domain.errors import Fault, UserError
from pipelines.report.data import FormatReport, ReportData, Workload

RESULT_TAG = "trtllm_pipelines.result"
"""Tag whose value is a hash of everything that is logged; by it a result is found again."""
MOST_PARAMS = 100
"""Parameters that MLflow takes at once."""
_NO_NAME = re.compile(r"[^\w .:/-]")
"""Characters that MLflow takes in no name of a metric."""
LONGEST_WORKLOAD = 150
"""Characters of a workload in the name of a metric, of which MLflow takes 250."""
LONGEST_VALUE = 6000
"""Characters that MLflow keeps of a parameter."""


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """The MLflow run of one format.

    Attributes:
        name: "<model>-<variant>".
        params: settings that decided the bytes of each artifact, "stage.setting".
        metrics: numbers, in the unit that ends the name; accuracies are fractions.
        tags: what the format is, its verdict, and where it comes from.
    """

    name: str
    experiment: str
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    tags: Mapping[str, str]

    @property
    def result(self) -> str:
        """Hash of everything that is logged."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def mlflow_fault(uri: str | None) -> Fault | None:
    """Return why results cannot be logged (mlflow is not installed), or None."""
    if uri is None or importlib.util.find_spec("mlflow") is not None:
        return None
    return Fault(
        f"report.mlflow='{uri}' needs the package mlflow-skinny, which is not installed.",
        todo="Install it, or leave report.mlflow out:",
        command=("python", "-m", "pip", "install", "mlflow-skinny>=3"),
    )


def log_runs(data: ReportData, uri: str, files: Sequence[Path], cards: Mapping[str, Path]) -> list[str]:
    """Log every format of a report that the store does not have yet.

    Args:
        data: result of `pipelines.report.collect`.
        uri: MLflow's store: file:/folder, sqlite:////folder/mlflow.db, or a server, http://host:5000.
        files: of the report, kept with each run.
        cards: model cards by label, each kept with its run.

    Returns:
        a line about each format.

    Raises:
        UserError: mlflow is not installed, or the store cannot be read or written.
    """
    if fault := mlflow_fault(uri):
        raise UserError.of([fault])
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it would report its use to its makers
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder is what the user asked for
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # its own default waits for minutes
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    try:
        client = MlflowClient(tracking_uri=uri)
        return [
            _log(client, uri, run, [*files, *([cards[item.label]] if item.label in cards else [])])
            for item in data.formats
            for run in [logged_run(item, data.workloads)]
        ]
    except (MlflowException, OSError, ImportError) as error:
        raise UserError(
            f"MLflow cannot use report.mlflow='{uri}': {' '.join(str(error).split()) or type(error).__name__}",
            allowed="It is file:/folder, sqlite:////folder/mlflow.db (with the packages sqlalchemy and alembic), or "
            "http://host:port.",
            todo="The report itself was written. Correct report.mlflow, then: make report",
        ) from None


def _log(client: Any, uri: str, run: LoggedRun, files: Sequence[Path]) -> str:
    """Log one format; a run that was cut short is replaced."""
    from mlflow.entities import Metric, Param, RunStatus, RunTag

    database = uri.removeprefix("sqlite:///")  # artifacts go beside it; MLflow's own default is the current folder
    folder = None if database == uri else (Path(database).absolute().parent / "mlartifacts").as_uri()
    existing = client.get_experiment_by_name(run.experiment)
    experiment = (
        client.create_experiment(run.experiment, artifact_location=folder)
        if existing is None
        else existing.experiment_id
    )
    for old in client.search_runs([experiment], filter_string=f"tags.`{RESULT_TAG}` = '{run.result}'"):
        if old.info.status == RunStatus.to_string(RunStatus.FINISHED):
            return f"mlflow: {run.name} was logged before, as run {old.info.run_id}"
        client.delete_run(old.info.run_id)
    run_id = client.create_run(experiment, run_name=run.name, tags={RESULT_TAG: run.result}).info.run_id
    now = int(time.time() * 1000)
    params = [Param(name, value) for name, value in run.params.items()]
    client.log_batch(
        run_id,
        [Metric(name, value, now, 0) for name, value in run.metrics.items()],
        params[:MOST_PARAMS],
        [RunTag(name, value) for name, value in run.tags.items()],
    )
    for start in range(MOST_PARAMS, len(params), MOST_PARAMS):
        client.log_batch(run_id, params=params[start : start + MOST_PARAMS])
    for file in files:
        client.log_artifact(run_id, str(file))
    client.set_terminated(run_id)
    return f"mlflow: {run.name} is run {run_id} of experiment '{run.experiment}'"


def logged_run(item: FormatReport, workloads: Sequence[Workload]) -> LoggedRun:
    """Return the parameters, metrics and tags of a format, whose loads are named by the report's workloads."""
    checkpoint, row = item.artifact("quantize") or item.chain[-1], item.accuracy.row if item.accuracy else None
    download, names = item.artifact("download"), _names(workloads)
    measured = [names[run.artifact.place] for run in item.runs]
    tags = {  # a title that is cut or numbered in the metrics' names
        **{f"workload.{name}": title[:LONGEST_VALUE] for name, title in measured if name != _plain(title)},
        "model": item.model,
        "format": item.variant,
        "source": f"{download.settings['repo_id']}@{download.facts.get('commit', 'unknown')}"
        if download
        else "unknown",
        "made_by": f"trtllm-pipelines {checkpoint.version} at {checkpoint.commit}",
        "artifacts": " ".join(f"{each.stage}:{each.digest[:16]}" for each in item.chain),
        "verdict": str(row["verdict"]) if row else "none",
    }
    return LoggedRun(
        name=f"{item.model}-{item.variant}",
        experiment=item.model,
        params={
            f"{artifact.stage}.{name}": value[:LONGEST_VALUE]
            for artifact in (*item.chain, *([item.fidelity.artifact] if item.fidelity else []))
            for name, value in flat(artifact.settings)
            if not name.startswith("sources.")  # hashes of the repository's own code
        },
        metrics={**_sizes(item), **_accuracy(item), **_fidelity(item), **_loads(item, names)},
        tags={**tags, "verdict.sentence": verdict_sentence(row)} if row else tags,
    )


def _sizes(item: FormatReport) -> dict[str, float]:
    named = (("quantize", "source_bytes"), ("quantize", "total_bytes"), ("build", "engine_bytes"))
    sizes = {f"size/{name}": artifact.facts.get(name) for stage, name in named if (artifact := item.artifact(stage))}
    return {name.replace("total", "checkpoint"): float(value) for name, value in sizes.items() if value is not None}


def _accuracy(item: FormatReport) -> dict[str, float]:
    if item.accuracy is None:
        return {}
    result, row = item.accuracy.result, item.accuracy.row
    metrics = {"accuracy": result.accuracy, "accuracy_questions": result.questions}
    if result.overall.stderr is not None:
        metrics["accuracy_stderr"] = result.overall.stderr
    if row is not None:
        metrics |= {f"loss/{name}": row[name] for name in ("lost", "gained", "loss_percent") if row[name] is not None}
        metrics |= {
            f"loss/{name}": 100 * row[field]
            for name, field in (("points_at_least", "loss_least"), ("points_at_most", "loss_most"))
            if row[field] is not None
        }
        metrics["loss/points"] = -100 * row["difference"]
    return {name: float(value) for name, value in metrics.items()}


def _fidelity(item: FormatReport) -> dict[str, float]:
    if item.fidelity is None:
        return {}
    result = item.fidelity.result
    names = ("kl_mean", "kl_median", "kl_p99", "kl_max", "top1_agreement", "perplexity_ratio")
    ours = {f"fidelity/{name}": float(getattr(result.overall, name)) for name in names}
    return ours | {"fidelity/noise_kl_mean": result.noise.kl_mean}


def _plain(text: str) -> str:
    return _NO_NAME.sub("", text.replace("=", " "))


def _names(workloads: Sequence[Workload]) -> dict[str, tuple[str, str]]:
    """Return name and title of the workload of each run, by its place; namesakes are numbered, the oldest first."""
    names = dict[str, tuple[str, str]]()
    seen = Counter[tuple[str, str]]()
    for workload in reversed(workloads):
        short = _plain(workload.short)[:LONGEST_WORKLOAD].rstrip("/. ")
        seen[workload.model, short] += 1
        number = seen[workload.model, short]
        name = short if number == 1 else f"{short} {number}"
        names |= {run.artifact.place: (name, workload.title) for run in workload.runs}
    return names


def _loads(item: FormatReport, names: Mapping[str, tuple[str, str]]) -> dict[str, float]:
    metrics: dict[str, float | None] = {}
    for run in item.runs:
        for level in run.result.levels:
            summary, place = level.summary, f"{names[run.artifact.place][0]}/{_plain(level.load)}"
            metrics |= {f"{place}/output_tokens_per_s": summary.output_tokens_per_s, f"{place}/counts": level.counts}
            for name, each in (("ttft", summary.ttft_s), ("itl", summary.itl_s)):
                metrics |= {f"{place}/{name}_p50_s": each.p50, f"{place}/{name}_p99_s": each.p99}
    return {name: float(value) for name, value in metrics.items() if value is not None}
