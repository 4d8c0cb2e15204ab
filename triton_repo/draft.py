"""Check a draft engine against its target: what would stop speculative decoding, or make it answer wrongly.

Source: TensorRT-LLM `examples/draft_target_model/README.md` and `docs/source/legacy/advanced/speculative-decoding.md`:
one vocabulary, the target built with max_draft_len, paged context FMHA and KV reuse in both. Two models on one GPU each
take their share of what is free when they load (tensorrtllm_backend issue 577).
"""

from __future__ import annotations

from collections.abc import Iterator

from pipelines.domain.errors import Fault
from pipelines.engines.limits import EngineLimits
from pipelines.engines.registry import ServerBackend
from triton_repo.config import TritonSettings
from triton_repo.parameters import RepositorySpec

HALF = 0.5


def draft_faults(
    target: EngineLimits, draft: EngineLimits, settings: TritonSettings, spec: RepositorySpec
) -> list[Fault]:
    """Find everything that does not match.

    Args:
        target: limits of the target engine.
        draft: limits of the draft engine.
        settings: conf/triton.
        spec: of the repository.
    """
    faults = engine_faults(target, draft)
    if spec.engine.server is ServerBackend.TENSORRTLLM:
        faults += [*_gpu_engines(target, draft, spec), *_gpu_placement(target, draft, settings)]
    return faults


def engine_faults(target: EngineLimits, draft: EngineLimits) -> list[Fault]:
    """Find faults that follow from the two engines alone."""
    return [*_same_tokens(target, draft), *_same_room(target, draft)]


def _same_tokens(target: EngineLimits, draft: EngineLimits) -> Iterator[Fault]:
    if draft.flavour != target.flavour:
        yield Fault(
            f"The draft engine is of flavour '{draft.flavour}', the engine of '{target.flavour}'.",
            todo="Build both with the same engine=.",
        )
    if draft.vocab_size != target.vocab_size:
        yield Fault(
            f"The draft engine has {draft.vocab_size} tokens, the engine {target.vocab_size}.",
            "A guess is checked token by token, so both need one vocabulary.",
            "Take a draft model of the same family.",
        )
    if draft.version != target.version:
        yield Fault(
            f"The draft engine was built by version {draft.version}, the engine by {target.version}.",
            "One server runs both.",
            "Build both again with the same version.",
        )


def _same_room(target: EngineLimits, draft: EngineLimits) -> Iterator[Fault]:
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
    wanted = spec.num_draft_tokens or 0
    if target.max_draft_len < wanted:
        yield Fault(
            f"speculative.num_draft_tokens={wanted}; the engine was built with max_draft_len={target.max_draft_len}.",
            todo=f"Build it with build.speculative_decoding_mode=draft_tokens_external build.max_draft_len={wanted}.",
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
            f"triton.participant_ids={settings.participant_ids} does not go with a draft model, whose ranks it does not"
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
            "Set it lower, or give the draft model GPUs of its own with triton.draft_gpu_device_ids.",
        )
