"""Configurations, what binds them, which is recommended, and what is said when there is none."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from pipelines.domain.benchmark import Slo
from pipelines.domain.errors import UserError
from pipelines.domain.formats import QFormat
from pipelines.predict.config import PriceSettings
from pipelines.predict.performance.gpus import gpu_named
from pipelines.predict.performance.limits import WantedLimits
from pipelines.predict.performance.models import model_named
from pipelines.predict.performance.performance import PerformanceModel
from pipelines.predict.simulator.run import IterationCost
from pipelines.predict.sizing.answer import RefusedOption, answer, attempt, check, refusals
from pipelines.predict.sizing.instance import InstanceUnderLoad, input_share, instance, instances_for, see
from pipelines.predict.sizing.sensitivity import changes
from tests.support.sizing_questions import demand, made_up, question

GIVEN = WantedLimits(max_batch_size=2048, max_num_tokens=8192)


def rate(asked, **how):
    setup = next(asked.setups())
    return InstanceUnderLoad(asked, instance(asked, setup, made_up(setup, **how))).capacity(asked.slo)


def test_at_the_rate_the_limit_is_met_and_a_little_above_it_is_not():
    asked = question(slo=Slo("given", ttft_ms=60.0))
    found = rate(asked)
    one = instance(asked, (setup := next(asked.setups())), made_up(setup))
    assert found.binding == "ttft"
    assert found.seen.at(95)["ttft"] <= 0.060
    assert see(asked, one, 1.05 * found.rate).at(95)["ttft"] > 0.060


def test_without_limits_an_instance_serves_what_the_engine_can():
    """A request costs 1,000 prompt tokens x 20 us = 20 ms and a little for its answer: below 50/s."""
    found = rate(question(slo=Slo()))
    assert found.binding == "queue"
    assert 35 < found.rate < 50
    assert found.rate == pytest.approx(found.most, rel=0.1)


def test_few_long_prompts_that_meet_by_chance_are_no_growing_queue():
    """With these arrivals, a twentieth of what the engine can serve was all that counted as steady."""
    gaps = np.random.default_rng(1).exponential(size=300)
    long = {"isl": np.full(300, 100_000), "osl": np.full(300, 500)}
    found = rate(question(slo=Slo(), gaps=gaps / gaps.mean(), **long))
    assert found.rate > 0.7 * found.most


@pytest.mark.parametrize("metric", ["ttft_ms", "itl_ms", "e2e_ms"])
def test_a_tighter_limit_serves_no_more(metric):
    rates = [rate(question(slo=Slo("given", **{metric: limit}))).rate for limit in (2000, 800, 750)]
    assert rates[0] >= rates[1] >= rates[2]


def test_what_binds_is_named():
    assert rate(question(wanted=WantedLimits(max_batch_size=4))).because == "max_batch_size"
    assert rate(question(max_kv_tokens=5000)).because == "KV cache"
    assert rate(question(slo=Slo("given", ttft_ms=60.0))).because == "compute"


def test_a_slower_engine_needs_no_simulation_of_its_own():
    """What it shows, from what was seen of the faster one, is what it shows when it is simulated."""
    asked = question(slo=Slo("given", ttft_ms=90.0))
    setup = next(asked.setups())
    costed = made_up(setup)
    longer = {name: 1.25 * getattr(costed.cost, name) for name in ("token_compute", "weights", "fixed")}
    one = InstanceUnderLoad(asked, instance(asked, setup, costed))
    slower = InstanceUnderLoad(asked, instance(asked, setup, replace(costed, cost=replace(costed.cost, **longer))))
    assert one.most / 1.25 == pytest.approx(slower.most, rel=1e-9)
    for share in (0.1, 0.6, 0.95, 1.2):
        told, simulated = one.at(share).slower(1.25, costed.overhead_s), slower.at(share)
        for name in ("rate", "ttft", "itl", "e2e", "queue", "growth", "batch", "kv_use"):
            assert getattr(told, name) == pytest.approx(getattr(simulated, name), rel=1e-7, abs=1e-9, nan_ok=True), name
    both = one.capacity(asked.slo, slower=1.25).rate, slower.capacity(asked.slo).rate
    assert both[0] == pytest.approx(both[1], rel=0.01)  # rates are found to half a percent


def test_pipeline_stages_work_on_batches_of_their_own():
    """Twice the batches, each as fast as before: twice the rate, where KV cache and batch are not the limit."""
    single, double = (rate(question(pp=(pp,), slo=Slo())) for pp in (1, 2))
    assert double.rate == pytest.approx(2 * single.rate, rel=0.01)


def test_the_recommendation_is_the_fewest_servers_then_gpus():
    found = answer(question(tp=(1, 2, 4), demand=demand(600.0)), made_up)
    sizes = [(option.fleet.servers, option.fleet.gpus) for option in found.options]
    assert sizes == sorted(sizes)
    assert found.chosen.label == "TP 1 fp8"  # 1.6 times as fast on two GPUs is slower per GPU
    assert "next TP 2 fp8" in found.reason


def test_instances_counted_one_by_one_are_those_of_the_rate():
    for peak in (3.0, 40.0, 95.0, 700.0):
        asked = question(demand=demand(peak), slo=Slo("given", ttft_ms=100.0))
        one = instance(asked, (setup := next(asked.setups())), made_up(setup))
        by_rate = math.ceil(peak / InstanceUnderLoad(asked, one).capacity(asked.slo).rate)
        assert instances_for(asked, one, 1) in (by_rate, by_rate - 1)  # the rate is found to half a percent
        assert instances_for(asked, one, 1) == instances_for(asked, one, 200)


def test_the_interval_holds_the_prediction_and_is_wider_for_a_worse_model():
    setup = next(question().setups())
    narrow, wide = (attempt(question(), setup, lambda each, sd=sd: made_up(each, spread=sd)) for sd in (0.05, 0.4))
    for option in (narrow, wide):
        assert option.low <= option.capacity.rate <= option.high
        assert option.fewest.needed <= option.fleet.needed <= option.largest.needed
    assert wide.high / wide.low > narrow.high / narrow.low


def test_one_reason_at_each_tp_is_said_once():
    copies = "quant=int8_sq with tp_size={} needs copies. tp_size up to 1 works."
    given = [(f"TP {tp} int8_sq", copies.format(tp)) for tp in (2, 4)]
    given += [(f"TP {tp} PP 2 fp8, KV fp8", "A10 has no FP8.") for tp in (1, 2)] + [("DEP 4 fp8", "weights of 9 GiB")]
    assert refusals([RefusedOption(label, why, "rules") for label, why in given]) == [
        ("TP 2, 4 int8_sq", "quant=int8_sq with tp_size=2, 4 needs copies. tp_size up to 1 works"),
        ("TP 1, 2 PP 2 fp8, KV fp8", "A10 has no FP8"),
        ("DEP 4 fp8", "weights of 9 GiB"),
    ]


def test_a_format_that_the_gpu_lacks_is_refused_and_the_others_are_tried():
    asked = question(gpu=gpu_named("a100_sxm_80gb"), formats=(QFormat.FP8, QFormat.INT8_SQ))
    found = answer(asked, PerformanceModel.load().cost)
    assert [option.label for option in found.options] == ["TP 1 int8_sq"]
    assert "needs FP8 tensor cores" in found.refused[0].why


@pytest.mark.parametrize(
    ("gpu", "formats"),
    [
        ("a100_sxm_80gb", {"none", "int8_sq", "int4_awq"}),
        ("l40s", {"none", "fp8", "int8_sq", "int4_awq", "w4a8_awq"}),
        ("b200_sxm", {"none", "fp8", "nvfp4"}),
    ],
)
def test_a_change_of_format_is_proposed_where_the_gpu_can_run_it(gpu, formats):
    """TensorRT-LLM's builder has no INT8 and INT4 kernels for B200, whatever its data sheet says."""
    asked = question(gpu=gpu_named(gpu), formats=(QFormat.NONE,))
    found = changes(asked, answer(asked, made_up).chosen, made_up)
    assert {each.what.split()[1] for each in found if each.what.startswith("format")} == formats - {"none"}


@pytest.mark.parametrize(
    ("gpu", "changes", "advice"),
    [
        ("a100_sxm_80gb", {}, r"It fits with sizing\.formats=\[int8_sq,int4_awq,int8_wo,int4_wo\]\.$"),
        ("a100_sxm_80gb", {"tp": (2,)}, r"It fits with sizing\.tp=\[4,8\] sizing\.formats=\[int8_sq,int4_"),
        ("b200_sxm", {"tp": (4,)}, r"It fits with sizing\.tp=\[8\], or with sizing\.formats=\[fp8,nvfp4\]\.$"),
        ("l4", {}, r"TP 8 none: weights of 94\.6 GiB per GPU.*\. Choose a GPU with more memory\.$"),
    ],
)  # fmt: skip
def test_what_is_advised_of_a_model_that_does_not_fit_was_not_tried_and_fits(gpu, changes, advice):
    asked = question(model=model_named("llama-3.1-405b"), gpu=gpu_named(gpu), wanted=GIVEN)
    asked = replace(asked, formats=(QFormat.NONE,), tp=(1, 2, 4, 8))
    with pytest.raises(UserError, match=advice):
        answer(replace(asked, **changes), made_up)


def test_a_given_limit_that_takes_the_memory_is_named():
    wanted = WantedLimits(max_batch_size=2048)
    asked = question(model=model_named("qwen2.5-7b"), gpu=gpu_named("a10"), formats=(QFormat.NONE,), wanted=wanted)
    with pytest.raises(
        UserError, match=r"buffers 10\.4 GiB of 22\.5 GiB\. It fits .*, or without build\.max_batch_size\.$"
    ):
        answer(asked, made_up)


def test_a_given_bound_of_the_kv_cache_is_the_reason():
    said = (
        r"TP 1 fp8: triton\.max_tokens_in_paged_kv_cache=512 holds no request of 1,100 tokens\. It fits without triton"
    )
    with pytest.raises(UserError, match=said):
        answer(question(max_kv_tokens=512), made_up)


def test_a_model_that_fits_nowhere_says_what_each_size_lacks():
    asked = question(model=model_named("llama-3.1-405b"), tp=(1, 2))
    with pytest.raises(
        UserError, match=r"No configuration tried fits llama-3\.1-405b on H100.*TP 1 fp8: weights of 382"
    ):
        answer(asked, made_up)


def test_a_limit_that_nothing_meets_says_the_best_there_is_and_what_limits_it():
    """A prompt of 1,000 tokens takes 20 ms on one GPU, 7.8 ms on four, and 1 + 5 ms come on top."""
    asked = question(slo=Slo("given", ttft_ms=5.0), tp=(1, 4))
    with pytest.raises(
        UserError,
        match=r"meets the limits: the closest is TP 4 fp8, where TTFT P95 is 16\.21 ms at 2 % of full load, .* is 5",
    ):
        answer(asked, made_up)
    advice = r"prefill of 1,000 input tokens, .* allow more GPUs per instance \(sizing\.tp=\[8\]\), another format"
    with pytest.raises(UserError, match=advice):
        answer(asked, made_up)
    with pytest.raises(UserError, match=r"lower bound: allow another format or GPU"):
        answer(replace(asked, tp=(8,)), made_up)


def test_the_closest_configuration_misses_its_limit_by_the_least():
    """26 ms of 20 are nearer than 9.6 ms of 6."""
    asked = question(slo=Slo("given", ttft_ms=20.0, itl_ms=6.0), tp=(1, 4))
    wide = replace(made_up(next(asked.setups())), cost=IterationCost(0.0, 0.0, 0.0, 0.0, fixed=9.6e-3))
    with pytest.raises(UserError, match=r"the closest is TP 1 fp8, where TTFT P95 is"):
        answer(asked, lambda setup: wide if setup.tp == 4 else made_up(setup))


def test_a_request_longer_than_the_context_is_refused():
    with pytest.raises(UserError, match=r"8,000 input and 193 output tokens .* context of llama-3-8b, 8,192"):
        answer(question(isl=np.full(10, 8000), osl=np.full(10, 193)), made_up)


def test_the_fleet_meets_the_limits_at_the_peak_and_one_fewer_does_not():
    asked = question(demand=demand(410.0), wanted=GIVEN)  # 9.7 instances
    found = answer(asked, made_up)
    trial = check(asked, found.chosen)
    assert trial.fleet.meets
    assert trial.fleet.instances == found.chosen.fleet.needed
    assert not trial.fewer.meets
    assert "one instance fewer the queue keeps growing" in trial.why or "one instance fewer TTFT is" in trial.why


def test_when_one_fewer_would_do_it_says_why():
    asked = question(demand=demand(85.0), headroom=0.5, spare=1)
    found = answer(asked, made_up)
    trial = check(asked, found.chosen)
    assert trial.fewer.meets
    assert "headroom of 50 % accounts for" in trial.why
    assert "rounding up" in trial.why


def test_one_instance_has_no_fewer():
    asked = question(demand=demand(3.0))
    assert check(asked, answer(asked, made_up).chosen).fewer is None


def test_prompts_take_the_share_of_time_that_their_tokens_do():
    """1,000 prompt tokens of 20 us beside 99 tokens of a batch: most of the time is prefill; with 1,000/1,000 less."""
    long_answers = question(osl=np.full(1000, 1000))
    shares = []
    for asked in (question(), long_answers):
        setup = next(asked.setups())
        one = instance(asked, setup, made_up(setup))
        shares.append(input_share(asked, one, InstanceUnderLoad(asked, one).capacity(asked.slo)))
    assert 0.5 < shares[0] < 1
    assert shares[1] < shares[0]


def test_prices_are_told_only_when_given():
    assert answer(question(), made_up).chosen.cost is None
    found = answer(question(prices=PriceSettings(gpu_hour_usd=2.0), demand=demand(30.0, 25.0)), made_up).chosen
    assert found.cost.per_year == found.fleet.servers * 8 * 2.0 * 8760
    assert found.cost.utilisation == pytest.approx(25.0 / (found.fleet.instances * found.capacity.rate))


def test_changes_go_the_way_they_must():
    asked = question(demand=demand(300.0))
    found = answer(asked, made_up)
    said = {change.what: change for change in changes(asked, found.chosen, made_up)}
    now = found.chosen.fleet.instances
    assert said["peak -20 % (240/s)"].instances <= now <= said["peak +20 % (360/s)"].instances
    assert said["1 spare"].instances == now + 1
    assert said["ISL -25 % (750)"].instances <= now <= said["ISL +25 % (1,250)"].instances
    assert said["OSL -25 % (75)"].instances <= now <= said["OSL +25 % (125)"].instances
    assert said["TTFT limit +25 % (625 ms)"].instances <= now <= said["TTFT limit -25 % (375 ms)"].instances
    assert said["headroom 10 %"].instances >= now
    assert "TP 2" in said
    assert "format int4_awq" in said


def test_a_length_that_stays_as_it_is_is_no_change():
    asked = question(osl=np.full(1000, 1))
    told = [change.what for change in changes(asked, answer(asked, made_up).chosen, made_up)]
    assert not [what for what in told if what.startswith("OSL")], told
    assert "ISL +25 % (1,250)" in told


def test_offline_work_is_sized_by_throughput():
    asked = question(mode="offline", slo=Slo(), demand=demand(300.0, 300.0))
    found = answer(asked, made_up).chosen
    assert found.capacity.binding == "queue"
    assert found.fleet.needed == math.ceil(300 / found.capacity.most)


def test_reused_prefixes_serve_more():
    plain = rate(question(slo=Slo()))
    reused = rate(question(slo=Slo(), prefix_tokens=800))
    assert reused.rate > 1.5 * plain.rate


def test_two_answers_to_one_question_are_equal():
    asked = question(tp=(1, 2))
    one, two = (answer(asked, made_up) for _ in range(2))
    assert json.dumps([replace_nan(o) for o in one.options]) == json.dumps([replace_nan(o) for o in two.options])


def replace_nan(option):
    return [option.capacity.rate, option.low, option.high, option.fleet.instances]


def test_a_question_is_not_changed_by_being_answered():
    asked = question()
    before = replace(asked)
    answer(asked, made_up)
    assert (before.isl == asked.isl).all()
    assert before.demand == asked.demand
