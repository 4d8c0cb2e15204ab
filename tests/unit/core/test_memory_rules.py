"""What the plan says of an engine's memory on a GPU."""

import pytest

from pipelines.commands import load
from pipelines.domain.formats import QFormat
from pipelines.memory_rules import check, request_tokens


def fit(*overrides, formats=(QFormat.NONE, QFormat.INT8_SQ, QFormat.INT4_AWQ)):
    settings = load(overrides)
    return check(settings, settings.model.shape.to_shape(), settings.hardware, list(formats))


def test_what_is_left_is_said_for_the_workload_and_for_the_longest_request():
    """Llama-3.1-8B FP8: 2,097,152 tokens would need 256 GiB; an H100 holds some 400,000."""
    found = fit("model=llama_3_1_8b", "quant=fp8", "hardware=h100_sxm", "build.max_seq_len=4096", "workload.isl=1000")
    assert (found.faults, found.warnings) == ((), ())
    parts, left = found.notes
    assert parts.startswith("on h100_sxm: weights 8.5 GiB, activations 1.0 GiB, buffers 8.8 GiB, CUDA 800.0 MiB, KV")
    assert "requests of 1,064 tokens at a time (KV cache binds)" in left
    assert "of max_seq_len=4,096 (modelled)" in left


def test_a_small_batch_binds_before_the_memory():
    found = fit("model=llama_3_1_8b", "quant=fp8", "hardware=h100_sxm", "build.max_batch_size=64")
    assert "64 requests of 192 tokens at a time (max_batch_size binds)" in found.notes[1]


def test_weights_that_do_not_fit_are_refused_with_what_does():
    (fault,) = fit("model=gemma_7b", "quant=none", "hardware=a10", "build.max_num_tokens=65536").faults
    assert "leaves no KV cache for one request on a10 of 22.4 GiB" in fault.message
    assert fault.todo.startswith("Fits with build.max_batch_size=256 build.max_num_tokens=2048 or build.tp_size=16")


def test_buffers_alone_only_warn():
    """Versions differ in what runtime and decoder take; nothing is refused for it."""
    found = fit("model=gemma_7b", "quant=int4_awq", "hardware=a10")
    (warning,) = found.warnings
    assert not found.faults
    assert "may not load on a10" in warning.message
    assert "build.max_batch_size=256" in warning.todo


@pytest.mark.parametrize(
    ("overrides", "tokens"),
    [
        (["workload.isl=100", "workload.osl=20"], 120),
        (["workload=uniform", "workload.isl.min=100", "workload.isl.max=300", "workload.osl=50"], 250),
        (["workload.isl=100", "workload.osl=20", "workload.turns=3"], 360),
    ],
)
def test_a_request_has_the_mean_length_of_the_workload(overrides, tokens):
    assert request_tokens(load(overrides).workload) == tokens
