"""Turn typed settings into `ModelConfig` messages and config.pbtxt, without text templates to fill in."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from pipelines.engines.limits import TRITON_TYPES, EngineLimits
from pipelines.engines.registry import ServerBackend
from triton_repo import parameters
from triton_repo.config import TritonSettings
from triton_repo.parameters import RepositorySpec
from triton_repo.tensors import (
    BLS,
    DRAFT,
    ENCODERS,
    ENSEMBLE,
    LLMAPI,
    LOGITS,
    POSTPROCESSING,
    PREPROCESSING,
    TABLE,
    TENSORRT_LLM,
    Tensor,
    interface,
)

# How the ensemble feeds its three models: tensors whose names begin with "_" never leave the server.
#
# `template_steps.json` is `triton_backend/all_models/inflight_batcher_llm/ensemble/config.pbtxt` (TensorRT-LLM 1.2).


STEPS = json.loads(Path(__file__).with_name("template_steps.json").read_text(encoding="utf-8"))
"""Of each step, the model, and its inputs and outputs -> the ensemble's tensors."""
CANCELLATION = [
    {"model_name": PREPROCESSING, "output_map": {"CANCELLATION_KEY": "_CANCELLATION_KEY"}},
    {
        "model_name": TENSORRT_LLM,
        "input_map": {"cancellation_key": "_CANCELLATION_KEY"},
        "output_map": {"cancellation_key": "_CANCELLATION_KEY_OF_RESPONSE"},
    },
    {"model_name": POSTPROCESSING, "input_map": {"CANCELLATION_KEY": "_CANCELLATION_KEY_OF_RESPONSE"}},
]
"""Added where `tensorrt_llm` is ours, so that a client of the ensemble that leaves frees its slot.

Triton tells a step of a cancellation only when the step begins. While an answer streams, postprocessing begins again
with every response and is told; the key says which request of `tensorrt_llm` it must stop. A request id would not do:
clients may leave it out or use the same one twice.
"""

MODELS = (PREPROCESSING, TENSORRT_LLM, POSTPROCESSING, ENSEMBLE, BLS)
"""The models of every repository of the in-flight batcher layout."""
HEADER = "# Written from conf/triton; change it there and make the repository again.\n"


def repository_configs(
    settings: TritonSettings, limits: EngineLimits, spec: RepositorySpec
) -> dict[str, pb.ModelConfig]:
    """Return the configuration of every model of the in-flight batcher layout, by model."""
    batch = settings.triton_max_batch_size or limits.max_batch_size
    ours = spec.engine.server is ServerBackend.PYTHON
    types = engine_types(limits)
    configs = {name: _model(name, batch, types, ours=ours) for name in MODELS}
    for name in (PREPROCESSING, POSTPROCESSING, BLS):
        configs[name].backend = "python"
    configs[TENSORRT_LLM].backend = str(spec.engine.server)
    if not ours:
        for name in (PREPROCESSING, TENSORRT_LLM):
            _queue(configs[name], batch, settings)
    for name in (TENSORRT_LLM, BLS):
        configs[name].model_transaction_policy.decoupled = settings.decoupled_mode
    _instances(configs[PREPROCESSING], settings.preprocessing_instance_count)
    _instances(configs[POSTPROCESSING], settings.postprocessing_instance_count)
    _instances(configs[BLS], settings.bls_instance_count)
    # one per group of GPUs; the CPU engine batches all requests in one
    _instances(configs[TENSORRT_LLM], 1 if ours else len(settings.gpu_device_ids or (None,)))
    _parameters(configs[PREPROCESSING], parameters.preprocessing(settings, spec))
    _parameters(configs[POSTPROCESSING], parameters.postprocessing(settings))
    _parameters(configs[BLS], parameters.bls(settings, spec))
    _parameters(configs[TENSORRT_LLM], parameters.tensorrt_llm(settings, limits, spec))
    _ensemble(configs[ENSEMBLE], (*STEPS, *CANCELLATION) if ours else STEPS)
    if spec.images is not None:
        configs[ENCODERS] = _model(ENCODERS, batch, types)
        configs[ENCODERS].backend = "python"
        if not ours:
            _queue(configs[ENCODERS], batch, settings)
        _instances(configs[ENCODERS], 1)
        _parameters(configs[ENCODERS], parameters.encoders(spec.images, spec))
    return configs


def draft_config(settings: TritonSettings, limits: EngineLimits, spec: RepositorySpec) -> pb.ModelConfig:
    """Return the configuration of the draft model on GPUs: a second `tensorrt_llm`."""
    batch = min(settings.triton_max_batch_size or limits.max_batch_size, limits.max_batch_size)
    config = _model(TENSORRT_LLM, batch, engine_types(limits))
    config.name, config.backend = DRAFT, "tensorrtllm"
    _queue(config, batch, settings)
    config.model_transaction_policy.decoupled = settings.decoupled_mode
    _instances(config, len(settings.draft_gpu_device_ids or settings.gpu_device_ids or (None,)))
    _parameters(config, parameters.draft(settings, limits, spec))
    return config


def llmapi_config(settings: TritonSettings) -> pb.ModelConfig:
    """Return the configuration of the single llmapi model.

    max_batch_size is 0 (its model.py takes requests one by one). Both values are also in model.yaml, where that
    model.py reads them; here they are for servers started with --disable-auto-complete-config, which do not query it.
    """
    config = _model(LLMAPI, 0, {})
    config.name, config.backend = TENSORRT_LLM, "python"
    config.model_transaction_policy.decoupled = settings.decoupled_mode
    _instances(config, 1)
    return config


def to_text(config: pb.ModelConfig) -> str:
    """Return the content of config.pbtxt."""
    return HEADER + str(text_format.MessageToString(config))


def parse(text: str) -> pb.ModelConfig:
    """Read config.pbtxt.

    Raises:
        google.protobuf.text_format.ParseError: it is not a ModelConfig, e.g. a number is still a placeholder.
    """
    return text_format.Parse(text, pb.ModelConfig())


def engine_types(limits: EngineLimits) -> dict[str, str]:
    """Return the types that the engine decides; the CPU engine converts a prompt table.

    Source: TensorRT-LLM `cpp/tensorrt_llm/batch_manager/promptTuningBuffers.cpp` (1.3.0rc3): another type than the
    model's fails the request.
    """
    converts = limits.engine.server is ServerBackend.PYTHON
    return {LOGITS: limits.logits_type, TABLE: "FP16" if converts else TRITON_TYPES.get(limits.dtype, "FP16")}


def _model(name: str, batch: int, types: Mapping[str, str], *, ours: bool = False) -> pb.ModelConfig:
    config = pb.ModelConfig(name=name, max_batch_size=batch)
    tensors = interface(name, ours=ours)
    for tensor in tensors.inputs:
        _fill(config.input.add(optional=tensor.optional, allow_ragged_batch=tensor.ragged), tensor, types)
    for tensor in tensors.outputs:
        _fill(config.output.add(), tensor, types)
    return config


def _fill(target: pb.ModelInput | pb.ModelOutput, tensor: Tensor, types: Mapping[str, str]) -> None:
    target.name = tensor.name
    target.data_type = pb.DataType.Value(f"TYPE_{types.get(tensor.dtype, tensor.dtype)}")
    target.dims.extend(tensor.dims)
    if tensor.scalar:
        target.reshape.SetInParent()  # an empty shape: the value without a dimension


def _queue(config: pb.ModelConfig, batch: int, settings: TritonSettings) -> None:
    """Let Triton group waiting requests, as TensorRT-LLM's templates do; its backend reads the bound of its queue here.

    Not before the CPU engine: there a request that comes while another is taken may wait for 0.5 s (decision 19).
    """
    batching = config.dynamic_batching
    batching.preferred_batch_size.append(batch)
    batching.max_queue_delay_microseconds = settings.max_queue_delay_microseconds
    batching.default_queue_policy.max_queue_size = settings.max_queue_size


def _instances(config: pb.ModelConfig, count: int) -> None:
    """Set KIND_CPU, even on a GPU machine, because the backend places the engine itself."""
    config.instance_group.add(count=count, kind=pb.ModelInstanceGroup.KIND_CPU)


def _parameters(config: pb.ModelConfig, values: Mapping[str, str]) -> None:
    for name, value in values.items():
        config.parameters[name].string_value = value


def _ensemble(config: pb.ModelConfig, steps: Iterable[Mapping[str, Any]]) -> None:
    """Wire the three models; the wires of a model may come in several parts."""
    config.platform = "ensemble"
    targets: dict[str, pb.ModelEnsembling.Step] = {}
    for step in steps:
        name = step["model_name"]
        if name not in targets:
            targets[name] = config.ensemble_scheduling.step.add(model_name=name, model_version=-1)
        targets[name].input_map.update(dict(step.get("input_map", ())))
        targets[name].output_map.update(dict(step.get("output_map", ())))


def logits_outputs(config: pb.ModelConfig) -> Iterable[pb.ModelOutput]:
    """List the outputs with raw logits."""
    return (output for output in config.output if output.name in ("context_logits", "generation_logits"))
