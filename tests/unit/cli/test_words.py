"""Words that are no overrides are refused before anything runs, with what was probably meant."""

import re

import pytest

from pipelines.cli.commands import COMMANDS
from pipelines.cli.main import main
from pipelines.cli.words import check_command, overrides_of
from pipelines.domain.errors import UserError


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["int4_awq"], r"'int4_awq' is not a valid override \(expected key=value\)\. Did you mean quant=int4_awq\?"),
        (["fp8"], r"'fp8' .*Did you mean quant=fp8 or kv_cache=fp8\?"),
        (["int4_aqw"], r"'int4_aqw' .*Did you mean quant=int4_awq\?"),
        (["quant"], r"'quant' .*Choices: auto, fp8, int4_awq, .*Write quant=\.\.\."),
        (["build.max_batch_size"], r"'build\.max_batch_size' .*Write build\.max_batch_size=\.\.\."),
        (["smoothquant"], r"'smoothquant' .*Did you mean quant=int8_sq\?"),
        (["--port", "80"], r"Did you mean 'serving\.http_port=80' or 'serving\.openai_port=80'\?"),
        (["--tensor-parallel-size=2"], r"Did you mean 'build\.tp_size=2'\?"),
        (["quant:fp8"], r"'quant:fp8' .*Did you mean quant=fp8\?"),
        (["quant", "=", "fp8"], r"'quant = fp8' has blanks around '='\. Write quant=fp8"),
        (["quant=", "fp8"], r"'quant= fp8' has blanks around '='\. Write quant=fp8"),
        (["quant", "=fp8"], r"'quant =fp8' has blanks around '='\. Write quant=fp8"),
        (["--quant", "fp8"], r"'--quant fp8' is not an option\. .*Did you mean 'quant=fp8'\?"),
        (["--build.max-batch-size=3"], r"Did you mean 'build\.max_batch_size=3'\?"),
        (["-v"], r"'-v' is not an option"),
        (["evaluate"], r"'build' and 'evaluate' are two commands"),
        (["none"], r"'none' is not a valid override .*`make help build`"),
    ],
)
def test_a_word_gets_its_likely_meaning(words, message):
    with pytest.raises(UserError, match=message):
        overrides_of("build", words)


def test_all_words_are_judged_at_once():
    with pytest.raises(UserError) as caught:
        overrides_of("build", ["int4_awq", "build.workers=2", "quant", "=", "fp8", "serve"])
    assert len(caught.value.faults) == 3


def test_overrides_pass_unchanged():
    words = ["quant=fp8", "+a.b=1", "++a.c=1", "~experiment", "eval.dataset=", "model.path=/a b", "x=a:b"]
    assert overrides_of("build", words) == words


def test_config_takes_the_name_of_a_group():
    assert overrides_of("config", ["build", "quant=fp8"]) == ["build", "quant=fp8"]
    assert overrides_of("config", ["quant=fp8", "build"]) == ["build", "quant=fp8"]
    with pytest.raises(UserError, match="'fp8' is not a valid override"):
        overrides_of("config", ["fp8"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("biuld", r"'biuld' is not a command\. Commands: all, build, .*Did you mean 'build'\?"),
        ("evaluat", r"Commands: all, .*Did you mean 'evaluate'\?"),
        ("int4_aqw", r"Did you mean 'make build quant=int4_awq'\?"),
        ("tset", r"Did you mean 'test'\?"),
        ("int4_awq", r"Did you mean 'make build quant=int4_awq'\?"),
        ("quant=fp8", r"'quant=fp8' is not a command\. Did you mean 'make build quant=fp8'\?"),
        ("--verison", r"'--verison' is not an option\. Options: --help, --version"),
    ],
)
def test_a_first_word_that_is_no_command(name, message):
    with pytest.raises(UserError, match=message):
        check_command(name, ["test", "check"])


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_a_bare_word_before_it_is_imported(command, monkeypatch, capsys):
    monkeypatch.setattr("importlib.import_module", lambda name: pytest.fail(f"{name} was imported"))
    assert main([command, "int4_awq"]) == 2
    assert "quant=int4_awq" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["biuld", "--help"], "'biuld' is not a command. .* Did you mean 'build'?"),
        (["--help", "biuld"], "'biuld' is not a command. .* Did you mean 'build'?"),
        (["help", "quant"], "'quant' is not a command. .*: make config quant$"),
        (["quant=fp8", "--help"], "'quant=fp8' is not a command. Did you mean 'make build quant=fp8'?"),
        (["--version", "junk"], "--version takes no arguments, but 'junk' follows it"),
        (["config", "build.max_batch_size"], r"'build\.max_batch_size' is not a group .* Did you mean 'build'?"),
        (["config", "serveng"], "'serveng' is not a group of settings. Groups: .* Did you mean 'serving'?"),
        (["--bogus", "--help"], "'--bogus' is not an option"),
    ],
)
def test_help_for_an_unknown_word_is_refused_as_the_word_itself(words, said, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(said.replace("?", r"\?"), " ".join(err.split()))


@pytest.mark.parametrize("words", [["build", "--help"], ["help", "build"], ["build", "quant=fp8", "-h"]])
def test_help_of_a_command_is_its_own(words, capsys):
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("Usage: trtllm-pipelines build")
