"""Facts, warnings, steps and failures out of trtllm-build's log.

`logs/` follows the lines of TensorRT-LLM's loggers (builder.py, commands/build.py, profiler.py) and of TensorRT 10,
with the sizes of a published build of LLaMA-7B.
"""

from pathlib import Path

import pytest

from pipelines.engines.tensorrt_llm.engine import STEPS, BuildLog

LOGS = Path(__file__).parent / "logs"
MIB = 2**20


def read(text):
    """A log that was read, its finished steps, its notes."""
    log = BuildLog()
    fed = [log.feed(line) for line in text.splitlines()]
    return log, sum(step for step, _ in fed), [note for _, note in fed if note]


@pytest.fixture
def llama():
    return read((LOGS / "llama_7b.log").read_text())


def test_facts_of_a_build(llama):
    assert llama[0].version == "1.2.1"
    assert llama[0].facts() == {
        "weights_bytes": 13476831737,
        "activation_bytes": 8791335272,
        "peak_gpu_bytes": 15317 * MIB,
        "peak_host_bytes": round(34537.25 * MIB),
        "rank_seconds": [15.0],
        "build_seconds": 37.0,
        "warnings": ["Overriding reduce_fusion to False"],
    }


def test_facts_of_a_version_that_estimates_the_kv_cache():
    """8384.07 + 12858.21 + 10240.00 = 31482.28; the log rounds each by itself."""
    facts = read((LOGS / "older_estimate.log").read_text())[0].facts()
    assert facts == {
        "activation_bytes": round(8384.07 * MIB),
        "weights_bytes": round(12858.21 * MIB),
        "kv_cache_estimate_bytes": 10240 * MIB,
        "memory_estimate_bytes": round(31482.27 * MIB),
        "peak_host_bytes": 40291 * MIB,
        "rank_seconds": [15.0],
        "build_seconds": 54.0,
    }


def test_each_rank_goes_through_every_step(llama):
    assert llama[1] == len(STEPS)


def test_a_person_sees_what_matters(llama):
    assert llama[2] == [
        "TensorRT-LLM 1.2.1",
        "warning: Overriding reduce_fusion to False",
        "built in 15 s: weights 12.6 GiB, activations 8.2 GiB",
    ]


def test_the_largest_rank_counts():
    text = "\n".join(f"[11/21/2026-10:00:16] [TRT] [I] Total Weights Memory: {size} bytes" for size in (5, 9, 7))
    assert read(text)[0].facts() == {"weights_bytes": 9}


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (
            [
                "Traceback (most recent call last):",
                '  File "builder.py", line 1182, in build',
                "RuntimeError: INT8/INT4 quantization is not supported on SM>=100.",
                "Traceback (most recent call last):",
                "AssertionError: Engine building failed, please check error log.",
            ],
            "RuntimeError: INT8/INT4 quantization is not supported on SM>=100.",
        ),
        (
            [
                "[11/21/2026-10:00:16] [TRT] [E] [virtualMemoryBuffer.cpp::154] Error Code 2: OutOfMemory",
                "[11/21/2026-10:00:17] [TRT] [E] [engineBuilder.cpp::makeEngineFromSubGraph::1714] Error Code 10",
                "AssertionError: Engine building failed, please check the error log.",
            ],
            "[virtualMemoryBuffer.cpp::154] Error Code 2: OutOfMemory",
        ),
        (
            ["usage: trtllm-build [-h]", "trtllm-build: error: unrecognized arguments: --cluster_key"],
            "trtllm-build: error: unrecognized arguments: --cluster_key",
        ),
        (["torch.OutOfMemoryError: CUDA out of memory."], "torch.OutOfMemoryError: CUDA out of memory."),
        (["starting", "Killed"], "Killed"),
        ([], ""),
    ],
)
def test_the_line_that_says_why_is_found(lines, reason):
    assert read("\n".join(lines))[0].failure() == reason


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Implicitly setting GemmaConfig.producer = {'name': 'modelopt', 'version': '0.37.0'}", 0),
        ("Provided but not required tensors: {'transformer.layers.0.mlp.gate.activation_scaling_factor'}", 0),
        ("Provided but not required tensors: {'transformer.layers.0.mlp.gate.weight'}", 1),
        ("fuse_gate_mlp cannot be done for transformer.layers.0.mlp due to unsupported activation relu. Skipping.", 1),
    ],
)
def test_only_unexpected_warnings_are_kept(text, shown):
    log, _, notes = read(f"[11/22/2026-10:00:00] [TRT-LLM] [W] {text}")
    assert (len(notes), len(log.warnings)) == (shown, shown)
