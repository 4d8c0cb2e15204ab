"""The commands of a plan can be pasted: names known beforehand, and no line that a shell would cut off."""

import re
import shlex
import shutil
import subprocess

import pytest

from pipelines.cli.main import main
from pipelines.domain.errors import UserError
from pipelines.host.screen import command_lines
from pipelines.run.console import plan_text
from pipelines.run.gpu_commands import gpu_commands
from pipelines.settings.by_hydra import parse_override
from pipelines.settings.model import BUNDLED
from tests.unit.core.test_plan import model, plan  # noqa: F401

GEMMA = ["engine=tensorrt_llm", "model=gemma_2b", "quant=fp8", "hardware=h100_sxm"]
LLAMA = ["engine=tensorrt_llm", "model=llama_3_1_8b", "quant=fp8", "hardware=h100_sxm"]
LLM_API = ["engine=tensorrt_llm_llmapi", "model=llama_3_1_8b", "quant=fp8", "hardware=h100_sxm"]
DRAFT = ["speculative=draft_target", "model@speculative.draft=llama_3_2_1b"]
PLANS = {
    "one GPU": (GEMMA, "all"),
    "no format": ([*GEMMA[:2], "quant=none", "hardware=h100_sxm"], "serve"),
    "two ranks": ([*LLAMA, "build.tp_size=2"], "serve"),
    "a draft model": ([*LLAMA, *DRAFT], "serve"),
    "two nodes": (
        ["engine=tensorrt_llm", "model=llama_3_1_70b", "quant=fp8", "hardware=h100_sxm", "parallel=tp8_pp2"],
        "serve",
    ),
    "the LLM API": (LLM_API, "benchmark"),
    "the LLM API with a draft model": ([*LLM_API, *DRAFT], "benchmark"),
    "a word with blanks": ([*GEMMA, "paths.store=/my artifacts"], "repository"),
}


def blocks(lines: list[str]) -> dict[str, str]:
    """Title of each block -> what stands below it, as it would be copied."""
    found: dict[str, str] = {}
    title = ""
    for line in lines:
        if line.startswith("    "):
            found[title] = found.get(title, "") + line + "\n"
        elif line.startswith("  "):
            title = line.strip()
    return found


def commands(tmp_path, words: list[str], target: str) -> dict[str, str]:
    return blocks(gpu_commands(plan(tmp_path, words, target), words))


@pytest.mark.parametrize(("words", "target"), PLANS.values(), ids=PLANS)
def test_every_block_is_shell_as_it_stands(tmp_path, words, target):
    """No pattern but of NVIDIA's own files, and no line broken without a backslash: each begins with a program."""
    programs = {"make", "trtllm-build", "(cd", "docker", "python3"}
    found = commands(tmp_path, words, target)
    assert found
    for text in found.values():
        done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
        assert (done.returncode, done.stderr) == (0, "")
        whole = re.sub(r" \\\n +", " ", text)
        assert [word for word in shlex.split(whole) if "*" in word and not word.startswith("/app/")] == []
        assert {line.split()[0] for line in whole.splitlines()} <= programs
        assert max(map(len, text.splitlines())) < 100


def test_the_folder_of_one_command_is_that_of_the_next(tmp_path):
    found = commands(tmp_path, GEMMA, "all")
    assert list(found)[:4] == ["container, in which the rest is typed", "quantize", "build", "repository"]
    assert list(found)[-1] == "serve"
    assert found["container, in which the rest is typed"].split("\n")[:2] == [
        "    make image engine=tensorrt_llm",
        "    make shell engine=tensorrt_llm",
    ]
    assert "stage.name=quantize stage.link=gemma_2b-fp8-kv_fp8-checkpoint" in found["quantize"]
    assert "--checkpoint_dir gemma_2b-fp8-kv_fp8-checkpoint \\\n" in found["build"]
    assert "--output_dir gemma_2b-fp8-kv_fp8-engine \\\n" in found["build"]
    assert "engine.path=gemma_2b-fp8-kv_fp8-engine" in found["repository"]
    assert "(cd gemma_2b-fp8-kv_fp8-repository && tritonserver" in found["serve"]
    for title in ("quantize", "repository"):
        assert set(GEMMA) < set(shlex.split(found[title].replace("\\\n", " ")))


def test_a_word_with_blanks_stays_one_word(tmp_path):
    words = [*GEMMA, f"paths.store={tmp_path}/my artifacts", "image.dev=true"]
    found = commands(tmp_path, words, "repository")
    for title in ("quantize", "container, in which the rest is typed"):
        assert f"paths.store={tmp_path}/my artifacts" in shlex.split(found[title].replace("\\\n", " "))
    assert "image.dev=true" in found["container, in which the rest is typed"]
    assert "image.dev" not in found["quantize"]


def test_a_folder_with_any_name_is_named_as_the_next_command_reads_it(tmp_path):
    """Its name is in the names of links, which were no overrides for Hydra."""
    folder = tmp_path / "it's (ü) 2"
    shutil.copytree(BUNDLED / "models" / "tiny_llama", folder)
    words = ["engine=tensorrt_llm", "hardware=h100_sxm", "quant=int8_wo", f'model.path="{folder}"']
    found = commands(tmp_path, words, "repository")
    for title, key in (("quantize", "stage.link"), ("repository", "stage.link"), ("repository", "engine.path")):
        line = shlex.split(found[title].replace("\\\n", " "))
        override = next(word for word in line if word.startswith(f"{key}="))
        assert parse_override(override).value().startswith("it's (ü) 2-int8_wo-")


def test_several_nodes_are_left_to_the_scripts(tmp_path):
    words, target = PLANS["two nodes"]
    (text,) = commands(tmp_path, words, target).values()
    assert shlex.split(text.replace("\\\n", " ")) == ["make", "scripts", "cluster=slurm", *words]


@pytest.mark.parametrize(
    ("tag", "word", "option"),
    [
        ("1.3.0rc3", "DraftTarget", True),
        ("1.2.1", "DraftTarget", True),
        ("1.3.0rc8", "Draft_Target", True),
        ("1.3.0rc24", "Draft_Target", None),
        ("1.4.0", "Draft_Target", None),
    ],
)
def test_the_container_of_the_llm_api_decides_the_word_for_a_draft_model_and_how_requests_sample(
    tmp_path, tag, word, option
):
    image = f"registry.example.com/tensorrt-llm/release:{tag}"
    made = plan(tmp_path, [*LLM_API, *DRAFT, f"image.base_llm_api={image}"], "build")
    (stage,) = (step.node.stage for step in made.steps if step.node.id == "build")
    assert stage.arguments["speculative_config"]["decoding_type"] == word
    assert stage.arguments["speculative_config"].get("allow_advanced_sampling") is option
    typed = commands(tmp_path, [*LLM_API, f"image.base_llm_api={image}"], "benchmark")
    assert image in typed["container, in which the rest is typed"]
    assert f"image.base_llm_api={image}" in typed["build"]


def test_a_searched_mix_gets_limits_for_the_load(tmp_path):
    made = plan(tmp_path, ["engine=tensorrt_llm", "model=llama_3_1_8b", "quant=auto", "hardware=h100_sxm"], "build")
    assert any("chosen for the load: build.max_batch_size" in note for note in made.notes)


def test_the_llm_api_is_served_by_nvidias_own_server_or_by_triton(tmp_path):
    found = commands(tmp_path, LLM_API, "benchmark")
    assert list(found) == [
        "build",
        "repository",
        "container, in which the rest is typed",
        "serve, with an OpenAI API",
        "or serve, in a Triton with TensorRT-LLM 1.3 or later (none is released)",
    ]
    served = shlex.split(found["serve, with an OpenAI API"].replace("\\\n", " "))
    assert served == [
        *("(cd", "llama_3_1_8b-fp8-engine", "&&", "trtllm-serve", "checkpoint"),
        *("--host", "127.0.0.1", "--port", "9000"),
        *("--extra_llm_api_options", "extra_llm_api_options.yaml)"),
    ]
    assert "/app/all_models/llmapi/tensorrt_llm/1/*.py tensorrt_llm/1/" in list(found.values())[-1].replace(
        "\\\n        ", ""
    )


def test_trtllm_serve_serves_the_format_and_both_are_evaluated(tmp_path):
    found = commands(tmp_path, [*LLM_API, "eval=gsm8k", "serving.server=trtllm_serve"], "evaluate")
    evaluate = "evaluate, where trtllm-serve is on PATH"
    assert list(found)[:4] == ["build", "repository", evaluate, "container, in which the rest is typed"]
    assert found[evaluate].split()[:2] == ["make", "evaluate"]
    assert "8b-none" not in "".join(found.values())  # nothing printed makes these folders


def test_a_second_build_starts_from_the_timings_of_the_first(tmp_path):
    found = commands(tmp_path, PLANS["a draft model"][0], "serve")
    assert "--input_timing_cache" not in found["build"]
    assert "--input_timing_cache timing.cache" in found["draft.build"]
    assert "--output_dir llama_3_2_1b-fp8-draft-engine" in found["draft.build"]


def test_long_commands_are_broken_between_words():
    words = ["program", *(f"--option-{number}=value" for number in range(12)), "'one word'"]
    lines = command_lines(words, 4)
    assert len(lines) > 2
    assert all(line.endswith(" \\") and len(line) <= 79 for line in lines[:-1])
    assert shlex.split("\n".join(lines).replace("\\\n", " ")) == [*words[:-1], "one word"]
    assert command_lines([]) == []


def test_sizes_are_modelled_and_times_have_a_source(tmp_path):
    text = " ".join(plan_text(plan(tmp_path, GEMMA, "all")).split())
    assert "download: about 4.7 GiB (modelled, weights at 16 bit)" in text
    assert re.search(r"disk: about [\d.]+ GiB \(modelled: downloads 4\.7 GiB, checkpoints [\d.]+ GiB, engines", text)
    assert "each trtllm-build roughly 2 minutes (NVIDIA's log of a 35B model on one GPU: 1 min 47 s)" in text
    assert "the other stages: unknown" in text


def test_a_rank_larger_than_any_published_has_no_time(tmp_path):
    words = ["engine=tensorrt_llm", "model=llama_3_1_70b", "quant=fp8", "hardware=h200_sxm"]
    assert "time: unknown; no build of a rank this large is published" in plan_text(plan(tmp_path, words, "build"))
    assert "time: unknown\n" in plan_text(plan(tmp_path, LLM_API, "build"))


def test_a_plan_for_the_processor_downloads_and_promises_nothing(tmp_path, model):  # noqa: F811
    text = plan_text(plan(tmp_path, ["engine=openvino", f"model.path={model}"], "build"))
    assert not re.search(r"^(download|disk|time|Commands)", text, re.M)


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("quantize", ["quantize"]),
        ("build", ["quantize", "build"]),
        ("baseline.evaluate", ["baseline.quantize", "baseline.build", "baseline.evaluate"]),
        ("repository", ["quantize", "build", "repository"]),
    ],
)
def test_one_stage_takes_with_it_what_it_needs(tmp_path, model, name, stages):  # noqa: F811
    made = plan(tmp_path, [f"model.path={model}", "engine=openvino"], "all", only=name)
    assert [step.node.id for step in made.steps] == stages
    assert made.command == "stage"


def test_a_checkpoint_for_a_gpu_is_made_without_one(tmp_path, model):  # noqa: F811
    words = [f"model.path={model}", "engine=tensorrt_llm", "quant=int8_wo"]
    assert plan(tmp_path, words, "all").not_here
    assert not plan(tmp_path, words, "all", only="quantize").not_here


def test_a_stage_that_is_not_in_the_plan_is_named_with_those_that_are(tmp_path, model):  # noqa: F811
    with pytest.raises(
        UserError,
        match=r"stage\.name='quantise' is not a stage of this plan\. Choose one of .* Did you mean 'quantize'",
    ):
        plan(tmp_path, [f"model.path={model}"], "all", only="quantise")


def test_a_stage_needs_a_name(capsys):
    assert main(["stage", "quant=fp8"]) == 2
    assert "stage.name is not set. It is the name of a stage as `make plan` lists it" in flat(capsys.readouterr().err)


def test_a_link_replaces_no_folder(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    assert main(["stage", "stage.name=quantize", f"stage.link={tmp_path}/mine"]) == 2
    assert "mine' already exists and is not a link." in flat(capsys.readouterr().err)


def flat(text: str) -> str:
    return " ".join(text.split())


def test_a_command_in_an_error_can_be_pasted(capsys, monkeypatch, tmp_path):
    """Neither docker nor podman is here: the command for another machine stands below the sentence, in whole words."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["image", "engine=tensorrt_llm", "image.tool=podman"]) == 2
    text, _, command = capsys.readouterr().err.partition("has it:\n")
    assert text.startswith("error: No container engine can be used here: podman is not installed.")
    lines = command.splitlines()
    assert all(line.endswith(" \\") for line in lines[:-1])
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:2] == ["docker", "build"]
    assert all(word.startswith("--") for word in words[2:-1])


def test_all_ranks_load_the_draft_model(tmp_path):
    """The command was made without it, so that the draft model had no second rank."""
    served = commands(tmp_path, [*LLAMA, *DRAFT, "build.tp_size=2"], "serve")["serve"]
    assert "--load-model=tensorrt_llm_draft" in served


def test_settings_of_the_server_are_in_the_command_that_serves(tmp_path):
    """NVIDIA's own line for a repository has none of them, so make serve takes them."""
    words = ["serving.host=0.0.0.0", "serving.openai_port=9100"]
    served = commands(tmp_path, [*LLM_API, *words], "benchmark")["serve, with an OpenAI API"]
    assert "--host 0.0.0.0 --port 9100" in served.replace(" \\\n     ", "")
    served = shlex.split(commands(tmp_path, [*GEMMA, *words], "serve")["serve"].replace("\\\n", " "))
    assert served == ["make", "serve", "serving.repository=gemma_2b-fp8-kv_fp8-repository", *words]
