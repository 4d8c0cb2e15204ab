"""One line of the history: the results of one cell in one run. Facts only; they are judged when read.

Units: seconds, bytes, tokens; shares 0..1. Schema 1.
"""

from __future__ import annotations

import base64
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from pipelines.domain.metrics import FIGURES, NIGHTLY_LATENCIES, NIGHTLY_RATES

SCHEMA = 1
Status = Literal["done", "failed", "not possible"]


@dataclass(frozen=True, slots=True)
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
        model: label of the model.
        precision: compression in one word.
        engine: the engine that executed it.
        tp_size: tensor parallel ranks of the running engine.
        protocol: settings of workload, benchmark and eval, flattened. Only equal protocols are compared.
        settings_digest: digest of all settings that determine the result; the settings are stored beside the history.
        machine: facts of the machine.
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
        schema: schema of this line.
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
    def from_json(cls, data: Mapping[str, Any]) -> Record:
        """Read what `to_json` wrote.

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

    def metrics(self) -> dict[str, float]:
        """Map metric names to values for everything that can be judged; the load is part of the name.

        For repeated measurements the median counts. A load that was limited by the client or cut short has no rates
        and latencies.
        """
        found = {"engine_bytes": float(self.sizes["engine_bytes"])} if self.sizes.get("engine_bytes") else {}
        found |= {f"{stage}_s": float(seconds) for stage, seconds in self.seconds.items()}
        found |= {f"{stage}_peak_bytes": float(value) for stage, value in self.peak_memory_bytes.items()}
        if self.accuracy is not None:
            found["accuracy"] = float(self.accuracy["accuracy"])
        values: dict[str, list[float]] = {}
        for loads in self.measurements:
            for load in loads:
                for name, value in load_metrics(load).items():
                    values.setdefault(f"{name} at {load['load']}", []).append(value)
        return found | {name: statistics.median(given) for name, given in values.items()}


def load_metrics(load: Mapping[str, Any]) -> dict[str, float]:
    """Return rates, latencies and the share of failed requests of one load."""
    found = {"error_share": float(load["error_share"])}
    if load["client_limited"] or not load["complete"]:
        return found
    for figure in (*NIGHTLY_RATES, *NIGHTLY_LATENCIES):
        value = figure.of_line(load)
        if value is not None:
            found[figure.key] = float(value)
    return found


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
    """Unpack what `pack_bits` packed."""
    packed = base64.b64decode(text)
    return [bool(packed[place // 8] >> (7 - place % 8) & 1) for place in range(count)]
