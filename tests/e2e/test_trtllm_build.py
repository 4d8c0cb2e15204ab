"""engine=tensorrt_llm from the model to the repository: a real checkpoint, an emulated machine and trtllm-build."""

import json
import re
import signal
import subprocess

import pytest

from tests.e2e.conftest import Cli
from tests.support.emulated_trtllm import A100, H100, environment
from triton_repo.check import check_repository

WORDS = ["model=tiny_llama", "quant=int8_wo", "build.tp_size=2", "build.workers=2", "build.max_batch_size=8"]


def flat(text):
    return re.sub(r"\s+", " ", text)


def only(cli, stage):
    (found,) = (cli.store / stage).glob("*")
    return found


@pytest.fixture(scope="module")
def cli(tmp_path_factory):
    """A user on a machine with two H100."""
    folder = tmp_path_factory.mktemp("user")
    return Cli(folder, folder / "artifacts", environment(folder))


@pytest.fixture(scope="module")
def made(cli):
    """What the first run printed."""
    return cli.run("repository", *WORDS)


def test_auto_takes_the_gpu_and_says_so(made):
    first = "engine: tensorrt_llm (engine=auto: NVIDIA H100 80GB HBM3 and tensorrt_llm are available)"
    assert " ".join(made.split()).startswith(first)


def test_progress_is_condensed_from_the_log(made):
    assert "TensorRT-LLM 1.2.1" in made
    assert len(re.findall(r"  built in .*: weights .*, activations ", made)) == 2
    assert "[TRT-LLM]" not in made


def test_the_engine_has_every_rank_and_its_facts(cli, made):
    engine = only(cli, "build")
    assert {path.name for path in engine.iterdir()} == {
        *("config.json", "rank0.engine", "rank1.engine", "built_on.json", "trtllm-build.log", "manifest.json")
    }
    config = json.loads((engine / "config.json").read_text())
    assert config["emulated"] is True
    assert config["build_config"]["max_batch_size"] == 8
    assert config["pretrained_config"]["quantization"]["quant_algo"] == "W8A16"
    facts = json.loads((engine / "manifest.json").read_text())["facts"]
    assert (facts["gpu"], facts["sm"]) == ("NVIDIA H100 80GB HBM3", 9.0)
    assert (facts["tensorrt_llm_version"], facts["tensorrt_version"]) == ("1.2.1", "10.14.1.48")
    assert facts["options"]["max_batch_size"] == "8"
    assert len(facts["rank_seconds"]) == 2
    assert {"weights_bytes", "activation_bytes", "peak_host_bytes", "peak_gpu_bytes", "build_seconds"} <= facts.keys()
    assert facts["timing_cache_reused"] is False


def test_the_repository_is_for_two_ranks_in_leader_mode(cli, made):
    folder = only(cli, "repository")
    assert check_repository(folder, running_version=lambda _name: "1.2.1") == []
    description = json.loads((folder / "repository.json").read_text())
    assert (description["flavour"], description["world_size"]) == ("tensorrt_llm", 2)
    assert description["start"]["commands"]["leader"].startswith("mpirun --allow-run-as-root -n 1 tritonserver")
    assert (folder / "tensorrt_llm" / "1" / "engine" / "rank1.engine").exists() or any(folder.rglob("rank1.engine"))
    assert not list(folder.rglob("trtllm-build.log"))


def test_a_second_run_does_nothing(cli, made):
    assert "Nothing to do: every stage is cached." in cli.run("repository", *WORDS)


def test_plan_shows_the_command_that_will_run(cli, made):
    text = cli.run("plan", *WORDS, "build.gemm_plugin=float16", "serving.http_port=8000")
    block = text[text.index("  build\n") :]
    assert "    trtllm-build \\\n" in block
    assert f"      --checkpoint_dir artifacts/quantize/{only(cli, 'quantize').name} \\\n" in block
    assert "      --gemm_plugin float16" in block
    assert "      --workers 2" in block
    assert "--input_timing_cache artifacts/.timing_caches/NVIDIA_H100_80GB_HBM3-sm9" in block
    assert "not run here" not in text
    assert max(map(len, text.splitlines())) <= 80 or "artifacts/" in max(text.splitlines(), key=len)


def test_the_timing_cache_of_this_gpu_and_version_is_reused(cli, made):
    (cache,) = (cli.store / ".timing_caches").iterdir()
    assert cache.name == "NVIDIA_H100_80GB_HBM3-sm9-tensorrt_llm1.2.1-tensorrt10.14.1.48.cache"
    before = int(cache.read_text().split()[-1])
    cli.run("build", *WORDS, "build.gemm_plugin=float16")
    assert int(cache.read_text().split()[-1]) > before
    facts = [json.loads((path / "manifest.json").read_text())["facts"] for path in (cli.store / "build").iterdir()]
    assert sorted(one["timing_cache_reused"] for one in facts) == [False, True]
    assert not list((cli.store / ".timing_caches").glob(".*"))


def on(cli, **changes):
    """The same user and store on another machine."""
    return Cli(cli.folder, cli.store, environment(cli.folder, **changes))


def test_another_gpu_gets_an_engine_of_its_own(cli, made):
    text = on(cli, gpus=(A100, A100)).run("plan", *WORDS)
    assert re.search(r"run +build", text)
    assert "sm 9.0 -> 8.0" in text


def test_other_versions_get_an_engine_of_their_own(cli, made):
    text = on(cli, tensorrt_llm="1.2.0").run("plan", *WORDS)
    assert "library tensorrt-llm 1.2.1 -> 1.2.0" in text


def test_an_engine_of_another_gpu_is_not_opened(cli, made, monkeypatch):
    """With the command that builds one here."""
    from pipelines.domain.errors import UserError
    from pipelines.engines.registry import open_engine

    for name, value in environment(cli.folder, gpus=(A100,)).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        UserError, match=r"built on NVIDIA H100.*\(compute capability 9\).*A100.*\(8\).*Build it here: "
    ):
        open_engine("tensorrt_llm").open(min((cli.store / "build").iterdir()))


def test_a_repository_with_an_engine_of_another_gpu_is_not_served(cli, made):
    folder = only(cli, "repository")
    text = on(cli, gpus=(A100, A100)).run("serve", "model=tiny_llama", f"serving.repository={folder}", code=2)
    assert re.search(r"was built on NVIDIA H100 .*this machine has NVIDIA A100", flat(text))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("memory", r"trtllm-build failed \(exit code 1\): .*OutOfMemory.*Lower build\.max_num_tokens"),
        pytest.param("silent", r"trtllm-build failed \(exit code 1\): ", marks=pytest.mark.thorough),
        ("disk", r"Stage build stopped: the disk of .* is full"),
    ],
)
def test_a_failing_build_says_why_and_keeps_its_log(cli, made, fault, message):
    broken = Cli(cli.folder, cli.store, {**cli.environment, "EMULATED_FAULT": fault})
    before = len(list((cli.store / "build").iterdir()))
    text = broken.run("build", *WORDS, "build.max_batch_size=4", code=2)
    assert re.search(message, flat(text))
    assert "Traceback" not in text
    assert len(list((cli.store / "build").iterdir())) == before
    assert list((cli.store / ".drafts").iterdir()) == []
    if fault != "disk":
        log = re.search(r"Its log: (\S+\.log)", flat(text)).group(1)
        assert "TensorRT-LLM version: 1.2.1" in open(log).read()  # noqa: PTH123, SIM115


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough), signal.SIGKILL]
)
def test_a_stopped_build_leaves_nothing_running(cli, made, number):
    slow = Cli(cli.folder, cli.store, {**cli.environment, "EMULATED_SECONDS": "61.25"})
    process = slow.start("build", *WORDS, "build.max_batch_size=2")
    for line in process.stdout:
        if "trtllm-build: 20 %" in line:
            break
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == {signal.SIGKILL: -9}.get(number, 130)
    if number == signal.SIGKILL:  # the supervisor looks five times a second
        import time

        time.sleep(1)
    else:
        assert list((cli.store / ".drafts").iterdir()) == []
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "sleep 61.25" not in running
    assert str(cli.store) not in "\n".join(line for line in running.splitlines() if "trtllm_build" in line)


def test_without_a_gpu_the_build_is_refused_with_the_way(cli):
    here = Cli(cli.folder, cli.store)
    text = flat(here.run("build", *WORDS, "engine=tensorrt_llm", code=2))
    assert "engine=tensorrt_llm cannot run here: there is no NVIDIA GPU" in text
    assert "trtllm-build is not on PATH; the Python package tensorrt_llm is not installed" in text
    assert re.search(r"make -C \S+ shell.*engine=openvino.*engine\.path=", text)


def test_without_a_gpu_plan_describes_it(cli):
    here = Cli(cli.folder, cli.store)
    text = here.run("plan", "engine=tensorrt_llm", "model=gemma_2b", "quant=fp8", "hardware=h100_sxm")
    assert "Commands (not run here: there is no NVIDIA GPU" in text
    assert "    trtllm-build \\\n      --checkpoint_dir gemma_2b-fp8-kv_fp8-checkpoint \\\n" in text
    assert "      --max_seq_len 4096 \\\n" in text
    assert "tritonserver --model-repository=." in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_gpu_that_lacks_the_format_is_refused_before_anything_runs(cli):
    text = on(cli, gpus=(A100,)).run("build", "model=tiny_llama", "quant=fp8", code=2)
    assert "fp8" in text


def test_fewer_gpus_than_ranks_are_named(cli, made):
    text = on(cli, gpus=(H100,)).run("evaluate", *WORDS, code=2)
    assert "need 2 GPUs in one server, which has 1" in flat(text)


def test_a_draft_model_is_built_and_laid_out_beside_its_target(cli, made):
    """The builder gives the target room for the guess (max_seq_len + max_draft_len); the draft needs none."""
    draft = ["speculative=draft_target", "model@speculative.draft=tiny_llama"]
    cli.run("repository", *WORDS, *draft)
    (folder,) = {
        path.parents[3] for path in (cli.store / "repository").rglob("tensorrt_llm_draft/1/engine/config.json")
    }
    sizes = [
        json.loads((folder / model / "1" / "engine" / "config.json").read_text())["build_config"]["max_seq_len"]
        for model in ("tensorrt_llm", "tensorrt_llm_draft")
    ]
    assert sizes == [2048 + 4, 2048]
    assert check_repository(folder) == []
