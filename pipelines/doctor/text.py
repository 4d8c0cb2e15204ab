"""Render a diagnosis for a terminal of 60 columns or more."""

from __future__ import annotations

import re
import sys
import textwrap
from itertools import groupby
from string import ascii_lowercase

from pipelines.doctor.record import CombinationVerdict, Diagnosis, ProbeResult
from pipelines.domain.formats import FORMATS
from pipelines.host import screen

MARKS = {"ok": "ok", "note": "--", "bad": "!!"}
COLOURS = {"ok": "\033[32m", "note": "\033[33m", "bad": "\033[31m"}
HEADINGS = {qformat.value: spec.heading for qformat, spec in FORMATS.items()}
WORDS = re.compile(r"\d+(?:\.\d+)?(?: [KMGT]iB)?|\w+|\W")
"""Splits a reason into words and what is between them; a size and its unit are one word."""


def render(diagnosis: Diagnosis) -> str:
    """Render the whole page."""
    width = min(100, screen.width())
    colour = screen.has_colour(sys.stdout)
    lines: list[str] = []
    for title, findings in diagnosis.sections.items():
        lines += [title, *_findings(findings, width, colour=colour), ""]
    for engine, judged in groupby(diagnosis.verdicts, key=lambda verdict: verdict.engine):
        lines += [f"engine={engine}", *_verdicts(list(judged), width), ""]
    return "\n".join(lines + _end(diagnosis, width)) + "\n"


def _findings(findings: list[ProbeResult], width: int, *, colour: bool) -> list[str]:
    column = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        mark = MARKS[finding.status]
        mark = f"{COLOURS[finding.status]}{mark}\033[0m" if colour else mark
        indent = " " * (column + 7)
        first = _wrap(finding.value, width, indent)
        lines += [f"  {mark} {finding.name:<{column}}  {first[0].strip()}", *first[1:]]
        lines += _wrap(f"-> {finding.todo}", width, indent) if finding.todo else []
    return lines


def _verdicts(verdicts: list[CombinationVerdict], width: int) -> list[str]:
    """Render a table of models by formats, and below it each kind of reason once, with all its cases."""
    reasons: dict[tuple[str, ...], list[CombinationVerdict]] = {}
    if all(not verdict.works for verdict in verdicts) and len({verdict.reason for verdict in verdicts}) == 1:
        return _wrap(f"none: {verdicts[0].reason}. {verdicts[0].todo}", width, "  ")
    quants = list(dict.fromkeys(verdict.quant for verdict in verdicts))
    column = max(len(verdict.model) for verdict in verdicts)
    lines = [
        f"  {'':<{column}} " + " ".join(f"{HEADINGS.get(quant, (quant, ''))[line]:>4}" for quant in quants).rstrip()
        for line in (0, 1)
    ]
    for model, judged in groupby(verdicts, key=lambda verdict: verdict.model):
        marks = [_mark(verdict, reasons) for verdict in judged]
        lines.append(f"  {model:<{column}} " + " ".join(f"{mark:>4}" for mark in marks))
    for letter, cases in zip(ascii_lowercase, reasons.values(), strict=False):
        lines += _wrap(f"{letter}: {_together(cases)} {cases[0].todo}", width, "  ", hang=3)
    return lines


def _mark(verdict: CombinationVerdict, reasons: dict[tuple[str, ...], list[CombinationVerdict]]) -> str:
    """Return "yes" or the letter of the reason; reasons that differ only in names and numbers share one letter."""
    if verdict.works:
        return "yes"
    of_case = re.compile(rf"{re.escape(verdict.model)}|{verdict.quant}|\d.*|\w+ForCausalLM")
    kind = tuple("" if of_case.fullmatch(word) else word for word in WORDS.findall(verdict.reason))
    reasons.setdefault(kind, []).append(verdict)
    return ascii_lowercase[list(reasons).index(kind)]


def _together(cases: list[CombinationVerdict]) -> str:
    """Render the reason for the first model, and how it differs for the others."""
    of_model = {
        model: [_span(words) for words in zip(*(WORDS.findall(case.reason) for case in judged), strict=True)]
        for model, judged in groupby(cases, key=lambda case: case.model)
    }
    first = next(iter(of_model.values()))
    others: dict[str, list[str]] = {}
    for model, said in list(of_model.items())[1:]:
        own = [word for word, usual in zip(said, first, strict=True) if word not in (usual, model)]
        others.setdefault(", ".join(own), []).append(model)
    listed = "; ".join(", ".join(models) + (f" ({own})" if own else "") for own, models in others.items())
    return "".join(first) + (f" Likewise {listed}." if listed else "")


def _span(words: tuple[str, ...]) -> str:
    """Merge the words of several formats into one: the word itself, or the range from least to most."""
    different = sorted(set(words), key=_size)
    least, most = different[0], different[-1]
    unit = most[-4:] if most.endswith("iB") else ""
    return least if len(different) == 1 else f"{least.removesuffix(unit)} to {most}"


def _size(word: str) -> tuple[int, float, str]:
    """Return the sort key of a word: sizes by size, other words alphabetically."""
    number, _, unit = word.partition(" ")
    return "KMGT".find(unit[:1]), float(number) if unit else 0.0, word


def _end(diagnosis: Diagnosis, width: int) -> list[str]:
    if not diagnosis.broken:
        return _wrap("The configured pipeline runs here: make all", width, "")
    lines = ["The configured pipeline does not run here:"]
    for finding in diagnosis.broken:
        lines += _wrap(f"!! {finding.name}: {finding.value} {finding.todo}", width, "  ", hang=3)
    return lines


def _wrap(text: str, width: int, indent: str, *, hang: int = 0) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent + " " * hang,
        break_long_words=False,
        break_on_hyphens=False,
    )
