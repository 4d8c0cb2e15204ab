"""NVIDIA's tuned files for the LLM API: the nearest one to a model, a GPU and a load.

Source: `llm_api_options/tuned.json`, of `examples/configs` of TensorRT-LLM. Only files of models that are built here.
"""

from __future__ import annotations

import math

from pipelines.domain.formats import KvFormat
from pipelines.engines.tensorrt_llm.config import OWN_SETTINGS
from pipelines.engines.tensorrt_llm.llm_api import TunedFile, complaints, tuned_files
from pipelines.engines.tuning import Recommended, TunedCase
from pipelines.settings.base import flat

CHOSEN_ELSEWHERE = ("kv_cache_config.dtype", "kv_cache_config.free_gpu_memory_fraction")
"""Options of a file that are settings here and that advice may set; the others stay with the load."""


def nearest(case: TunedCase) -> TunedFile | None:
    """Return the file for this model, GPU and number of ranks whose load is nearest; None if there is none."""
    build, model = case.settings.build, case.settings.model.hub_id
    ranks, load = build.tp_size * build.pp_size, _load(case)
    fitting = [
        each
        for each in tuned_files().values()
        if model in each.models
        and (each.gpu is None or (case.gpu.gpu or "").startswith(f"{each.gpu}-"))
        and each.gpus in (None, ranks)
    ]
    return min(fitting, key=lambda each: _distance(each, load), default=None)


def recommend(case: TunedCase) -> tuple[Recommended, ...]:
    """Recommend the nearest file, with the settings that it gives; nothing that its version would refuse."""
    tuned = nearest(case)
    if tuned is None or complaints(tuned.options, case.settings.image.llm_api_version, ""):
        return ()
    own_values = {name: value for name, value in flat(tuned.options).items() if name in OWN_SETTINGS}
    left = ", ".join(f"{name}={value}" for name, value in own_values.items() if name not in CHOSEN_ELSEWHERE)
    isl, osl, concurrency = _load(case)
    reason = (
        f"NVIDIA's nearest file: {_tuned_for(tuned)}; here {isl:,.0f} in, {osl:,.0f} out, concurrency {concurrency}"
    )
    reason += f"; not taken, as they follow the load here: {left}" if left else ""
    source = f"{tuned.file}@{tuned.commit[:7]}"
    advice = [Recommended("llm_api", "tuned", tuned.file, reason, source)]
    for name in CHOSEN_ELSEWHERE:
        if name in own_values and OWN_SETTINGS[name].holds(own_values[name]):
            own, value = OWN_SETTINGS[name], own_values[name]
            value = KvFormat(value) if name == "kv_cache_config.dtype" else value
            advice.append(Recommended(own.group, own.field, value, "as in that file", source))
    return tuple(advice)


def _load(case: TunedCase) -> tuple[float, float, int]:
    """Return the mean lengths of the load, and its highest concurrency; 32, the last level, where none is given."""
    workload, levels = case.settings.workload, case.settings.benchmark.concurrency
    return workload.isl.mean or 1, workload.osl.mean or 1, max(levels or (32,))


def _distance(each: TunedFile, load: tuple[float, float, int]) -> float:
    own = (each.isl, each.osl, each.concurrency)
    return sum(abs(math.log(theirs / ours)) for theirs, ours in zip(own, load, strict=True) if theirs)


def _tuned_for(each: TunedFile) -> str:
    if each.isl is None:
        return "any GPU and load"
    return f"{each.gpus} {each.gpu}, {each.isl:,} in, {each.osl:,} out, concurrency {each.concurrency}"
