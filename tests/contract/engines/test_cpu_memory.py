"""Predicted beside observed memory of the CPU engine: bundled models and a larger one, as a library and served."""

import json
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.thorough

ov = pytest.importorskip("openvino")
pytest.importorskip("openvino_genai")

from pipelines.checkpoint.adapter_files import AdapterFiles  # noqa: E402 - after the skips
from pipelines.domain.adapter import linear_widths  # noqa: E402
from pipelines.domain.formats import QFormat  # noqa: E402
from pipelines.domain.model_shape import ModelShape  # noqa: E402
from pipelines.domain.progress import SilentProgress  # noqa: E402
from pipelines.engines.openvino.engine import OpenVinoEngine  # noqa: E402
from pipelines.engines.openvino.memory import (  # noqa: E402
    CpuSizes,
    adapter_memory,
    cpu_memory,
    in_same_process,
    inference_precision,
    multiplies_tiles,
)
from pipelines.engines.openvino.runtime import OpenVinoOptions  # noqa: E402
from pipelines.engines.port import BuildLimits  # noqa: E402
from pipelines.host.machine import has_avx512, native_bf16  # noqa: E402
from pipelines.loadgen.health import read_metrics  # noqa: E402
from pipelines.serving.config import ServingSettings  # noqa: E402
from pipelines.serving.process import TritonServer  # noqa: E402
from tests.contract.engines.conftest import MODELS  # noqa: E402
from tests.support.adapters import write_adapter  # noqa: E402
from tests.support.engine_memory import FULL_ITERATIONS  # noqa: E402
from tests.support.random_checkpoint import write_checkpoint  # noqa: E402
from tests.support.served_gemma import Client  # noqa: E402
from triton_repo.config import TritonSettings  # noqa: E402
from triton_repo.parameters import RepositorySpec  # noqa: E402
from triton_repo.write import write_repository  # noqa: E402

LARGE = ModelShape("LlamaForCausalLM", 12, 768, 12, 4, 64, 2048, 8192, 2048, tie_word_embeddings=False)
"""88 M parameters: 168 MiB at 16 bit, 60 MiB in INT4."""
LIMITS = BuildLimits(max_batch_size=32, max_input_len=1024, max_seq_len=2048, max_num_tokens=2048)
BLOCKS = 128
LENGTHS = 110
"""Prompts of so many different lengths bring more kernels than the plugin keeps, or nearly."""
NATIVE = inference_precision(OpenVinoOptions())
TOLERANCE = 0.1
PROCESSORS = 0.3
"""A Xeon without bf16 arithmetic needs up to 27 % less than the processor on which the constants were measured."""


def shape_of(kind: str) -> ModelShape:
    return ModelShape.from_hf_config(json.loads((MODELS / f"tiny_{kind}" / "config.json").read_text()))


def sizes_of(shape: ModelShape, qformat: QFormat, precision: str = NATIVE, lengths: int = 0):
    sizes = CpuSizes(
        *(shape, qformat, precision, precision, LIMITS.max_num_tokens, LIMITS.max_seq_len),
        avx512=has_avx512(),
        bf16=native_bf16(),
    )
    return replace(sizes, kv_cache_bytes=BLOCKS * sizes.block_bytes, iterations=FULL_ITERATIONS + lengths)


def predicted(shape: ModelShape, qformat: QFormat, precision: str = NATIVE, lengths: int = 0):
    return cpu_memory(sizes_of(shape, qformat, precision, lengths))


def observed(engine: Path, precision: str = NATIVE, lengths: int = 0) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.support.engine_memory", str(engine), precision, str(BLOCKS), str(lengths)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout)


def agree(memory, found) -> None:
    """Never more than a tenth above the prediction, and below it by no more than processors differ.

    Mapped pages that the kernel dropped because others needed the memory are not held against the prediction.
    """
    assert (1 - PROCESSORS) * memory.own <= found["own"] <= (1 + TOLERANCE) * memory.own
    assert (1 - PROCESSORS) * memory.total - memory.mapped <= found["resident"] <= (1 + TOLERANCE) * memory.total
    assert found["kv_blocks"] == memory.kv_blocks


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Engines of the large model by format, each made once."""
    root, made = tmp_path_factory.mktemp("large"), {}

    def engine(qformat: QFormat) -> Path:
        if qformat not in made:
            checkpoint = write_checkpoint(root / f"{qformat}-checkpoint", LARGE, qformat)
            OpenVinoEngine().build(checkpoint, LIMITS, root / f"{qformat}-engine", SilentProgress())
            made[qformat] = root / f"{qformat}-engine"
        return made[qformat]

    return engine


@pytest.mark.parametrize("qformat", [QFormat.NONE, QFormat.INT8_SQ, QFormat.INT4_WO])
def test_a_model_of_a_hundred_megabytes(large, qformat):
    agree(predicted(LARGE, qformat), observed(large(qformat)))


def test_float32_arithmetic_holds_wider_weights(large):
    agree(predicted(LARGE, QFormat.NONE, "f32"), observed(large(QFormat.NONE), "f32"))


@pytest.mark.parametrize(
    ("kind", "qformat"),
    [
        ("llama", QFormat.FP8),
        ("llama", QFormat.INT8_WO),
        ("gemma", QFormat.NONE),
    ],
)
def test_the_bundled_models_under_prompts_of_many_lengths(workshop, tmp_path, kind, qformat):
    shape = shape_of(kind)
    OpenVinoEngine().build(workshop.checkpoint(kind, qformat), LIMITS, tmp_path, SilentProgress())
    agree(predicted(shape, qformat, lengths=LENGTHS), observed(tmp_path, lengths=LENGTHS))


@pytest.mark.parametrize("grouped", [True, False])
def test_experts_have_rows_of_their_own(workshop, tmp_path, grouped):
    """Products of each expert keep buffers of all layers, one product for all only those of a layer."""
    if grouped and not multiplies_tiles(OpenVinoOptions()):
        pytest.skip("the processor has no AMX")
    shape = ModelShape.from_hf_config(json.loads((workshop.source("mixtral") / "config.json").read_text()))
    checkpoint = workshop.checkpoint("mixtral", QFormat.INT8_WO)
    form = OpenVinoOptions(experts="grouped" if grouped else "separate")
    OpenVinoEngine(form).build(checkpoint, LIMITS, tmp_path, SilentProgress())
    sizes = replace(sizes_of(shape, QFormat.INT8_WO), grouped_experts=grouped)
    agree(cpu_memory(sizes), observed(tmp_path))


def test_many_lengths_cost_a_large_model_no_more_than_a_small_one(large):
    agree(predicted(LARGE, QFormat.INT4_AWQ, lengths=LENGTHS), observed(large(QFormat.INT4_AWQ), lengths=LENGTHS))


def served_gauges(folder, kind, memory, lengths, tasks=(None,), spec=None, **beside):
    """Fill the pools of a served engine, run prompts of many lengths, and return what Prometheus reads."""
    write_repository(
        folder / "repository",
        engine_dir=folder / "engine",
        tokenizer_dir=MODELS / f"tiny_{kind}",
        settings=TritonSettings(),
        spec=RepositorySpec(
            flavour="openvino",
            label="model",
            variant="any",
            options={"num_threads": 1, "inference_precision": NATIVE, "kv_cache_bytes": int(memory.kv_pool)},
            **(spec or {}),
        ),
        made_from={},
        **beside,
    )
    numbers = np.random.default_rng(1)
    with TritonServer(folder / "repository", ServingSettings()) as server:
        client = Client(server.grpc_url)

        def answered(task, *lengths: int) -> None:
            names = [f"{length}-{index}" for index, length in enumerate(lengths)]
            adapter = {} if task is None else {"lora_task_id": np.array([[task]], np.uint64)}
            for name, length in zip(names, lengths, strict=True):
                prompt = numbers.integers(5, shape_of(kind).vocab_size, (1, length)).astype(np.int32)
                client.send(
                    "tensorrt_llm", name, input_ids=prompt, input_lengths=length, request_output_len=2, **adapter
                )
            assert not any(answer.error for answer in client.take(*names).values())

        for task in tasks:
            for _ in range(2):
                answered(task, *[1000] * 4)
            for length in range(8, 8 + lengths):
                answered(task, length)
        client.close()
        with urllib.request.urlopen(server.metrics_url, timeout=5) as page:
            return read_metrics(page.read().decode())


def test_the_served_engine_needs_the_same(workshop, tmp_path):
    """The gauge that Prometheus reads is the engine's process, under long prompts and ones of many lengths."""
    memory = predicted(shape_of("gemma"), QFormat.INT4_AWQ, lengths=LENGTHS)
    OpenVinoEngine().build(
        workshop.checkpoint("gemma", QFormat.INT4_AWQ), LIMITS, tmp_path / "engine", SilentProgress()
    )
    gauges = served_gauges(tmp_path, "gemma", memory, LENGTHS)
    assert (1 - TOLERANCE) * memory.total - memory.mapped <= gauges["memory_cpu"] <= (1 + TOLERANCE) * memory.total
    assert gauges["kv_cache_block_max"] == memory.kv_blocks


def test_a_served_draft_model_and_adapter_are_in_the_engines_process(tmp_path):
    """A model of 88 M parameters, a draft model of a fifth, and the model again with an adapter of all linears."""
    vocabulary, rank, numbers = shape_of("llama").vocab_size, 16, np.random.default_rng(2)
    shape = replace(LARGE, vocab_size=vocabulary)
    small = replace(shape, num_hidden_layers=4, hidden_size=512, num_attention_heads=8, intermediate_size=1408)
    for name, each in (("engine", shape), ("draft", small)):
        checkpoint = write_checkpoint(tmp_path / f"{name}-checkpoint", each, QFormat.NONE)
        OpenVinoEngine().build(checkpoint, LIMITS, tmp_path / name, SilentProgress())
    tensors = {}
    for layer in range(shape.num_hidden_layers):
        for linear, (inputs, outputs) in linear_widths(shape).items():
            group = "mlp" if linear in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            module = f"{layer}.{group}.{linear}"
            tensors[f"{module}.lora_A"] = 0.01 * numbers.standard_normal((rank, inputs))
            tensors[f"{module}.lora_B"] = 0.01 * numbers.standard_normal((outputs, rank))
    adapter = write_adapter(tmp_path / "adapter", tensors, r=rank)
    engine, draft = (predicted(each, QFormat.NONE) for each in (shape, small))
    again = adapter_memory(sizes_of(shape, QFormat.NONE), AdapterFiles.read(adapter).described.wide_bytes)
    parts = [engine, in_same_process(draft), again]
    needs, mapped = sum(each.total for each in parts), sum(each.mapped for each in parts)
    gauges = served_gauges(
        *(tmp_path, "llama", engine, 4, (None, 1), {"num_draft_tokens": 4, "lora_tasks": (1,)}),
        draft_dir=tmp_path / "draft",
        adapters={1: adapter},
    )
    assert gauges["kv_cache_block_max"] == 2 * engine.kv_blocks  # the draft model's are not counted
    assert (1 - TOLERANCE) * needs - mapped <= gauges["memory_cpu"] <= (1 + TOLERANCE) * needs
