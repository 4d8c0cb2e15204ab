"""Check configurations against the engine and each other, including faults that tritonserver would not notice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from pipelines.domain.errors import Fault, did_you_mean
from pipelines.engines.limits import EngineLimits
from pipelines.engines.registry import ServerBackend
from triton_repo.generate import logits_outputs
from triton_repo.tensors import BLS, DRAFT, INTERFACES, LLMAPI, LOGITS, TENSORRT_LLM, Tensor, interface

if TYPE_CHECKING:
    from tritonclient.grpc import model_config_pb2 as pb

Configs = Mapping[str, "pb.ModelConfig"]
TRUE = ("1", "true", "True", "TRUE")
"""Texts that the C++ backend reads as true."""


def config_faults(configs: Configs, limits: EngineLimits) -> list[Fault]:
    """Find everything that contradicts the engine or another model."""
    return [
        *_batch_faults(configs, limits),
        *_engine_faults(configs, limits),
        *_logits_faults(configs, limits),
        *_decoupled_faults(configs),
        *_rank_faults(configs, limits),
        *_node_faults(configs, limits),
    ]


def tensor_faults(configs: Configs, *, llmapi: bool) -> list[Fault]:
    """Find tensors that clients do not know, or know with another type or shape."""
    faults: list[Fault] = []
    ours = not llmapi and TENSORRT_LLM in configs and configs[TENSORRT_LLM].backend == ServerBackend.PYTHON
    for name, config in configs.items():
        known_as = LLMAPI if llmapi else TENSORRT_LLM if name == DRAFT else name
        if known_as in INTERFACES:
            tensors = interface(known_as, ours=ours)
            faults += _unknown(name, "input", config.input, tensors.inputs)
            faults += _unknown(name, "output", config.output, tensors.outputs)
    return faults


def parameter(config: pb.ModelConfig, key: str) -> str:
    """Return the text of a parameter; empty if it is absent."""
    return str(config.parameters[key].string_value) if key in config.parameters else ""


def _batch_faults(configs: Configs, limits: EngineLimits) -> Iterator[Fault]:
    most = limits.max_batch_size
    for name, config in configs.items():
        given = config.max_batch_size
        if given > most:
            yield Fault(
                f"{name} has max_batch_size={given}; the engine was built for {most}.",
                f"At most {most}.",
                f"Set triton.triton_max_batch_size={most} or less, or build with build.max_batch_size={given}.",
            )
        for preferred in config.dynamic_batching.preferred_batch_size:
            if preferred > given:
                yield Fault(
                    f"{name} has preferred_batch_size={preferred} and max_batch_size={given}.",
                    f"At most {given}; Triton does not load it otherwise.",
                )


def _engine_faults(configs: Configs, limits: EngineLimits) -> Iterator[Fault]:
    """Find parameters of tensorrt_llm that the engine was not built for."""
    config = configs.get(TENSORRT_LLM)
    if config is None:
        return
    beams = parameter(config, "max_beam_width")
    if beams and not (beams.isdigit() and 1 <= int(beams) <= limits.max_beam_width):
        yield Fault(
            f"{TENSORRT_LLM} has max_beam_width={beams}; the engine was built for {limits.max_beam_width}.",
            f"1 to {limits.max_beam_width}.",
            "Set triton.max_beam_width lower, or build with a higher build.max_beam_width.",
        )
    if parameter(config, "enable_chunked_context") in TRUE and limits.paged_context_fmha is False:
        yield Fault(
            f"{TENSORRT_LLM} has enable_chunked_context=true; the engine was built with use_paged_context_fmha=false.",
            todo="Set runtime.enable_chunked_context=false, or build the engine with paged context FMHA.",
        )


def _logits_faults(configs: Configs, limits: EngineLimits) -> Iterator[Fault]:
    """Check the type of logits: the C++ backend copies them bytewise, so another type would be read as garbage."""
    from tritonclient.grpc import model_config_pb2 as pb

    wanted = f"TYPE_{limits.logits_type}"
    for name, config in configs.items():
        for output in logits_outputs(config):
            given = pb.DataType.Name(output.data_type)
            if given != wanted:
                yield Fault(
                    f"{name} declares {output.name} as {given}; the engine's logits are {limits.logits_dtype}.",
                    f"It must be {wanted}.",
                    "Make the repository again: make repository",
                )


def _decoupled_faults(configs: Configs) -> Iterator[Fault]:
    engine, bls = configs.get(TENSORRT_LLM), configs.get(BLS)
    if engine is None or bls is None:
        return
    given = engine.model_transaction_policy.decoupled, bls.model_transaction_policy.decoupled
    if given[0] != given[1]:
        yield Fault(
            f"decoupled is {given[0]} in {TENSORRT_LLM} and {given[1]} in {BLS}.",
            "Both must be the same: streaming needs it in both.",
            "Set triton.decoupled_mode and make the repository again.",
        )


def _node_faults(configs: Configs, limits: EngineLimits) -> Iterator[Fault]:
    """Check the nodes: ranks are spread evenly, and several nodes need leader mode, with one server per rank.

    Source: `scripts/launch_triton_server.py` and `docs/model_config.md` of TensorRT-LLM's Triton backend.
    """
    nodes = parameter(configs[TENSORRT_LLM], "num_nodes") if TENSORRT_LLM in configs else ""
    if not nodes.isdigit() or int(nodes) == 1:
        return
    if limits.world_size % int(nodes):
        yield Fault(
            f"{TENSORRT_LLM} has num_nodes={nodes}; the engine has {limits.world_size} rank(s).",
            "Every node has the same number of ranks.",
            "Set triton.num_nodes to a divisor, or build with other build.tp_size and build.pp_size.",
        )
    if given := parameter(configs[TENSORRT_LLM], "participant_ids"):
        yield Fault(
            f"{TENSORRT_LLM} has num_nodes={nodes} and participant_ids='{given}'.",
            "Several nodes run in leader mode, which names no ranks.",
            "Leave out triton.participant_ids.",
        )


def _rank_faults(configs: Configs, limits: EngineLimits) -> Iterator[Fault]:
    """Check that every instance has one MPI rank and one GPU per rank of the engine; all nodes number GPUs alike."""
    config = configs.get(TENSORRT_LLM)
    if config is None:
        return
    several_nodes = parameter(config, "num_nodes") not in ("", "1")
    for key in ("gpu_device_ids", "participant_ids"):
        for group in filter(None, parameter(config, key).split(";")):
            ids = [part.strip() for part in group.split(",")]
            twice = len(set(ids)) != len(ids) and not several_nodes
            if len(ids) != limits.world_size or twice or not all(part.isdigit() for part in ids):
                yield Fault(
                    f"{TENSORRT_LLM} has {key}='{group}'; the engine has {limits.world_size} rank(s).",
                    f"It must name {limits.world_size} different number(s) per instance.",
                    f"Set triton.{key}, or build with other build.tp_size and build.pp_size.",
                )


def _unknown(model: str, kind: str, given: Iterable[pb.ModelInput], known: tuple[Tensor, ...]) -> Iterator[Fault]:
    """Find tensors that the reference lacks or defines differently."""
    from tritonclient.grpc import model_config_pb2 as pb

    by_name = {tensor.name: tensor for tensor in known}
    for entry in given:
        tensor = by_name.get(entry.name)
        if tensor is None:
            yield Fault(
                f"{model} declares the {kind} '{entry.name}', which TensorRT-LLM's template does not have.",
                "No client of that template sends or reads it.",
                did_you_mean(entry.name, by_name),
            )
            continue
        dtype, dims = pb.DataType.Name(entry.data_type).removeprefix("TYPE_"), tuple(entry.dims)
        if dims != tensor.dims or (tensor.dtype != LOGITS and dtype != tensor.dtype):
            yield Fault(
                f"{model} declares the {kind} '{entry.name}' as {dtype}{list(dims)}.",
                f"Clients take it for {tensor.dtype}{list(tensor.dims)}.",
            )
