"""History and expectations -> regressions with cell, metric, before, now, limit and since when; and the exit code."""

from dataclasses import replace

import pytest

from eval.verdict import Verdict
from pipelines.nightly.accuracy import limit_verdict
from pipelines.nightly.config import ExpectSettings
from pipelines.nightly.nightly_command import summary, words
from pipelines.nightly.sentences import History, causes, headline
from pipelines.nightly.verdict import is_suspect, judge, nights_before, without_effect
from pipelines.settings.compose import load as load_settings
from tests.support.nights import accuracy, load, night, nightly_settings

RATES = (1000.0, 1002.0, 998.0, 1001.0, 999.0, 1000.0, 1003.0, 997.0)
BEFORE = [night(number, rate) for number, rate in enumerate(RATES)]
SETTINGS = nightly_settings()


def verdict(*tonight, before=BEFORE, settings=SETTINGS):
    return judge([*before, *tonight], tonight[-1].run, settings)


def test_the_same_again_is_no_regression():
    found = verdict(night(8))
    assert (found.regressions, found.failures, found.exit_code) == ((), (), 0)
    assert headline(found) == "1 cell measured; nothing got worse."


def test_a_regression_is_named(tmp_path):
    history = History(tmp_path)
    history.keep_settings("d0", {"build.max_batch_size": 64})
    history.keep_settings("d1", {"build.max_batch_size": 8})
    bad = night(8, 800.0, settings_digest="d1", versions={"openvino": "2026.5.0"})
    found = verdict(bad)
    assert found.exit_code == 3
    (cause,) = causes(history, found.regressions)
    assert cause.text == (
        "tiny_gemma fp8 fixed: output tokens/s at concurrency 8: 1,000/s before, 800/s now (-20.0 %), "
        "limit 952/s (tonight). Since 000000000008 of 2026-11-09; last good 000000000007 of 2026-11-08. "
        "Changed in between: commit 000000000007 -> 000000000008; openvino 2026.4.1 -> 2026.5.0; "
        "build.max_batch_size 64 -> 8."
    )
    assert words(history, found)[0].startswith("REGRESSION  tiny_gemma fp8 fixed: output tokens/s")
    assert cause.items == ()


def test_what_one_change_made_worse_is_one_finding(tmp_path):
    """A slower commit: throughput and TTFT of two cells, since the same night."""
    other = "tiny_gemma none fixed"
    before = [*BEFORE, *(replace(record, cell=other, key="none") for record in BEFORE)]
    slow = {"measurements": [[load(800.0, ttft=0.03)]]}
    found = verdict(night(8, **slow), night(8, cell=other, **{"key": "none"} | slow), before=before)
    assert len(found.regressions) == 4
    text = words(History(tmp_path), found)
    assert text[0].startswith("REGRESSION  2 cells: 4 metrics got worse together. Since 000000000008 of")
    assert [" ".join(line.split()).partition(":")[2].partition(":")[0] for line in text[1:5]] == [
        " output tokens/s at concurrency 8", " TTFT p50 at concurrency 8",
    ] * 2  # fmt: skip
    assert len(text) == 6


def test_changes_of_different_nights_are_not_joined(tmp_path):
    """TTFT since the ninth night, throughput since the tenth."""
    slower = night(8, measurements=[[load(1000.0, ttft=0.03)]])
    found = verdict(night(9, measurements=[[load(800.0, ttft=0.03)]]), before=[*BEFORE, slower])
    assert [len(cause.regressions) for cause in causes(History(tmp_path), found.regressions)] == [1, 1]


def test_failures_with_one_reason_are_one_line(tmp_path):
    found = verdict(*(night(8, cell=cell, status="failed", reason="no disk left") for cell in ("a", "b")))
    assert words(History(tmp_path), found)[0] == "FAILED  a, b: no disk left"


def test_a_slow_decline_is_a_regression():
    """0.2 % a night: the nights of the decline must not become the level that it is compared with."""
    level = [night(number, RATES[number % len(RATES)]) for number in range(20)]
    decline = [night(20 + number, 1000 * 0.998**number) for number in range(40)]
    found = [verdict(tonight, before=level + decline[:place]).exit_code for place, tonight in enumerate(decline)]
    assert found.index(3) < 30
    assert set(found[30:]) == {3}


def test_it_stays_a_regression_since_the_first_bad_night():
    bad = [night(number, 800.0) for number in (8, 9, 10)]
    (found,) = verdict(*bad).regressions
    assert (found.first, found.last_good) == (bad[0], BEFORE[-1])


@pytest.mark.parametrize("metric", ["*", "output_tokens_per_s*"])
def test_an_accepted_level_is_no_regression(metric):
    accepted = {"cell": "* fp8 *", "metric": metric, "since": "2026-11-09", "reason": "new scheduler"}
    settings = nightly_settings(expect={"accepted": [accepted]})
    assert verdict(night(8, 800.0), settings=settings).exit_code == 0


def test_an_accepted_level_of_another_cell_does_not_help():
    accepted = {"cell": "* int4_awq *", "metric": "*", "since": "2026-11-09", "reason": "new scheduler"}
    assert verdict(night(8, 800.0), settings=nightly_settings(expect={"accepted": [accepted]})).exit_code == 3


@pytest.mark.parametrize(
    "other",
    [
        {"machine_class": "1 x NVIDIA L4"},
        {"key": "asked for with other words"},
        {"protocol": {"workload.isl.mean": 256}},
        {"status": "failed"},
    ],
)
def test_only_like_is_compared_with_like(other):
    assert nights_before([replace(record, **other) for record in BEFORE], night(8)) == []


def test_a_setting_that_did_not_exist_yet_does_not_end_a_series():
    tonight = night(8, protocol={"workload.isl.mean": 128, "workload.brand_new": True})
    assert nights_before(BEFORE, tonight) == BEFORE


def test_a_failed_cell_is_named_and_is_no_regression():
    found = verdict(night(8), night(8, cell="tiny_llama fp8 fixed", status="failed", reason="was killed by SIGKILL"))
    assert found.failures == (("tiny_llama fp8 fixed", "was killed by SIGKILL"),)
    assert found.exit_code == 1


def test_a_regression_beside_a_failure_is_a_regression():
    broken = night(8, cell="tiny_llama fp8 fixed", status="failed", reason="x")
    assert verdict(night(8, 800.0), broken).exit_code == 3


def test_what_the_rules_refuse_is_no_failure():
    refused = night(8, cell="gemma nvfp4 fixed", status="not possible", reason="nvfp4 needs Blackwell")
    found = verdict(night(8), refused)
    assert found.exit_code == 0
    assert headline(found) == "1 cell measured; 1 not possible; nothing got worse."


def test_what_was_possible_before_may_not_become_impossible_unseen():
    found = verdict(night(8, status="not possible", reason="no GPU"), night(8, cell="other"))
    assert found.exit_code == 1
    assert found.failures[0][1].startswith("no longer possible (it was with 000000000007, 2026-11-08): no GPU")


def test_a_run_that_could_measure_nothing_has_failed():
    found = verdict(night(8, status="not possible", reason="no GPU"), before=[])
    assert found.failures == (("the run", "no cell could be measured here"),)


def lossy(wrong, **changed):
    return accuracy([place >= wrong for place in range(1000)], **changed)


def test_more_loss_than_the_format_may_have():
    bad = night(8, accuracy=lossy(20, lost=20))
    (found,) = verdict(bad, before=[]).regressions
    assert found.metric == "accuracy"
    assert found.reason == "loses 2.00 % of the baseline's accuracy; the limit is 1 %"


def test_a_loss_that_is_not_proven_to_be_above_the_limit_is_none():
    """14 lost of 1,000 are above 1 %, but so many are likely at a loss of 1 %."""
    assert verdict(night(8, accuracy=lossy(14, lost=14)), before=[]).exit_code == 0


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ((0, 0), Verdict.GO),
        ((20, 0), Verdict.UNDECIDED),
        ((30, 0), Verdict.NO_GO),
        ((None, None), None),  # a line from before they were recorded
    ],
)
def test_a_night_has_the_verdict_of_an_evaluation(changed, word):
    found = accuracy([True] * 1000, lost=changed[0], gained=changed[1])
    assert limit_verdict(night(8, accuracy=found), nightly_settings().expect, 0.001) is word


@pytest.mark.parametrize(("precision", "right"), [("fp8", 260), ("none", 240), ("fp8", 990)])
def test_the_loss_of_a_baseline_that_guesses_is_not_measured(precision, right):
    """Whether or not the format has a limit; 1,000 questions with four choices."""
    found = accuracy([True] * right + [False] * (1000 - right), lost=10, gained=0)
    found |= {"looks": [[1000, 10, 0, 1.0]], "before": [[right + 10, [[0.25, 1000]]]], "loss_percent": 4.0}
    said = summary(night(8, precision=precision, accuracy=found), nightly_settings())
    assert said.endswith("accuracy loss 4.00 %" if right == 990 else "accuracy loss NOT MEASURED")


def test_a_night_that_stopped_asking_early_pays_for_its_looks():
    """The same answers as NO-GO above, at a look that may use a thousandth of the probability of error."""
    found = {**accuracy([True] * 1000, lost=30, gained=0), "looks": [[500, 15, 0, 0.001], [1000, 30, 0, 0.001]]}
    assert limit_verdict(night(8, accuracy=found), nightly_settings().expect, 0.001) is Verdict.UNDECIDED


def test_a_format_without_a_limit_or_a_baseline_has_no_verdict():
    expect = nightly_settings().expect
    assert limit_verdict(night(8, precision="nvfp4"), expect, 0.001) is None
    assert limit_verdict(night(8, precision="nvfp4", accuracy=None), expect, 0.001) is None


def test_a_format_with_a_limit_that_was_asked_nothing_is_not_measured():
    found = verdict(night(8, accuracy=None), before=[])
    assert (found.unmeasured, found.exit_code) == (("tiny_gemma fp8 fixed",), 4)
    assert "NOT MEASURED in tiny_gemma fp8 fixed: no questions, or" in headline(found)


def test_a_models_own_limit_goes_before_the_formats():
    settings = nightly_settings(expect={"accuracy_loss_percent": {"fp8": 1, "tiny_gemma fp8": 3}})
    bad = night(8, accuracy=lossy(20, lost=20))
    assert verdict(bad, before=[], settings=settings).exit_code == 0


def test_fewer_right_answers_than_the_best_night_before():
    before = [night(number, accuracy=lossy(30)) for number in range(4)]
    slow = [night(4, accuracy=lossy(60)), night(5, accuracy=lossy(60))]
    (found,) = verdict(*slow, before=before).regressions
    assert (found.before, found.now, found.first, found.last_good) == (0.97, 0.94, slow[0], before[-1])
    assert found.reason == "30 answers lost and 0 gained against 000000000000, the best night"


@pytest.mark.parametrize(("since", "code"), [("2026-11-05", 0), ("2026-11-04", 3)])
def test_an_accepted_accuracy_is_what_later_nights_are_compared_with(since, code):
    """30 answers are lost from 5 November on; a level accepted from the night before has one with the old answers."""
    accepted = {"cell": "* fp8 *", "metric": "accuracy", "since": since, "reason": "new calibration texts"}
    nights = [night(number, accuracy=lossy(30 if number < 4 else 60)) for number in range(8)]
    settings = nightly_settings(expect={"accepted": [accepted]})
    assert verdict(night(8, accuracy=lossy(60)), before=nights, settings=settings).exit_code == code


def test_losing_from_an_accepted_accuracy_is_a_regression():
    accepted = {"cell": "* fp8 *", "metric": "accuracy", "since": "2026-11-05", "reason": "new calibration texts"}
    nights = [night(number, accuracy=lossy(30 if number < 4 else 60)) for number in range(8)]
    settings = nightly_settings(expect={"accepted": [accepted]})
    (found,) = verdict(night(8, accuracy=lossy(90)), before=nights, settings=settings).regressions
    assert (found.before, found.now, found.last_good) == (0.94, 0.91, nights[-1])


def test_some_other_answers_are_no_loss():
    """12 lost, 9 gained of 1,000: McNemar's p is 0.66."""
    before = [place >= 30 for place in range(1000)]
    after = [*[True] * 9, *[False] * 21, *[False] * 12, *[True] * 958]
    nights = [night(number, accuracy=accuracy(before)) for number in range(4)]
    assert verdict(night(8, accuracy=accuracy(after)), before=nights).exit_code == 0


def test_other_questions_are_not_compared():
    before = [night(number, accuracy=lossy(0)) for number in range(4)]
    tonight = night(8, accuracy=lossy(60, prompts_sha256="other"))
    assert verdict(tonight, before=before).exit_code == 0


def test_a_pinned_value_holds_without_any_history():
    pin = {"cell": "* fp8 *", "metric": "output_tokens_per_s*", "worst": 900, "reason": "contract"}
    settings = nightly_settings(expect={"pinned": [pin]})
    assert verdict(night(8, 950.0), before=[], settings=settings).exit_code == 0
    (found,) = verdict(night(8, 850.0), before=[], settings=settings).regressions
    assert found.reason == "pinned: contract"


def test_requests_that_failed_are_a_regression():
    bad = night(8, measurements=[[load(error_share=0.03, errors={"timeout": 3})]])
    assert [found.metric for found in verdict(bad).regressions] == ["error_share at concurrency 8"]


def test_an_engine_that_grew_is_a_regression():
    assert verdict(night(8, sizes={"engine_bytes": 4_100_000})).regressions[0].metric == "engine_bytes"


def test_what_looks_worse_is_measured_again_and_the_median_counts():
    slow = night(8, 800.0)
    assert is_suspect(BEFORE, slow, SETTINGS, 1)
    once = replace(slow, measurements=[*slow.measurements, [load(1000.0)]])
    assert is_suspect(BEFORE, once, SETTINGS, 1)  # median of two: 900
    twice = replace(once, measurements=[*once.measurements, [load(1003.0)]])
    assert not is_suspect(BEFORE, twice, SETTINGS, 1)


def test_what_another_benchmark_cannot_answer_is_not_measured_again():
    assert not is_suspect(BEFORE, night(8, sizes={"engine_bytes": 8_000_000}), SETTINGS, 1)


def test_expectations_that_match_nothing_are_named():
    """A mistyped limit would be met every night."""
    accepted, pinned = {"since": "2026-11-09", "reason": "x"}, {"worst": 1, "reason": "x"}
    expect = ExpectSettings.model_validate({
        "accepted": [accepted | {"cell": "*", "metric": "status"}, accepted | {"cell": "tiny_gema *", "metric": "*"}],
        "pinned": [pinned | {"cell": "* fp8 *", "metric": "ttft_p50_s *"}, pinned | {"cell": "*", "metric": "ttft50"}],
        "floor_percent": {"ttft_p99_s": 5, "build_s": 9, "itl_50_s": 3},
        "accuracy_loss_percent": {"fp8": 1, "int8_sq": 1, "tiny_gemma fp8": 1, "fp88": 1},
    })  # fmt: skip
    assert [text.removesuffix(" matches nothing in the history, so it has no effect.") for text in
            without_effect(BEFORE, expect)] == [
        "nightly.expect.accepted {cell: tiny_gema *, metric: *}",
        "nightly.expect.pinned {cell: *, metric: ttft50}",
        "nightly.expect.floor_percent.itl_50_s",
        "nightly.expect.accuracy_loss_percent.fp88",
    ]  # fmt: skip
    tuned = without_effect([night(1, precision="fp8-kv_fp8")], nightly_settings().expect)
    assert tuned == ("nightly.expect.accuracy_loss_percent.fp8 matches nothing in the history, so it has no effect.",)
    for preset in ("cpu", "gpu"):
        assert without_effect(BEFORE, load_settings([f"nightly={preset}"]).nightly.expect) == ()


@pytest.mark.parametrize("since", ["2026-11-09T04:30:00+02:00", "2026-11-09 02:30", "2026-11-09"])
def test_an_accepted_time_is_compared_in_utc(since):
    accepted = {"cell": "*", "metric": "*", "since": since, "reason": "new scheduler"}
    assert verdict(night(8, 800.0), settings=nightly_settings(expect={"accepted": [accepted]})).exit_code == 0
    late = nightly_settings(expect={"accepted": [accepted | {"since": "2026-11-09T03:30:00+00:30"}]})
    assert verdict(night(8, 800.0), settings=late).exit_code == 3
