"""Turn settings into the record that the rules judge."""

from __future__ import annotations

from pipelines.domain.model_shape import ModelShape
from pipelines.engines.description import EngineDescription
from pipelines.host.machine import Machine
from pipelines.plan.user_inputs import Found
from pipelines.predict.performance.hardware import resolved
from pipelines.rules.record import DeploymentFacts, Images
from pipelines.settings.root import Settings
from triton_repo.tensors import BLS


def deployment(
    settings: Settings, shape: ModelShape | None, engine: EngineDescription, machine: Machine, found: Found
) -> DeploymentFacts:
    """Return the facts of the planned deployment, for the rules."""
    target = resolved(settings.hardware, machine)
    guess, images = settings.speculative, settings.multimodal
    return DeploymentFacts(
        needs_gpu=engine.needs_gpu,
        writes_engine=engine.writes_engine,
        label=settings.model.label,
        shape=shape,
        qformat=settings.quant.qformat,
        candidates=settings.quant.mixed,
        dtype=settings.quant.dtype,
        kv_format=settings.kv_cache.dtype,
        group_size=settings.quant.group_size,
        sparsity=settings.sparsity.method,
        sm=target.sm,
        gpus_per_server=target.gpus_per_server,
        kv_reuse=settings.kv_cache.enable_block_reuse,
        chunked_context=settings.runtime.enable_chunked_context,
        build=settings.build,
        triton=settings.triton,
        dynamic_quantization=settings.engine.openvino.dynamic_quantization,
        through_bls=settings.benchmark.model_name == BLS,
        speculation=guess.mode,
        draft=found.draft or guess.draft_shape,
        draft_depth=guess.num_heads or guess.num_layers,
        same_vocabulary=found.same_vocabulary,
        pickled_heads=found.pickled_heads,
        adapters=found.adapters,
        images=(
            Images(images.model_type, images.visual_tokens, images.images_per_request)
            if images.visual_tokens is not None and images.model_type != "none"
            else None
        ),
        rotary=found.rotary,
    )
