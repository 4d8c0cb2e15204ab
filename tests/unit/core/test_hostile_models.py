"""A model folder whose files make no sense is refused while planning: one clear sentence each, whatever it holds."""

import json
import math
import os
import re
import shutil
import struct

import pytest

from pipelines.domain.errors import UserError
from pipelines.domain.model_shape import ModelShape
from pipelines.plan.plan import make_plan
from pipelines.settings.compose import load
from pipelines.settings.model import BUNDLED
from pipelines.store.sources import model_config
from pipelines.store.store import Store
from tests.support.engine_folders import write_engine
from tests.unit.core.test_machine import MACHINE

LLAMA = json.loads((BUNDLED / "models" / "tiny_llama" / "config.json").read_text())
DEEP = '{"a":' * 100_000


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "my_llama"
    shutil.copytree(BUNDLED / "models" / "tiny_llama", folder)
    return folder


@pytest.fixture(scope="module")
def settings():
    """Compose once: only the folder's content differs."""
    return load([])


def refusal(settings, tmp_path, model, target="all"):
    wanted = settings.model_copy(update={"model": settings.model.model_copy(update={"path": model})})
    with pytest.raises(UserError) as refused:
        make_plan(wanted, target, Store(tmp_path / "store"), MACHINE)
    (fault,) = refused.value.faults
    assert len(str(fault)) < 600
    return str(fault)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads=0. It must be a whole number from 1 to 65,536"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0"),
        ({"num_hidden_layers": -3}, "num_hidden_layers=-3"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers=10000000"),
        ({"hidden_size": "256"}, "hidden_size='256'"),
        ({"hidden_size": 256.5}, "hidden_size=256.5"),
        ({"hidden_size": True}, "hidden_size=True"),
        ({"vocab_size": [1]}, "vocab_size=[1]"),
        ({"vocab_size": {"a": {"b": 1}}}, "vocab_size={'a': {'b': 1}}"),
        ({"vocab_size": math.inf}, "vocab_size=inf"),
        ({"vocab_size": math.nan}, "vocab_size=nan"),
        ({"vocab_size": 10**400}, "vocab_size=1000"),
        ({"rope_theta": 10**400}, "rope_theta=1000"),
        ({"intermediate_size": None}, "has no 'intermediate_size'"),
        ({"max_position_embeddings": 10**9}, "max_position_embeddings=1000000000"),
        ({"head_dim": -8}, "head_dim=-8"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3, which does not divide num_attention_heads="),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no'. It must be true or false"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps=nan. It must be a number above 0 and at most 1"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps=-1e-05"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5'"),
        ({"rope_theta": 0}, "rope_theta=0"),
        ({"partial_rotary_factor": math.nan}, "partial_rotary_factor=nan"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear'. It must be a JSON object"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor='2'"),
        ({"rope_parameters": {"rope_type": ["llama3"]}}, "rope_parameters.rope_type=['llama3']"),
        ({"architectures": "LlamaForCausalLM"}, "architectures='LlamaForCausalLM'. It must be a list of names"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures=[['LlamaForCausalLM']]"),
        ({"architectures": []}, "names the architecture None, which this project does not know"),
        (
            {"architectures": ["A"], "conv_L_cache": 3},
            "not know: some of its layers are convolutions without a KV cache",
        ),
        (
            {"architectures": ["A"], "text_config": {"cross_attention_layers": [3]}},
            "some of its layers attend to pictures",
        ),
        ({"architectures": ["A"], "text_config": 3}, "it has several parts"),
        ({"architectures": ["\x1b[2J" + "x" * 10**6]}, r"names the architecture '\x1b[2Jxxx"),
    ],
)
def test_a_number_that_makes_no_sense_is_named(settings, tmp_path, model, changes, said):
    (model / "config.json").write_text(json.dumps(LLAMA | changes))
    assert said in refusal(settings, tmp_path, model)


def test_all_numbers_that_make_no_sense_are_named_at_once():
    with pytest.raises(UserError) as refused:
        ModelShape.from_hf_config(LLAMA | {"hidden_size": 0, "vocab_size": "x", "rms_norm_eps": math.inf})
    assert [str(fault).split()[2] for fault in refused.value.faults] == [
        "hidden_size=0.", "vocab_size='x'.", "rms_norm_eps=inf.",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", '{"vocab_size": 1e999, "architectures": ["LlamaForCausalLM"]', "is not valid JSON"),
        ("config.json", DEEP, "is not valid JSON: it is nested too deeply"),
        ("config.json", "[]", "is not a JSON object"),
        ("config.json", "\0", "is not valid JSON"),
        ("config.json", " " * (16 * 2**20 + 1), "has 16,777,217 bytes. It may have 16,777,216"),
        ("tokenizer.json", DEEP, "nested too deeply"),
        ("tokenizer_config.json", "[1]", "tokenizer_config.json is not a JSON object"),
        ("tokenizer_config.json", DEEP, "nested too deeply"),
        ("model.safetensors.index.json", DEEP, "is not an index of safetensors"),
        ("model.safetensors.index.json", '{"weight_map": {"a": 5}}', "names 5, which is not the name of a file"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "../../etc/passwd"}}', "names '../../etc/passwd'"),
        ("model.safetensors.index.json", f'{{"weight_map": {{"a": "{"x" * 5000}"}}}}', "names 'xxx"),
    ],
)
def test_json_of_another_form_is_refused(settings, tmp_path, model, name, content, said):
    (model / name).write_text(content)
    assert said in refusal(settings, tmp_path, model)


def entry(begin, end, shape=(4,), dtype="U8"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        ({}, b"", "has no tensors: the header of model.safetensors is empty"),
        ({"__metadata__": {}}, b"", "has no tensors"),
        ({"a": entry(0, 4), "b": entry(2, 6)}, bytes(6), "'a' and 'b' overlap"),
        ({"a": entry(0, 4), "b": entry(0, 4)}, bytes(4), "'a' and 'b' overlap"),
        ({"a": entry(0, 4), "b": entry(6, 10)}, bytes(10), "'a' and 'b' leave a gap"),
        ({"a": entry(4, 8)}, bytes(8), "the header and 'a' leave a gap"),
        ({"a": entry(0, 4)}, bytes(9), "'a' ends at byte"),
        ({"a": entry(0, 4, "4")}, bytes(4), "the header entry of 'a' is"),
        ({"a": entry(0, 4, [True, 4])}, bytes(4), "the header entry of 'a' is"),
        ({"a": entry(0, 4, [4.0])}, bytes(4), "the header entry of 'a' is"),
        ({"a": entry(0, math.inf)}, bytes(4), "the header entry of 'a' is"),
        ({"a": entry(0, 4, [2**62] * 32)}, bytes(4), "bytes, but its entry has 4"),
        ({"a": entry(0, 4, [1] * 99)}, bytes(4), "the header entry of 'a' is"),
        ({"a": entry(0, 4, dtype=["U8"])}, bytes(4), "with dtype ['U8'], which is not supported"),
        ({"a": [[[0]]]}, b"", "the header entry of 'a' is [[[0]]]"),
        ({"\x1b[31m" + "w" * 10**5: entry(0, 3)}, bytes(3), r"'\x1b[31mwww"),
    ],
)
def test_a_header_that_makes_no_sense_is_refused(settings, tmp_path, model, header, data, said):
    raw = json.dumps(header).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    assert said in refusal(settings, tmp_path, model)


@pytest.mark.parametrize("raw", [b"", b"\xff" * 8, struct.pack("<Q", 2**63), struct.pack("<Q", 10) + b"[" * 10])
def test_bytes_that_are_no_header_are_refused(settings, tmp_path, model, raw):
    (model / "model.safetensors").write_bytes(raw)
    assert "is damaged or truncated" in refusal(settings, tmp_path, model)


def test_a_header_nested_without_end_is_refused(settings, tmp_path, model):
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(DEEP)) + DEEP.encode())
    assert "nested too deeply" in refusal(settings, tmp_path, model)


@pytest.mark.parametrize(
    "spoilt",
    [
        {"pretrained_config": {"mapping": [1]}, "build_config": {}},
        {"pretrained_config": {"mapping": {"tp_size": "two"}}, "build_config": {}},
        {"pretrained_config": {"mapping": {"tp_size": -1}}, "build_config": {}},
        {"pretrained_config": 5, "build_config": {}},
        {"pretrained_config": {}, "build_config": {}, "engine": 7},
    ],
)
def test_an_engine_of_another_form_is_refused(tmp_path, spoilt):
    engine = write_engine(tmp_path / "engine")
    (engine / "config.json").write_text(json.dumps(spoilt))
    with pytest.raises(UserError, match=r"engine\.path='.*' is not an engine"):
        make_plan(load([f"engine.path={engine}"]), "repository", Store(tmp_path / "store"), MACHINE)


def test_an_adapter_nested_without_end_is_refused(tmp_path):
    adapter = tmp_path / "adapter"
    shutil.copytree(BUNDLED / "adapters" / "in_words", adapter)
    (adapter / "adapter_config.json").write_text(DEEP)
    words = ["lora=adapters", f"lora.adapters={{1:{adapter}}}", "quant=none"]
    with pytest.raises(UserError, match=r"adapter_config\.json is not valid JSON: it is nested too deeply"):
        make_plan(load(words), "build", Store(tmp_path / "store"), MACHINE)


def test_every_bundled_model_is_still_taken():
    for folder in (BUNDLED / "models").iterdir():
        assert re.fullmatch(r"\w+ForCausalLM", ModelShape.from_hf_config(model_config(folder)).architecture)


def sparse(path):
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(2**40)


def pipe(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def nowhere(path):
    path.unlink(missing_ok=True)
    path.symlink_to("not_there")


def a_folder(path):
    path.unlink(missing_ok=True)
    path.mkdir()


SMALL = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "added_tokens.json")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (sparse, "has 1,099,511,627,776 bytes. It may have"),
        (pipe, "is not an ordinary file"),
        (nowhere, "cannot be read|does not exist"),
        (a_folder, "is not an ordinary file"),
    ],
)
@pytest.mark.parametrize("name", [*SMALL, "model.safetensors.index.json", "tokenizer.json", "chat_template.jinja"])
def test_a_file_that_cannot_be_read_is_named_and_not_waited_for(settings, tmp_path, model, spoil, said, name):
    spoil(model / name)
    wanted = settings.model_copy(update={"model": settings.model.model_copy(update={"path": model})})
    with pytest.raises(UserError) as refused:
        make_plan(wanted, "all", Store(tmp_path / "store"), MACHINE)
    assert any(name in str(fault) and re.search(said, str(fault)) for fault in refused.value.faults)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_is_neither_a_configuration_nor_a_model(settings, tmp_path, model, name):
    pipe(model / name)
    assert name in refusal(settings, tmp_path, model)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("A" * 240, "names a folder with 240 bytes in its name; 120 are allowed"),
        ("x\x1b[2Jy", r"'.*x\\x1b\[2Jy'; rename"),
    ],
)
def test_a_folder_whose_name_cannot_be_shown_is_refused(tmp_path, name, message):
    with pytest.raises(UserError, match=message) as refused:
        load([f"model.path='{tmp_path / name}'"])
    assert "\x1b" not in str(refused.value)


@pytest.mark.parametrize(
    "words", ["workload=trace workload.trace=", "workload=empirical workload.isl.values=null workload.isl.file="]
)
def test_a_pipe_as_a_workload_is_refused(tmp_path, words):
    pipe(tmp_path / "pipe")
    wanted = load(f"{words}{tmp_path / 'pipe'}".split())
    with pytest.raises(UserError, match="pipe is not an ordinary file"):
        make_plan(wanted, "benchmark", Store(tmp_path / "store"), MACHINE)
