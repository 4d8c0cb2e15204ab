"""The answer as a report, built from the blocks that all reports share."""

from __future__ import annotations

import math

from pipelines.document.blocks import LEFT, Block, Callout, Card, Column, Document, Section, Table, Terms
from pipelines.document.show import NONE, count, number
from pipelines.predict.performance.performance import origin
from pipelines.predict.sizing.answer import FleetOption
from pipelines.predict.sizing.pictures import day_picture, pareto
from pipelines.predict.sizing.question import Question
from pipelines.predict.sizing.result import Result
from pipelines.predict.sizing.words import (
    NO_PRICES,
    binds,
    cost_texts,
    day_lines,
    fleet_text,
    interval_text,
    length_text,
    limits_text,
    memory_text,
    tokens_text,
    trial_text,
    whole,
)


def document(result: Result) -> Document:
    """Build the report."""
    answer = result.answer
    question, best = answer.question, answer.chosen
    where = six(result)
    sections = [
        Section("options", "Configurations tried", tuple(_options(result, where))),
        Section("check", "Simulated at the peak", tuple(_check(result))),
        Section("changes", "Effect of one change", tuple(_changes(result))),
    ]
    if result.day is not None:
        sections.append(
            Section(
                "day",
                "A day",
                (day_picture(result, result.day, where), *(Callout("note", line) for line in day_lines(result))),
            )
        )
    sections.append(Section("terms", "The question and its assumptions", (Terms(_terms(result)),)))
    return Document(
        title=f"{question.model.name} on {question.gpu.gpu}",
        subtitle=f"{question.demand.peak:,.4g} requests/s at peak, {limits_text(question)}",
        cards=_cards(result),
        lead=(Callout("good", f"{best.label}: {fleet_text(best.fleet)}. Because {answer.reason}."),),
        sections=tuple(sections),
        kind="Sizing",
        source="a model of the engine, not measurements",
    )


def six(result: Result) -> str:
    """Return the conditions that accompany every number: model, precision, ISL, OSL, load, TP."""
    question = result.answer.question
    options = result.answer.options
    formats = ", ".join(dict.fromkeys(option.instance.setup.qformat.value for option in options))
    tps = ", ".join(dict.fromkeys(str(option.instance.setup.tp) for option in options))
    return (
        f"Modelled: model {question.model.name}; precision {formats}; ISL {length_text(question.isl)}; OSL "
        f"{length_text(question.osl)}; Poisson arrivals; TP {tps}; {question.gpu.gpu}."
    )


def _cards(result: Result) -> tuple[Card, ...]:
    best = result.answer.chosen
    fleet = best.fleet
    rounded = f"{fleet.servers_raw:.2f} before rounding; {whole(fleet)}"
    cards = [
        Card("Servers", f"{fleet.servers:,}", "", rounded, "modelled"),
        Card("GPUs", f"{fleet.gpus:,}", "", f"{count(fleet.instances, 'instance')} of {best.label}", "modelled"),
        Card("An instance serves", number(best.capacity.rate), "requests/s", f"{binds(best)} binds", "modelled"),
    ]
    if best.cost is not None:
        cards.append(Card("A year", f"{best.cost.per_year:,.0f}", "USD", "whole servers, prices as given", "modelled"))
    return tuple(cards)


def _options(result: Result, where: str) -> list[Block]:
    question, options = result.answer.question, result.answer.options
    percent = f"P{question.percentile:g}, ms"
    columns = (
        Column("configuration", right=LEFT),
        Column("each", "requests/s"), Column("per GPU", "requests/s"), Column("8 of 10 cases", "requests/s"),
        Column("TTFT", percent), Column("ITL", percent), Column("E2E", percent),
        Column("instances", "fleet"), Column("GPUs", "fleet"), Column("servers", "fleet"), Column("raw", "fleet"),
        Column("binds", right=LEFT), Column("KV tokens"), Column("at a time"), Column("rests on", right=LEFT),
    )  # fmt: skip
    rows = tuple(_row(option, question) for option in options)
    blocks: list[Block] = [
        pareto(result, where),
        Table(f"Best first. {where}", "modelled", columns, rows, 0, ("Raw: servers before rounding, without spares.",)),
    ]
    if result.answer.refused:
        titles = (Column("configuration", right=LEFT), Column("why not", right=LEFT))
        refused = tuple((each.label, each.why) for each in result.answer.refused)
        blocks.append(Table("Configurations that do not qualify", "modelled", titles, refused))
    return blocks


def _row(option: FleetOption, question: Question) -> tuple[str, ...]:
    seen = option.capacity.seen.at(question.percentile)
    fleet, one = option.fleet, option.instance
    together = one.placed.concurrency
    low = "out of reach" if option.low is None else number(option.low)
    tokens = (one.engine.kv_blocks or 0) * one.engine.tokens_per_block * one.setup.pp
    return (
        option.label, number(option.capacity.rate), number(option.per_gpu), f"{low} to {number(option.high)}",
        *(NONE if math.isnan(seen[name]) else number(1000 * seen[name]) for name in ("ttft", "itl", "e2e")),
        f"{fleet.instances:,}", f"{fleet.gpus:,}", f"{fleet.servers:,}", f"{fleet.servers_raw:.2f}",
        binds(option), f"{tokens:,}", f"{together.requests:,} ({together.binds})", one.costed.provenance,
    )  # fmt: skip


def _check(result: Result) -> list[Block]:
    question, check = result.answer.question, result.check
    blocks: list[Block] = [Callout("good" if check.fleet.meets else "warning", trial_text(question, check.fleet))]
    if check.fewer is not None:
        blocks.append(Callout("note", trial_text(question, check.fewer)))
    return [*blocks, Callout("note", check.why)]


def _changes(result: Result) -> list[Block]:
    columns = (
        Column("change", right=LEFT),
        Column("instances"),
        Column("GPUs"),
        Column("GPUs, change"),
        Column("servers"),
        Column("note", right=LEFT),
    )
    now, rows = result.answer.chosen.fleet.gpus, []
    for change in result.changes:
        more = NONE if change.gpus is None else f"{change.gpus - now:+,}" if change.gpus != now else "0"
        one, gpus, servers = (
            NONE if size is None else f"{size:,}" for size in (change.instances, change.gpus, change.servers)
        )
        rows.append((change.what, one, gpus, more, servers, change.why))
    caption = f"All else equal; the recommended fleet has {count(now, 'GPU')}. {six(result)}"
    return [Table(caption, "modelled", columns, tuple(rows))]


def _terms(result: Result) -> tuple[tuple[str, str], ...]:
    question, best = result.answer.question, result.answer.chosen
    demand = question.demand
    terms = [
        ("Peak", f"{demand.peak:,.4g} requests/s: {demand.how}"),
        ("Requests", f"{length_text(question.isl)} tokens in, {length_text(question.osl)} out; {question.mode}"),
        ("Limits", limits_text(question)),
        ("Headroom, spares", f"{100 * question.headroom:g} %, {question.spare}"),
        ("Day", tokens_text(question)),
        ("Engine", best.instance.limits.text()),
        *([("Limits chosen", "; ".join(lines))] if (lines := best.instance.limits.lines()) else []),
        ("KV cache", memory_text(best)),
        ("Interval", interval_text(best)),
        ("Rests on", origin(best.instance.costed.provenance, best.instance.costed.why)),
        ("Framework", question.framework),
        ("TTFT", "request sent to first token, including queue, prefill, network and tokenizer"),
        ("ITL", "(E2E - TTFT) / (output tokens - 1) per request"),
    ]
    terms += [("Cost", text) for text in (cost_texts(best.cost) if best.cost is not None else [NO_PRICES])]
    terms.append(("Billing", whole(best.fleet)))
    return tuple(terms)
