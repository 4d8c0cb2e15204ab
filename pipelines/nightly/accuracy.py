"""Judge the accuracy of a night against its limit and, question by question, against earlier nights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eval.chance import Answered
from eval.exact import Changed
from eval.looks import Evidence, Look
from eval.paired import mcnemar_exact
from eval.verdict import Verdict, verdict_of
from pipelines.nightly.record import Record, unpack_bits
from pipelines.nightly.regression import Regression
from pipelines.settings.nightly import ExpectSettings, NightlySettings


def limit_verdict(record: Record, expect: ExpectSettings, chance: float) -> Verdict | None:
    """Judge the loss against the format's limit.

    A baseline that does not beat guessing by it gives NOT MEASURED, as does a format that was asked no questions.

    Args:
        record: line of the history.
        expect: contains the limits.
        chance: probability of a wrong verdict.

    Returns:
        None without a limit or a baseline, and for a line that was written before lost and gained were recorded.
    """
    found, limit = record.accuracy, _limit(record, expect)
    if limit is None or (found is not None and found.get("lost") is None):
        return None
    if found is None:
        return Verdict.NOT_MEASURED
    evidence, margin = _evidence(found), limit / 100 * found["baseline"]
    guessing = evidence.p_guessing(margin)
    return verdict_of(evidence.p_below(margin), evidence.mirrored.p_below(-margin), chance, guessing)


def measured_loss(record: Record, expect: ExpectSettings, chance: float) -> float | None:
    """Return the loss, percent of the baseline's accuracy; None without one, or if the baseline only guesses."""
    found = record.accuracy or {}
    if found.get("lost") is not None:
        margin = (_limit(record, expect) or 0.0) / 100 * found["baseline"]
        if _evidence(found).p_guessing(margin) > chance:
            return None
    loss: float | None = found.get("loss_percent")
    return loss


def _evidence(found: Mapping[str, Any]) -> Evidence:
    """Return what a line of the history proves.

    Older lines have no looks, because all questions were asked, or do not say what the baseline could have guessed.
    """
    if (looks := found.get("looks")) is None:
        return Evidence.once(Changed(found["questions"], found["lost"], found["gained"]))
    before = [Answered(right, tuple((chance, n) for chance, n in parts)) for right, parts in found.get("before") or ()]
    known: list[Answered | None] = [*before] or [None] * len(looks)
    return Evidence(
        tuple(
            Look(Changed(n, lost, gained), share, each)
            for (n, lost, gained, share), each in zip(looks, known, strict=True)
        )
    )


def _limit(record: Record, expect: ExpectSettings) -> float | None:
    limits = expect.accuracy_loss_percent
    return limits.get(f"{record.model} {record.precision}", limits.get(record.precision))


def accuracy_limit(record: Record, expect: ExpectSettings, chance: float) -> list[Regression]:
    """Find a loss that is proven to be above the format's limit."""
    found, limit = record.accuracy, _limit(record, expect)
    if found is None or limit is None or limit_verdict(record, expect, chance) is not Verdict.NO_GO:
        return []
    least = found["baseline"] * (1 - limit / 100)
    why = f"loses {found['loss_percent']:.2f} % of the baseline's accuracy; the limit is {limit:g} %"
    return [Regression(record.cell, "accuracy", found["baseline"], found["accuracy"], least, why, record, None)]


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
    asked = [n for n in nights if n.accuracy and n.accuracy["prompts_sha256"] == last["prompts_sha256"]]
    best = max(asked, key=_right)
    stretch = []
    for night in reversed(asked):
        if not _fell(best, night, floor / 100, chance):
            break
        stretch.append(night)
    if not stretch:
        return []
    place = asked.index(stretch[-1])
    before = _right(best)
    lost, gained = _paired(best, nights[-1])
    why = f"{lost} answers lost and {gained} gained against {best.commit[:12]}, the best night"
    return [
        Regression(
            nights[-1].cell, "accuracy", before, _right(nights[-1]), before * (1 - floor / 100), why,
            stretch[-1], asked[place - 1] if place else None,
        )
    ]  # fmt: skip


def _right(record: Record) -> float:
    return float(record.accuracy["accuracy"]) if record.accuracy else 0.0


def _fell(best: Record, night: Record, floor: float, chance: float) -> bool:
    lost, gained = _paired(best, night)
    return _right(night) < _right(best) * (1 - floor) and lost > gained and mcnemar_exact(lost, gained) < chance


def _paired(best: Record, night: Record) -> tuple[int, int]:
    """Count (questions lost, questions gained) from one night to another."""
    before, after = (_answers(record.accuracy) for record in (best, night))
    return (
        sum(a and not b for a, b in zip(before, after, strict=True)),
        sum(b and not a for a, b in zip(before, after, strict=True)),
    )


def _answers(accuracy: Any) -> list[bool]:
    return unpack_bits(accuracy["right"], accuracy["questions"])
