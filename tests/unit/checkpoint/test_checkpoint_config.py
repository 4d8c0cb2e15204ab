"""config.json of a checkpoint: what is read, what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines.checkpoint.config_json import CheckpointConfig
from pipelines.domain.errors import UserError
from pipelines.domain.formats import KvFormat, QFormat

Parse = Callable[..., CheckpointConfig]


@pytest.fixture
def parse(checkpoint_config: dict[str, Any]) -> Parse:
    """Return a function that parses the small configuration with changes; "absent" takes a key away."""

    def parsed(**changes: Any) -> CheckpointConfig:
        return CheckpointConfig.parse({k: v for k, v in {**checkpoint_config, **changes}.items() if v != "absent"})

    return parsed


def test_sizes_and_formats_are_read(parse: Parse) -> None:
    """W4A16_AWQ is our int4_awq; the KV cache is FP8."""
    block = {"quant_algo": "W4A16_AWQ", "kv_cache_quant_algo": "FP8", "group_size": 64, "pre_quant_scale": True}
    config = parse(quantization=block)
    assert (config.qformat, config.kv_format) == (QFormat.INT4_AWQ, KvFormat.FP8)
    assert (config.quantization.group_size, config.head_size, config.world_size) == (64, 2, 1)


def test_absent_fields_take_the_defaults_of_trtllm(parse: Parse) -> None:
    config = parse(head_size="absent", num_key_value_heads=None, norm_epsilon="absent", mapping="absent")
    assert (config.head_size, config.num_key_value_heads, config.norm_epsilon, config.tp_size) == (2, 2, 1e-5, 1)


@pytest.mark.parametrize(
    ("patterns", "module", "excluded"),
    [
        (None, "lm_head", True),
        (None, "transformer.layers.0.mlp.fc", False),
        (["*.mlp.*"], "transformer.layers.0.mlp.fc", True),
        (["lm_head"], "transformer.layers.0.mlp.fc", False),
        ([], "lm_head", False),
    ],
)
def test_excluded_modules(parse: Parse, patterns: list[str] | None, module: str, excluded: bool) -> None:
    """Patterns have wildcards; without a list TensorRT-LLM leaves the head alone."""
    block = {"quant_algo": "FP8", "exclude_modules": patterns}
    assert parse(quantization=block).quantization.excludes(module) is excluded


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "absent"}, "has no 'hidden_size'"),
        ({"rotary_base": "absent"}, "has no 'rotary_base'"),
        ({"hidden_size": "4"}, "has hidden_size='4'.*positive integer"),
        ({"num_hidden_layers": 0}, "has num_hidden_layers=0"),
        ({"norm_epsilon": "tiny"}, r"norm_epsilon='tiny'.*a number"),
        ({"architecture": 7}, "architecture=7.*a string"),
        ({"mapping": [1]}, r"mapping=\[1\].*an object"),
        ({"dtype": "int8"}, "dtype='int8'.*bfloat16"),
        ({"num_key_value_heads": 3}, "2 attention heads and 3 KV heads"),
        ({"mapping": {"world_size": 4, "tp_size": 2, "pp_size": 1}}, "world_size=4 to tp_size=2, pp_size=1"),
        ({"mapping": {"world_size": 4, "tp_size": 4}}, "2 attention heads.*tp_size=4"),
        ({"mapping": {"cp_size": 2}}, "cp_size=2"),
        ({"quantization": {"quant_algoo": "FP8"}}, "unknown key 'quant_algoo'.*Did you mean 'quant_algo'"),
        ({"quantization": {"kv_cache_quant_algo": "FP4"}}, "kv_cache_quant_algo='FP4'"),
    ],
)
def test_wrong_values_are_named(parse: Parse, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(**changes)


def test_an_unknown_format_is_named_when_asked_for(parse: Parse) -> None:
    """A checkpoint of another format can still be listed; only using its format fails."""
    config = parse(quantization={"quant_algo": "FP8_BLOCK_SCALES"})
    with pytest.raises(UserError, match="quant_algo='FP8_BLOCK_SCALES'"):
        _ = config.qformat


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config\.json"):
        CheckpointConfig.load(tmp_path)


def test_broken_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="is not valid JSON"):
        CheckpointConfig.load(tmp_path)
