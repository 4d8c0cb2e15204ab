"""Candidates for a Tab: commands, then Hydra's groups, choices and keys, and the values of settings."""

import subprocess
import sys

import pytest

from pipelines.cli.main import candidates, script
from pipelines.domain.errors import UserError
from pipelines.settings.by_hydra import hydra_candidates
from pipelines.settings.describe import plain_candidates
from pipelines.settings.groups import choices
from tests.conftest import ROOT


def found(line: str) -> list[str]:
    return candidates([f"trtllm-pipelines {line}"]).split()


def test_commands_first():
    assert found("s") == ["sweep", "smallest", "stage", "serve", "size", "simulate", "shell", "scripts"]
    assert found("nosuchcommand ") == []


def test_choices_of_a_group():
    assert found("build quant=") == [f"quant={name}" for name in choices("quant")]


def test_the_last_of_a_list():
    assert found("sweep quant=fp8,int8_s") == ["quant=fp8,int8_sq"]


def test_keys_with_the_words_before_them():
    """The keys of an override that stands before are there, and a wrong word before disturbs nothing."""
    assert "model.bundled=" in found("build model=tiny_llama model.b")
    assert found("build quant=fp9 quant=int4_a") == ["quant=int4_awq"]


def test_values_that_the_settings_allow():
    assert found("build build.kv_cache_type=") == [
        f"build.kv_cache_type={value}" for value in ("continuous", "disabled", "paged")
    ]
    assert "serving.show_log=true" in found("serve serving.show_log=")


def test_launchers_belong_to_sweeps():
    assert found("sweep hyd") == ["hydra/launcher="]
    assert found("build hyd") == []


def test_groups_of_config():
    assert {"doctor", "paths", "quant", "verify"} <= set(found("config "))


def test_another_shell_is_refused():
    with pytest.raises(UserError, match=r"'fish' is not a shell that can be completed\. Choose one of bash, zsh"):
        script(["fish"])


@pytest.mark.parametrize(
    ("before", "word"),
    [
        ([], ""),
        ([], "quant=int"),
        (["model=tiny_llama"], "model.b"),
        *(
            pytest.param(before, word, marks=pytest.mark.thorough)
            for before, word in [
                ([], "quant"),
                ([], "hyd"),
                ([], "paths."),
                ([], "build.max_"),
                ([], "build.kv_cache_type=pa"),
                (["workload=chat"], "workload."),
            ]
        ),
        (["benchmark.warmup_s=3"], "benchmark.warmup_s="),
        (["experiment=cpu_demo"], "store.remove="),
        ([], "plan.target="),
    ],
)
def test_what_is_found_without_hydra_is_what_hydra_finds(before, word):
    mine = plain_candidates(before, word)
    assert mine is not None
    hydras = hydra_candidates(before, word)
    assert {each for each in mine if each[:6] != "hydra."} == {each for each in hydras if each[:6] != "hydra."}


@pytest.mark.parametrize("word", ["+quant", "~quant", "model.path=/", "hydra/", "a b", "eval.task", "lora.adapters="])
def test_other_words_are_left_to_hydra(word):
    assert plain_candidates(["lora=tiny_gemma"] if "lora" in word else ["eval=lm_eval", "x=y"], word) is None


def test_a_completion_of_keys_loads_no_hydra():
    code = (
        "import sys; from pipelines.cli.main import candidates; "
        "assert candidates(['trtllm-pipelines build quant=fp8 build.max_']); "
        "sys.exit(bool({'hydra', 'omegaconf'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0
