"""The commands `sweep`, `compare` and `smallest`: run cells, then show one table. A failed cell stops no others."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.compare import bound_cells, in_points, verdict_sentence
from eval.config import EvalSettings
from eval.verdict import UNMEASURED, Verdict
from pipelines.domain.errors import UserError
from pipelines.domain.formats import FORMATS, QFormat
from pipelines.domain.units import show_bytes
from pipelines.host.disk import check_folders, relative_to_cwd
from pipelines.host.files import write_json
from pipelines.host.screen import say, table, tell
from pipelines.plan.plan import with_questions
from pipelines.plan.targets import Goal
from pipelines.run.console import ResultTable, comparison, unasked_table
from pipelines.settings.compose import load
from pipelines.settings.root import Settings
from pipelines.store.manifest import read_manifest
from pipelines.store.store import Store, recover
from pipelines.sweep.cells import SweepCell
from pipelines.sweep.launch import run_cells

CRITERIA = ("eval.baseline=", "eval.margin_points=", "eval.false_go=")
"""Overrides that say what a table compares with, and when a loss is acceptable."""


def sweep(overrides: Sequence[str]) -> int:
    """Evaluate every combination and print one table.

    Returns:
        0, 1 when a cell failed, or 4 when a loss could not be measured.

    Raises:
        UserError: Hydra cannot compose the combinations.
    """
    settings = load(_single(overrides))
    folder, cells = run_cells("evaluate", overrides)
    good = [cell for cell in cells if cell.state == "done"]
    table = _judged(good, settings.eval)
    say("\n" + table.text if good else "\nNo cell finished.")
    write_json(folder / "accuracy.json", table.rows)
    return _close(folder, cells) or table.exit_code


def compare(overrides: Sequence[str]) -> int:
    """Run everything for each combination, then show one table, one plot and one report per model.

    Returns:
        0, 1 when a cell failed, or 4 when a loss could not be measured.
    """
    from pipelines.report.report_command import write
    from pipelines.report.stored import earlier_numbers

    settings = load(_single(overrides))
    check_folders(settings.report.written)
    earlier_numbers(settings.report.against)
    folder, cells = run_cells("all", overrides)
    store = Store(settings.paths.store)
    recover(store)
    measured = [cell for cell in cells if cell.artifacts]
    code = _close(folder, cells)
    for model in dict.fromkeys(cell.model for cell in measured):
        variants = dict.fromkeys(cell.variant for cell in measured if cell.model == model)
        write(settings, store, model, list(variants), compared=True)
    if unasked := [(cell.model, cell.variant) for cell in measured if cell.is_unasked]:
        say("\n" + unasked_table(unasked).text)
    return code or _judged(measured, settings.eval).exit_code


def _judged(cells: Sequence[SweepCell], settings: EvalSettings) -> ResultTable:
    unasked = [(cell.model, cell.variant) for cell in cells if cell.is_unasked]
    pairs = [(cell.baseline, cell.after) for cell in cells if "evaluate" in cell.artifacts]
    tables = [comparison(pairs, settings)] if pairs or not unasked else []
    tables += [unasked_table(unasked)] if unasked else []
    return ResultTable.joined(tables)


def _single(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that have a single value: folders and criteria are the same for every cell."""
    return [text for text in overrides if text.startswith(("paths.", "report.", "sizing.prices.", *CRITERIA))]


def _close(folder: Path, cells: Sequence[SweepCell]) -> int:
    failed = [cell for cell in cells if cell.state == "failed"]
    if failed:
        logs = [(cell, cell.log(folder)) for cell in failed]
        rows = [
            (
                f"[{cell.number}] {cell.words}",
                f"{cell.reason}; log: {relative_to_cwd(log)}" if log.is_file() else cell.reason,
            )
            for cell, log in logs
        ]
        say("\nfailed cells:\n" + "\n".join(table(rows, text_columns=(1,))))
        say("Remove the causes, then run it again: only what is missing is computed.")
    say(f"\nsweep: {relative_to_cwd(folder)}")
    return 1 if failed else 0


# The command `smallest`: the fewest bits per weight at which a mix of formats is still GO, in few evaluations.

STEP = 0.5
BELOW_16 = 15.5
BITS, LEVEL = "quant.effective_bits", "eval.false_go"
NONE_IS_GO = 3
"""Exit code when not even the most bits are GO."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A mix that was evaluated.

    Attributes:
        bound: most bits per weight that the search allowed.
        bits: what the mix it chose has, at most as many.
        engine_bytes: of the engine.
        row: what was lost, with the verdict; see `eval.compare.loss_rows`.
    """

    bound: float
    bits: float
    engine_bytes: int
    row: dict[str, Any]

    @property
    def is_go(self) -> bool:
        """Whether the loss is proven to be below the margin."""
        return bool(self.row["verdict"] == Verdict.GO)


def smallest(overrides: Sequence[str]) -> int:
    """Find the fewest bits per weight with verdict GO, and print the values tried.

    Returns:
        0, 1 when an evaluation failed, 3 when no mix is GO, or 4 when no loss could be measured.

    Raises:
        UserError: the settings give nothing to search, or nothing to judge by.
    """
    settings = load([word for word in overrides if not word.startswith("hydra")])
    _check(settings, overrides)
    bounds = grid(settings.quant.candidates or ())
    level = settings.eval.false_go / len(bounds)
    unit = 10.0 ** (math.floor(math.log10(level)) - 1)
    level = round(math.floor(level / unit + 1e-9) * unit, 12)  # down to two digits, so that what is shown is used
    own = [word for word in overrides if not word.startswith(f"{LEVEL}=")]
    settings = settings.model_copy(update={"eval": settings.eval.model_copy(update={"false_go": level})})
    say(
        f"{bounds[0]:g} to {bounds[-1]:g} bits per weight, {len(bounds)} bounds. The verdict on each is wrong in at"
        f" most {100 * level:g} % of cases, and so the GO that is found in at most {100 * level * len(bounds):.2g} %."
    )
    failed: list[SweepCell] = []

    def evaluate(bound: float) -> Tried | None:
        folder, [cell] = run_cells("evaluate", [*own, f"{BITS}={bound:g}", f"{LEVEL}={level:g}"])
        if cell.state == "failed":
            tell(f"failed: {cell.reason}")
            failed.append(cell)
            return None
        mix = _read(cell, bound, settings)
        write_json(folder / "accuracy.json", [mix.row])
        say(f"{bound:g} bits: {mix.row['verdict']}")
        return mix

    tried = search(bounds, evaluate)
    if failed:
        say("Remove the causes, then run it again: only what is missing is computed.")
        return 1
    say("\n" + "\n".join(table([_HEADER, *map(_cells, sorted(tried, key=lambda each: each.bound))])))
    best = min((each for each in tried if each.is_go), key=lambda each: each.bound, default=None)
    if best is None:
        say(f"\n{_none(tried[0], settings)}")
        return UNMEASURED if tried[0].row["verdict"] == Verdict.NOT_MEASURED else NONE_IS_GO
    arguments = " ".join([*overrides, f"{BITS}={best.bound:g}"])
    say(f"\n{_found(best, settings)}\nmake build {arguments}")
    return 0


def grid(candidates: Sequence[QFormat]) -> list[float]:
    """Return the bounds that may be tried: from the candidates' fewest bits per weight to their most, in half bits.

    Candidates of equal size are mixed with 16 bit alone, so that bounds go on towards 16.
    """
    bits = [float(FORMATS[qformat].weights.bits) for qformat in candidates]
    low, high = min(bits), max(bits)
    high = high if high > low else BELOW_16
    return [low + STEP * number for number in range(round((high - low) / STEP) + 1)]


def search(bounds: Sequence[float], evaluate: Callable[[float], Tried | None]) -> list[Tried]:
    """Evaluate bounds until the smallest that is GO is known, if fewer bits are never better.

    The largest comes first: without it nothing is GO. A bound above the bits that a mix has was answered by that mix.

    Args:
        bounds: ascending.
        evaluate: evaluates one; None if that failed, which ends the search.

    Returns:
        what was tried, in this order.
    """
    tried: list[Tried] = []
    last = len(bounds) - 1
    # places: of the largest bound that is not GO, of the smallest that is, and of the next to try
    lost, go, at = -1, last, last
    while (mix := evaluate(bounds[at])) is not None:
        tried.append(mix)
        if mix.is_go:
            go = next((place for place in range(at) if bounds[place] >= mix.bits), at)
        elif at == last:
            break
        else:
            lost = at
        if go - lost <= 1:
            break
        at = (lost + go) // 2
    return tried


def _check(settings: Settings, overrides: Sequence[str]) -> None:
    quant = settings.quant
    if quant.qformat is not QFormat.AUTO:
        raise UserError(
            f"quant={quant.qformat} has one size. This command looks for the smallest mix of formats.",
            todo="Add quant=auto, or see several formats side by side with make compare.",
        )
    if bound := next((word for word in overrides if word.lstrip("+").startswith(f"{BITS}=")), None):
        raise UserError(
            f"{bound} cannot be set: this command searches for it.", todo="Leave it out, or use make evaluate."
        )
    goal = Goal(settings, "evaluate")
    if not goal.has_baseline:
        raise UserError(
            f"eval.baseline={settings.eval.baseline} gives no verdict on the loss of a mix.",
            allowed="eval.baseline=build, the usual one.",
        )
    resolved, notes = with_questions(goal, Store(settings.paths.store))
    if resolved.settings.eval.is_auto:
        raise UserError(f"This command needs a verdict on each mix. {' '.join(notes)}")


def _read(cell: SweepCell, bound: float, settings: Settings) -> Tried:
    row = comparison([(cell.baseline, cell.after)], settings.eval).rows[0]
    if "verdict" not in row:
        raise UserError(f"eval.task={settings.eval.task} gives no verdict: its answers are not right or wrong.")
    mix, engine = (read_manifest(Path(cell.artifacts[stage]))["facts"] for stage in ("quantize", "build"))
    return Tried(bound, mix["search"]["effective_bits"], engine["engine_bytes"], row)


_HEADER = ("at most", "bits", "engine", "accuracy", "loss", "at least", "at most", "verdict")


def _cells(tried: Tried) -> tuple[str, ...]:
    row = tried.row
    return (
        f"{tried.bound:g}",
        f"{tried.bits:.2f}",
        show_bytes(tried.engine_bytes),
        f"{100 * row['accuracy']:.2f} %",
        f"{0.0 - 100 * row['difference']:+.2f}",
        *bound_cells(row)[:2],
        row["verdict"],
    )


def _found(best: Tried, settings: Settings) -> str:
    fewest = best.bound == grid(settings.quant.candidates or ())[0]
    others = "Mixes of these formats cannot have fewer." if fewest else "Fewer that were not tried might be GO too."
    return (
        f"{best.bits:.2f} bits per weight are the fewest found whose loss is proven to be below"
        f" {in_points(settings.eval.margin_points / 100)}. {others}"
    )


def _none(largest: Tried, settings: Settings) -> str:
    if largest.row["verdict"] == Verdict.NOT_MEASURED:
        return verdict_sentence(largest.row)
    needed, margin = largest.row["questions_needed"], in_points(settings.eval.margin_points / 100)
    more = f" About {needed:,} questions would decide it." if needed else ""
    return (
        f"No mix is GO: with {largest.bound:g} bits, the most that is tried, the verdict is {largest.row['verdict']} at"
        f" a margin of {margin}.{more} Ask more questions, raise eval.margin_points, or give other quant.candidates."
    )
