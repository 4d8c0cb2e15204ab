"""`make calibrate`: fit the performance model to a benchmark, for this machine or GPU."""

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from pipelines.document.show import NONE
from pipelines.domain.errors import UserError
from pipelines.domain.variant import Variant
from pipelines.engines.registry import ENGINES, TENSORRT_LLM, runs_on_cpu
from pipelines.engines.tensorrt_llm.config import LIMITS_FOR_LOAD
from pipelines.host.machine import Machine, gather, library_versions
from pipelines.host.screen import table, wrapped
from pipelines.predict.config import FITS
from pipelines.predict.performance.deployment import FittedModel, fitted_model, gpu_model
from pipelines.predict.performance.fit import FitResult, FittedLevel, fit
from pipelines.predict.performance.gpus import data_sheet, ranks, resolved, with_gpus
from pipelines.predict.performance.measured import Measured
from pipelines.predict.performance.modelled import ModelledDeployment
from pipelines.predict.performance.models import known_model
from pipelines.predict.performance.performance import PerformanceModel
from pipelines.predict.performance.read_measured import ELSEWHERE, read_measured
from pipelines.predict.simulator.interface import Policy, SchedulerLimits, admission_of
from pipelines.settings.compose import load
from pipelines.settings.root import Settings

SHOWN = {
    "token_compute": ("linears, computed", "us/token"),
    "weights": ("weights, read", "ms"),
    "token": ("token", "us"),
    "prefill_attention": ("attention of prompts", "ns/token²"),
    "kv_token": ("KV cache, read", "ns/token"),
    "fixed": ("iteration", "ms"),
    "sequence": ("request in an iteration", "us"),
    "prefill": ("prompt", "ms"),
    "prompts": ("iteration with prompts", "ms"),
    "end": ("request that has ended", "ms"),
    "overhead_s": ("in transit, per request", "ms"),
    "client_gap_s": ("client, between two requests", "ms"),
}
OURS = "trtllm-pipelines"
"""Name of the tool in benchmarks of this project, which say their own format."""
_UNITS = {"ns": 1e9, "us": 1e6, "ms": 1e3}


def run(overrides: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    return calibrate(load(overrides), gather())


def calibrate(settings: Settings, machine: Machine) -> int:
    """Fit the model, print the table of the fit and write the file.

    Raises:
        UserError: there is no benchmark to fit to, it cannot be read, or its ranks are not known.
    """
    if settings.sizing.measured is None:
        raise UserError(
            "sizing.measured names no benchmark to fit to.",
            todo=f"Add sizing.measured={settings.paths.store}/benchmark/...; `make benchmark` measures one.",
        )
    measured = with_gpus(read_measured([settings.sizing.measured]), settings)
    ranks(measured)  # before the fit, which takes a while
    start, source = start_of(settings, machine, measured)
    result, measured = fit(measured, start), labelled(measured, settings)
    fitted = fitted_model(measured, result, library_versions(("numpy", "scipy", "numba")))
    path = settings.sizing.fit or place(settings, fitted)
    fitted.save(path)
    sys.stdout.write(fit_text(measured, result, source) + f"\nfit: {path}\n")
    return 0


def start_of(
    settings: Settings, machine: Machine, measured: Measured
) -> tuple[ModelledDeployment | SchedulerLimits, str]:
    """Return the fit's start and its description: the performance model of a named GPU, or only the engine's limits.

    Raises:
        UserError: the GPU or the model is unknown, or the model does not fit.
    """
    if runs_on_cpu(measured.engine) or settings.hardware.name == "auto":
        why = "the CPU engine" if runs_on_cpu(measured.engine) else "no GPU is named (hardware=...)"
        return free_engine(settings, measured), f"each coefficient is fitted by itself: {why}"
    gpu = data_sheet(resolved(settings.hardware, machine))
    tp, pp = ranks(measured)
    # of an engine that was measured, nothing is chosen: its limits are those reported, or else trtllm-build's defaults
    limits = {name: measured.limits.get(name, getattr(settings.build, name)) for name in LIMITS_FOR_LOAD}
    built = settings.model_copy(update={"build": settings.build.model_copy(update=limits)})
    form = Variant.of(measured.precision or "") if measured.tool == OURS else None  # as it was tuned
    model = gpu_model(built, known_model(built), gpu, PerformanceModel.load().cost, form=form, tp=tp, pp=pp)
    return model.deployment, "multipliers on the performance model are fitted"


def free_engine(settings: Settings, measured: Measured) -> SchedulerLimits:
    """Take the scheduler's limits from the benchmark, or from the configuration where the benchmark lacks them.

    The CPU engine mixes prompts (in pieces where they do not fit) and tokens in one iteration (dynamic split-fuse), and
    under guaranteed_no_evict a request starts when all the blocks it needs are free. So do servers elsewhere that our
    load generator measures (vLLM, SGLang, trtllm-serve, llama.cpp).
    """
    limits, build = measured.limits, settings.build
    mixed: dict[str, Policy] = {
        ELSEWHERE: "inflight_chunked",
        **{name: engine.policy for name, engine in ENGINES.items()},
    }
    return SchedulerLimits(
        policy=mixed.get(measured.engine or "", "inflight"),
        slots=limits.get("max_batch_size", build.max_batch_size),
        max_num_tokens=limits.get("max_num_tokens", build.max_num_tokens),
        admission=admission_of(settings.triton.batch_scheduler_policy),
        kv_blocks=limits.get("kv_blocks"),
        tokens_per_block=build.tokens_per_block,
    )


def labelled(measured: Measured, settings: Settings) -> Measured:
    """Replace another tool's names by this project's: the configuration says what was measured."""
    if measured.tool == OURS or settings.hardware.name == "auto":
        return measured
    return replace(
        measured,
        model=known_model(settings).name,
        precision=settings.variant.label,
        engine=measured.engine or TENSORRT_LLM.name,
        gpu=settings.hardware.name,
    )


def place(settings: Settings, fitted: FittedModel) -> Path:
    """Return where a fit is kept in the store, derived from what it describes."""
    parts = [fitted.model, fitted.precision or "unknown", fitted.gpu or fitted.engine or "unknown", f"tp{fitted.tp}"]
    parts += [f"images{images}"] if (images := fitted.fitted_on.get("images")) else []
    name = "-".join(re.sub(r"[^A-Za-z0-9_.]+", "_", part) for part in parts)
    return settings.paths.store / FITS / f"{name}.json"


def fit_text(measured: Measured, result: FitResult, source: str) -> str:
    """Describe the measurements, the fit's error on them, and the fitted values."""
    head = f"{measured.model} {measured.precision or 'in an unknown format'} measured with {measured.tool}: {source}"
    coefficients = []
    for name, (title, unit) in SHOWN.items():
        if name not in result.intervals:
            continue
        low, high = result.intervals[name]
        scale = _UNITS[unit[:2]]
        value = scale * (low * high) ** 0.5
        mark = " *" if name in result.undecided else ""
        coefficients.append((title, _shown(value), unit, f"{_shown(scale * low)} to {_shown(scale * high)}{mark}"))
    lines = [wrapped(head, 0), "", *compared(result.rows), "", "coefficient, fitted, 95 % interval"]
    lines += table(coefficients, text_columns=(2, 3), indent=2) if coefficients else []
    if result.undecided:
        lines.append("  * not determined by these loads: other values fit about as well")
    if result.at_bound:
        titles = [SHOWN[name][0] for name in result.at_bound if name in SHOWN]
        lines.append(wrapped(f"at the bound of the allowed range: {', '.join(titles)}"))
    return "\n".join([*lines, *(wrapped(f"note: {note}") for note in measured.notes)])


METRICS = {"rps": "req/s", "ttft_p50": "TTFT p50 ms", "ttft_p95": "TTFT p95 ms", "itl_mean": "ITL mean ms"}
"""Metrics that a fit is judged by, and their titles."""


def compared(rows: Sequence[FittedLevel]) -> list[str]:
    """List measured, modelled and error of each load on separate lines, so that each fits 80 columns; medians last."""
    lines = [("load", *METRICS.values())]
    for row in rows:
        columns = zip(*(_cells(row, name) for name in METRICS), strict=True)
        names = (row.level.load, "  modelled", "  error, %")
        lines += [(name, *cells) for name, cells in zip(names, columns, strict=True)]
    medians = []
    for name in METRICS:
        values = [abs(row.errors()[name]) for row in rows if name in row.errors()]
        medians.append(f"{100 * median(values):.1f}" if values else NONE)
    return table([*lines, ("median error, %", *medians)])


def _cells(row: FittedLevel, name: str) -> tuple[str, str, str]:
    """Return a metric as measured and as modelled, requests/s or ms, and the error in percent."""
    if (error := row.errors().get(name)) is None:
        return NONE, NONE, NONE
    what, _, part = name.partition("_")
    real = row.level.requests_per_s if name == "rps" else 1e3 * float(getattr(getattr(row.level, f"{what}_s"), part))
    return _shown(real), _shown(real * (1 + error)), f"{100 * error:+.0f}"


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
