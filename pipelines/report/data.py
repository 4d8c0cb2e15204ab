"""What a report is made of: frozen records, filled by `pipelines.report.collect`. Units: bytes, seconds, tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eval.results import EvalResult
from pipelines.domain.benchmark import BenchmarkResult, Level, Summary
from pipelines.domain.timing import RequestTiming

BASELINE = "none"
"""Variant of the uncompressed 16-bit model."""


@dataclass(frozen=True, slots=True)
class ArtifactInput:
    """One thing an artifact was made from.

    Attributes:
        name: what the stage calls it, e.g. "checkpoint".
        digest: of its content, 64 hex digits.
        source: "build/tiny_gemma-fp8-01ab..." for an artifact of the store, else the name of the folder or file.
        in_store: it is an artifact of the store.
    """

    name: str
    digest: str
    source: str
    in_store: bool


@dataclass(frozen=True, slots=True)
class ReportedArtifact:
    """One finished artifact as its manifest tells it.

    Attributes:
        stage: "quantize", "build", "evaluate", ...
        label: "<model>-<variant>", or another name for people.
        place: its folder below the store, e.g. "build/tiny_gemma-fp8-01ab...".
        digest: of its content.
        created: ISO time, UTC, when it was begun.
        seconds: how long it took; None when the run was killed.
        peak_memory_bytes: highest resident memory of the process meanwhile; None when not recorded.
        repeat: the command that made it.
        version: of this project.
        commit: of this project's source.
        machine: where it was made.
        libraries: versions that decided its bytes.
        settings: settings that decided its bytes.
        facts: what the stage found out.
        inputs: what it was made from.
        model: label of the model, None where the manifest does not tell.
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


@dataclass(frozen=True, slots=True)
class Accuracy:
    """One evaluation, beside the 16-bit baseline where one answered the same questions.

    Attributes:
        piece: the artifact.
        result: scores and every answer.
        row: of `eval.compare.loss_rows`; None for the baseline itself, or without a baseline.
        baseline: place of the baseline's evaluation; None likewise.
        missing: why there is no row, for people; empty otherwise.
    """

    piece: ReportedArtifact
    result: EvalResult
    row: Mapping[str, Any] | None
    baseline: str | None
    missing: str = ""


@dataclass(frozen=True, slots=True)
class ModelledRun:
    """What a model says of the loads of a benchmark.

    Attributes:
        levels: by the level's `requests_file`; without those that were cut short.
        why: where the model comes from, e.g. "fitted: ...".
    """

    levels: Mapping[str, Summary]
    why: str


@dataclass(frozen=True, slots=True)
class BenchmarkRun:
    """One benchmark of one format under one workload.

    Attributes:
        piece: the artifact.
        result: all levels.
        requests: one record per request, by the level's `requests_file`.
        repeats: earlier benchmarks of the same engine under the same workload, for the spread between runs.
        modelled: what a model says of the same loads; None when there is no model of it.
    """

    piece: ReportedArtifact
    result: BenchmarkResult
    requests: Mapping[str, tuple[RequestTiming, ...]]
    repeats: tuple[BenchmarkResult, ...]
    modelled: ModelledRun | None = None

    def timings(self, level: Level) -> tuple[RequestTiming, ...]:
        """The requests of one level; empty when its records were not kept."""
        return self.requests.get(level.requests_file, ())


@dataclass(frozen=True, slots=True)
class FormatReport:
    """Everything about one model in one format whose parts belong together by digest.

    Attributes:
        model: label.
        variant: compression in one word.
        chain: artifacts from the model to the newest result, in the order they depend on each other.
        accuracy: None when it was not evaluated.
        runs: newest benchmark of each workload.
        missing: parts that are not there, for people.
        left_out: artifacts of the same label that do not belong to the chain, with the reason.
    """

    model: str
    variant: str
    chain: tuple[ReportedArtifact, ...]
    accuracy: Accuracy | None
    runs: tuple[BenchmarkRun, ...]
    missing: tuple[str, ...]
    left_out: tuple[str, ...]

    def piece(self, stage: str) -> ReportedArtifact | None:
        """The chain's artifact of a stage."""
        return next((piece for piece in self.chain if piece.stage == stage), None)

    @property
    def label(self) -> str:
        """Model and variant, for people."""
        return f"{self.model} {self.variant}"

    @property
    def newest(self) -> str:
        """ISO time of the newest artifact."""
        pieces = [*self.chain, *(run.piece for run in self.runs)]
        return max(piece.created for piece in pieces)


@dataclass(frozen=True, slots=True)
class Workload:
    """Runs that may be compared: same model, engine, parallelism, lengths, protocol and machine; one per format.

    Attributes:
        title: name of the workload and what tells it from the others in this report.
        model: label.
        runs: in the order of the report's formats.
    """

    title: str
    model: str
    runs: tuple[BenchmarkRun, ...]


@dataclass(frozen=True, slots=True)
class ReportData:
    """All of a report.

    Attributes:
        formats: the 16-bit baseline first, then the formats in the order asked for or found.
        workloads: groups of comparable runs, newest first.
    """

    formats: tuple[FormatReport, ...]
    workloads: tuple[Workload, ...]

    @property
    def models(self) -> tuple[str, ...]:
        """Labels of the models, each once."""
        return tuple(dict.fromkeys(item.model for item in self.formats))

    @property
    def newest(self) -> str:
        """ISO time of the newest artifact: the report's date, so that the same store gives the same report."""
        return max(item.newest for item in self.formats)
