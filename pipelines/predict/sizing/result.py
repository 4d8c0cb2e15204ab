"""Result of the command, and its JSON and CSV."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from pipelines.document.show import csv_text
from pipelines.engines.tensorrt_llm.config import LIMITS_FOR_LOAD
from pipelines.predict.sizing.answer import Answer, Check, FleetOption
from pipelines.predict.sizing.autoscale import Replay
from pipelines.predict.sizing.fleet import PeakFleet
from pipelines.predict.sizing.instance import LoadOutcome
from pipelines.predict.sizing.question import Question
from pipelines.predict.sizing.sensitivity import Change

SCHEMA = 1
OF_SIZES = (
    *("max_beam_width", "gather_context_logits", "windows", "tokens_per_block", "kv_fraction", "max_kv_tokens"),
    *("group_size", "gpu_weights_percent", "user_buffers"),
)
"""Properties of the engine that the answer's file repeats."""


@dataclass(frozen=True, slots=True, eq=False)
class Day:
    """A day replayed on the fixed fleet and on an autoscaled one. `how`: origin of the day's shape."""

    how: str
    fixed: Replay
    moving: Replay


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """Result of the command.

    Attributes:
        answer: options, the recommended first.
        ladders: figures from almost no load up to the rate, one list per option.
        check: simulation of the recommended fleet.
        day: replay of a day, or None.
    """

    answer: Answer
    ladders: tuple[tuple[LoadOutcome, ...], ...]
    check: Check
    changes: tuple[Change, ...]
    day: Day | None


def to_json(result: Result) -> dict[str, Any]:
    """Convert to plain JSON values (seconds, tokens, USD); a missing value becomes null."""
    question = result.answer.question
    document = {
        "schema": SCHEMA,
        "origin": "modelled",
        "question": _question(question),
        "recommended": result.answer.chosen.label,
        "reason": result.answer.reason,
        "options": [_option(option, question) for option in result.answer.options],
        "refused": [{"option": each.label, "why": each.why} for each in result.answer.refused],
        "check": {
            "fleet": asdict(result.check.fleet),
            "one_fewer": None if result.check.fewer is None else asdict(result.check.fewer),
            "why": result.check.why,
        },
        "changes": [asdict(change) for change in result.changes],
        "day": None if result.day is None else _day(result.day, result.answer.chosen.gpus),
    }
    return _plain(document)  # type: ignore[no-any-return]


def _question(question: Question) -> dict[str, Any]:
    return {
        "model": question.model.name,
        "gpu": question.gpu.gpu,
        "gpus_per_server": question.gpu.gpus_per_server,
        "framework": question.engine,
        "mode": question.mode,
        "demand": asdict(question.demand) | {"requests_per_day": question.demand.requests_per_day},
        "isl": {"mean": question.mean_isl, "min": int(question.isl.min()), "max": int(question.isl.max())},
        "osl": {"mean": question.mean_osl, "min": int(question.osl.min()), "max": int(question.osl.max())},
        "slo": asdict(question.slo) | {"percentile": question.percentile},
        "headroom": question.headroom,
        "spare": question.spare,
        "sparse": question.sparse,
        "limits": _limits(question),
        "prices": {name.removesuffix("_usd"): value for name, value in question.prices},
        "requests_simulated": len(question.gaps),
    }


def _limits(question: Question) -> dict[str, Any]:
    """Flatten the limits; null is chosen for the load."""
    terms, sizes = question.terms, question.terms.sizes
    return {
        **asdict(terms.wanted),
        **{name: getattr(sizes, name) for name in OF_SIZES},
        **{name: getattr(terms, name) for name in ("policy", "admission", "prefix_tokens")},
    }


def _option(option: FleetOption, question: Question) -> dict[str, Any]:
    one, seen = option.instance, option.capacity.seen
    return {
        "option": option.label,
        "tp": one.setup.tp,
        "pp": one.setup.pp,
        "format": one.setup.qformat.value,
        "kv_format": one.setup.kv_format.value,
        **{name: getattr(one.limits, name) for name in LIMITS_FOR_LOAD},
        "chosen": one.limits.reasons,
        "requests_per_s": option.capacity.rate,
        "requests_per_s_low": option.low,
        "requests_per_s_high": option.high,
        "requests_per_s_per_gpu": option.per_gpu,
        "requests_per_s_most": option.capacity.most,
        "binding": option.capacity.binding,
        "because": option.capacity.because,
        "at_percentile_s": seen.at(question.percentile),
        "batch": seen.batch,
        "kv_use": seen.kv_use,
        "kv_tokens": one.kv_tokens,
        "concurrency": one.placed.concurrency.requests,
        "concurrency_binds": one.placed.concurrency.binds,
        "weight_bytes_per_gpu": one.placed.memory.weights,
        "input_time_share": option.input_share,
        "provenance": one.costed.provenance,
        "why": one.costed.why,
        "spread": dict(one.costed.spread),
        "fleet": asdict(option.fleet),
        "fleet_low": asdict(option.fewest),
        "fleet_high": None if option.largest is None else asdict(option.largest),
        "cost": None if option.cost is None else option.cost.to_json(),
    }


def _day(day: Day, gpus: int) -> dict[str, Any]:
    def one(replay: Replay) -> dict[str, Any]:
        return {
            "gpu_hours": replay.instance_hours * gpus,
            "requests": replay.requests,
            "over_limit_share": replay.over,
            "starts": replay.starts,
            "instances_min": int(replay.ready.min()),
            "instances_max": int(replay.ready.max()),
        }

    return {"how": day.how, "fixed": one(day.fixed), "autoscaled": one(day.moving)}


def _plain(value: Any) -> Any:
    """Replace NaN, which JSON does not allow, with null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_csv(result: Result) -> str:
    """Format one CSV row per option, best first."""
    rows = [_row(option, result.answer.question) for option in result.answer.options]
    return csv_text(list(rows[0]), (row.values() for row in rows))


def _row(option: FleetOption, question: Question) -> dict[str, Any]:
    document = _option(option, question)
    nested = ("chosen", "at_percentile_s", "spread", "fleet", "fleet_low", "fleet_high", "cost")
    flat = {name: value for name, value in document.items() if name not in nested}
    values = {f"{name}_ms": round(1000 * seconds, 3) for name, seconds in document["at_percentile_s"].items()}
    cost = option.cost
    prices = {
        "usd_per_year": None if cost is None else cost.per_year,
        "usd_per_million_input": None if cost is None else cost.per_million_input,
        "usd_per_million_output": None if cost is None else cost.per_million_output,
    }
    return flat | {f"{name}_p{question.percentile:g}": value for name, value in values.items()} | {
        **_sizes(option.fleet, ""), **_sizes(option.fewest, "_low"),
        **_sizes(option.largest, "_high"), **prices,
    }  # fmt: skip


def _sizes(fleet: PeakFleet | None, ending: str) -> dict[str, Any]:
    names = ("instances", "gpus", "servers", "servers_raw")
    return {f"{name}{ending}": None if fleet is None else getattr(fleet, name) for name in names}
