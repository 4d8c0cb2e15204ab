"""What the plan says of an engine's memory on a GPU."""

import pytest

from pipelines.domain.formats import QFormat
from pipelines.domain.units import GIB
from pipelines.plan.memory_checks import check, cpu_predicted, cpu_reached, gpu_predicted, request_tokens
from pipelines.plan.other_memory import DRAFT, ColocatedEngine
from pipelines.predict.performance.models import model_named
from pipelines.settings.compose import load


def fit(*overrides, formats=(QFormat.NONE, QFormat.INT8_SQ, QFormat.INT4_AWQ)):
    settings = load(overrides)
    return check(settings, settings.model.shape.to_shape(), settings.hardware, list(formats))


def test_what_is_left_is_said_for_the_workload_and_for_the_longest_request():
    """Llama-3.1-8B FP8: 2,097,152 tokens would need 256 GiB; an H100 holds some 400,000."""
    found = fit("model=llama_3_1_8b", "quant=fp8", "hardware=h100_sxm", "build.max_seq_len=4096", "workload.isl=1000")
    (warning,) = found.warnings
    assert not found.faults
    assert "8.8 GiB for build.max_batch_size=2048, more than the weights, 8.5 GiB" in warning.message
    assert warning.todo.startswith("Set build.max_batch_size=1024 or less.")
    parts, left = found.notes
    assert parts.startswith("on h100_sxm: weights 8.5 GiB, activations 1.0 GiB, buffers 8.8 GiB, CUDA 800.0 MiB, KV")
    assert "requests of 1,064 tokens at a time (KV cache binds)" in left
    assert "of max_seq_len=4,096 (modelled)" in left


def test_a_small_batch_binds_before_the_memory():
    found = fit("model=llama_3_1_8b", "quant=fp8", "hardware=h100_sxm", "build.max_batch_size=64")
    assert "64 requests of 192 tokens at a time (max_batch_size binds)" in found.notes[1]


def test_the_kv_caches_of_attention_data_parallel_ranks_hold_more_together():
    """Each of 4 ranks of Qwen3 30B has 4 KV heads of 128 channels in 48 layers, for requests of its own."""
    words = ["quant=fp8", "hardware=h100_sxm", "build.tp_size=4", "build.max_batch_size=4", "workload.isl=40000"]
    words += ["engine=tensorrt_llm_llmapi", "build.max_seq_len=40960", "build.max_num_tokens=40960", "workload.osl=960"]
    shape, requests = model_named("qwen3-30b-a3b"), []
    for extra in ("{}", "{enable_attention_dp: true}"):
        settings = load([*words, "triton.max_tokens_in_paged_kv_cache=81920", f"llm_api.extra={extra}"])
        found = check(settings, shape, settings.hardware, [])
        assert len(found.warnings) == (extra == "{}")  # the KV cache holds only 2 requests
        requests.append(found.notes[1].split(" at a time")[0])
    assert requests == [
        "KV cache: 81,920 tokens; 2 requests of 40,960 tokens",
        "KV cache: 327,680 tokens; 8 requests of 40,960 tokens",
    ]


def test_weights_that_do_not_fit_are_refused_with_what_does():
    (fault,) = fit("model=gemma_7b", "quant=none", "hardware=a10", "build.max_num_tokens=65536").faults
    assert "leaves no KV cache for one request on a10 of 22.5 GiB" in fault.message
    assert fault.todo.startswith("Fits with build.max_batch_size=256 build.max_num_tokens=2048 or build.tp_size=16")


def test_buffers_alone_only_warn():
    """Versions differ in what runtime and decoder take; nothing is refused for it."""
    found = fit("model=gemma_7b", "quant=int4_awq", "hardware=a10")
    (warning,) = found.warnings
    assert not found.faults
    assert "may not load on a10" in warning.message
    assert "build.max_batch_size=256" in warning.todo


def test_few_requests_beside_a_draft_model_are_its_fault():
    """The same advice as where nothing fits at all: of 22.5 GiB the draft model takes 11."""
    words = ["model=llama_3_8b", "quant=fp8", "hardware=l4", "build.max_batch_size=8", "build.max_num_tokens=2048"]
    settings = load([*words, "build.max_seq_len=8192", "workload.isl=4000", "workload.osl=2000"])
    beside = [ColocatedEngine(DRAFT, 11 * GIB, 11 * GIB)]
    found = check(settings, settings.model.shape.to_shape(), settings.hardware, [], beside, lambda _change: False)
    (warning,) = found.warnings
    assert "The KV cache holds only 2 requests of 6,000 tokens" in warning.message
    assert warning.todo.startswith("Choose a smaller draft model")


@pytest.mark.parametrize(
    ("overrides", "tokens"),
    [
        (["workload.isl=100", "workload.osl=20"], 120),
        (["workload=uniform", "workload.isl.min=100", "workload.isl.max=300", "workload.osl=50"], 250),
        (["workload.isl=100", "workload.osl=20", "workload.turns=3"], 240),  # of requests of 120, 240 and 360
    ],
)
def test_a_request_has_the_mean_length_of_the_workload(overrides, tokens):
    assert request_tokens(load(overrides)) == tokens


def test_streamed_weights_leave_their_room_to_the_kv_cache():
    """Llama-3-8B at 16 bit: 14.96 GiB of weights and 4 MiB of angles; two fifths of it stay on the GPU."""
    words = ["model=llama_3_8b", "quant=none", "hardware=a10", "build.max_batch_size=64", "build.max_num_tokens=2048"]
    words += ["weights=streaming"]
    all_there, parts, rest = (fit(*words, f"triton.gpu_weights_percent={share}").notes for share in (1.0, 0.4, 0.0))
    assert all_there[0].startswith("on a10: weights 15.0 GiB,")
    assert "stream" not in all_there[0]
    assert parts[0].startswith("on a10: weights 6.0 GiB,")
    assert parts[0].endswith("; 9.0 GiB of weights stay on the host and are streamed in every iteration (modelled)")
    assert rest[0].startswith("on a10: weights 0 B,")


def test_a_share_counts_where_the_engine_streams_only():
    """Without build.weight_streaming every weight is on the GPU, and a rule refuses the share."""
    (note, _) = fit("model=llama_3_8b", "quant=fp8", "hardware=h100_sxm", "triton.gpu_weights_percent=0.5").notes
    assert note.startswith("on h100_sxm: weights 8.5 GiB,")


def test_the_engine_holds_all_weights_wherever_they_stay():
    settings = load(["model=llama_3_8b", "weights=streaming", "triton.gpu_weights_percent=0.4"])
    shape = settings.model.shape.to_shape()
    assert gpu_predicted(settings, shape) == gpu_predicted(load(["model=llama_3_8b"]), shape)


def test_a_benchmark_reaches_iterations_of_all_users_prompts_together():
    """32 users of 128 tokens: 4,096 of max_num_tokens=8,192; with one user, two numbers of tokens."""
    settings = load(["quant=int4_awq", "build.max_num_tokens=8192"])
    shape = load(["model=llama_3_8b"]).model.shape.to_shape()
    full, usual = cpu_predicted(settings, shape), cpu_reached(settings, shape)
    alone = cpu_reached(load(["quant=int4_awq", "benchmark.concurrency=1"]), shape)
    assert full is not None
    assert usual is not None
    assert alone is not None
    assert (usual.activations, usual.kernels) == (full.activations / 2, full.kernels)
    assert alone.kernels == pytest.approx(full.kernels * 2 * 5 / 512)
    assert usual.kv_pool == alone.kv_pool == full.kv_pool


def test_a_load_whose_prompts_nobody_knows_may_reach_full_load():
    settings = load(["quant=int4_awq", "workload=poisson", "benchmark.request_rate=4"])
    shape = load(["model=llama_3_8b"]).model.shape.to_shape()
    assert cpu_reached(settings, shape) == cpu_predicted(settings, shape)
