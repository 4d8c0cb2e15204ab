"""Judge the accuracy of a night against its limit and, question by question, against earlier nights."""

import base64
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, Self

from eval.exact import Answered, Changed, Evidence, Interim
from eval.results import mcnemar_exact
from eval.verdict import Verdict, verdict_of
from pipelines.document.show import NONE, number, percent
from pipelines.domain.metrics import FIGURES, NIGHTLY_LATENCIES, NIGHTLY_RATES, REQUEST_RATE, SHARE, SIZE, TOKEN_RATE
from pipelines.domain.units import show_bytes, show_seconds
from pipelines.nightly.config import ExpectSettings, NightlySettings

# One line of the history: the results of one cell in one run. Facts only; they are judged when read.
#
# Units: seconds, bytes, tokens; shares 0..1. Schema 1.

SCHEMA = 1
Status = Literal["done", "failed", "not possible"]


@dataclass(frozen=True)
class Record:
    """One cell of one run.

    Attributes:
        run: id of the run, sortable by time.
        at: ISO time, UTC, at which the cell finished.
        cell: name, e.g. "tiny_gemma fp8 fixed".
        key: hash of the axes and overrides that determine the deployment; equal keys form one series.
        machine_class: GPUs, or processor and its number of cores; only runs on the same class are compared.
        status: "done", "failed", or "not possible" if the plan refuses the combination.
        reason: why the status is not "done".
        commit: commit of this project, with "+changes" if the work tree differed.
        overrides: overrides of the cell, as on the command line.
        precision: compression in one word.
        tp_size: tensor parallel ranks of the running engine.
        protocol: settings of workload, benchmark and eval, flattened. Only equal protocols are compared.
        settings_digest: digest of all settings that determine the result; the settings are stored beside the history.
        versions: versions of the libraries, driver and server.
        accuracy: task, questions, share right, loss against the baseline with the answers lost and gained, also at each
            look where asking could stop early, per subject, and every answer as a bit (`right`, base64) so that nights
            can be paired question by question.
        measurements: one per benchmark, each a list of loads with ISL, OSL, rates, percentiles and errors; more than
            one if the first looked worse and was repeated.
        sizes: bytes of checkpoint and engine.
        seconds: durations of the stages that this run executed, without those taken from the store.
        peak_memory_bytes: peak memory of the same stages.
        log: log of the cell, relative to the current folder of the run.
    """

    run: str
    at: str
    cell: str
    key: str
    machine_class: str
    status: Status
    reason: str = ""
    commit: str = "unknown"
    overrides: Sequence[str] = ()
    model: str = ""
    precision: str = ""
    engine: str = ""
    tp_size: int | None = None
    protocol: Mapping[str, Any] = field(default_factory=dict)
    settings_digest: str = ""
    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    accuracy: Mapping[str, Any] | None = None
    measurements: Sequence[Sequence[Mapping[str, Any]]] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    peak_memory_bytes: Mapping[str, int] = field(default_factory=dict)
    log: str = ""
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Invert `to_json`.

        Raises:
            ValueError: the line has another schema, or a field is missing or unknown.
        """
        if data.get("schema") != SCHEMA:
            raise ValueError(f"has schema {data.get('schema')!r}; this version reads {SCHEMA}")
        if unknown := sorted(set(data) - {item.name for item in fields(cls)}):
            raise ValueError(f"has the unknown field '{unknown[0]}'")
        try:
            return cls(**data)
        except TypeError as error:
            raise ValueError(str(error).split("() ")[-1]) from None

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Values by metric name of everything that can be judged; the load is part of the name.

        For repeated measurements the median counts. A load that was limited by the client or cut short has no rates
        and latencies.
        """
        metrics = {"engine_bytes": float(self.sizes["engine_bytes"])} if self.sizes.get("engine_bytes") else {}
        metrics |= {f"{stage}_s": float(seconds) for stage, seconds in self.seconds.items()}
        metrics |= {f"{stage}_peak_bytes": float(value) for stage, value in self.peak_memory_bytes.items()}
        if self.accuracy is not None:
            metrics["accuracy"] = float(self.accuracy["accuracy"])
        values: dict[str, list[float]] = {}
        for loads in self.measurements:
            for load in loads:
                for name, value in load_metrics(load).items():
                    values.setdefault(f"{name} at {load['load']}", []).append(value)
        return metrics | {name: statistics.median(numbers) for name, numbers in values.items()}


def load_metrics(load: Mapping[str, Any]) -> dict[str, float]:
    """Return rates, latencies and the share of failed requests of one load."""
    metrics = {"error_share": float(load["error_share"])}
    if load["client_limited"] or not load["complete"]:
        return metrics
    for figure in (*NIGHTLY_RATES, *NIGHTLY_LATENCIES):
        value = figure.of_line(load)
        if value is not None:
            metrics[figure.key] = float(value)
    return metrics


def base_name(metric: str) -> str:
    """Remove the load from a metric's name: "ttft_p50_s at concurrency 8" -> "ttft_p50_s"."""
    return metric.partition(" at ")[0]


def higher_is_better(metric: str) -> bool:
    """Return whether more is better; for metrics outside the table (seconds and memory of stages), less is."""
    figure = FIGURES.get(base_name(metric))
    return figure is not None and figure.metric.better == "higher"


def pack_bits(right: Sequence[bool]) -> str:
    """Pack answers as bits, most significant first, in base64."""
    packed = bytearray((len(right) + 7) // 8)
    for place, value in enumerate(right):
        packed[place // 8] |= value << (7 - place % 8)
    return base64.b64encode(packed).decode()


def unpack_bits(text: str, count: int) -> list[bool]:
    """Invert `pack_bits`."""
    packed = base64.b64decode(text)
    return [bool(packed[place // 8] >> (7 - place % 8) & 1) for place in range(count)]


# The record of a regression.


@dataclass(frozen=True, slots=True)
class Regression:
    """A metric of a cell that is worse than before, or worse than a pinned limit.

    Attributes:
        metric: name of the metric, including its load.
        before: median of the earlier nights, or the pinned limit.
        limit: value beyond which tonight counts as worse.
        last_good: the record before `first`; None if there is none.
    """

    cell: str
    metric: str
    before: float
    now: float
    limit: float
    reason: str
    first: Record
    last_good: Record | None

    @property
    def change_percent(self) -> float:
        """Return the change from `before` to tonight in percent; positive means more."""
        return 100 * (self.now / self.before - 1) if self.before else float("inf")


# Format the values of metrics for display.


def shown(metric: str, value: float | None) -> str:
    """Format a value with its unit."""
    base = base_name(metric)
    if value is None:
        return NONE
    if base.endswith("_bytes"):
        return show_bytes(int(value))
    figure = FIGURES.get(base)
    if figure is None:
        return show_seconds(value)  # seconds of a stage
    if figure.metric.unit is SHARE:
        return f"{percent(value)} %"
    if figure.metric.unit in (TOKEN_RATE, REQUEST_RATE):
        return f"{number(value)}/s"
    return f"{number(figure.shown(value))} {figure.metric.unit.shown}"


def named(metric: str) -> str:
    """Return a metric's name in words, without a unit: "TTFT p50 at concurrency 8", "build peak memory"."""
    base, _, load = metric.partition(" at ")
    figure = FIGURES.get(base)
    if figure is not None:
        name = figure.metric.title.partition(",")[0] + (" size" if figure.metric.unit is SIZE else "")
        name += f" {figure.statistic}" if figure.statistic else ""
    elif base.endswith("_peak_bytes"):
        name = f"{base.removesuffix('_peak_bytes')} peak memory"
    else:
        name = f"{base.removesuffix('_s')} time"
    return f"{name}{f' at {load}' if load else ''}"


def title(metric: str) -> str:
    """Return a metric's name with the unit of a plot: "TTFT p50, ms at concurrency 8", "build peak memory, MiB"."""
    base, _, load = metric.partition(" at ")
    figure = FIGURES.get(base)
    if figure is not None:
        name = figure.title
    elif base.endswith("_bytes"):
        name = f"{named(base)}, {SIZE.shown}"
    else:
        name = f"{base.removesuffix('_s')}, s"
    return f"{name}{f' at {load}' if load else ''}"


def scale(metric: str) -> float:
    """Return the factor from the stored value to the unit in `title`."""
    base = base_name(metric)
    if base.endswith("_bytes"):
        return SIZE.scale
    figure = FIGURES.get(base)
    return figure.metric.unit.scale if figure else 1.0


def limit_verdict(record: Record, expect: ExpectSettings, chance: float) -> Verdict | None:
    """Judge the loss against the format's limit.

    A baseline that does not beat guessing by it gives NOT MEASURED, as does a format that was asked no questions.

    Returns:
        None without a limit or a baseline, and for a line that was written before lost and gained were recorded.
    """
    accuracy, limit = record.accuracy, _limit(record, expect)
    if limit is None or (accuracy is not None and accuracy.get("lost") is None):
        return None
    if accuracy is None:
        return Verdict.NOT_MEASURED
    evidence, margin = _evidence(accuracy), limit / 100 * accuracy["baseline"]
    guessing = evidence.p_guessing(margin)
    return verdict_of(evidence.p_below(margin), evidence.mirrored.p_below(-margin), chance, guessing)


def measured_loss(record: Record, expect: ExpectSettings, chance: float) -> float | None:
    """Return the loss, percent of the baseline's accuracy; None without one, or if the baseline only guesses."""
    accuracy = record.accuracy or {}
    if accuracy.get("lost") is not None:
        margin = (_limit(record, expect) or 0.0) / 100 * accuracy["baseline"]
        if _evidence(accuracy).p_guessing(margin) > chance:
            return None
    loss: float | None = accuracy.get("loss_percent")
    return loss


def _evidence(accuracy: Mapping[str, Any]) -> Evidence:
    """Return what a line of the history proves.

    Older lines have no looks, because all questions were asked, or do not say what the baseline could have guessed.
    """
    if (interims := accuracy.get("looks")) is None:
        return Evidence.once(Changed(accuracy["questions"], accuracy["lost"], accuracy["gained"]))
    before = [
        Answered(right, tuple((chance, n) for chance, n in parts)) for right, parts in accuracy.get("before") or ()
    ]
    counts: list[Answered | None] = [*before] or [None] * len(interims)
    return Evidence(
        tuple(
            Interim(Changed(n, lost, gained), share, each)
            for (n, lost, gained, share), each in zip(interims, counts, strict=True)
        )
    )


def _limit(record: Record, expect: ExpectSettings) -> float | None:
    limits = expect.accuracy_loss_percent
    return limits.get(f"{record.model} {record.precision}", limits.get(record.precision))


def accuracy_limit(record: Record, expect: ExpectSettings, chance: float) -> list[Regression]:
    """Find a loss that is proven to be above the format's limit."""
    accuracy, limit = record.accuracy, _limit(record, expect)
    if accuracy is None or limit is None or limit_verdict(record, expect, chance) is not Verdict.NO_GO:
        return []
    least = accuracy["baseline"] * (1 - limit / 100)
    why = f"loses {accuracy['loss_percent']:.2f} % of the baseline's accuracy; the limit is {limit:g} %"
    return [Regression(record.cell, "accuracy", accuracy["baseline"], accuracy["accuracy"], least, why, record, None)]


def accuracy_fell(nights: list[Record], settings: NightlySettings, chance: float) -> list[Regression]:
    """Find a significant loss of right answers against the best earlier night, paired question by question.

    Args:
        nights: nights of one cell since its accuracy was last expected to change, oldest first; the last is judged.
        settings: contain the tolerated loss.
        chance: probability below which a loss counts as real.
    """
    floor = settings.expect.floor_percent.get("accuracy")
    last = nights[-1].accuracy
    if floor is None or last is None:
        return []
    comparable = [n for n in nights if n.accuracy and n.accuracy["prompts_sha256"] == last["prompts_sha256"]]
    best = max(comparable, key=_right)
    stretch = []
    for night in reversed(comparable):
        lost, gained = _paired(best, night)
        fell = _right(night) < _right(best) * (1 - floor / 100) and lost > gained
        if not fell or mcnemar_exact(lost, gained) >= chance:
            break
        stretch.append(night)
    if not stretch:
        return []
    place = comparable.index(stretch[-1])
    before = _right(best)
    lost, gained = _paired(best, nights[-1])
    why = f"{lost} answers lost and {gained} gained against {best.commit[:12]}, the best night"
    return [
        Regression(
            nights[-1].cell, "accuracy", before, _right(nights[-1]), before * (1 - floor / 100), why,
            stretch[-1], comparable[place - 1] if place else None,
        )
    ]  # fmt: skip


def _right(record: Record) -> float:
    return float(record.accuracy["accuracy"]) if record.accuracy else 0.0


def _paired(best: Record, night: Record) -> tuple[int, int]:
    """Count (questions lost, questions gained) from one night to another."""
    before, after = (
        unpack_bits(night.accuracy["right"], night.accuracy["questions"]) for night in (best, night) if night.accuracy
    )
    pairs = list(zip(before, after, strict=True))
    return sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
