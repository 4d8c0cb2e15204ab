"""Check configurations against the engine and each other, including faults that tritonserver would not notice."""

from collections.abc import Iterable, Iterator, Mapping

from tritonclient.grpc import model_config_pb2 as pb

from pipelines.domain.errors import Fault, did_you_mean
from pipelines.engines.limits import EngineLimits
from pipelines.engines.registry import ServerBackend
from triton_repo.config import TritonSettings
from triton_repo.generate import engine_types, logits_outputs
from triton_repo.parameters import RepositorySpec
from triton_repo.tensors import BLS, DRAFT, INTERFACES, LLMAPI, LOGITS, TABLE, TENSORRT_LLM, Tensor, interface

Configs = Mapping[str, pb.ModelConfig]
TRUE = ("1", "true", "True", "TRUE")
"""Texts that the C++ backend reads as true."""


def config_faults(configs: Configs, limits: EngineLimits) -> Iterator[Fault]:
    """Find everything that contradicts the engine or another model."""
    yield from _batch_faults(configs, limits)
    yield from _engine_faults(configs, limits)
    yield from _type_faults(configs, limits)
    yield from _decoupled_faults(configs)
    yield from _rank_faults(configs, limits)
    yield from _node_faults(configs, limits)


def tensor_faults(configs: Configs, *, llmapi: bool) -> Iterator[Fault]:
    """Find tensors that clients do not know, or know with another type or shape."""
    ours = not llmapi and TENSORRT_LLM in configs and configs[TENSORRT_LLM].backend == ServerBackend.PYTHON
    for name, config in configs.items():
        interface_name = LLMAPI if llmapi else TENSORRT_LLM if name == DRAFT else name
        if interface_name in INTERFACES:
            tensors = interface(interface_name, ours=ours)
            yield from _unknown(name, "input", config.input, tensors.inputs)
            yield from _unknown(name, "output", config.output, tensors.outputs)


def parameter(config: pb.ModelConfig, key: str) -> str:
    """Return the text of a parameter; empty if it is absent."""
    return str(config.parameters[key].string_value) if key in config.parameters else ""


def _batch_faults(configs: Configs, limits: EngineLimits) -> Iterator[Fault]:
    most = limits.max_batch_size
    for name, config in configs.items():
        batch = config.max_batch_size
        if batch > most:
            yield Fault(
                f"{name} has max_batch_size={batch}; the engine was built for {most}.",
                f"At most {most}.",
                f"Set triton.triton_max_batch_size={most} or less, or build with build.max_batch_size={batch}.",
            )
        for preferred in config.dynamic_batching.preferred_batch_size:
            if preferred > batch:
                yield Fault(
                    f"{name} has preferred_batch_size={preferred} and max_batch_size={batch}.",
                    f"At most {batch}; Triton does not load it otherwise.",
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


def _type_faults(configs: Configs, limits: EngineLimits) -> Iterator[Fault]:
    """Check the types that the engine decides.

    The C++ backend copies raw bytes of logits, so another type would be read as garbage. It fails a request whose
    prompt table has another type; where the engine takes no tables, theirs does no harm.
    """
    types = engine_types(limits)
    for name, config in configs.items():
        of_engine = [
            (output, LOGITS, f"the engine's logits are {limits.logits_dtype}") for output in logits_outputs(config)
        ]
        if limits.max_prompt_embedding_table_size and name != DRAFT:
            tensors = (each for each in (*config.input, *config.output) if each.name.lower().endswith(TABLE))
            of_engine += [(each, TABLE, f"the engine computes in {limits.dtype}") for each in tensors]
        for tensor, kind, why in of_engine:
            declared, expected = pb.DataType.Name(tensor.data_type), f"TYPE_{types[kind]}"
            if declared != expected:
                yield Fault(
                    f"{name} declares {tensor.name} as {declared}; {why}.",
                    f"It must be {expected}.",
                    "Make the repository again: make repository",
                )


def _decoupled_faults(configs: Configs) -> Iterator[Fault]:
    engine, bls = configs.get(TENSORRT_LLM), configs.get(BLS)
    if engine is None or bls is None:
        return
    ours, theirs = (each.model_transaction_policy.decoupled for each in (engine, bls))
    if ours != theirs:
        yield Fault(
            f"decoupled is {ours} in {TENSORRT_LLM} and {theirs} in {BLS}.",
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
    if ranks := parameter(configs[TENSORRT_LLM], "participant_ids"):
        yield Fault(
            f"{TENSORRT_LLM} has num_nodes={nodes} and participant_ids='{ranks}'.",
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


def _unknown(model: str, kind: str, entries: Iterable[pb.ModelInput], tensors: tuple[Tensor, ...]) -> Iterator[Fault]:
    """Find tensors that the reference lacks or defines differently."""
    by_name = {tensor.name: tensor for tensor in tensors}
    for entry in entries:
        tensor = by_name.get(entry.name)
        if tensor is None:
            yield Fault(
                f"{model} declares the {kind} '{entry.name}', which TensorRT-LLM's template does not have.",
                "No client of that template sends or reads it.",
                did_you_mean(entry.name, by_name),
            )
            continue
        dtype, dims = pb.DataType.Name(entry.data_type).removeprefix("TYPE_"), tuple(entry.dims)
        if dims != tensor.dims or tensor.dtype not in (LOGITS, TABLE, dtype):
            yield Fault(
                f"{model} declares the {kind} '{entry.name}' as {dtype}{list(dims)}.",
                f"Clients take it for {dtype if tensor.dtype in (LOGITS, TABLE) else tensor.dtype}{list(tensor.dims)}.",
            )


# Check a draft engine against its target: faults that stop speculative decoding or change its answers.
#
# Source: TensorRT-LLM `examples/draft_target_model/README.md` and
# `docs/source/legacy/advanced/speculative-decoding.md`: one vocabulary, the target built with max_draft_len, paged
# context FMHA and KV reuse in both. Two models on one GPU each take their share of what is free when they load
# (tensorrtllm_backend issue 577).

HALF = 0.5


def draft_faults(
    target: EngineLimits, draft: EngineLimits, settings: TritonSettings, spec: RepositorySpec
) -> Iterator[Fault]:
    """Find everything that does not match."""
    yield from draft_engine_faults(target, draft)
    if spec.engine.server is ServerBackend.TENSORRTLLM:
        yield from _gpu_engines(target, draft, spec)
        yield from _gpu_placement(target, draft, settings)


def draft_engine_faults(target: EngineLimits, draft: EngineLimits) -> Iterator[Fault]:
    """Find faults that follow from the two engines alone: they differ in tokens, or the draft reads less."""
    if draft.flavour != target.flavour:
        yield Fault(
            f"The draft engine is of flavour '{draft.flavour}', the engine of '{target.flavour}'.",
            todo="Build both with the same engine=.",
        )
    if draft.vocab_size != target.vocab_size:
        yield Fault(
            f"The draft engine has {draft.vocab_size} tokens, the engine {target.vocab_size}.",
            "Logits are compared token by token, so both need one vocab_size, padding included.",
            "Take a draft model of that size.",
        )
    if draft.version != target.version:
        yield Fault(
            f"The draft engine was built by version {draft.version}, the engine by {target.version}.",
            "One server runs both.",
            "Build both again with the same version.",
        )
    # trtllm-build adds max_draft_len to max_seq_len for the draft (builder.py), which does not lengthen sequences
    needed = {"max_seq_len": target.max_seq_len - target.max_draft_len, "max_input_len": target.max_input_len}
    for name, ours in needed.items():
        theirs = getattr(draft, name)
        if theirs < ours:
            yield Fault(
                f"The draft engine has {name}={theirs}; the engine has {ours}.",
                "It reads everything the engine has read.",
                f"Build the draft with {name}={ours}, or the engine with {theirs}.",
            )


def _gpu_engines(target: EngineLimits, draft: EngineLimits, spec: RepositorySpec) -> Iterator[Fault]:
    drafts = spec.num_draft_tokens or 0
    if target.max_draft_len < drafts:
        yield Fault(
            f"speculative.num_draft_tokens={drafts}; the engine was built with max_draft_len={target.max_draft_len}.",
            todo=f"Build it with build.speculative_decoding_mode=draft_tokens_external build.max_draft_len={drafts}.",
        )
    for name, limits in (("engine", target), ("draft engine", draft)):
        if limits.paged_context_fmha is False:
            yield Fault(
                f"The {name} was built with use_paged_context_fmha=disable.",
                "Drafting needs it in both, so that neither reads the prompt again at every step.",
                "Build it with build.trtllm.use_paged_context_fmha=enable.",
            )
    if not spec.enable_kv_cache_reuse:
        yield Fault(
            "kv_cache.enable_block_reuse=false: with a draft model both would read the prompt again at every step.",
            todo="Set kv_cache.enable_block_reuse=true.",
        )
    if draft.logits_dtype != target.logits_dtype:
        yield Fault(
            f"The draft engine's logits are {draft.logits_dtype}, the engine's {target.logits_dtype}.",
            "use_draft_logits hands them over bytewise.",
            "Build both with the same logits_dtype.",
        )


def _gpu_placement(target: EngineLimits, draft: EngineLimits, settings: TritonSettings) -> Iterator[Fault]:
    if settings.participant_ids is not None:
        yield Fault(
            f"triton.participant_ids={settings.participant_ids} conflicts with a draft model, whose ranks it does not"
            " name.",
            todo="Leave it out: leader mode, or orchestrator mode that spawns.",
        )
    if draft.world_size != target.world_size:
        yield Fault(
            f"The draft engine has {draft.world_size} rank(s), the engine {target.world_size}.",
            "Every rank of the server loads both.",
            "Build both with the same build.tp_size and build.pp_size.",
        )
    for group in settings.draft_gpu_device_ids or ():
        if len(group) != draft.world_size or len(set(group)) != len(group):
            yield Fault(
                f"triton.draft_gpu_device_ids has {list(group)}; the draft engine has {draft.world_size} rank(s).",
                f"It must name {draft.world_size} different number(s) per instance.",
            )
    shared = settings.draft_gpu_device_ids is None
    fraction = settings.kv_cache_free_gpu_mem_fraction
    if shared and fraction > HALF:
        yield Fault(
            f"triton.kv_cache_free_gpu_mem_fraction={fraction:g} with a draft model on the same GPU: the model that"
            " loads first would leave too little for the other.",
            f"At most {HALF:g}.",
            "Set it lower, or give the draft model its own GPUs with triton.draft_gpu_device_ids.",
        )
