"""Candidates for a Tab: commands, then Hydra's groups, choices and keys, and the values of settings."""

import pytest

from pipelines.cli.completion import candidates, script
from pipelines.domain.errors import UserError
from pipelines.settings.groups import choices


def found(line: str) -> list[str]:
    return candidates([f"trtllm-pipelines {line}"]).split()


def test_commands_first():
    assert found("s") == ["sweep", "stage", "serve", "size", "simulate", "shell", "scripts"]
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
