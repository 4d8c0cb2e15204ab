"""Limits of an engine are chosen for its load, unless they are given, and alike by `plan`, `size` and `simulate`."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from pipelines.domain.errors import UserError
from pipelines.domain.formats import QFormat
from pipelines.engines.tensorrt_llm.config import BuildSettings
from pipelines.host.machine import Machine
from pipelines.plan.plan import make_plan
from pipelines.predict.performance.deployment import costs
from pipelines.predict.performance.gpus import gpu_named
from pipelines.predict.performance.limits import BATCHES, LoadLengths, WantedLimits, known_lengths
from pipelines.predict.performance.models import known_model
from pipelines.predict.performance.performance import PerformanceModel
from pipelines.predict.performance.placement import full_load_rate, limits_for_load
from pipelines.predict.simulate.case import make_case
from pipelines.predict.sizing.answer import answer
from pipelines.predict.sizing.instance import InstanceUnderLoad, instance
from pipelines.predict.sizing.question import ask
from pipelines.predict.sizing.sensitivity import changes
from pipelines.predict.sizing.words import shown_options
from pipelines.settings.compose import load
from pipelines.store.store import Store
from tests.support.sizing_questions import demand, made_up, question

NO_GPU = Machine(2, 2**34, (), "nvidia-smi is not installed", has_tensorrt_llm=False, platform="test")
A10 = ("model=gemma_2b", "quant=none", "hardware=a10", "workload.isl=500", "workload.osl=100")
H100 = ("model=llama_3_8b", "quant=fp8", "hardware=h100_sxm", "workload.isl=2000", "workload.osl=200")
LLAMA_70B = ("model=llama_3_1_70b", "quant=fp8", "hardware=h100_sxm", "build.tp_size=2", "workload.isl=1000")
WINDOWS = ("model=llama_3_1_8b", "hardware=h100_sxm", "workload.isl=6000", "triton.max_attention_window_size=[4096]")
TURNS = ("model=llama_3_8b", "quant=fp8", "hardware=l4", "workload=chat")


def chosen(*words):
    settings = load(words)
    return limits_for_load(settings, known_model(settings), settings.hardware, costs(settings))


def sized(*words):
    settings = load((*words, "sizing.average_rate=1", "sizing.requests=400"))
    return answer(ask(settings, NO_GPU), costs(settings))


def planned(tmp_path, *words, target="build"):
    return make_plan(load((*words, f"paths.store={tmp_path}")), target, Store(tmp_path), NO_GPU)


def test_gemma_2b_needs_one_a10_and_not_two():
    """Buffers of 2,048 requests take 17.6 GiB; taken for given, they double the GPUs."""
    assert sized(*A10).chosen.fleet.gpus == 1
    assert sized(*A10, "build.max_batch_size=2048").chosen.fleet.gpus == 2


@pytest.mark.parametrize(
    "words", [A10, H100, LLAMA_70B, TURNS, WINDOWS], ids=["a10", "h100", "tp2", "turns", "windows"]
)
def test_plan_size_and_simulate_speak_of_one_engine(tmp_path, words):
    settings = load((*words, "sizing.average_rate=5", "sizing.tp=2" if words is LLAMA_70B else "sizing.tp=1"))
    asked = ask(settings, NO_GPU)
    one = instance(asked, setup := next(asked.setups()), costs(settings)(setup))
    engines = make_case(settings, NO_GPU).engines
    simulated = next(each for each in engines if each.policy != "static")  # a static engine has no token budget
    plan = planned(tmp_path, *words, "engine=tensorrt_llm")
    build = plan.settings.build
    assert one.limits.max_batch_size == simulated.slots == build.max_batch_size
    assert one.limits.max_num_tokens == simulated.max_num_tokens == build.max_num_tokens
    assert (one.limits.max_seq_len, one.limits.max_input_len) == (build.max_seq_len, build.max_input_len)
    assert one.engine.kv_blocks == simulated.kv_blocks
    kv = next(note for note in plan.notes if note.startswith("KV cache"))
    tokens, together = asked.lengths.mean, one.placed.concurrency
    assert f"{together.requests:,} requests of {tokens:,} tokens at a time ({together.binds} binds)" in kv
    held = int(re.search(r"KV cache: ([\d,]+) tokens", kv)[1].replace(",", ""))
    assert held - build.tokens_per_block < one.kv_tokens <= held  # whole blocks


@pytest.mark.parametrize("name", ["max_batch_size", "max_num_tokens", "max_seq_len"])
def test_a_limit_that_is_given_stays_even_at_the_default(name):
    default = {"max_batch_size": 2048, "max_num_tokens": 8192, "max_seq_len": 8192}[name]
    found = chosen(*H100, f"build.{name}={default}")
    assert getattr(found, name) == default
    assert name not in found.reasons
    assert name in chosen(*H100).reasons


def test_given_is_told_from_the_default():
    assert not load(["quant=fp8"]).build.given("max_batch_size")
    assert load(["quant=fp8", "build.max_batch_size=2048"]).build.given("max_batch_size")
    assert load(["experiment=cpu_demo"]).build.given("max_batch_size")
    assert load(["speculative=lookahead"]).build.given("max_batch_size")
    assert not load(["build.max_batch_size=64", "build.max_batch_size=null"]).build.given("max_batch_size")


def test_what_is_not_given_has_the_default_of_trtllm_build_elsewhere():
    build = load([]).build
    found = (build.max_batch_size, build.max_input_len, build.max_num_tokens, build.max_seq_len)
    assert found == (2048, 1024, 8192, None)
    assert build.model_dump() == BuildSettings().model_dump()


def test_the_batch_is_the_smallest_that_reaches_nearly_the_best_rate():
    """By simulation, on the A10: half of it serves clearly less, four times as much hardly more."""
    asked = question(model=known_model(load(A10)), gpu=gpu_named("a10"), formats=(QFormat.NONE,))
    asked = replace(asked, isl=asked.isl // 2)
    cost, setup = PerformanceModel.load().cost, next(asked.setups())

    def most(batch):
        tried = replace(asked, terms=replace(asked.terms, wanted=WantedLimits(max_batch_size=batch)))
        return InstanceUnderLoad(tried, instance(tried, setup, cost(setup))).most

    batch = instance(asked, setup, cost(setup)).limits.max_batch_size
    assert batch in BATCHES
    assert most(batch // 2) < 0.98 * most(batch)
    assert most(4 * batch) < 1.06 * most(batch)


def test_the_longest_prompt_fits_beside_the_tokens_of_all_others():
    """A prompt of 6,000 tokens beside 256 decoding requests: 6,256, in steps of 1,024."""
    found = chosen(*H100[:3], "workload.isl=6000", "workload.osl=100", "build.max_batch_size=256")
    assert (found.max_num_tokens, found.max_seq_len, found.max_input_len) == (7168, 6144, 6144)
    assert chosen(*H100[:3], "workload.isl=6000", "workload.osl=100", "runtime=chunked").max_num_tokens == 4096


def test_draft_tokens_count_for_every_request():
    """64 requests check 1 + 83 tokens each, beside a prompt of 2,000: 7,376, in steps of 1,024."""
    assert chosen(*H100, "speculative=lookahead").max_num_tokens == 8192


def test_limits_never_exceed_the_context():
    """8,090 tokens are 8,192 in steps of 1,024, and so is the context of Gemma; its prompt of 8,000 must fit too."""
    found = chosen("model=gemma_2b", "quant=none", "hardware=a10", "workload.isl=8000", "workload.osl=90")
    assert (found.max_seq_len, found.max_input_len) == (8192, 8192)


def test_a_load_that_nobody_can_count_keeps_the_defaults(tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text('{"time": 0, "prompt": "Hello", "osl": 5}\n')
    assert chosen(*H100[:3], "workload=trace", f"workload.trace={file}") is None
    assert known_lengths(load([*H100[:3], "workload=trace", f"workload.trace={file}"])) is None


def test_the_lengths_are_those_that_the_settings_state():
    """Turns of 100/20 tokens: prompts of 100, 220, 340."""
    stated = known_lengths(load(["workload.isl=100", "workload.osl=20", "workload.turns=3"]))
    assert stated == LoadLengths(mean_isl=220.0, mean_osl=20.0, longest_isl=340, longest=360)


def test_an_engine_for_the_cpu_keeps_its_limits(tmp_path):
    plan = planned(tmp_path, *A10, "engine=openvino")
    assert not plan.settings.build.given("max_batch_size")
    assert plan.settings.build.max_batch_size == 2048


def test_the_plan_says_what_was_chosen_and_why(tmp_path):
    notes = [note for note in planned(tmp_path, *A10, "engine=tensorrt_llm").notes if note.startswith("chosen")]
    assert [note.split()[4] for note in notes] == ["build.max_batch_size", "build.max_num_tokens", "build.max_seq_len"]
    assert "256: with it, 256 requests of 600 tokens at a time reach 98 % of" in notes[0]


def test_one_request_reaches():
    limits = chosen("model=llama_3_1_8b", "quant=none", "hardware=a10", "workload.isl=20000", "workload.osl=100")
    assert limits.reasons["max_batch_size"].startswith("with it, 1 request of 20,100 tokens at a time reaches ")


def warned(tmp_path, *words):
    return [str(each) for each in planned(tmp_path, "engine=tensorrt_llm", *words).warnings]


def test_the_plan_warns_of_buffers_above_the_weights(tmp_path):
    words = (*A10, "build.max_batch_size=1024")
    (text,) = [each for each in warned(tmp_path, *words) if "buffers" in each or "runtime and decoder take" in each]
    assert "8.8 GiB for build.max_batch_size=1024, more than the weights, 4.7 GiB" in text
    assert "Set build.max_batch_size=512 or less" in text
    assert not [each for each in warned(tmp_path, *A10) if "more than the weights" in each]


def test_the_plan_warns_where_fewer_than_four_requests_fit(tmp_path):
    words = ("model=llama_3_1_8b", "quant=none", "hardware=a10", "workload.isl=20000", "workload.osl=1000")
    (text,) = [each for each in warned(tmp_path, *words) if "holds only" in each]
    assert "The KV cache holds only" in text
    assert "4 or more fit with build.tp_size=2 or quant=" in text
    assert not [each for each in warned(tmp_path, *A10) if "holds only" in each]


def test_the_plan_warns_of_a_context_that_the_load_does_not_need(tmp_path):
    words = ("model=llama_3_1_8b", "quant=fp8", "hardware=h100_sxm", "workload.isl=1800", "workload.osl=200")
    (text,) = [each for each in warned(tmp_path, *words, "build.max_seq_len=131072") if "max_seq_len" in each]
    assert "build.max_seq_len=131072, and the longest request of workload=fixed has 2,000 tokens" in text
    assert "Set build.max_seq_len=4096" in text
    assert not [each for each in warned(tmp_path, *words) if "max_seq_len" in each]
    assert planned(tmp_path, "engine=tensorrt_llm", *words).settings.build.max_seq_len == 4096


@pytest.mark.parametrize(("name", "value"), [("max_input_len", 1500), ("max_seq_len", 2100)])
def test_a_limit_that_the_load_exceeds_is_refused(name, value):
    asked = ask(load((*H100, "sizing.average_rate=5", f"build.{name}={value}")), NO_GPU)
    with pytest.raises(UserError, match=rf"of 2,[02]00 tokens; build\.{name}={value} does not hold"):
        asked.check()


def test_all_formats_that_the_gpu_runs_are_ranked():
    found = sized(*A10, "sizing.formats=auto", "sizing.tp=[1,2]")
    tried = {option.instance.setup.qformat for option in found.options}
    assert tried == {"none", "int8_sq", "int4_awq", "int8_wo", "int4_wo"}
    assert {option.instance.setup.qformat for option in shown_options(found.options)} == tried
    assert not found.refused


def test_auto_is_not_given_with_other_formats():
    with pytest.raises(UserError, match=r"formats=\[auto,fp8\]: auto already tries all"):
        load(["sizing.formats=[auto,fp8]"])


def test_two_changes_are_combined_where_they_need_fewer_gpus_than_each():
    asked = question(demand=demand(300.0), formats=(QFormat.NONE,), isl=question().isl * 4)
    asked = replace(asked, slo=replace(asked.slo, ttft_ms=None))
    found = answer(asked, PerformanceModel.load().cost).chosen
    said = changes(asked, found, PerformanceModel.load().cost)
    together = [each for each in said if each.together]
    alone = {each.what: each.size for each in said if not each.together}
    assert together
    for pair in together:
        first, second = pair.what.split(", ")
        assert pair.size < min(alone[first], alone[second], (found.fleet.servers, found.fleet.gpus))


def test_limits_given_too_large_are_a_change_to_undo():
    asked = ask(load((*A10, "sizing.average_rate=60", "build.max_batch_size=1024", "sizing.requests=400")), NO_GPU)
    found = answer(asked, made_up).chosen
    assert "limits chosen for the load" in {each.what for each in changes(asked, found, made_up)}


@pytest.mark.parametrize("quant", ["none", "int8_sq", "int4_awq"])
def test_the_experiment_for_an_a10_is_planned_whole(tmp_path, quant):
    plan = planned(tmp_path, "experiment=a10_gemma_2b", f"quant={quant}", target="all")
    assert {"build", "evaluate", "repository", "benchmark"} <= {step.node.stage.name for step in plan.steps}
    assert not [each for each in plan.warnings if "KV cache" in each.message or "runtime and decoder" in each.message]


@pytest.mark.parametrize(("isl", "osl", "busy"), [(100, 400, 64), (1000, 10, 10 * (2048 - 64) / 1000)])
def test_a_full_engine_has_as_many_busy_slots_as_prompts_fit_beside_them(isl, osl, busy):
    """A second per iteration, so that the rate is the number of busy slots: all, or what 1,984 prompt tokens feed."""
    cost = SimpleNamespace(window=0, seconds=lambda *_, **__: 1.0)
    assert full_load_rate(cost, isl, osl, 64, 2048) == pytest.approx(busy)
