"""Tensors, wiring and parameters are those of TensorRT-LLM's own templates, one by one.

`template_*.json` hold what their config.pbtxt files declare, extracted as JSON.
"""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from pipelines.doctor.doctor_command import TABLE
from pipelines.engines.limits import EngineLimits
from tests.support.engine_folders import write_engine
from tests.support.own_tensors import OWN
from triton_repo.config import TritonSettings
from triton_repo.generate import llmapi_config, repository_configs
from triton_repo.parameters import ENGINE_DIR, ImageSpec, RepositorySpec

IO = json.loads(TABLE.with_name("template_tensors.json").read_text())
STEPS = json.loads(TABLE.with_name("template_steps.json").read_text())
PARAMETERS = json.loads(TABLE.read_text())
PLACEHOLDERS = {
    "${logits_datatype}": "TYPE_FP16",
    "${encoder_input_features_data_type}": "TYPE_FP16",
}
ENCODER, IMAGES = "encoder-decoder models are not built here", "the group multimodal"
DECIDED_ELSEWHERE = {
    "triton_backend": "the flavour of the engine",
    "engine_dir": "the layout of the repository",
    "tokenizer_dir": "the layout of the repository",
    "logits_datatype": "the engine's logits_dtype",
    "enable_kv_cache_reuse": "kv_cache.enable_block_reuse",
    "enable_chunked_context": "runtime.enable_chunked_context",
    "prompt_embedding_table_data_type": "the engine's dtype",
    "tensorrt_llm_model_name": "the layout of the repository",
    "tensorrt_llm_draft_model_name": "the layout of the repository, where speculative.mode is draft_target",
    "encoder_input_features_data_type": ENCODER,
    "encoder_engine_dir": ENCODER,
    "cross_kv_cache_fraction": ENCODER,
    "multimodal_model_path": IMAGES,
    "multimodal_encoders_name": IMAGES,
    "max_num_images": IMAGES,
    "hf_model_path": IMAGES,
}
"""Parameter that is no setting of its own -> what decides it."""
MODELS = ("preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls")


WHOLE = RepositorySpec("tensorrt_llm", "m", "none", num_draft_tokens=4, images=ImageSpec("llava", "/hf", 2))


def test_the_bls_takes_and_gives_all_that_nvidias_multimodal_ensemble_does(tmp_path):
    engine = EngineLimits.load(write_engine(tmp_path, "openvino"))
    spec = RepositorySpec("openvino", "m", "none", images=ImageSpec("llava", "", 1))
    bls = repository_configs(TritonSettings(), engine, spec)["tensorrt_llm_bls"]
    for ours, theirs in (bls.input, "inputs"), (bls.output, "outputs"):
        wanted = {each["name"] for each in IO["multimodal_ensemble"][theirs]}
        assert wanted <= {each.name for each in ours}
    assert len(IO["multimodal_ensemble"]["inputs"]) == 28


@pytest.fixture(params=["openvino", "tensorrt_llm"])
def configs(request, tmp_path):
    """All five models of a bfloat16 engine whose logits are FP16."""
    engine = write_engine(tmp_path, request.param, logits_dtype="float16")
    return repository_configs(TritonSettings(), EngineLimits.load(engine), RepositorySpec(request.param, "m", "fp8"))


def as_reference(tensor: Any, *, is_input: bool) -> dict[str, Any]:
    """One tensor of a ModelConfig in the shape of the reference."""
    from tritonclient.grpc import model_config_pb2 as pb

    found = {"name": tensor.name, "dtype": pb.DataType.Name(tensor.data_type), "dims": list(tensor.dims)}
    found["optional"] = bool(is_input and tensor.optional)
    if tensor.HasField("reshape"):
        found["reshape"] = list(tensor.reshape.shape)
    if is_input and tensor.allow_ragged_batch:
        found["allow_ragged_batch"] = True
    return found


def expected(tensors: list[dict[str, Any]], table: str = "TYPE_BF16") -> list[dict[str, Any]]:
    """The reference with its types filled in; what it declares twice stands once.

    A prompt table has the engine's type everywhere: TensorRT-LLM fails a request with another one, and Triton an
    ensemble whose wires join two types. The template of the ensemble is for float16 alone.
    """
    filled = [{**tensor, "dtype": PLACEHOLDERS.get(tensor["dtype"], tensor["dtype"])} for tensor in tensors]
    for tensor in filled:
        if tensor["name"].lower().endswith("prompt_embedding_table"):
            tensor["dtype"] = table
    return [tensor for index, tensor in enumerate(filled) if tensor not in filled[:index]]


def table_type(configs: Any) -> str:
    """The CPU engine converts a table, so its clients send the type that NumPy has."""
    return "TYPE_FP16" if configs["tensorrt_llm"].backend == "python" else "TYPE_BF16"


def beside_the_reference(configs: Any, model: str, kind: str) -> list[dict[str, Any]]:
    ours = configs["tensorrt_llm"].backend == "python"
    return OWN.get(model, {}).get(kind, []) if ours else []


@pytest.mark.parametrize("model", MODELS)
def test_inputs_are_those_of_the_reference_in_its_order(configs, model):
    found = [as_reference(tensor, is_input=True) for tensor in configs[model].input]
    assert found == expected(IO[model]["inputs"], table_type(configs)) + beside_the_reference(configs, model, "inputs")


@pytest.mark.parametrize("model", MODELS)
def test_outputs_are_those_of_the_reference_in_its_order(configs, model):
    found = [as_reference(tensor, is_input=False) for tensor in configs[model].output]
    assert found == expected(IO[model]["outputs"], table_type(configs)) + beside_the_reference(
        configs, model, "outputs"
    )


def test_the_reference_declares_exactly_one_tensor_twice():
    """The only difference between it and ours."""
    twice = {
        (model, tensor["name"])
        for model in MODELS
        for kind in ("inputs", "outputs")
        for tensor in IO[model][kind]
        if IO[model][kind].count(tensor) > 1
    }
    assert twice == {("ensemble", "kv_cache_alloc_total_blocks")}


def test_llmapi_tensors_are_those_of_the_reference():
    config = llmapi_config(TritonSettings())
    reference = IO["llmapi_tensorrt_llm"]
    assert [as_reference(tensor, is_input=True) for tensor in config.input] == expected(reference["inputs"])
    assert [as_reference(tensor, is_input=False) for tensor in config.output] == expected(reference["outputs"])
    assert (config.max_batch_size, config.model_transaction_policy.decoupled) == (0, True)


def test_the_vision_model_has_the_tensors_of_the_reference(tmp_path):
    limits = EngineLimits.load(write_engine(tmp_path, logits_dtype="float16"))
    config = repository_configs(TritonSettings(), limits, WHOLE)["multimodal_encoders"]
    reference = IO["multimodal_encoders"]
    assert [as_reference(tensor, is_input=True) for tensor in config.input] == expected(reference["inputs"])
    assert [as_reference(tensor, is_input=False) for tensor in config.output] == expected(reference["outputs"])


def test_the_ensemble_is_wired_as_the_reference(configs):
    found = [
        (step.model_name, without_keys(step.input_map), without_keys(step.output_map))
        for step in configs["ensemble"].ensemble_scheduling.step
    ]
    assert found == [(step["model_name"], dict(step["input_map"]), dict(step["output_map"])) for step in STEPS]
    keys = [
        wire
        for step in configs["ensemble"].ensemble_scheduling.step
        for wire in (*step.input_map.values(), *step.output_map.values())
        if wire.startswith("_CANCELLATION_KEY")
    ]
    assert len(keys) == (4 if configs["tensorrt_llm"].backend == "python" else 0)


def without_keys(wires: Mapping[str, str]) -> dict[str, str]:
    """The wires that the reference knows."""
    return {name: wire for name, wire in wires.items() if not wire.startswith("_CANCELLATION_KEY")}


def test_every_wire_ends_at_a_tensor_of_the_same_type(configs):
    """Triton would refuse the ensemble, but only when it loads."""
    types: dict[str, int] = {}
    for step in configs["ensemble"].ensemble_scheduling.step:
        model = configs[step.model_name]
        for tensors, wires in ((model.input, step.input_map), (model.output, step.output_map)):
            known = {tensor.name: tensor.data_type for tensor in tensors}
            for name, wire in wires.items():
                assert types.setdefault(wire, known[name]) == known[name], wire
    for tensor in (*configs["ensemble"].input, *configs["ensemble"].output):
        assert types[tensor.name] == tensor.data_type


@pytest.mark.parametrize("model", MODELS)
def test_every_template_parameter_is_a_setting_or_decided_elsewhere(model):
    known = {*TritonSettings.model_fields, *DECIDED_ELSEWHERE}
    assert set(PARAMETERS[model]) <= known


def test_no_parameter_is_decided_twice():
    assert not set(TritonSettings.model_fields) & set(DECIDED_ELSEWHERE)


def test_defaults_are_those_of_the_reference():
    """Where the reference has one; beams follow the engine, and streaming is on."""
    ours = {"max_beam_width": None, "executor_worker_path": None}
    for model in MODELS:
        for name, entry in PARAMETERS[model].items():
            if name in TritonSettings.model_fields and name not in ours and entry["default"] is not None:
                assert TritonSettings.model_fields[name].default == entry["default"], name


def test_choices_are_those_of_the_reference():
    gone = {"V1", "v1"}  # static batching, with which the server of TensorRT-LLM 1.2 stops (executorImpl.cpp)
    for name, entry in PARAMETERS["tensorrt_llm"].items():
        if name in TritonSettings.model_fields and entry.get("choices"):
            extra = {"lookahead_window_size": 1, "lookahead_ngram_size": 1, "lookahead_verification_set_size": 1}
            for choice in set(entry["choices"]) - gone:
                assert getattr(TritonSettings(**extra, **{name: choice}), name) == choice


def test_parameter_keys_are_those_of_the_reference(tmp_path):
    """What the C++ backend looks up, and not one key more."""
    hard_coded = {"FORCE_CPU_ONLY_INPUT_TENSORS", "executor_worker_path"}
    of_our_own = {"exclude_input_in_output"}  # with a draft model our tensorrt_llm_bls puts the answer together
    every = TritonSettings(
        max_tokens_in_paged_kv_cache=1,
        max_attention_window_size=(1,),
        sink_token_length=1,
        gpu_device_ids=((0,),),
        participant_ids=((1,),),
        lora_prefetch_dir="/lora",
        decoding_mode="lookahead",
        lookahead_window_size=1,
        lookahead_ngram_size=1,
        lookahead_verification_set_size=1,
        medusa_choices="{0}",
        eagle_choices="{0}",
        guided_decoding_backend="xgrammar",
        xgrammar_tokenizer_info_path="/info.json",
    )
    limits = EngineLimits.load(write_engine(tmp_path))
    configs = repository_configs(every, limits, WHOLE)
    absent = {name for name, why in DECIDED_ELSEWHERE.items() if "not built here" in why}
    for model in ("preprocessing", "postprocessing", "tensorrt_llm", "tensorrt_llm_bls", "multimodal_encoders"):
        keys = {entry["triton_key"] for name, entry in PARAMETERS[model].items() if name not in absent}
        keys = {
            key for key in keys if "." not in key and key not in ("backend", "max_batch_size", "(tensor data_type)")
        }
        ours = hard_coded | (of_our_own if model == "tensorrt_llm_bls" else set())
        assert set(configs[model].parameters) - ours == keys, model
    assert configs["tensorrt_llm"].parameters["gpt_model_path"].string_value == ENGINE_DIR
