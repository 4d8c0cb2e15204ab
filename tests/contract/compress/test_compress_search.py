"""Searching a format for each linear: the bits are kept, the checkpoint is sound, the record is whole."""

import json

import pytest

pytest.importorskip("modelopt")

from pipelines.checkpoint.config_json import CheckpointConfig
from pipelines.checkpoint.describe import LINEARS
from pipelines.checkpoint.verify import verify
from pipelines.compress.modelopt_door import VERSION
from pipelines.compress.quantizing import quantize
from pipelines.compress.specs import QuantSpec
from pipelines.domain.errors import UserError
from pipelines.domain.formats import FORMATS, KvFormat, QFormat
from tests.contract.compress.conftest import CALIBRATION
from tests.support.specs import mix_spec

FP8_AWQ = (QFormat.FP8, QFormat.INT4_AWQ)
HAS_KL_DIV = tuple(map(int, VERSION.split(".")[:2])) >= (0, 47)


def spec_of(bits: float, candidates=FP8_AWQ, texts=4, **options) -> QuantSpec:
    return mix_spec(candidates, bits, texts=texts, **options, group_size=64, awq_alpha_step=0.25)


@pytest.mark.parametrize(
    ("kind", "bits"),
    [
        ("llama", 4.0),
        pytest.param("tied", 9.0, marks=pytest.mark.thorough),
        pytest.param("gemma", 6.0, marks=pytest.mark.thorough),
    ],
)
def test_a_mix_spends_at_most_the_bits_it_was_given(kind, bits, models, texts, tmp_path) -> None:
    """The head, which is not quantized, is not counted, tied or not; and the bound is used up to one linear."""
    facts = quantize(models[kind], tmp_path, spec_of(bits), texts, CALIBRATION)
    search = facts["search"]
    spent = search["effective_bits"]
    weights = {choice["linears"][0]: choice["weights"] for choice in search["choices"]}
    largest_step = 8 * max(weights.values()) / sum(weights.values())
    assert bits - largest_step <= spent <= bits
    assert verify(tmp_path) == []


def test_the_record_is_what_the_checkpoint_holds(models, texts, tmp_path) -> None:
    """q, k and v share a format, as do gate and up; every linear of every layer is in the record once."""
    facts = quantize(models["llama"], tmp_path, spec_of(6.0, texts=1000), texts, CALIBRATION)
    assert facts["search"]["texts"] == facts["calibration"]["sequences"] < 1000  # there are no more
    config = CheckpointConfig.load(tmp_path)
    assert config.qformat is QFormat.AUTO
    theirs = {
        "self_attn.q_proj": ("attention.qkv",),
        "self_attn.o_proj": ("attention.dense",),
        "mlp.gate_proj": ("mlp.fc", "mlp.gate"),
        "mlp.down_proj": ("mlp.proj",),
    }
    told = {}
    for choice in facts["search"]["choices"]:
        layer, _, name = choice["linears"][0].removeprefix("model.layers.").partition(".")
        told |= {f"layers.{layer}.{ours}": choice["chosen"] for ours in theirs[name]}
        assert choice["scores"]["none"] == 0
        assert choice["scores"]["int4_awq"] >= choice["scores"]["fp8"] > 0
    assert told == facts["formats"]
    assert len(told) == 2 * len(LINEARS)
    for module, qformat in told.items():
        assert config.format_of(f"transformer.{module}") is FORMATS[QFormat(qformat)]


@pytest.mark.thorough
def test_the_same_search_twice_is_the_same_checkpoint(models, texts, tmp_path) -> None:
    for name in ("one", "two"):
        quantize(models["llama"], tmp_path / name, spec_of(6.0), texts, CALIBRATION)
    for file in ("config.json", "quant_cfg.json", "rank0.safetensors"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


@pytest.mark.thorough
def test_a_mix_for_two_ranks_with_an_8_bit_cache(models, texts, tmp_path) -> None:
    """quant_cfg.json names the format of the cache, because TensorRT-LLM reads it there."""
    spec = mix_spec(FP8_AWQ, 6.0, texts=4, kv_cache=KvFormat.FP8, group_size=64)
    quantize(models["llama"], tmp_path, spec, texts, CALIBRATION, tp_size=2)
    assert verify(tmp_path) == []
    assert CheckpointConfig.load(tmp_path).kv_format is KvFormat.FP8
    assert json.loads((tmp_path / "quant_cfg.json").read_text())["kv_cache_quant_algo"] == "FP8"


@pytest.mark.thorough
def test_int8_is_mixed_too(models, texts, tmp_path) -> None:
    facts = quantize(models["llama"], tmp_path, spec_of(6.0, (QFormat.INT8_SQ, QFormat.INT4_AWQ)), texts, CALIBRATION)
    assert set(facts["formats"].values()) <= {"int8_sq", "int4_awq", "none"}
    assert verify(tmp_path) == []


def test_candidates_are_judged_by_their_divergence(models, texts, tmp_path) -> None:
    """ModelOpt 0.37 cannot, and says which one can."""
    spec = spec_of(6.0, scoring="kl_div")
    if not HAS_KL_DIV:
        with pytest.raises(UserError, match=r"quant\.scoring=kl_div is not known to nvidia-modelopt 0\.37"):
            quantize(models["llama"], tmp_path, spec, texts, CALIBRATION)
        return
    facts = quantize(models["llama"], tmp_path, spec, texts, CALIBRATION)
    assert facts["search"]["effective_bits"] <= 6.0
    assert verify(tmp_path) == []
