"""Records that a report is made of, filled by `pipelines.report.collect`. Units: bytes, seconds, tokens."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from eval.fidelity.bounds import BoundsResult
from eval.fidelity.divergence import FidelityResult
from eval.perplexity import PerplexityResult
from eval.results import EvalResult, Flips
from pipelines.compress.config import ABOUT, SHIPPED
from pipelines.document.show import NONE, flat
from pipelines.domain.benchmark import BenchmarkResult, Distribution, LoadPoint, Summary
from pipelines.domain.summary import RequestColumns, Window
from pipelines.host.files import sha256_file
from pipelines.store.store import canonical, content_digest

BASELINE = "none"
"""Variant of the uncompressed 16-bit model."""


@dataclass(frozen=True, slots=True)
class ArtifactInput:
    """One input that an artifact was made from.

    Attributes:
        name: the stage's name for it, e.g. "checkpoint".
        digest: digest of its content, 64 hex digits.
        source: "build/tiny_gemma-fp8-01ab..." for an artifact of the store, else the name of the folder or file.
        path: the folder or file as it was recorded, which may be of another machine.
    """

    name: str
    digest: str
    source: str
    in_store: bool
    path: str = ""


@cache
def _shipped() -> dict[str, str]:
    """Return what a plan calls the calibration texts that ship with the project, by the digest of their content."""
    return {content_digest({"": sha256_file(path)}): ABOUT[name] for name, path in SHIPPED.items()}


def place_of(source: ArtifactInput) -> str:
    """Return what a report calls an input: a text that ships with the project by its name, others by their place."""
    return _shipped().get(source.digest, source.source)


@dataclass(frozen=True, slots=True)
class ReportedArtifact:
    """One finished artifact as described by its manifest.

    Attributes:
        stage: "quantize", "build", "evaluate", ...
        label: "<model>-<variant>", or another readable name.
        place: its folder below the store, e.g. "build/tiny_gemma-fp8-01ab...".
        created: start time, ISO, UTC.
        seconds: how long it took; None if the run was killed.
        peak_memory_bytes: highest resident memory of the process during that time; None if not recorded.
        repeat: the command that made it.
        libraries: library versions that determined its bytes.
        settings: settings that determined its bytes.
        model: label of the model; None if the manifest does not contain it.
        tuning: the tuning it was planned with; None in manifests from before there was one.
    """

    stage: str
    label: str
    place: str
    digest: str
    created: str
    seconds: float | None
    peak_memory_bytes: int | None
    repeat: str
    version: str
    commit: str
    machine: Mapping[str, Any]
    libraries: Mapping[str, str]
    settings: Mapping[str, Any]
    facts: Mapping[str, Any]
    inputs: tuple[ArtifactInput, ...]
    model: str | None
    tuning: str | None

    def input(self, name: str) -> ArtifactInput | None:
        """Return the input of a name; None without one."""
        return next((each for each in self.inputs if each.name == name), None)

    def is_of(self, engines: Collection[str]) -> bool:
        """Return whether it was made from one of these engines, by their digests."""
        return any(source.digest in engines for source in self.inputs)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """One evaluation, compared with a 16-bit baseline if one answered the same questions.

    Attributes:
        row: a row of `eval.compare.loss_rows`; None for the baseline itself, or without a baseline.
        baseline: place of the baseline's evaluation; None in the same cases.
        missing: text that explains why there is no row; empty otherwise.
        original: likewise a row, against the model itself as Transformers computes it, if it was evaluated.
        before: the baseline's evaluation; None where there is no row.
    """

    artifact: ReportedArtifact
    result: EvalResult
    row: Mapping[str, Any] | None
    baseline: str | None
    missing: str = ""
    original: Mapping[str, Any] | None = None
    before: EvalResult | None = None


@dataclass(frozen=True, slots=True)
class ReportedFidelity:
    """A comparison of predictions with those of the 16-bit model.

    Attributes:
        flips: answers that changed; None if the two did not answer the same questions.
    """

    artifact: ReportedArtifact
    result: FidelityResult
    flips: Flips | None


@dataclass(frozen=True, slots=True)
class ReportedBounds:
    """Bounds on the predictions of a running server, against the 16-bit model."""

    artifact: ReportedArtifact
    result: BoundsResult


@dataclass(frozen=True, slots=True)
class ReportedPerplexity:
    """The perplexity of texts, beside that of the 16-bit model on the same engine.

    Attributes:
        baseline: of the 16-bit model; None if it did not read the same texts.
    """

    artifact: ReportedArtifact
    result: PerplexityResult
    baseline: PerplexityResult | None


@dataclass(frozen=True, slots=True)
class ModelledRun:
    """Predictions of the performance model for the loads of a benchmark.

    Attributes:
        levels: predictions by the level's `requests_file`, without levels that were cut short.
        why: origin of the model, e.g. "fitted: ...".
    """

    levels: Mapping[str, Summary]
    why: str


@dataclass(frozen=True, slots=True)
class BenchmarkRun:
    """One benchmark of one format under one workload.

    Attributes:
        requests: of each level whose records were kept, by its `requests_file`, with the measured window, if any.
        repeats: earlier benchmarks of the same engine under the same workload, for the spread between runs.
        modelled: predictions for the same loads; None if there is no model of this deployment.
    """

    artifact: ReportedArtifact
    result: BenchmarkResult
    requests: Mapping[str, tuple[RequestColumns, Window | None]]
    repeats: tuple[BenchmarkResult, ...]
    modelled: ModelledRun | None = None


@dataclass(frozen=True, slots=True)
class FormatReport:
    """All results of one model in one format that are linked by digest.

    Attributes:
        chain: artifacts from the model to the newest result, in order of dependency.
        accuracy: the evaluation, of the task that most formats of the model were evaluated on; None if there is none.
        runs: newest benchmark of each workload.
        left_out: artifacts of the same label that do not belong to the chain, with the reason.
        fidelity: the newest comparison of the same engine with the 16-bit model; None if there is none.
        perplexities: the newest perplexity of the same engine for each task.
        other_tasks: the newest evaluation of the same engine for each further task.
    """

    model: str
    variant: str
    chain: tuple[ReportedArtifact, ...]
    accuracy: Accuracy | None
    runs: tuple[BenchmarkRun, ...]
    missing: tuple[str, ...]
    left_out: tuple[str, ...]
    fidelity: ReportedFidelity | None = None
    perplexities: tuple[ReportedPerplexity, ...] = ()
    other_tasks: tuple[Accuracy, ...] = ()

    def artifact(self, stage: str) -> ReportedArtifact | None:
        """Return the chain's artifact of a stage."""
        return next((artifact for artifact in self.chain if artifact.stage == stage), None)

    @property
    def label(self) -> str:
        """Return model and variant as text."""
        return f"{self.model} {self.variant}"

    @property
    def newest(self) -> str:
        """Return the ISO time of the newest artifact."""
        return max(artifact.created for artifact in (*self.chain, *(run.artifact for run in self.runs), *self.beside))

    @property
    def beside(self) -> tuple[ReportedArtifact, ...]:
        """Return what was measured of the engine besides accuracy and speed: fidelity, perplexity, other tasks."""
        fidelity = (self.fidelity.artifact,) if self.fidelity else ()
        texts = (each.artifact for each in self.perplexities)
        return (*fidelity, *texts, *(each.artifact for each in self.other_tasks))


@dataclass(frozen=True, slots=True)
class Workload:
    """Comparable runs, one per format: same model, engine, parallelism, lengths, protocol and machine.

    Attributes:
        title: name of the workload, with what distinguishes it from the model's others in this report.
        short: the same without the facts of the machine; two machines have one.
        runs: in the order of the report's formats.
    """

    title: str
    short: str
    model: str
    runs: tuple[BenchmarkRun, ...]


@dataclass(frozen=True, slots=True)
class ReportData:
    """All data of a report.

    Attributes:
        formats: the 16-bit baseline first, then the formats in the requested order or as found.
        workloads: groups of comparable runs, newest first.
        bounds: newest comparison of each server that runs elsewhere with the 16-bit model.
    """

    formats: tuple[FormatReport, ...]
    workloads: tuple[Workload, ...]
    bounds: tuple[ReportedBounds, ...] = ()

    @property
    def models(self) -> tuple[str, ...]:
        """Return the distinct labels of the models."""
        return tuple(dict.fromkeys(item.model for item in self.formats))

    @property
    def newest(self) -> str:
        """Return the ISO time of the newest artifact, which dates the report: the same store gives the same report."""
        return max(*(item.newest for item in self.formats), *(item.artifact.created for item in self.bounds), "")


# Text of the six facts that qualify every number of a report: model, precision, ISL, OSL, load and TP.


def lengths(distributions: Sequence[Distribution]) -> str:
    """Return token counts over several levels: "128" if all are equal, else "119 (52..200)" as mean (min..max)."""
    measured = [item for item in distributions if item.count and item.mean is not None]
    if not measured:
        return NONE
    low = min(item.min for item in measured if item.min is not None)
    high = max(item.max for item in measured if item.max is not None)
    if low == high:
        return f"{low:g}"
    mean = sum(float(item.mean or 0) * item.count for item in measured) / sum(item.count for item in measured)
    return f"{mean:.0f} ({low:g}..{high:g})"


def loads(levels: Sequence[LoadPoint]) -> str:
    """Return all loads as text: "concurrency 1, 4, 16" or "2, 4 requests/s (poisson)"."""
    closed = [str(level.concurrency) for level in levels if level.concurrency is not None]
    parts = [f"concurrency {', '.join(closed)}"] if closed else []
    rates: dict[str, list[str]] = {}
    for level in levels:
        if level.concurrency is None and level.request_rate is not None:
            rates.setdefault(level.arrival, []).append(f"{level.request_rate:g}")
    parts += [f"{', '.join(numbers)} requests/s ({arrival})" for arrival, numbers in rates.items()]
    others = [level.load for level in levels if level.concurrency is None and level.request_rate is None]
    return "; ".join([*parts, *dict.fromkeys(others)]) or NONE


def run_label(runs: Sequence[BenchmarkRun], levels: Sequence[LoadPoint] | None = None) -> str:
    """Return the six facts of a number as text: model, precision, ISL, OSL, concurrency or rate, TP.

    Args:
        runs: at least one run; all of the same model and TP.
        levels: the levels to describe; None is every level of the runs.
    """
    chosen = [level for run in runs for level in run.result.levels] if levels is None else list(levels)
    first = runs[0].result
    precisions = ", ".join(dict.fromkeys(run.result.precision for run in runs))
    unique = list({level.load: level for level in chosen}.values())
    return (
        f"model {first.model}; precision {precisions}; ISL {lengths([level.summary.isl for level in chosen])}; "
        f"OSL {lengths([level.summary.osl for level in chosen])}; {loads(unique)}; TP {first.tp_size}"
    )


# Benchmarks that are comparable: the same load on the same kind of deployment and machine.

_MACHINE = ("platform", "cpu_count", "cpu", "memory_bytes", "gpus")
"""Facts that distinguish two machines; the rest (load, names) changes from run to run."""


def _alike(result: BenchmarkResult) -> dict[str, Any]:
    """Return what is equal for runs that may be compared."""
    return {
        "model": result.model,
        "engine": result.engine,
        "TP": result.tp_size,
        "ranks": result.world_size,
        "gpus": result.gpus,
        "workload": dict(result.workload),
        "arrivals": sorted({level.arrival for level in result.levels}),
        "machine": {name: result.machine[name] for name in _MACHINE if name in result.machine},
    }


def run_key(result: BenchmarkResult) -> str:
    """Return a key that is equal for runs that may be compared or, in the same format, replace each other."""
    return canonical(_alike(result))


def group_runs(formats: Iterable[FormatReport]) -> tuple[Workload, ...]:
    """Group runs by workload, one per format, with the most recently measured workload first."""
    groups: dict[str, list[BenchmarkRun]] = {}
    for item in formats:
        for run in item.runs:
            groups.setdefault(run_key(run.result), []).append(run)
    ordered = sorted(groups.values(), key=lambda runs: max(run.artifact.created for run in runs), reverse=True)
    alike = [dict(flat(_alike(runs[0].result))) for runs in ordered]
    names = [(facts["model"], facts.get("workload.name", "workload")) for facts in alike]
    workloads = []
    for (model, name), facts, runs in zip(names, alike, ordered, strict=True):
        namesakes = [each for other, each in zip(names, alike, strict=True) if other == (model, name)]
        unlike = [key for key in facts if len({each.get(key) for each in namesakes}) > 1]
        told = [f"{key} {facts[key]}" for key in unlike]
        short = [each for each in told if not each.startswith("machine.")]
        title, short_title = (f"{name} ({', '.join(each)})" if each else name for each in (told, short))
        workloads.append(Workload(title, short_title, model, tuple(runs)))
    return tuple(workloads)


def spread(run: BenchmarkRun, load: str) -> tuple[float, float] | None:
    """Return lowest and highest output tokens/s of a load over repeated runs; None if it was measured once.

    Of a load that one run measured several times, they are the ends of its interval.
    """
    results = (run.result, *run.repeats)
    levels = [level for result in results for level in result.levels if level.load == load and level.counts]
    ends = [level.intervals.get("output_tokens_per_s", (level.summary.output_tokens_per_s,)) for level in levels]
    rates = [rate for each in ends for rate in each]
    return (min(rates), max(rates)) if len(rates) > 1 else None
