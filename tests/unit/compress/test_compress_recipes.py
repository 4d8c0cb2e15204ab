"""One table for both configuration styles of ModelOpt; presets here are cut down to what matters."""

from typing import Any

import pytest

from pipelines.compress.recipes import modelopt_config
from pipelines.domain.families import FAMILIES, Architecture
from pipelines.domain.formats import FORMATS, KvFormat, QFormat, scale_faults, version_faults
from tests.support.specs import quant_spec

LLAMA, GEMMA = FAMILIES[Architecture.LLAMA], FAMILIES[Architecture.GEMMA]
BLOCK = {"num_bits": 4, "block_sizes": {-1: 128, "type": "static"}}
GROUPED = "INT4_BLOCKWISE_WEIGHT_ONLY_CFG"
FP8 = {"num_bits": (4, 3), "axis": None}


def old_style(name: str) -> dict[str, Any]:
    """ModelOpt 0.37: a dict of patterns."""
    weights: Any = {
        "W4A8_AWQ_BETA_CFG": [dict(BLOCK), dict(FP8)],
        "INT4_AWQ_CFG": dict(BLOCK),
        GROUPED: dict(BLOCK),
    }.get(name, dict(FP8))
    entries = {"*weight_quantizer": weights, "*input_quantizer": dict(FP8), "*lm_head*": {"enable": False}}
    return {"quant_cfg": {**entries, "default": {"enable": False}}, "algorithm": "preset"}


def new_style(name: str) -> dict[str, Any]:
    """ModelOpt 0.47: a list of entries, the last one wins."""
    old = old_style(name)["quant_cfg"]
    entries = [
        {"quantizer_name": "*", "enable": False},
        {"quantizer_name": "*weight_quantizer", "cfg": old["*weight_quantizer"]},
        {"quantizer_name": "*input_quantizer", "cfg": old["*input_quantizer"]},
        {"quantizer_name": "*lm_head*", "enable": False},
    ]
    return {"quant_cfg": entries, "algorithm": "preset"}


def test_every_format_whose_weights_are_stored_quantized_has_a_preset() -> None:
    stored = {qformat for qformat, spec in FORMATS.items() if spec.weights.stored is not None}
    assert stored == {qformat for qformat, spec in FORMATS.items() if spec.preset is not None}


@pytest.mark.parametrize("preset", [old_style, new_style])
@pytest.mark.parametrize("qformat", [QFormat.NONE, QFormat.INT8_WO, QFormat.INT4_WO])
def test_float_formats_simulate_nothing(qformat, preset) -> None:
    assert modelopt_config(quant_spec(qformat), LLAMA, preset) is None


@pytest.mark.parametrize("qformat", [QFormat.INT4_AWQ, QFormat.W4A8_AWQ])
def test_the_group_size_reaches_both_styles(qformat) -> None:
    old = modelopt_config(quant_spec(qformat, group_size=64), LLAMA, old_style)
    new = modelopt_config(quant_spec(qformat, group_size=64), LLAMA, new_style)
    assert old is not None
    assert new is not None
    weights = [old["quant_cfg"]["*weight_quantizer"], new["quant_cfg"][1]["cfg"]]
    for attributes in weights:
        first = attributes[0] if isinstance(attributes, list) else attributes
        assert first["block_sizes"] == {-1: 64, "type": "static"}


@pytest.mark.parametrize(("kv_cache", "bits"), [(KvFormat.FP8, (4, 3)), (KvFormat.INT8, 8)])
def test_the_kv_cache_uses_the_bmm_quantizers(kv_cache, bits) -> None:
    old = modelopt_config(quant_spec(QFormat.FP8, kv_cache), LLAMA, old_style)
    new = modelopt_config(quant_spec(QFormat.NONE, kv_cache), LLAMA, new_style)
    assert old is not None
    assert new is not None
    assert old["quant_cfg"]["*[kv]_bmm_quantizer"] == {"num_bits": bits, "axis": None, "enable": True}
    assert new["quant_cfg"] == [
        {"quantizer_name": "*", "enable": False},
        {"quantizer_name": "*[kv]_bmm_quantizer", "cfg": {"num_bits": bits, "axis": None}, "enable": True},
    ]


@pytest.mark.parametrize(
    ("spec", "family", "algorithm"),
    [
        (quant_spec(QFormat.INT8_SQ), LLAMA, "preset"),
        (quant_spec(QFormat.INT8_SQ), GEMMA, {"method": "smoothquant", "alpha": 0.5}),
        (quant_spec(QFormat.INT8_SQ, smoothquant_alpha=0.0), GEMMA, {"method": "smoothquant", "alpha": 0.0}),
        (quant_spec(QFormat.W4A8_AWQ), GEMMA, {"method": "awq_lite", "alpha_step": 1.0}),
        (quant_spec(QFormat.INT4_AWQ), GEMMA, "preset"),
        (quant_spec(QFormat.INT4_AWQ, awq_alpha_step=0.2), LLAMA, {"method": "awq_lite", "alpha_step": 0.2}),
    ],
)
def test_gemma_has_exceptions_and_given_values_win(spec, family, algorithm) -> None:
    config = modelopt_config(spec, family, new_style)
    assert config is not None
    assert config["algorithm"] == algorithm


def test_the_preset_itself_is_not_changed() -> None:
    kept = new_style("INT4_AWQ_CFG")
    modelopt_config(quant_spec(QFormat.INT4_AWQ, KvFormat.FP8, group_size=32), LLAMA, lambda _name: kept)
    assert kept == new_style("INT4_AWQ_CFG")


def test_scales_with_the_least_error_replace_the_algorithm() -> None:
    config = modelopt_config(quant_spec(QFormat.INT4_RTN, int4_scales="mse"), LLAMA, new_style)
    assert config is not None
    assert config["algorithm"] == {"method": "mse"}


@pytest.mark.parametrize(
    ("qformat", "why"),
    [
        (QFormat.INT4_AWQ, "export of AWQ"),
        (QFormat.INT4_WO, "trtllm-build itself"),
        (QFormat.FP8, "quant=fp8. It applies to quant=int4_gptq, int4_rtn"),
    ],
)
def test_scales_that_a_format_does_not_search_are_refused(qformat, why) -> None:
    (fault,) = scale_faults(qformat, "mse", "max")
    assert fault.message.startswith(f"quant.int4_scales=mse has no effect on quant={qformat}")
    assert why in str(fault)


def test_headroom_for_activations_in_fp4_replaces_the_algorithm() -> None:
    config = modelopt_config(quant_spec(QFormat.NVFP4, fp4_inputs="headroom"), LLAMA, lambda _: new_style(GROUPED))
    assert config is not None
    assert config["algorithm"] == {"method": "nvfp4_act_headroom"}
    (fault,) = scale_faults(QFormat.FP8, "max", "headroom")
    assert "fp4_inputs=headroom has no effect on quant=fp8. It applies to quant=nvfp4" in str(fault)


def test_what_an_old_modelopt_lacks_is_named() -> None:
    """0.37 has no scales by their error (`modelopt/torch/quantization/config.py`)."""
    (mse,) = version_faults("0.37.0", "mse", "max")
    assert "quant.int4_scales=mse needs an algorithm that nvidia-modelopt 0.37.0 does not have" in str(mse)
    (headroom,) = version_faults("0.37.0", "max", "headroom")
    assert "quant.fp4_inputs=headroom needs" in str(headroom)
    assert version_faults("0.37.0", "max", "max") == version_faults("0.47.0", "mse", "headroom") == []
