"""`config GROUP`: every key with type, allowed values, value and one sentence, all from the settings' classes."""

import pytest

from pipelines.cli.main import main
from pipelines.cli.words import groups_with_keys
from pipelines.settings.describe import Key, keys_of
from pipelines.settings.groups import CONF, groups
from pipelines.settings.root import Settings

KEYS = [key for group in Settings.model_fields for key in keys_of(group)]


def test_every_key_has_a_sentence(subtests):
    for key in KEYS:
        with subtests.test(key.name):
            assert len(key.sentence.split()) >= 1, (
                f"the docstring of its class says nothing under Attributes about {key.name}"
            )
            assert key.sentence.endswith(".") or key.sentence.endswith("...")
            assert key.kind


def test_every_group_can_be_explained(capsys):
    assert set(Settings.model_fields) <= set(groups_with_keys())


def test_kinds_in_words():
    found = {key.name: key for key in KEYS}
    assert found["build.max_batch_size"] == Key(
        "build.max_batch_size",
        "integer >= 1 and <= 65536",
        (),
        "requests that the engine schedules together, at most; null is chosen for the load on a GPU whose speed is "
        "known, and trtllm-build's 2,048 elsewhere.",
    )
    assert found["build.max_seq_len"].kind == "integer >= 1 and <= 16777216 or null"
    assert found["build.kv_cache_type"].choices == ("continuous", "paged", "disabled")
    assert found["quant.qformat"].kind.startswith("one of none, fp8, int8_sq")
    assert found["sizing.prices.utilisation"].kind == "number > 0 and <= 1 or null"
    assert found["benchmark.concurrency"].kind == "list of integer >= 1 and <= 1000000 or null"
    assert found["serving.openai"].choices == ("true", "false")
    assert found["build.trtllm.dora_plugin"] == Key(
        "build.trtllm.dora_plugin",
        "one of enable, disable or null",
        ("enable", "disable"),
        "DoRA. Default: disable.",
    )
    assert found["model.shape"].kind.startswith("null, or a mapping with the keys architecture, ")
    assert (
        found["sizing.slo.percentile"].sentence
        == "the percentile of TTFT, ITL and E2E that must meet the limits, e.g. 95."
    )
    assert found["sizing.slo.preset"].sentence == found["benchmark.slo.preset"].sentence


def test_a_group_explained(capsys):
    assert main(["config", "doctor"]) == 0
    text = capsys.readouterr().out
    assert "doctor.format=text\n    one of text, json\n    Text for people, json for programs.\n" in text
    assert "doctor.timeout_s=2.0\n    number > 0\n    How long the Hub may take to answer.\n" in text


def test_values_are_those_of_the_overrides(capsys):
    assert main(["config", "quant", "quant=int4_awq"]) == 0
    text = capsys.readouterr().out
    assert "quant.qformat=int4_awq" in text
    assert "Choices: quant=auto, quant=fp8, quant=int4_awq" in " ".join(text.split())


def test_a_number_in_place_of_a_mapping_is_shown(capsys):
    whole = "workload.isl=128\n    a number, or in its place a mapping with the keys below\n\nworkload.isl.distribution"
    assert main(["config", "workload"]) == 0
    assert whole in capsys.readouterr().out
    assert main(["config", "workload", "workload=normal"]) == 0
    assert "in its place" not in capsys.readouterr().out


@pytest.mark.parametrize("group", [group for group in groups() if group not in Settings.model_fields])
def test_a_group_without_keys_names_what_it_sets(group, capsys):
    assert main(["config", group]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"Choices: {group}=" in text
    assert str(CONF / group) in text


def test_overrides_are_judged(capsys):
    assert main(["config", "quant", "quant=fp9"]) == 2
    assert "quant=fp9 is not known" in capsys.readouterr().err
