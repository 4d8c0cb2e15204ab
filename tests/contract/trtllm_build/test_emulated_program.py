"""The emulation refuses what trtllm-build refuses, with its words, and takes every command this project makes."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import asdict

import pytest

from pipelines.checkpoint.config_json import CheckpointConfig
from pipelines.engines.port import BuildLimits
from pipelines.engines.tensorrt_llm.config import DECIDED, OPTIONS, BuildSettings
from pipelines.engines.tensorrt_llm.folder import BuildPaths, command, identity, read_back
from tests.support.build_options import of_options
from tests.support.emulated_trtllm import A100, B200
from tests.support.emulated_trtllm.plan import planned, read_checkpoint
from tests.support.emulated_trtllm.trtllm_build import parser
from tests.support.tiny_checkpoint import write_checkpoint

LIMITS = BuildLimits(8, 64, 128, 256)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), tp_size=2)


def words(build, checkpoint, out):
    parts = command(build, LIMITS, BuildPaths(str(checkpoint), str(out), None, str(out / "model.cache")))
    return [word for part in parts[1:] for word in part]


def other_value(option):
    """A value that is not the default."""
    if option.choices:
        other = next(choice for choice in option.choices if choice != option.default)
        return {"log_level": "debug", "lora_target_modules": [other]}.get(option.key, other)
    return True if option.type == "flag" else (option.default or 0) + 32


ALONE = [option for option in OPTIONS.values() if option.key not in DECIDED]
REFUSED = {
    "streamingllm": "StreamingLLM is no longer supported",
    "pp_reduce_scatter": "PP reduce scatter is only supported in the mixtral model",
}


def test_every_option_reaches_the_program(checkpoint, tmp_path, subtests):
    for option in ALONE:
        with subtests.test(option.key):
            value = other_value(option)
            args = parser().parse_args(words(of_options(**{option.key: value}), checkpoint, tmp_path))
            limits = asdict(LIMITS)
            assert getattr(args, option.key) == limits.get(
                option.key, value.upper() if option.key == "kv_cache_type" else value
            )
            with pytest.raises(AssertionError, match=REFUSED[option.key]) if option.key in REFUSED else nullcontext():
                planned(args, read_checkpoint(checkpoint), sm=9.0)


def test_defaults_are_left_out_and_limits_are_said(checkpoint, tmp_path):
    given = words(BuildSettings(), checkpoint, tmp_path)
    assert [word for word in given if word.startswith("--")] == [
        *("--checkpoint_dir", "--output_dir", "--output_timing_cache"),
        *("--max_batch_size", "--max_input_len", "--max_seq_len", "--max_beam_width", "--max_num_tokens"),
    ]


def test_flags_and_lists_are_written_as_argparse_takes_them(checkpoint, tmp_path):
    build = of_options(weight_sparsity=True, lora_plugin="auto", lora_target_modules=("attn_q", "attn_v"))
    parts = command(build, LIMITS, BuildPaths("c", "o", "in", "out"))
    assert ("--weight_sparsity",) in parts
    assert ("--lora_target_modules", "attn_q", "attn_v") in parts
    assert ("--input_timing_cache", "in") in parts


def test_the_key_holds_what_decides_the_engine_and_no_more():
    same = of_options(workers=4, log_level="debug", monitor_memory=True)
    assert identity(same) == identity(BuildSettings())
    assert identity(BuildSettings(gemm_plugin="auto")) == identity(BuildSettings()) | {"gemm_plugin": "auto"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--max_batch_size", "many"], "argument --max_batch_size: invalid int value: 'many'"),
        (["--gemm_plugin", "yes"], "argument --gemm_plugin: invalid choice: 'yes'"),
        (["--kv_cache_type", "ring"], "argument --kv_cache_type: Invalid value 'ring'"),
        (["--use_embedding_sharing"], "unrecognized arguments: --use_embedding_sharing"),
        (["--gather_context_logits", "--max_draft_len", "4"], "Gather context logits is not support with"),
        (["--multiple_profiles", "enable", "--opt_num_tokens", "8"], "multiple_profiles is enabled, while"),
    ],
)  # fmt: skip
def test_wrong_words_are_refused(trtllm_build, checkpoint, tmp_path, given, message):
    done = trtllm_build(*words(BuildSettings(), checkpoint, tmp_path), *given)
    assert done.returncode != 0
    assert message in done.stdout


def test_aliases_are_taken(trtllm_build, checkpoint, tmp_path):
    done = trtllm_build(
        "--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path), "--max_decoder_seq_len", "96"
    )
    assert done.returncode == 0
    assert json.loads((tmp_path / "config.json").read_text())["build_config"]["max_seq_len"] == 96


def test_without_a_gpu_nothing_is_built(trtllm_build, checkpoint, tmp_path):
    done = trtllm_build(*words(BuildSettings(), checkpoint, tmp_path), gpus=())
    assert "max_workers must be greater than 0" in done.stdout


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"quantization": {"quant_algo": None, "zero_point": True}}, "unexpected keyword argument 'zero_point'"),
        ({"architecture": "GPTForCausalLM"}, "Unsupported model architecture: GPTForCausalLM"),
        ({"mapping": {"world_size": 4, "tp_size": 4, "pp_size": 1}}, "rank2.safetensors is missing"),
    ],
)
def test_a_checkpoint_it_cannot_take_is_refused(trtllm_build, checkpoint, tmp_path, changed, message):
    folder = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    config = json.loads((folder / "config.json").read_text()) | changed
    (folder / "config.json").write_text(json.dumps(config))
    done = trtllm_build(*words(BuildSettings(), folder, tmp_path / "out"))
    assert done.returncode != 0
    assert message in done.stdout


@pytest.mark.parametrize(
    ("build", "message"),
    [
        ({"gemm_swiglu_plugin": "fp8"}, "gemm_swiglu_plugin=fp8 is not supported on SM 100"),
        ({"low_latency_gemm_plugin": "fp8"}, "low_latency_gemm_plugin=fp8 is not supported on SM 100"),
    ],
)
def test_blackwell_refuses_plugins(trtllm_build, checkpoint, tmp_path, build, message):
    given = words(of_options(**build), checkpoint, tmp_path)
    assert message in trtllm_build(*given, gpus=(B200,)).stdout
    assert trtllm_build(*given, gpus=(A100,)).returncode == 0


def test_blackwell_refuses_int8_weights(trtllm_build, tmp_path):
    folder = write_checkpoint(tmp_path / "checkpoint", quant_algo="W8A16")
    given = words(BuildSettings(), folder, tmp_path / "out")
    assert "INT8/INT4 quantization is not supported on SM>=100" in trtllm_build(*given, gpus=(B200,)).stdout


@pytest.mark.parametrize(
    ("build", "limits"),
    [
        ({}, LIMITS),
        ({}, BuildLimits(2, 64, 64, 8192)),  # max_num_tokens is cut to 2 * 64
        ({}, BuildLimits(8, 200, 128, 256)),  # max_input_len is cut to max_seq_len
        ({"speculative_decoding_mode": "draft_tokens_external", "max_draft_len": 5}, LIMITS),
    ],
)
def test_what_the_builder_adjusts_is_no_difference(trtllm_build, checkpoint, tmp_path, build, limits):
    settings = of_options(**build)
    parts = command(settings, limits, BuildPaths(str(checkpoint), str(tmp_path), None, str(tmp_path / "model.cache")))
    assert trtllm_build(*(word for part in parts[1:] for word in part)).returncode == 0
    assert read_back(tmp_path, settings, limits, CheckpointConfig.load(checkpoint)) == []


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "rank1.engine").unlink(), r"wrote no rank1\.engine; the checkpoint has 2 ranks"),
        (lambda f: (f / "rank0.engine").write_bytes(b""), r"wrote no rank0\.engine"),
        (lambda f: (f / "config.json").unlink(), r"wrote no engine configuration"),
        (lambda f: edit(f, "build_config", "max_batch_size", 4), r"max_batch_size=4; max_batch_size=8 was requested"),
        (lambda f: edit(f, "pretrained_config", "architecture", "X"), r"architecture=X, the checkpoint .*LlamaFor"),
    ],
)
def test_an_engine_that_is_not_what_was_asked_for_is_named(trtllm_build, checkpoint, tmp_path, spoil, message):
    import re

    assert trtllm_build(*words(BuildSettings(), checkpoint, tmp_path)).returncode == 0
    spoil(tmp_path)
    (fault, *_) = read_back(tmp_path, BuildSettings(), LIMITS, CheckpointConfig.load(checkpoint))
    assert re.search(message, str(fault))


def edit(folder, block, key, value):
    """Change one value of the engine's config.json."""
    raw = json.loads((folder / "config.json").read_text())
    raw[block][key] = value
    (folder / "config.json").write_text(json.dumps(raw))


def test_nothing_outside_tests_can_reach_it():
    """The program is not on any PATH of its own, and nothing of the project names it."""
    from pathlib import Path

    from tests.conftest import ROOT

    assert shutil.which("trtllm-build") is None or "emulated" not in str(shutil.which("trtllm-build"))
    sources = [*(ROOT / "pipelines").rglob("*.py"), *(ROOT / "triton_repo").rglob("*.py"), ROOT / "Makefile"]
    assert not [path for path in map(Path, sources) if "emulated_trtllm" in path.read_text()]
