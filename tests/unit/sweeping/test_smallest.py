"""The search for the smallest mix: bounds, order, and what it refuses."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.results import RESULT
from pipelines.domain.errors import UserError
from pipelines.domain.formats import QFormat
from pipelines.store.store import Store
from pipelines.sweep import sweep_command as module
from pipelines.sweep.cells import SweepCell
from pipelines.sweep.sweep_command import NONE_IS_GO, Tried, grid, search, smallest
from tests.support.report_store import commit, evaluation

BOUNDS = grid((QFormat.FP8, QFormat.INT4_AWQ))


def tried(asked: float, bits: float, *, go: bool) -> Tried:
    return Tried(asked, bits, 1000, {"verdict": "GO" if go else "NO-GO"})


def test_bounds_reach_from_the_fewest_bits_of_the_candidates_to_their_most() -> None:
    assert grid((QFormat.FP8, QFormat.INT4_AWQ)) == [4, 4.5, 5, 5.5, 6, 6.5, 7, 7.5, 8]
    assert grid((QFormat.INT8_SQ,)) == [8 + half / 2 for half in range(16)]


@given(st.floats(3.9, 8.5), st.lists(st.floats(0, 1), min_size=9, max_size=9))
def test_the_smallest_that_is_go_is_found_in_few_evaluations(least: float, unused: list[float]) -> None:
    """Wherever it is, and however much of a bound a mix leaves unused."""

    def evaluate(bound: float) -> Tried:
        bits = bound - 0.49 * unused[BOUNDS.index(bound)] * (bound > BOUNDS[0])
        return tried(bound, bits, go=bits >= least)

    found = search(BOUNDS, evaluate)
    assert found[0].bound == BOUNDS[-1]
    assert len(found) <= 1 + math.ceil(math.log2(len(BOUNDS)))
    assert len({each.bound for each in found}) == len(found)
    go = [each.bits for each in found if each.is_go]
    everywhere = [each.bits for bound in BOUNDS if (each := evaluate(bound)).is_go]
    assert min(go) == min(everywhere) if found[0].is_go else not go


def test_a_mix_answers_for_all_bounds_above_its_bits() -> None:
    """The solver may leave bits unused; the same mix would be found again."""
    asked: list[float] = []

    def evaluate(bound: float) -> Tried:
        asked.append(bound)
        return tried(bound, min(bound, 5.2), go=bound >= 5)

    search(BOUNDS, evaluate)
    assert asked == [8, 4.5, 5]


def test_an_evaluation_that_fails_ends_the_search() -> None:
    def evaluate(bound: float) -> Tried | None:
        return tried(bound, bound, go=True) if bound == BOUNDS[-1] else None

    assert [each.bound for each in search(BOUNDS, evaluate)] == [8]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["quant=fp8"], r"quant=fp8 has one size.*Add quant=auto"),
        (
            ["quant=auto", "quant.effective_bits=5"],
            r"quant\.effective_bits=5 cannot be set: this command searches for it",
        ),
        (["quant=auto", "eval.baseline=skip"], r"eval\.baseline=skip gives no verdict"),
    ],
)
def test_what_gives_nothing_to_search_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        smallest(words)


@pytest.fixture
def evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[float, int], list[list[str]]]:
    """Put evaluations of 200 questions in place of real ones: bound -> wrong answers; and the words of each."""
    wrong: dict[float, int] = {}
    asked: list[list[str]] = []
    store = Store(tmp_path / "store")

    def run_cells(target: str, words: Sequence[str]) -> tuple[Path, list[SweepCell]]:
        asked.append(list(words))
        cell = SweepCell(1, "evaluate", tuple(words), "", state="done", variant="auto")
        bound = float(next(word for word in words if word.startswith("quant.effective_bits=")).partition("=")[2])
        if bound not in wrong:
            return tmp_path, [cell.failed("no disk")]
        minute = len(asked)
        made = {
            "baseline.evaluate": commit(store, "evaluate", "t-none", {}, {}, {}, _answers("none", 0), minute),
            "quantize": commit(
                store, "quantize", "t-auto", {"search": {"effective_bits": bound}}, {}, {}, {"a": 1}, minute
            ),
            "build": commit(store, "build", "t-auto", {"engine_bytes": 2**20}, {}, {}, {"a": 1}, minute),
            "evaluate": commit(store, "evaluate", "t-auto", {}, {}, {}, _answers("auto", wrong[bound]), minute),
        }
        cell.artifacts.update({stage: str(artifact.path) for stage, artifact in made.items()})
        return tmp_path, [cell]

    monkeypatch.setattr(module, "run_cells", run_cells)
    return wrong, asked


def _answers(variant: str, wrong: int) -> dict[str, object]:
    return {RESULT: evaluation(variant, wrong).to_json()}


WORDS = ["quant=auto", "eval.margin_points=10"]


def test_the_command_ends_with_what_builds_the_smallest(evaluations, capsys) -> None:
    """Each verdict is made with a share of eval.false_go."""
    wrong, asked = evaluations
    wrong.update({8: 0, 5.5: 2, 4.5: 50, 5: 3})
    assert smallest(WORDS) == 0
    shown = capsys.readouterr().out
    assert [words[-2:] for words in asked] == [
        [f"quant.effective_bits={bound}", "eval.false_go=0.0055"] for bound in ("8", "5.5", "4.5", "5")
    ]
    assert re.findall(r"^([\d.]+) .* MiB .* (\S+)$", shown, re.MULTILINE) == [
        ("4.5", "NO-GO"), ("5", "GO"), ("5.5", "GO"), ("8", "GO"),
    ]  # fmt: skip
    assert "5.00 bits per weight are the fewest found whose loss is proven to be below 10 points." in shown
    assert shown.splitlines()[-1] == "make build quant=auto eval.margin_points=10 quant.effective_bits=5"


def test_a_share_of_the_users_own_level_is_taken(evaluations, capsys) -> None:
    wrong, asked = evaluations
    wrong[8] = 200
    assert smallest([*WORDS, "eval.false_go=0.1"]) == NONE_IS_GO
    assert [word for word in asked[0] if word.startswith("eval.false_go")] == ["eval.false_go=0.011"]
    assert "No mix is GO: with 8 bits, the most that is tried, the verdict is NO-GO" in capsys.readouterr().out


def test_an_evaluation_that_fails_is_said(evaluations, capsys) -> None:
    wrong, _ = evaluations
    wrong[8] = 0
    assert smallest(WORDS) == 1
    shown = capsys.readouterr().out
    assert "failed: no disk" in shown
    assert "Remove the causes, then run it again" in shown
