"""Comparing formats: the choice and its reasons."""

import dataclasses
import re
from functools import partial
from types import SimpleNamespace

import pytest

from pipelines.domain.benchmark import Distribution, Slo
from pipelines.domain.errors import UserError
from pipelines.report.collect import collect
from pipelines.report.compare import comparison, meets
from pipelines.report.report_command import comparison_text
from pipelines.report.sections import document
from pipelines.run.console import outcome_table
from pipelines.stages.benchmark import Benchmark, best_rate
from pipelines.store.store import Store
from tests.support.report_store import add_benchmark, add_format, benchmark, commit, full_store


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    return collect(full_store(tmp_path_factory.mktemp("all")))


def test_the_fastest_within_the_loss_is_chosen(everything):
    """int4_wo is faster, but 40 of 200 questions are lost: 20 %. int4_awq loses 1 of 200: 0.5 %."""
    (found,) = comparison(everything, 1.0)
    assert found.chosen == "int4_awq"
    reasons = found.rejected
    assert reasons["int4_wo"] == "loses 20.00 % of the accuracy; the limit is 1 %"
    assert reasons["none"].endswith("44 % below int4_awq")  # speed 1.0 against 1.8


def test_a_stricter_limit_changes_the_choice(everything):
    (found,) = comparison(everything, 0.2)
    assert found.chosen == "fp8"


def test_a_format_with_no_go_is_not_chosen_whatever_the_limit(everything):
    """int4_wo is the fastest and loses 20 %, less than 30 %, but that is proven to be more than the margin."""
    (found,) = comparison(everything, 30.0)
    assert found.chosen == "int4_awq"
    reasons = found.rejected
    assert reasons["int4_wo"] == "NO-GO: loses 20.00 % of the accuracy, proven to be more than the margin"


def test_a_wide_interval_is_said(everything):
    (found,) = comparison(everything, 1.0)
    assert any("accuracy loss of int4_awq may be up to 2." in note for note in found.notes)


def test_an_unknown_accuracy_is_not_chosen(tmp_path):
    store = Store(tmp_path)
    add_benchmark(store, add_format(store, "fp8"), "fp8")
    (found,) = comparison(collect(store))
    assert found.chosen is None
    assert next(iter(found.rejected.values())) == "its loss is unknown (no baseline)"


def test_with_limits_the_load_that_meets_them_decides(tmp_path):
    """ITL is (2 + c / 4) / speed ms: 2.25, 3 and 6 ms at 1, 4 and 16 for the baseline, so 3 ms ends at 4."""
    (found,) = comparison(collect(full_store(tmp_path, ("none", "fp8"), slo=Slo("given", None, 3.001))))
    none = next(row for row in found.rows if row.variant == "none")
    assert none.at_slo.concurrency == 4
    assert none.peak.concurrency == 16
    assert none.score == none.at_slo.summary.output_tokens_per_s


def test_limits_nobody_meets_leave_no_choice(tmp_path):
    (found,) = comparison(collect(full_store(tmp_path, ("none",), slo=Slo("given", 0.5))))
    assert found.chosen is None
    assert next(iter(found.rejected.values())) == "no load met the limits of the SLO at p99"


def test_a_client_that_was_the_limit_is_said(tmp_path):
    (found,) = comparison(collect(full_store(tmp_path, ("none", "fp8"), bottleneck=16)))
    assert any("fp8 at concurrency 16 (cpu 98 %)" in note and "lower bound" in note for note in found.notes)


def test_a_load_that_the_client_limited_is_neither_peak_nor_score(tmp_path):
    """2,061 tokens/s at 16 say nothing about the server; 1,393 at 4 do."""
    (found,) = comparison(collect(full_store(tmp_path, ("none", "fp8"), slo=Slo("given", 30.0, 5.0), bottleneck=16)))
    fp8 = next(row for row in found.rows if row.variant == "fp8")
    assert (fp8.peak.concurrency, fp8.at_slo.concurrency) == (4, 4)
    assert found.chosen == "fp8"
    assert "1,393 output tokens/s at its best load that meets the SLO (concurrency 4)" in found.reason


def test_no_winner_while_a_client_limited_format_may_be_faster(tmp_path):
    """The baseline reached at least 1,477 tokens/s at 16, more than the 1,393 of fp8 at 4."""
    (found,) = comparison(collect(full_store(tmp_path, ("none", "fp8"), bottleneck=16)))
    assert found.chosen is None
    assert (
        "fp8 gives 1,393 output tokens/s at its best load (concurrency 4), but none (16 bit) reached 1,477"
        in found.reason
    )


def test_no_winner_over_a_format_whose_higher_loads_do_not_count(tmp_path):
    """A lower bound below the best does not prove that a format is slower."""
    store = full_store(tmp_path, ("none",))
    add_benchmark(store, add_format(store, "fp8"), "fp8", bottleneck=16, speed=0.5)
    (found,) = comparison(collect(store))
    assert found.chosen is None
    assert "but fp8 counts only up to concurrency 4: at concurrency 16 the load generator was the" in found.reason
    assert "% below" not in comparison_text([found])
    assert re.search(r"^fp8 .* ≥\d+ +4 ", comparison_text([found]), re.M)
    assert "≥: higher loads do not count" in comparison_text([found])


def test_no_winner_over_a_format_whose_benchmark_ended_early(tmp_path):
    """At 4 users int8_sq gives 1,248 tokens/s; what it gives at 16, where fp8 gives 2,061, nobody knows."""
    store = full_store(tmp_path, ("none", "fp8"))
    add_benchmark(store, add_format(store, "int8_sq"), "int8_sq", cut=16)
    (found,) = comparison(collect(store))
    assert found.chosen is None
    ended = "but the benchmark of int8_sq ended early (the server died) after concurrency 4, its best load so far."
    assert ended in found.reason


def test_a_load_that_nobody_else_has_decides_nothing(tmp_path):
    """Nobody else went above 4, where int8_sq is slower."""
    store = full_store(tmp_path, ("none", "fp8"), concurrencies=(1, 4))
    add_benchmark(store, add_format(store, "int8_sq"), "int8_sq", cut=16)
    (found,) = comparison(collect(store))
    assert found.chosen == "fp8"
    assert found.rejected["int8_sq"].endswith("below fp8")


def test_a_format_that_was_slower_at_its_last_load_is_compared(tmp_path):
    """With a limit of 12 ms int8_sq missed it at 16, so what it would do at 32 decides nothing."""
    loads, slo = (1, 4, 16, 32), Slo("given", 12.0)
    store = full_store(tmp_path, ("none", "fp8"), concurrencies=loads, slo=slo)
    add_benchmark(store, add_format(store, "int8_sq"), "int8_sq", cut=32, concurrencies=loads, slo=slo)
    (found,) = comparison(collect(store))
    assert found.chosen == "fp8"
    assert found.rejected["int8_sq"].endswith("below fp8")


def test_the_best_load_need_not_be_the_highest_that_meets_the_limits(tmp_path):
    """Both loads meet 100 ms; eight users get no more than four, as from a server that is full."""
    store = Store(tmp_path)
    result, files = benchmark("none", (1, 4, 8), slo=Slo("given", 100.0))
    faster = dataclasses.replace(result.levels[1].summary, output_tokens_per_s=9999.0)
    levels = (result.levels[0], dataclasses.replace(result.levels[1], summary=faster), result.levels[2])
    files["benchmark.json"] = dataclasses.replace(result, levels=levels).to_json()
    commit(store, "benchmark", "synthetic-none", {}, {"repository": add_format(store, "none")}, {}, files, 10)
    (found,) = comparison(collect(store))
    assert "9,999 output tokens/s at its best load that meets the SLO (concurrency 4)" in found.reason


def test_marked_loads_alone_choose_nothing(tmp_path):
    (found,) = comparison(collect(full_store(tmp_path, ("none", "fp8"), concurrencies=(16,), bottleneck=16)))
    assert found.chosen is None
    assert {row.peak for row in found.rows} == {None}
    assert [*found.rejected.values()][1] == "each of its loads was cut short or limited by the load generator"


def test_one_format_is_no_winner(tmp_path):
    (found,) = comparison(collect(full_store(tmp_path, ("none",))))
    assert found.chosen is None
    assert found.reason == (
        "none (16 bit) gives 1,477 output tokens/s at its best load (concurrency 16). No other format has a "
        "usable throughput, so there is nothing to choose from."
    )


def test_a_format_without_a_benchmark_is_no_rival(tmp_path):
    store = full_store(tmp_path, ("none",))
    add_format(store, "fp8")
    (found,) = comparison(collect(store))
    assert found.chosen is None
    assert found.rejected == {"fp8": "it was not benchmarked"}


def test_the_only_format_within_the_loss_is_not_called_the_fastest(tmp_path):
    (found,) = comparison(collect(full_store(tmp_path, ("none", "int4_wo"))))
    assert found.chosen == "none"
    assert found.reason.startswith("none (16 bit) is the only format that qualifies within an accuracy loss of 1 %")


def test_a_loss_that_is_not_decided_is_said_with_the_choice(everything):
    (found,) = comparison(everything, 1.0)
    assert found.reason.endswith("loss 0.50 % (UNDECIDED).")


def test_an_incomplete_level_is_not_the_peak(tmp_path):
    (found,) = comparison(collect(full_store(tmp_path, ("none",), cut=16)))
    assert found.rows[0].peak.concurrency == 4


@pytest.mark.parametrize(("speed", "said"), [(1.05, "cannot be told apart"), (2.0, "do not overlap")])
def test_repeated_runs_say_whether_noise_explains_the_order(tmp_path, speed, said):
    """None runs at 1.0 and 1.2; fp8 at `speed` and 1.3: from 1.05 the ranges overlap, from 2.0 they do not."""
    store = Store(tmp_path)
    for variant, speeds in (("none", (1.0, 1.2)), ("fp8", (speed, 1.3 if speed < 2 else 2.1))):
        repository = add_format(store, variant)
        for minute, each in enumerate(speeds, 10):
            add_benchmark(store, repository, variant, minute=minute, speed=each)
    (found,) = comparison(collect(store))
    assert found.chosen == "fp8"
    assert any(said in note for note in found.notes)


def test_a_load_meets_limits_at_p99_only(two_formats):
    """Baseline at concurrency 1: TTFT 6, 7 and 8 ms; p99 is 8 ms."""
    level = benchmark("none", (1,))[0].levels[0]
    assert meets(level, Slo("given", 8.0))
    assert not meets(level, Slo("given", 7.9))
    assert not meets(level, Slo())


def test_a_load_of_which_requests_failed_is_outside_the_limits_and_named(tmp_path):
    """One of 25 is more than a hundredth; without it the load of 24 would be the best."""
    data = collect(full_store(tmp_path, ("none",), concurrencies=(1, 4), slo=Slo("given", 50.0)))
    (run,) = data.workloads[0].runs
    light, busy = run.result.levels
    some = dataclasses.replace(busy.summary, errors={"rejected": 1})
    result = dataclasses.replace(run.result, levels=(light, dataclasses.replace(busy, summary=some)))
    workload = dataclasses.replace(data.workloads[0], runs=(dataclasses.replace(run, result=result),))
    (found,) = comparison(dataclasses.replace(data, workloads=(workload,)))
    assert found.rows[0].at_slo == light
    assert "Requests failed, and the figures cover the others: none at concurrency 4 (1 of 25)." in found.notes


def test_loads_that_one_run_repeated_are_not_said_to_be_measured_once(tmp_path):
    """Intervals of the mean say what the noise explains; fp8 gives 1.4 times as much."""
    store = Store(tmp_path)
    for variant, own in (("none", (100, 200)), ("fp8", (1e5, 2e5))):
        intervals = {"output_tokens_per_s": own}
        add_benchmark(store, add_format(store, variant), variant, minute=10, intervals=intervals)
    notes = comparison(collect(store))[0].notes
    assert "Repeated runs of fp8 and none do not overlap." in notes
    add_benchmark(store, add_format(store, "int4_awq"), "int4_awq", minute=11)
    notes = comparison(collect(store))[0].notes
    assert "int4_awq was measured once, so the noise between runs is not known." in notes


def test_a_format_without_its_baseline_lacks_that_and_not_itself(tmp_path):
    """Its loss is unknown, which is neither more nor less than the limit."""
    page = document(collect(full_store(tmp_path, ("fp8",))))
    assert page.cards[1].detail.endswith("200 questions; no 16-bit model with the same questions to compare")
    (found,) = comparison(collect(Store(tmp_path)))
    assert found.reason.endswith("not one has a usable throughput and a known loss of at most 1 %.")


def test_what_was_not_streamed_has_no_time_to_its_first_token(tmp_path):
    """And answers of one token have no time between two."""
    store = Store(tmp_path)
    result, files = benchmark("none", (1,))
    (level,) = result.levels
    for minute, gone in ((10, ("itl_s",)), (20, ("ttft_s", "itl_s"))):
        summary = dataclasses.replace(level.summary, **dict.fromkeys(gone, Distribution(0)))
        made = dataclasses.replace(result, levels=(dataclasses.replace(level, summary=summary),))
        files |= {"benchmark.json": made.to_json()}
        inputs, settings = {"repository": add_format(store, "none")}, {"model": "synthetic", "precision": "none"}
        commit(store, "benchmark", "synthetic-none", {}, inputs, settings, files, minute)
        card = document(collect(store)).cards[3]
        assert card.detail.startswith(
            "none at concurrency 1: answers came" if "ttft_s" in gone else "none at concurrency 1"
        )
        assert "–" not in card.value + card.detail


def test_loads_are_shown_from_the_lightest(tmp_path):
    """Measured from the top, the lines and "darker for higher loads" of the plots hold all the same."""
    store = Store(tmp_path)
    add_benchmark(store, add_format(store, "none"), "none", concurrencies=(16, 1, 4))
    (item,) = collect(store).formats
    assert [level.concurrency for level in item.runs[0].result.levels] == [1, 4, 16]


def test_the_table_fits_a_terminal(everything):
    text = comparison_text(comparison(everything))
    assert max(map(len, text.splitlines())) <= 79
    assert "int4_awq gives the most throughput" in text
    assert text.splitlines()[1].split()[:5] == ["none", "100.00", "0.00", "–", "8.00"]


@pytest.mark.parametrize(
    ("mean", "noise", "shown"),
    [(0.0025, 1e-5, "0.0025"), (0.00094, 1e-5, "9.4e-4"), (5.4e-5, 1e-3, "5.4e-5~"), (12.0, 1e-5, "12"), (0, 0, "0~")],
)
def test_the_divergence_stands_in_the_table_in_80_columns(everything, mean, noise, shown):
    found = SimpleNamespace(
        overall=SimpleNamespace(kl_mean=mean), within_noise=frozenset({"kl_mean"} if mean <= noise else ())
    )
    (compared,) = comparison(everything)
    rows = tuple(dataclasses.replace(row, fidelity=found) for row in compared.rows)
    text = comparison_text([dataclasses.replace(compared, rows=rows)])
    assert max(map(len, text.splitlines())) <= 79
    assert text.splitlines()[0].split()[5] == "KL"
    assert text.splitlines()[0].endswith(" SLO tok/s")  # not cut into two tables
    assert {line.split()[3] for line in text.splitlines()[1 : 1 + len(rows)]} == {shown}
    assert "KL: mean divergence" in text
    assert ("~: within noise" in text) == shown.endswith("~")


def test_a_long_format_name_stands_in_each_part_of_a_cut_table(everything, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    (found,) = comparison(everything)
    row = dataclasses.replace(found.rows[0], variant="int4_awq-kv_int8")
    lines = comparison_text([dataclasses.replace(found, rows=(row,))]).splitlines()
    for at in (0, 4):  # a title, a row and the rest of its name in each part
        assert [line.split()[0] for line in lines[at : at + 3]] == ["format", "int4_awq-", "kv_int8"]


def test_tiles_show_no_marked_load(tmp_path):
    """Client-limited at 16: the tile shows 1,393 tokens/s at 4, and says so; one undecided format is not "kept"."""
    store = full_store(tmp_path, ("none", "fp8", "int8_sq", "int4_wo"), slo=Slo("given", 30.0, 5.0), bottleneck=16)
    cards = {card.title: card for card in document(collect(store)).cards}
    assert cards["Throughput"].value == "1,393"
    assert cards["Throughput"].detail == "fp8 at concurrency 4, within the SLO TTFT 30 ms, ITL 5 ms"
    assert cards["GO: less than 1 point lost"].value == "0 of 3"
    detail = cards["GO: less than 1 point lost"].detail
    assert detail.startswith("int4_wo NO-GO, at least 15.46 points lost; fp8, int8_sq UNDECIDED; mini_mmlu")


def test_a_benchmark_without_a_load_that_counts_has_no_headline(tmp_path):
    store = full_store(tmp_path, ("none", "fp8"), concurrencies=(16,), bottleneck=16)
    assert [card.value for card in document(collect(store)).cards][2:] == ["no load counts"]


@pytest.mark.parametrize(
    ("concurrencies", "said"), [((1, 4, 16), "3 loads, best 1,393 output tokens/s"), ((16,), "1 load, none counts")]
)
def test_the_number_of_a_run_is_of_a_load_that_counts(concurrencies, said):
    """Printed at the end of `make benchmark`."""
    levels = benchmark("fp8", concurrencies, bottleneck=16)[0].levels
    facts = {"levels": len(levels), "complete": True, "best_output_tokens_per_s": best_rate(levels)}
    node = SimpleNamespace(id="benchmark", stage=SimpleNamespace(headline=partial(Benchmark.headline, None)))
    outcome = SimpleNamespace(node=node, state="made", seconds=1.0, artifact=SimpleNamespace(facts=facts))
    assert said in outcome_table([outcome])


def tuned_engines(data, **tuning):
    """The same formats as TensorRT engines that were planned with these tunings, by variant."""

    def build(artifact, variant):
        options = {"multiple_profiles": "enable", "max_batch_size": "64"}
        options |= {"gemm_plugin": "auto"} if variant == "none" else {}
        facts = {**artifact.facts, "options": options if tuning[variant] == "recommended" else {}}
        return dataclasses.replace(artifact, settings={"engine": "tensorrt_llm"}, tuning=tuning[variant], facts=facts)

    formats = tuple(
        dataclasses.replace(item, chain=tuple(build(p, item.variant) if p.stage == "build" else p for p in item.chain))
        for item in data.formats
        if item.variant in tuning
    )
    return dataclasses.replace(data, formats=formats)


def test_the_tuning_of_both_sides_is_said(everything):
    data = tuned_engines(everything, none="recommended", fp8="recommended")
    (found,) = comparison(data)
    said = (
        "Every engine has tuning=recommended: none (16 bit) with gemm_plugin=auto, multiple_profiles=enable; fp8 with "
    )
    assert found.tuning == said + "multiple_profiles=enable."
    assert "Every engine has tuning=recommended" in comparison_text([found])


def test_the_report_names_the_tuning(tmp_path):
    data = tuned_engines(collect(full_store(tmp_path, ("none", "fp8"))), none="recommended", fp8="recommended")
    assert "Every engine has tuning=recommended" in str(document(data))


def test_a_comparison_of_engines_that_are_not_tuned_alike_says_so(everything):
    (found,) = comparison(tuned_engines(everything, none="plain", fp8="recommended"))
    assert "not tuned alike" in found.tuning
    assert "none (16 bit) with the defaults of its builder (tuning=plain)" in found.tuning
    assert "fp8 with multiple_profiles=enable (tuning=recommended)" in found.tuning
    (old,) = comparison(tuned_engines(everything, none="plain", fp8=None))
    assert "fp8 with the defaults of its builder (tuning not recorded)" in old.tuning


def test_nothing_is_said_of_engines_without_any_tuning(everything):
    assert [found.tuning for found in comparison(everything)] == [""]
    assert [found.tuning for found in comparison(tuned_engines(everything, none=None, fp8=None))] == [""]


def test_a_missing_variant_is_asked_for_in_words_that_exist(tmp_path):
    """`quant=fp8-kv_fp8` is no choice of conf/quant."""
    with pytest.raises(UserError, match=r"in the format magnitude_2_4-fp8-kv_fp8 in") as caught:
        collect(full_store(tmp_path), variants=["magnitude_2_4-fp8-kv_fp8"])
    assert "make evaluate sparsity=magnitude_2_4 quant=fp8 kv_cache=fp8" in str(caught.value)
