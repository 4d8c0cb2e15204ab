"""NVIDIA's advice for the speed of a TensorRT engine, and their tuned files for the LLM API.

What they only advise to try, because it can cost something else, is left to the user:
docs/decisions/0011-tensorrt-engines.md.
"""

import math
from collections.abc import Callable

from pipelines.domain.families import FAMILIES, Feature
from pipelines.domain.formats import FORMATS, KvFormat, QFormat, formats_for
from pipelines.engines.tensorrt_llm.config import OWN_SETTINGS
from pipelines.engines.tensorrt_llm.llm_api import TunedFile, complaints, tuned_files
from pipelines.engines.tuning import Recommended, TunedCase
from pipelines.settings.base import flat
from pipelines.settings.features import HEADS, WITHOUT_REDUCE_FUSION

GUIDE = "performance-tuning-guide"
"""Under docs/source/legacy/performance of TensorRT-LLM; short, because the plan shows it."""
FLAGS, FP8 = f"{GUIDE}/useful-build-time-flags.md", f"{GUIDE}/fp8-quantization.md"
RUNTIME = f"{GUIDE}/useful-runtime-flags.md"
ONE_PROFILE = 64
"""Up to this max_num_tokens there is a single profile, in a form that TensorRT-LLM's builder does not read (1.3.0rc3).
Source: tensorrt_llm/models/generation_mixin.py, split_num_tokens_range."""
MEASURED = "Llama 3.3 70B on 4 H100:"
"""What the guides measured, with 2,048 input and 2,048 output tokens."""


def recommend_build(case: TunedCase) -> tuple[Recommended, ...]:
    """List the advice that applies, whether or not the user gives another value."""
    return tuple(each for each, applies in ROWS if applies(case))


def _profiles(case: TunedCase) -> bool:
    """ReDrafter's class defines its inputs for one profile. Source: tensorrt_llm/models/redrafter/model.py:194-225."""
    build = case.settings.build
    only_one = build.opt_num_tokens is not None or build.max_num_tokens <= ONE_PROFILE
    return not only_one and case.settings.speculative.mode != "redrafter"


def _needs_own_kernels(case: TunedCase) -> bool:
    """Return whether the weights must stay outside of plugins: streamed, or in TensorRT's 2:4 kernels."""
    return case.settings.build.weight_streaming or case.settings.build.weight_sparsity


def _gemm_beside_integers(case: TunedCase) -> bool:
    """The linears have a plugin of their own; the head, for one, stays in 16 bit."""
    integer = any(FORMATS[qformat].weights.integer for qformat in case.settings.quant.formats)
    return integer and not _needs_own_kernels(case)


def _fp8_kv_cache(case: TunedCase) -> bool:
    """Trained heads are converted without scales of the KV cache; a format that is refused anyway gets no advice."""
    settings, qformat, sm = case.settings, case.settings.quant.qformat, case.gpu.sm
    has_one = settings.build.kv_cache_type != "disabled" and settings.speculative.mode not in HEADS
    for_model = qformat is not QFormat.NVFP4 or case.shape is None or _supports(case, "nvfp4")
    runs = for_model and (sm is None or qformat in formats_for(sm))
    return has_one and runs and FORMATS[qformat].fp8_kv_cache


def _supports(case: TunedCase, feature: Feature) -> bool:
    family = FAMILIES.get(case.shape.architecture) if case.shape else None  # sizes are known of more models
    return family is not None and feature in family.features


def _split_fp8_on_hopper(case: TunedCase) -> bool:
    """Return whether it is what NVIDIA measured the FP8 fusions with: FP8, tensor parallel in one server, Hopper."""
    build, sm = case.settings.build, case.gpu.sm or 0.0
    in_one_server = build.tp_size > 1 and (build.pp_size, case.settings.triton.num_nodes) == (1, 1)
    return case.settings.quant.qformat is QFormat.FP8 and in_one_server and 9.0 <= sm < 10.0


def _reduce_fusion(case: TunedCase) -> bool:
    build, own_class = case.settings.build, case.settings.speculative.mode in WITHOUT_REDUCE_FUSION
    fits = build.tp_size > 1 and _supports(case, "reduce_fusion") and not own_class
    return fits and build["norm_quant_fusion"] == "disable"


def _user_buffer(case: TunedCase) -> bool:
    """User buffers are filled over NVLink and take part in the fused all-reduce only."""
    build = case.settings.build
    fused = build.reduce_fusion == "enable" if build.given("reduce_fusion") else _reduce_fusion(case)
    connected = case.gpu.nvlink_gb_s_bidir is not None and build["lora_plugin"] == "disable"
    return fused and connected and _supports(case, "user_buffer") and _split_fp8_on_hopper(case)


def _fused_swiglu(case: TunedCase) -> bool:
    build = case.settings.build
    free = build["use_fused_mlp"] == "enable" and build["low_latency_gemm_swiglu_plugin"] == "disable"
    return (
        free
        and build["lora_plugin"] == "disable"
        and not _needs_own_kernels(case)
        and _supports(case, "swiglu")
        and _split_fp8_on_hopper(case)
    )


def _alone_on_the_gpu(case: TunedCase) -> bool:
    """Return whether nothing else takes memory of the GPU after the KV cache."""
    settings = case.settings
    shared = settings.speculative.mode == "draft_target" or settings.multimodal.model_type != "none"
    return not shared and settings.build["lora_plugin"] == "disable" and not settings.build.weight_streaming


ROWS: tuple[tuple[Recommended, Callable[[TunedCase], bool]], ...] = (
    (Recommended(
        "build", "multiple_profiles", "enable",
        f"kernels for small and for large batches, for a longer build; {MEASURED} ITL 31.3 -> 19.6 ms", FLAGS,
    ), _profiles),
    (Recommended(
        "build", "gemm_plugin", "auto", f"cuBLASLt for 16-bit products; {MEASURED} ITL 19.6 -> 15.4 ms", FLAGS,
    ), lambda case: case.settings.quant.qformat is QFormat.NONE and not _needs_own_kernels(case)),
    (Recommended(
        "build", "gemm_plugin", "auto", "cuBLASLt for the products that stay in 16 bit",
        "examples/models/core/llama/README.md",
    ), _gemm_beside_integers),
    (Recommended(
        "kv_cache", "dtype", KvFormat.FP8,
        f"half the bytes, and FP8 attention over the prompt; {MEASURED} 3,390 -> 5,300 tokens/s", FP8,
    ), _fp8_kv_cache),
    (Recommended(
        "build", "reduce_fusion", "enable",
        f"residual add and norm inside the all-reduce; {MEASURED} ITL 15.4 -> 14.4 ms, at worst as before", FLAGS,
    ), _reduce_fusion),
    (Recommended(
        "build", "user_buffer", "enable",
        f"no copies around the all-reduce; {MEASURED} 5,300 -> 5,980 tokens/s together with reduce_fusion", FP8,
    ), _user_buffer),
    (Recommended(
        "build", "gemm_swiglu_plugin", "fp8",
        "gate, up and SwiGLU in one kernel, which drops one scale (the evaluation includes that); "
        f"{MEASURED} ITL 12.7 -> 11.7 ms", FP8,
    ), _fused_swiglu),
    (Recommended(
        "triton", "kv_cache_free_gpu_mem_fraction", 0.95, "nothing else takes memory of the GPU", RUNTIME,
    ), _alone_on_the_gpu),
)  # fmt: skip
"""All advice, and when it applies. A value that the user gives is never replaced, see `pipelines.engines.tuning`."""


# NVIDIA's tuned files for the LLM API: the nearest one to a model, a GPU and a load.
#
# Source: `llm_api_options/tuned.json`, of `examples/configs` of TensorRT-LLM. Only files of models that are built here.

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


def recommend_llm_api(case: TunedCase) -> tuple[Recommended, ...]:
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
