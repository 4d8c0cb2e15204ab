"""`build`, `evaluate`, `plan`, `verify`, `sweep` on the bundled models, with real parts only."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from pipelines.settings.model import BUNDLED

MODEL = BUNDLED / "models" / "tiny_llama"


def artifact(cli, stage, label):
    """The one artifact of a stage and label."""
    (found,) = (cli.store / stage).glob(f"{label}-*")
    return found


def test_build_fp8(cli):
    """The README's first command: real quantization, real engine, its facts on the screen."""
    text = cli.run("build", "quant=fp8")
    assert text.startswith("engine: openvino (engine=auto: no NVIDIA GPU here")
    assert re.search(r"quantize +made .* -> ", text)
    assert re.search(r"build +made ", text)
    config = json.loads((artifact(cli, "build", "tiny_gemma-fp8") / "config.json").read_text())
    assert config["pretrained_config"]["quantization"]["quant_algo"] == "FP8"
    assert config["build_config"]["max_seq_len"] == 2048


def test_a_second_build_does_nothing(cli):
    before = sorted((path, path.stat().st_mtime_ns) for path in cli.store.rglob("*") if path.is_file())
    text = cli.run("build", "quant=fp8")
    assert "Nothing to do: every stage is cached." in text
    after = sorted((path, path.stat().st_mtime_ns) for path in cli.store.rglob("*") if path.is_file())
    assert [item for item in after if not item[0].name.startswith(".hashes")] == [
        item for item in before if not item[0].name.startswith(".hashes")
    ]


def test_the_cached_run_imports_nothing_heavy(cli):
    code = (
        "import sys; from pipelines.cli.main import main; "
        f"code = main(['build', 'quant=fp8', 'paths.store={cli.store}']); "
        "print(sorted({'torch', 'transformers', 'modelopt', 'openvino', 'numpy'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=cli.folder, env=cli.env(), capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_each_run_leaves_log_configuration_and_plan(cli):
    runs = sorted((cli.folder / "runs").iterdir())
    assert {"run.log", "config.yaml", "plan.json", "overrides.json"} <= {path.name for path in runs[0].iterdir()}
    assert "quantize: tiny_gemma-fp8" in (runs[0] / "run.log").read_text()


def test_verify_reads_the_checkpoint_back(cli):
    text = cli.run("verify", "quant=fp8")
    assert "verified: no faults found" in text
    assert "GemmaForCausalLM" in text


def test_a_changed_limit_rebuilds_the_engine_only(cli):
    text = cli.run("plan", "quant=fp8", "build.max_batch_size=64")
    assert re.search(r"cached +quantize +tiny_gemma-fp8", text)
    assert "why: max_batch_size 2048 -> 64" in text


EVALUATED = "quant=fp8", "eval.limit=5"


def test_evaluate_beside_the_baseline(cli):
    text = cli.run("evaluate", *EVALUATED)
    assert "asks 60 questions, which are too few for GO" in " ".join(text.split())
    assert "239 more questions would decide (eval.limit=25)" in " ".join(text.split())
    run = max((cli.folder / "runs").glob("*-evaluate-*"))
    (row,) = json.loads((run / "accuracy.json").read_text())
    assert (row["model"], row["format"], row["engine"], row["num_fewshot"]) == ("tiny_gemma", "fp8", "openvino", 5)
    assert row["baseline_accuracy"] > 0.7


@pytest.mark.thorough
def test_asking_until_the_verdict_is_known(cli):
    """Fidelity comes along; the verdict is the last word, and says how many questions of how many were asked."""
    words = ("quant=fp8", "eval=quick", "eval.max_questions=60", "eval.margin_points=20", "fidelity.tokens=500")
    words = (*words, "fidelity.window=128", "fidelity.prompts=2", "fidelity.new_tokens=8")
    text = " ".join(cli.run("evaluate", *words).split())
    assert "30 of 60 questions asked, 0 lost, 0 gained" in text
    assert text.index("KL shows that predictions changed") < text.index("GO: tiny_gemma fp8 loses at most")
    assert "Asked in random order until the verdict was known: fp8 30 of 60, looked at after 30." in text
    folder = next(path.parent for path in (cli.store / "evaluate").glob("tiny_gemma-fp8-*/baseline.json"))
    both = [json.loads((folder / name).read_text()) for name in ("baseline.json", "evaluation.json")]
    asked = [[(record["subject"], record["index"]) for record in each["records"]] for each in both]
    assert asked[0] == asked[1]
    assert len(asked[0]) == 30
    assert both[1]["sequential"]["available"] == 1104
    assert "Nothing to do" in cli.run("evaluate", *words)


@pytest.mark.thorough
def test_fidelity_of_the_same_engines(cli):
    """Both engines are in the store, and so are both evaluations, whose answers show as flips."""
    cli.run("evaluate", *EVALUATED)
    words = ("fidelity.tokens=1000", "fidelity.window=128", "fidelity.prompts=2", "fidelity.new_tokens=8")
    text = cli.run("fidelity", "quant=fp8", *words, "fidelity.by_layer=true")
    assert re.search(r"cached", text)
    newest = max((cli.store / "fidelity").glob("tiny_gemma-fp8-*"), key=lambda folder: folder.stat().st_mtime_ns)
    result = json.loads((newest / "fidelity.json").read_text())
    assert result["vocabulary"] == 1920
    assert result["overall"]["tokens"] == 8 * 127
    assert 0 < result["noise"]["kl_mean"] < result["overall"]["kl_mean"] < 0.1
    assert result["overall"]["top1_agreement"] > 0.9
    assert len(result["layers"]["blocks"]) == 4
    assert 0 < result["layers"]["weights"]["mlp.up_proj"][0] < 0.05  # E4M3 has steps of at most 1/8
    assert re.search(r"Flips: \d+ answers? of 60 changed", " ".join(text.split()))
    assert re.search(r"bundled +1,016 +\S+", text)


@pytest.mark.thorough
def test_evaluate_against_the_model_itself(cli):
    """The 16-bit engine of Gemma rounds its norms; the comparison with Transformers says how much that is."""
    text = " ".join(cli.run("evaluate", "quant=none", "eval.limit=5", "eval.baseline=hugging_face").split())
    assert "Baseline: the model itself, computed by Transformers in float32." in text
    run = max((cli.folder / "runs").glob("*-evaluate-*"))
    (row,) = json.loads((run / "accuracy.json").read_text())
    assert (row["baseline_format"], row["baseline_engine"]) == ("hugging_face", "transformers")
    assert 0 < row["logprob_shift_mean"] < row["logprob_shift_max"] < 1
    assert f"{row['logprob_shift_max']:.3g} at most" in text
    again = cli.run("evaluate", "quant=none", "eval.limit=5")  # without it, the engine is the baseline itself
    assert "16-bit engine is the baseline" in again
    assert "UNDECIDED" not in again.split("Loss % is in percent")[0]


@pytest.mark.thorough
def test_sweep_names_a_failed_cell_and_finishes_the_others(cli):
    """nvfp4 is not for Gemma; the other two cells still get their row."""
    text = cli.run("sweep", "quant=fp8,nvfp4,int8_wo", "eval.limit=5", code=1)
    assert re.search(r"failed cells:\n.*quant=nvfp4.*nvfp4 is not supported", text)
    (folder,) = (cli.folder / "runs" / "sweeps").iterdir()
    assert [row["format"] for row in json.loads((folder / "accuracy.json").read_text())] == ["fp8", "int8_wo"]


@pytest.fixture
def copy_of_llama(tmp_path):
    return shutil.copytree(MODEL, tmp_path / "my_llama")


def test_a_truncated_file_is_named(cli, copy_of_llama):
    path = copy_of_llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    text = cli.run("build", f"model.path={copy_of_llama}", code=2)
    assert "model.safetensors" in text
    assert "Traceback" not in text
    assert list((cli.store / ".drafts").iterdir()) == []


def test_a_changed_artifact_is_set_aside_and_made_again(cli):
    """A checkpoint that somebody edited is not used, and the bytes made again are the same."""
    cli.run("build", "quant=int8_wo")
    folder = artifact(cli, "quantize", "tiny_gemma-int8_wo")
    path = folder / "config.json"
    whole, stat = path.read_text(), path.stat()
    path.write_text(whole.replace("W8A16", "W4A16"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    text = re.sub(r"\s+", " ", cli.run("build", "quant=int8_wo"))
    assert f"{folder.name} was changed after it was made: config.json has SHA-256" in text
    assert re.search(r"quantize made .* build cached", text)
    assert path.read_text() == whole
    assert "W4A16" in (cli.store / ".set_aside" / "quantize" / folder.name / "config.json").read_text()


@pytest.mark.parametrize("stage", ["quantize", "build"])
def test_a_run_killed_in_any_stage_is_finished_by_the_next(cli, copy_of_llama, stage):
    words = ["build", f"model.path={copy_of_llama}", "quant=int4_wo"]
    process = cli.start(*words)
    for line in process.stdout:
        if line.startswith(f"{stage}: my_llama"):
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert re.search(rf"{stage} +(made|cached)", cli.run(*words))
    assert list((cli.store / ".drafts").iterdir()) == []
    shutil.rmtree(artifact(cli, "build", "my_llama-int4_wo"))  # the next case builds again, the next test makes both
    if stage == "build":
        shutil.rmtree(artifact(cli, "quantize", "my_llama-int4_wo"))


INTERRUPTED = """
import sys
from pipelines.cli.main import program

class Once:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy.polynomial":
            sys.meta_path.remove(self)
            raise KeyboardInterrupt

sys.meta_path.insert(0, Once())
program()
"""


def test_an_interrupt_while_torch_loads_is_not_lost(cli, tmp_path):
    """Torch imports numpy in its own C code, which drops what is raised there."""
    words = ["build", "model=tiny_llama", "quant=int4_rtn", f"paths.store={tmp_path}/store", f"paths.runs={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, *words], cwd=cli.folder, env=cli.env(), capture_output=True, text=True
    )
    assert done.returncode == 130, done.stderr
    assert not (tmp_path / "store" / "quantize").exists()


def test_ctrl_c_keeps_what_is_finished(cli, copy_of_llama):
    process = cli.start("build", f"model.path={copy_of_llama}", "quant=int4_wo")
    for line in process.stdout:
        if line.startswith("quantize: made"):
            break
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=120)[0]
    assert process.returncode == 130, rest
    assert "Finished stages are kept" in rest
    assert "Traceback" not in rest
    assert re.search(r"quantize +cached", cli.run("build", f"model.path={copy_of_llama}", "quant=int4_wo"))


def fill_the_disk(cli, tmp_path, stage, size):
    """Build on a file system of a size, on which a stage fails."""
    small = tmp_path / "small"
    small.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", small]
    mount = subprocess.run(command, capture_output=True, check=False)
    if mount.returncode != 0:
        pytest.skip("mounting a small file system needs root")
    try:
        # few texts, so that hidden states take less than an engine
        text = cli.run("build", "quant=fp8", "calibration.size=8", f"paths.store={small}/store", code=2)
        assert re.search(rf"Stage {stage} stopped: the disk of \S+ is full", re.sub(r"\s+", " ", text))
        assert list((small / "store" / ".drafts").iterdir()) == []
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_full_disk_is_said_and_leaves_nothing(cli, tmp_path):
    """The store lies on a small file system, which the checkpoint does not fit."""
    fill_the_disk(cli, tmp_path, "quantize", "1m")


@pytest.mark.thorough
def test_a_disk_that_is_full_beside_the_checkpoint_is_said_too(cli, tmp_path):
    fill_the_disk(cli, tmp_path, "build", "6m")


def test_two_runs_at_once_share_the_work(cli, copy_of_llama):
    words = ["build", f"model.path={copy_of_llama}", "quant=int8_wo"]
    processes = [cli.start(*words) for _ in range(2)]
    texts = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], texts
    states = [re.search(r"quantize +(made|cached)", text)[1] for text in texts]
    assert sorted(states) == ["cached", "made"]


def test_the_llm_api_gets_a_checkpoint_and_its_arguments(cli):
    """What TensorRT-LLM 1.3 runs is made without it: quantized, read back, configured, and carried by a repository."""
    import yaml

    words = ["engine=tensorrt_llm_llmapi", "model=tiny_llama", "quant=fp8", "kv_cache=fp8", "calibration.size=8"]
    words += ["build.tp_size=2", "triton.kv_cache_free_gpu_mem_fraction=0.8"]
    assert cli.run("build", *words).startswith("engine: llmapi (asked for)")
    folder = artifact(cli, "build", "tiny_llama-fp8-kv_fp8")
    config = json.loads((folder / "checkpoint" / "hf_quant_config.json").read_text())["quantization"]
    assert (config["quant_algo"], config["kv_cache_quant_algo"]) == ("FP8", "FP8")
    arguments = yaml.safe_load((folder / "extra_llm_api_options.yaml").read_text())
    assert arguments["tensor_parallel_size"] == 2
    assert arguments["kv_cache_config"]["free_gpu_memory_fraction"] == 0.8
    assert (folder / "checkpoint" / "tokenizer.json").is_file()
    assert re.search(r"quantize +cached", cli.run("repository", *words))
    repository = artifact(cli, "repository", "tiny_llama-fp8-kv_fp8")
    content = yaml.safe_load((repository / "tensorrt_llm" / "1" / "model.yaml").read_text())
    assert content["model"] == "tensorrt_llm/1/checkpoint"
    assert (repository / content["model"] / "model.safetensors").is_file()


def test_the_llm_api_refuses_gemma(cli):
    text = cli.run("build", "engine=tensorrt_llm_llmapi", "model=tiny_gemma", "quant=fp8", code=2)
    assert "cannot serve GemmaForCausalLM" in text
