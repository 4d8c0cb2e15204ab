"""Tables of the accuracy lost to compression: as rows for JSON and as text for a terminal."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from eval.exact import Answered
from eval.results import (
    SOURCE,
    EvalResult,
    above_chance,
    answers_of,
    compare_pair,
    differences,
    logprob_shift,
    references_of,
)
from eval.spec import TASK_SIZES
from eval.verdict import WHAT_MEASURES, Criteria, Judgement, Verdict, judge
from pipelines.document.blocks import Table, groups, left, right
from pipelines.document.show import NONE, count, percent
from pipelines.host.screen import table, wrapped

Row = dict[str, Any]

_LOSS_HEADER = ("model", "format", "base %", "after", "loss %", "verdict")
_PAIRED_HEADER = ("format", "asked", "lost", "gained", "loss", "at least", "at most", "p")
_PROVEN = ("loss_least", "loss_most", "p_go", "p_no_go", "questions_needed", "next_setting")
"""Fields of a row that say what is proven of the loss."""
ITSELF = "baseline"
"""Verdict on the result that the others are compared with."""
ORIGINAL = "transformers"
"""What executes the model in a result of the model itself, before any conversion."""


def loss_rows(pairs: Sequence[tuple[EvalResult, EvalResult]], criteria: Criteria) -> list[Row]:
    """Return one row per pair (baseline, result), with a verdict; plain JSON values.

    Results of one model are judged together. Accuracies, `difference`, `loss_least`, `loss_most` and `margin` are
    fractions (0..1); `loss_percent` is in percent of the baseline's accuracy, negative for a gain.
    `logprob_shift_mean` and `_max` are distances between the natural-log probabilities of a choice. A baseline may be
    paired with itself; it has no verdict. Where nothing was measured, the loss and its bounds are None.

    Raises:
        UserError: a result did not answer its baseline's questions.
    """
    judged: dict[int, Judgement] = {}
    for model in dict.fromkeys(other.model for _, other in pairs):
        places = [i for i, (base, other) in enumerate(pairs) if other.model == model and base is not other]
        judged |= zip(places, judge([compare_pair(*pairs[i]).evidence for i in places], criteria), strict=True)
    return [
        {**change_row(baseline, other), **_verdict_of(judged.get(place), other, criteria)}
        for place, (baseline, other) in enumerate(pairs)
    ]


def change_row(baseline: EvalResult, other: EvalResult) -> Row:
    """Return what changed between two results, without a verdict; units as in `loss_rows`.

    Raises:
        UserError: the two did not answer the same questions.
    """
    pair, (mean, most) = compare_pair(baseline, other), logprob_shift(baseline, other)
    return {
        "model": other.model,
        "format": other.qformat,
        "baseline_format": baseline.qformat,
        "baseline_engine": baseline.engine,
        "engine": other.engine,
        "task": other.task,
        "num_fewshot": other.num_fewshot,
        "shots": other.shots,
        "questions": pair.questions,
        "sequential": None if other.sequential is None else asdict(other.sequential),
        "baseline_accuracy": pair.baseline_accuracy,
        "baseline_stderr": baseline.overall.stderr,
        "baseline_above_chance": above_chance(baseline),
        "chance": Answered.of(answers_of(baseline)).chance,
        "accuracy": pair.accuracy,
        "accuracy_stderr": other.overall.stderr,
        "loss_percent": pair.loss_percent,
        "lost": pair.lost,
        "gained": pair.gained,
        "flips": pair.flips,
        "difference": pair.difference,
        "logprob_shift_mean": mean,
        "logprob_shift_max": most,
    }


def _verdict_of(judged: Judgement | None, other: EvalResult, criteria: Criteria) -> Row:
    """Return the verdict with what it rests on; for the baseline itself only that it is the baseline."""
    row: Row = {"margin": criteria.margin, "false_go": criteria.false_go, "power": criteria.power}
    if judged is None:
        return row | dict.fromkeys((*_PROVEN, "p_guessing")) | {"compared": 0, "verdict": ITSELF}
    verdict = {"compared": judged.compared, "verdict": str(judged.verdict), "p_guessing": judged.p_guessing}
    if judged.verdict is Verdict.NOT_MEASURED:
        return row | dict.fromkeys((*_PROVEN, "loss_percent")) | verdict
    setting = _next_setting(judged, other)
    proven = (judged.least, judged.most, judged.p_go, judged.p_no_go, judged.needed, setting)
    return {**row, **verdict, **dict(zip(_PROVEN, proven, strict=True))}


def _next_setting(judged: Judgement, result: EvalResult) -> str | None:
    """Return the setting that asks the questions needed; None if none are, or if there are too few."""
    subjects, questions = TASK_SIZES.get(result.task, (0, 0))
    went = result.sequential
    if judged.needed is None:
        return None
    if went is not None and result.questions < went.of:  # its own verdict was known, and now it is one of several
        return f"eval.judged_together={judged.compared}"
    if went is not None and result.limit is None:
        return f"eval.max_questions={judged.needed}" if judged.needed <= went.available else None
    if result.limit is None or judged.needed > questions:
        return None
    subjects -= sum(each.questions < result.limit for each in result.subjects.values())  # all of theirs are asked
    further = judged.needed - result.questions
    return f"eval.limit={result.limit - (-further // subjects)}" if subjects else None


def loss_table(rows: Sequence[Row]) -> str:
    """Return the rows as two blocks of text: the loss, and the paired statistics behind the verdict.

    One table may contain rows of several models and tasks.
    """
    if not rows:
        return "No compressed result to compare."
    losses = table([_LOSS_HEADER, *_by_task(rows, _loss_cells)], left=2, text_columns=(5,))
    models = len({row["model"] for row in rows}) > 1
    head = ("model", *_PAIRED_HEADER)[not models :]
    cells = _by_task(rows, lambda row: (row["model"], *_paired_cells(row))[not models :])
    paired = table([head, *cells], left=1 + models)
    if len({row["task"] for row in rows}) > 1:
        rows = [{**row, "format": f"{row['format']} on {row['task']}"} for row in rows]
    return "\n".join([*losses, "", *paired, "", *_footnotes(rows)])


def _by_task(rows: Sequence[Row], cells: Callable[[Row], tuple[str, ...]]) -> list[tuple[str, ...] | str]:
    """Return the cells of rows, below the name of their task if not all are of the same."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    if len(tasks) == 1:
        return [cells(row) for row in rows]
    return [line for task in tasks for line in (task, *(cells(row) for row in rows if row["task"] == task))]


def _loss_cells(row: Row) -> tuple[str, ...]:
    return (
        row["model"],
        row["format"],
        percent(row["baseline_accuracy"]),
        percent(row["accuracy"]),
        "-" if row["loss_percent"] is None else f"{row['loss_percent']:.2f}",
        row["verdict"],
    )


def _paired_cells(row: Row) -> tuple[str, ...]:
    return (
        row["format"],
        str(row["questions"]),
        str(row["lost"]),
        str(row["gained"]),
        f"{0.0 - 100 * row['difference']:+.2f}",
        *bound_cells(row),
    )


def bound_cells(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the bounds of the loss in points and the p-value of the verdict; dashes where nothing is proven."""
    if row["loss_least"] is None:
        return "-", "-", "-"
    p = min(row["p_go"], row["p_no_go"])
    return (
        f"{100 * row['loss_least']:+.2f}",
        f"{100 * row['loss_most']:+.2f}",
        f"{p:.4f}" if p >= 0.0001 else "< 0.0001",
    )


def _footnotes(rows: Sequence[Row]) -> list[str]:
    notes = [wrapped(f"Loss % is in percent of the baseline's accuracy. {method_text(rows[0])}", 0)]
    if any(row["verdict"] == ITSELF for row in rows):
        itself = "The 16-bit engine is the baseline. eval.baseline=hugging_face compares it with the model itself."
        notes += ["", wrapped(itself, 0)]
    original = [row for row in rows if row["baseline_engine"] == ORIGINAL]
    if original:
        notes += ["", "Baseline: the model itself, computed by Transformers in float32."]
        notes += [wrapped(against_original(row), 2) for row in original]
    alone = sorted({row["model"] for row in rows if row["verdict"] == ITSELF and not row["baseline_above_chance"]})
    if alone:
        sentence = f"The baseline of {', '.join(alone)} does not beat guessing, so no loss could be measured."
        notes.append(wrapped(sentence, 0))
    if stopped := sequential_text(rows):
        notes += ["", wrapped(stopped, 0)]
    verdicts = [wrapped(sentence, 0) for row in rows if (sentence := verdict_sentence(row))]
    return [*notes, "", *verdicts] if verdicts else notes


def method_text(row: Mapping[str, Any]) -> str:
    """Explain the verdict, its bounds and its p-value in a few sentences, with the numbers that it was made with."""
    false = f"{100 * row['false_go']:g} %"
    return (
        f"GO: the loss is below {in_points(row['margin'])}; NO-GO: it is above; each is wrong in at most {false} of "
        "cases. UNDECIDED: neither is proven. Lost, gained: right only before, only after. Loss in points, with bounds "
        f"(at least, at most) that are each wrong in at most {false} of cases. p: chance of answers as good (or bad) "
        "as these if the loss were the margin, from an exact paired test, corrected by Holm's method for all results "
        "of a model compared here."
    )


def sequential_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Describe how asking went where it could stop early; empty if it could not in any row."""
    went = [(row, row["sequential"]) for row in rows if row["sequential"] is not None]
    if not went:
        return ""
    several = len({row["model"] for row, _ in went}) > 1
    each = [
        (f"{row['model']} " if several else "")
        + f"{row['format']} {row['questions']:,} of {how['of']:,}, looked at after "
        + ", ".join(f"{interim['questions']:,}" for interim in how["looks"])
        for row, how in went
    ]
    return (
        f"Asked in random order until the verdict was known: {'; '.join(each)}. Bounds and p-values allow for looking "
        "several times."
    )


def in_points(share: float) -> str:
    """Return a fraction of the questions in percentage points: "1 point", "0.5 points"."""
    return f"{100 * share:g} point{'' if share == 0.01 else 's'}"


ASK_MORE = "With so few questions a better score may be chance: ask more, or others that the model answers better."


def verdict_sentence(row: Mapping[str, Any]) -> str:
    """State a verdict with what it rests on, as somebody would sign it; empty for the baseline itself."""
    who, margin = f"{row['model']} {row['format']}", in_points(row["margin"])
    sure = f"{100 * (1 - row['false_go']):g} % sure"
    if row["verdict"] == Verdict.GO:
        most = 100 * row["loss_most"]
        loses = f"loses at most {most:.2f} points" if most >= 0 else f"gains at least {-most:.2f} points"
        return f"GO: {who} {loses} ({sure}); the margin is {margin}."
    if row["verdict"] == Verdict.NO_GO:
        return f"NO-GO: {who} loses at least {100 * row['loss_least']:.2f} points ({sure}); the margin is {margin}."
    if row["verdict"] == Verdict.UNDECIDED:
        between = f"{100 * row['loss_least']:+.2f} and {100 * row['loss_most']:+.2f} points"
        if not row["loss_least"] <= row["margin"] <= row["loss_most"]:  # the bounds are those of this result alone
            p = min(row["p_go"], row["p_no_go"])
            margin += f", but p = {p:.4f}, corrected for {row['compared']} results, is above {row['false_go']:g}"
        return f"UNDECIDED: the loss of {who} is between {between}; the margin is {margin}. {_what_decides(row)}"
    if row["verdict"] != Verdict.NOT_MEASURED:
        return ""
    ahead = row["baseline_accuracy"] > row["chance"] + row["margin"]
    return f"NOT MEASURED: {_why_not(row)} {ASK_MORE if ahead else WHAT_MEASURES}"


def _why_not(row: Mapping[str, Any]) -> str:
    """Say why no loss could be measured, with the test that decides it."""
    who = f"{row['model']} {row['format']}"
    score = f"{100 * row['baseline_accuracy']:.2f} % of {count(row['questions'], 'question')} of {row['task']}"
    p = f"{row['p_guessing']:.4f}" if row["p_guessing"] >= 0.0001 else "< 0.0001"
    return (
        f"the baseline of {who} answers {score} right, and guessing {100 * row['chance']:.2f} %. That it beats "
        f"guessing by more than the margin of {in_points(row['margin'])} is not shown (exact one-sided binomial "
        f"test: p = {p}, the level is {row['false_go']:g}), so no loss of {row['format']} could show."
    )


ROUNDED = 10_000
"""Further questions from which on two digits are stated: so many mean that the loss seen is nearly the margin."""


def _what_decides(row: Mapping[str, Any]) -> str:
    """Say how many more questions would decide, and whether they can be asked."""
    needed = row["questions_needed"]
    if needed is None:
        return "How many questions would decide is unknown: the loss seen equals the margin."
    more = count(further := needed - row["questions"], "more question")
    if further >= ROUNDED:
        more = f"About {float(f'{further:.2g}'):,.0f} more questions"
    chance = f"with a probability of {100 * row['power']:g} %, if answers go on changing at this rate"
    if not row["lost"] + row["gained"]:
        chance = "if none of their answers changes either"
    if (setting := row["next_setting"]) is not None:
        subjects, questions = TASK_SIZES.get(row["task"], (1, 1))
        if setting.startswith("eval.limit") and questions % subjects:
            setting += " or more, because its subjects differ in size"
        return f"{more} would decide ({setting}), {chance}."
    went = row["sequential"]
    total = went["available"] if went else TASK_SIZES.get(row["task"], (0, 0))[1]
    left = total - row["questions"]
    if needed > total > 0:
        return f"{more} would decide, {chance}; {row['task']} has {f'{left:,}' if left else 'no'} more."
    return f"{more} would decide, {chance}."


def against_original(row: Mapping[str, Any]) -> str:
    """Describe how far a result is from that of the model itself, in one sentence."""
    differing = (
        f"{row['model']} {row['format']} against Hugging Face: {row['flips']:,} of {count(row['questions'], 'answer')} "
        "differ"
    )
    if row["logprob_shift_mean"] is None:
        return f"{differing}."
    return (
        f"{differing}, and the log probabilities of the choices by {row['logprob_shift_mean']:.3g} on average, "
        f"{row['logprob_shift_max']:.3g} at most."
    )


def alone_rows(results: Iterable[EvalResult]) -> list[Row]:
    """Return one row per result that is not compared with a baseline; accuracies are fractions (0..1)."""
    return [
        {
            "model": result.model,
            "format": result.qformat,
            "engine": result.engine,
            "task": result.task,
            "num_fewshot": result.num_fewshot,
            "shots": result.shots,
            "questions": result.questions,
            "accuracy": result.accuracy,
            "accuracy_stderr": result.overall.stderr,
            "above_chance": above_chance(result),
        }
        for result in results
    ]


def alone_table(rows: Sequence[Row]) -> str:
    """Return accuracies without a baseline as text."""
    cells = _by_task(rows, lambda row: (row["model"], row["format"], str(row["questions"]), percent(row["accuracy"])))
    lines = table([("model", "format", "asked", "accuracy %"), *cells], left=2)
    notes = ["There is no baseline (eval.baseline=skip, or a server is asked), so no loss can be stated."]
    if guessing := [f"{row['model']} on {row['task']}" for row in rows if not row["above_chance"]]:
        notes.append(wrapped(f"Not shown to beat guessing (exact test, 5 %): {', '.join(guessing)}.", 0))
    return "\n".join([*lines, "", *notes])


def reference_rows(results: Iterable[EvalResult]) -> list[Row]:
    """Return the rows of `alone_rows` with what NVIDIA published of each model, in percent."""
    results = list(results)
    published = [[asdict(each) for each in references_of(result.model, result.task)] for result in results]
    return [{**row, "published": each} for row, each in zip(alone_rows(results), published, strict=True)]


def published_table(results: Sequence[EvalResult]) -> Table:
    """Return results of one model and task beside published accuracies, with how far each is from each of them."""
    published, model, task = references_of(results[0].model, results[0].task), results[0].model, results[0].task
    measured = [("measured", each.qformat, NONE, percent(each.accuracy), *(NONE for _ in results)) for each in results]
    theirs = [
        (
            "published", each.qformat, each.kv_cache, f"{each.accuracy:.2f}",
            *(f"{100 * result.accuracy - each.accuracy:+.2f}" for result in results),
        )
        for each in published
    ]  # fmt: skip
    return Table(
        caption=f"{model} on {task} beside what NVIDIA published of {published[0].model}",
        origin="",
        columns=(
            *left("", "format", "KV cache"),
            *right("accuracy %"),
            *groups("measured - published", [result.qformat for result in results]),
        ),
        rows=(*measured, *theirs),
        notes=(f"Published: {SOURCE}.", *dict.fromkeys(map(differences, results))),
    )
