"""Settings -> the record that rules judge."""

from __future__ import annotations

from pipelines.domain.model_shape import ModelShape
from pipelines.flavours import Flavour
from pipelines.machine import Machine
from pipelines.rulebook.record import Deployment
from pipelines.settings import Settings


def target_gpu(settings: Settings, machine: Machine) -> tuple[str, float | None, float]:
    """Name, compute capability and memory in bytes of the GPU it is meant for; None and 0 where nothing is known."""
    hardware = settings.hardware
    if hardware.name != "auto":
        return hardware.name, hardware.sm, (hardware.memory_gb or 0) * 1e9
    if not machine.gpus:
        return hardware.name, None, 0.0
    gpu = machine.gpus[0]
    return gpu.name, gpu.sm, float(gpu.memory_bytes)


def deployment(settings: Settings, shape: ModelShape | None, flavour: Flavour, machine: Machine) -> Deployment:
    """What is to be deployed, in the rulebook's words."""
    return Deployment(
        engine=flavour.name,
        label=settings.model.label,
        shape=shape,
        qformat=settings.quant.qformat,
        kv_format=settings.kv_cache.dtype,
        group_size=settings.quant.group_size,
        sparsity=settings.sparsity.method,
        sm=target_gpu(settings, machine)[1],
        gpus_per_server=settings.hardware.gpus_per_server,
        kv_reuse=settings.kv_cache.enable_block_reuse,
        chunked_context=settings.runtime.enable_chunked_context,
        build=settings.build,
        triton=settings.triton,
    )
