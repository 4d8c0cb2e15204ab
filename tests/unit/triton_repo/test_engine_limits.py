"""Limits come from the engine's own config.json, or a clear word why not."""

import json

import pytest

from pipelines.domain.errors import UserError
from pipelines.engines.limits import EngineLimits
from tests.support.engine_folders import write_engine


def test_limits_of_a_tensorrt_engine(tmp_path):
    limits = EngineLimits.load(write_engine(tmp_path, tp_size=2, pp_size=2, logits_dtype="float16", max_batch_size=32))
    assert (limits.flavour, limits.version) == ("tensorrt_llm", "1.2.1")
    assert (limits.tp_size, limits.pp_size, limits.world_size) == (2, 2, 4)
    assert (limits.max_batch_size, limits.max_seq_len, limits.logits_type) == (32, 128, "FP16")
    assert limits.paged_context_fmha is True


def test_limits_of_an_openvino_engine(tmp_path):
    limits = EngineLimits.load(write_engine(tmp_path, "openvino"))
    assert (limits.flavour, limits.version, limits.world_size) == ("openvino", "2026.4.1", 1)
    assert (limits.logits_type, limits.paged_context_fmha) == ("FP32", None)


def test_a_folder_without_engine_is_named(tmp_path):
    with pytest.raises(UserError, match=f"'{tmp_path}' is not an engine folder: it has no config.json"):
        EngineLimits.load(tmp_path)


def test_a_checkpoint_is_no_engine(tmp_path):
    (tmp_path / "config.json").write_text('{"architecture": "LlamaForCausalLM"}')
    with pytest.raises(UserError, match="has no 'pretrained_config'"):
        EngineLimits.load(tmp_path)


@pytest.mark.parametrize(("content", "message"), [("{", "not valid JSON"), ("[1]", "holds a list")])
def test_a_damaged_file_is_named(tmp_path, content, message):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=message):
        EngineLimits.load(tmp_path)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        ({"max_batch_size": 0}, "max_batch_size=0"),
        ({"max_seq_len": None}, "max_seq_len=None"),
        ({"max_num_tokens": "many"}, "max_num_tokens='many'"),
        ({"max_beam_width": True}, "max_beam_width=True"),
    ],
)
def test_an_impossible_limit_is_named(tmp_path, build, message):
    with pytest.raises(UserError, match=message):
        EngineLimits.load(write_engine(tmp_path, **build))


def test_all_faults_come_at_once(tmp_path):
    write_engine(tmp_path, tp_size=2, logits_dtype="float8", max_input_len=-1)
    (tmp_path / "rank1.engine").unlink()
    with pytest.raises(UserError) as caught:
        EngineLimits.load(tmp_path)
    text = "\n".join(str(fault) for fault in caught.value.faults)
    assert "max_input_len=-1" in text
    assert "lacks rank1.engine" in text
    assert "logits_dtype='float8'" in text


def test_an_unknown_flavour_is_named(tmp_path):
    write_engine(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "engine": {"flavour": "onnx"}}))
    with pytest.raises(UserError, match="engine='onnx', which is not known"):
        EngineLimits.load(tmp_path)
