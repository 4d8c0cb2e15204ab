"""engine=tensorrt_llm for real: build, read back, generate, score and evaluate; what cannot be proven without a GPU."""

import json
import subprocess

import pytest
import torch
import transformers

from pipelines.domain.progress import SilentProgress
from pipelines.engines.port import SamplingParams
from pipelines.engines.registry import open_engine
from pipelines.engines.tensorrt_llm.folder import help_differences
from scripts.measure_engine import measure
from tests.support.small_models import write_random

WORDS = ["model=tiny_llama", "engine=tensorrt_llm", "build.max_batch_size=64"]


def only(cli, stage, label):
    (found,) = (cli.folder / "store" / stage).glob(f"{label}-*")
    return found


@pytest.fixture(scope="module")
def built(cli):
    cli.run("build", *WORDS, "quant=none")
    return next(path.parent for path in (cli.folder / "store" / "build").glob("tiny_llama-none-*/rank0.engine"))


def test_the_programs_help_is_our_option_table():
    done = subprocess.run(["trtllm-build", "--help"], capture_output=True, text=True, check=True)
    assert [str(fault) for fault in help_differences(done.stdout)] == []


def test_the_class_that_opens_engines_is_where_it_was():
    """`tensorrt_llm.LLM` is the class of the PyTorch backend; the one for engines is in a module with an underscore."""
    from tensorrt_llm._tensorrt_engine import LLM

    assert LLM is not __import__("tensorrt_llm").LLM


def test_the_log_tells_the_facts(built):
    facts = json.loads((built / "manifest.json").read_text())["facts"]
    assert {"weights_bytes", "activation_bytes", "peak_host_bytes", "rank_seconds", "build_seconds"} <= facts.keys()
    assert facts["weights_bytes"] > 2**20
    assert facts["sm"] > 0
    assert "emulated" not in json.loads((built / "config.json").read_text())


def test_the_timing_cache_is_reused(cli, built):
    """Another limit is another engine of the same layers."""
    cli.run("build", *WORDS, "quant=none", "build.max_num_tokens=4096")
    folders = (cli.folder / "store" / "build").glob("tiny_llama-none-*")
    facts = [json.loads((folder / "manifest.json").read_text())["facts"] for folder in folders]
    assert sorted(one["timing_cache_reused"] for one in facts if one.get("flavour") == "tensorrt_llm") == [False, True]


def test_the_cpu_engine_says_the_same(cli, built):
    """One checkpoint, two engines: greedy tokens and scores agree as far as 16 bits do."""
    pytest.importorskip("openvino", reason="the CPU engine comes with image.dev=true")
    cli.run("build", "model=tiny_llama", "engine=openvino", "quant=none")
    folders = (cli.folder / "store" / "build").glob("tiny_llama-none-*")
    cpu_dir = next(folder for folder in folders if (folder / "openvino_model.xml").is_file())
    prompts, limits = [[1, 30, 40, 50], [1, 60, 70]], SamplingParams(8)
    pairs = [([1, 30, 40], [50]), ([1, 30, 40], [51, 52]), ([1, 60], [70])]
    with open_engine("openvino").open(cpu_dir) as cpu, open_engine("tensorrt_llm").open(built) as gpu:
        theirs = gpu.generate(prompts, limits, SilentProgress())
        ours = cpu.generate(prompts, limits, SilentProgress())
        assert [one.token_ids[:2] for one in theirs] == [one.token_ids[:2] for one in ours]
        scores = gpu.loglikelihood(pairs, SilentProgress())
        expected = cpu.loglikelihood(pairs, SilentProgress())
    assert [score for score, _ in scores] == pytest.approx([score for score, _ in expected], abs=0.05)
    assert [greedy for _, greedy in scores] == [greedy for _, greedy in expected]


def test_longrope_and_partly_rotated_heads_are_the_cpu_engines(cli, tmp_path):
    """Phi-4-mini's positions, up to the context that it was first trained on."""
    pytest.importorskip("openvino", reason="the CPU engine comes with image.dev=true")
    model = write_random(tmp_path / "phi", "phi3_longrope")
    words = [f"model.path={model}", "quant=none", "build.max_seq_len=1024"]
    for engine in ("tensorrt_llm", "openvino"):
        cli.run("build", *words, f"engine={engine}")
    folders = list((cli.folder / "store" / "build").glob("phi-none-*"))
    (gpu_dir,) = (folder for folder in folders if (folder / "rank0.engine").is_file())
    (cpu_dir,) = (folder for folder in folders if (folder / "openvino_model.xml").is_file())
    pairs = [(list(range(2, 900)), [5]), ([2, 30, 40], [51, 52])]
    with open_engine("openvino").open(cpu_dir) as cpu, open_engine("tensorrt_llm").open(gpu_dir) as gpu:
        ours, theirs = (each.loglikelihood(pairs, SilentProgress()) for each in (cpu, gpu))
    assert [score for score, _ in theirs] == pytest.approx([score for score, _ in ours], abs=0.05)


def test_gemma_2_is_transformers(cli, tmp_path):
    """Soft caps, the scale of queries, and windows of 32 tokens, which the session tells the engine."""
    model = write_random(tmp_path / "gemma2", "gemma2")
    windows = "triton.max_attention_window_size=[32,256]"
    cli.run("build", f"model.path={model}", "quant=none", "build.max_seq_len=256", windows, "engine=tensorrt_llm")
    (folder,) = (path.parent for path in (cli.folder / "store" / "build").glob("gemma2-none-*/rank0.engine"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    pairs = [(list(range(2, 202)), [5]), ([2, 30, 40], [51])]
    with torch.no_grad():
        logits = [theirs(torch.tensor([context])).logits[0, -1].log_softmax(-1) for context, _ in pairs]
    expected = [float(each[token]) for each, (_, (token,)) in zip(logits, pairs, strict=True)]
    with open_engine("tensorrt_llm").open(folder) as session:
        scores = session.loglikelihood(pairs, SilentProgress())
    assert [score for score, _ in scores] == pytest.approx(expected, abs=0.05)


def test_the_engine_is_measured_without_a_server(built):
    assert all(each > 0 for each in measure(built, requests=16, isl=64, osl=32, rounds=2))


@pytest.mark.parametrize("quant", ["int8_wo", "int4_wo", "fp8", "int4_awq", "int8_sq"])
def test_every_format_is_built_and_evaluated(cli, quant):
    """Formats the GPU lacks are refused in words."""
    done = subprocess.run(
        cli.command("evaluate", *WORDS, f"quant={quant}"), cwd=cli.folder, capture_output=True, text=True, timeout=1800
    )
    if done.returncode == 2:
        assert quant in done.stderr
        pytest.skip(done.stderr.strip().splitlines()[0])
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((only(cli, "evaluate", f"tiny_llama-{quant}") / "manifest.json").read_text())["facts"]
    assert result["accuracy"] > 0.5  # of four choices; chance is 0.25
