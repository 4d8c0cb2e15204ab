"""Judge a local model folder that is already quantized: whether the configuration takes it over as it is."""

from __future__ import annotations

from pipelines.checkpoint.declarations import quantization_of
from pipelines.checkpoint.given import import_faults
from pipelines.domain.errors import Fault
from pipelines.engines.registry import EngineDescription
from pipelines.plan.targets import Target, has_baseline
from pipelines.settings.root import Settings
from pipelines.store.sources import model_config


def is_given(settings: Settings) -> bool:
    """Return whether the model is a local folder whose weights are already quantized."""
    folder = settings.model.folder
    return folder is not None and quantization_of(folder, model_config(folder)) is not None


def given_faults(settings: Settings, engine: EngineDescription, target: Target) -> list[Fault]:
    """Return why such a folder cannot be used like that; none for a folder in 16 bit."""
    folder, build = settings.model.folder, settings.build
    if folder is None:
        return []
    faults = import_faults(
        folder,
        model_config(folder),
        qformat=settings.quant.qformat,
        group_size=settings.quant.group_size,
        kv_cache=settings.kv_cache.dtype,
        world_size=build.tp_size * build.pp_size,
        effective_bits=settings.quant.effective_bits,
        candidates=settings.quant.mixed,
    )
    if faults or not is_given(settings):
        return faults
    what = f"model.path='{folder}' is already quantized"
    if not engine.writes_engine:
        faults.append(Fault(f"{what}; engine={engine.setting} takes models in 16 bit.", todo="Use another engine."))
    for name in ("smoothquant_alpha", "awq_alpha_step", "fp4_inputs"):
        if (value := getattr(settings.quant, name)) not in (None, "max"):
            faults.append(Fault(f"{what}; quant.{name}={value} has no effect.", todo=f"Leave quant.{name} out."))
    changing = {
        "prune": settings.prune.method,
        "sparsity": settings.sparsity.method,
        "recover": settings.recover.method,
    }
    for group, method in changing.items():
        if method != "none":
            faults.append(Fault(f"{what}, so {group}={method} cannot change its weights.", todo=f"Set {group}=none."))
    if has_baseline(settings, target):
        faults.append(
            Fault(
                f"{what}: the 16-bit model to compare it with is not known.",
                todo="Set eval.baseline=skip, which measures without a verdict"
                " (make fidelity: fidelity.reference_path=/the/original).",
            )
        )
    return faults
