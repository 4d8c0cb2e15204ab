"""LoRA adapters against the engine's limits, the model and the format."""

from collections.abc import Iterator
from functools import partial

from pipelines.domain.adapter import MODULES, Adapter, linear_widths
from pipelines.domain.formats import QFormat
from pipelines.domain.units import MIB
from pipelines.engines.tensorrt_llm.config import key_of
from pipelines.rules.record import BUILT, GPU, Cases, DeploymentFacts, Rule, known, listed
from pipelines.rules.split import COMBINATIONS, COMMAND, LAYERS, LORA, MLP, MODEL_CONFIG, SWIGLU_PLUGINS

TOPIC = "LoRA"
INSIDE_SWIGLU = ("mlp_h_to_4h", "mlp_gate")
OF_MLP = ("gate_proj", "up_proj", "down_proj")
SPLIT_INPUTS = ("o_proj", "down_proj")
MANAGER = "tensorrt_llm/lora_manager.py"


def _each(d: DeploymentFacts) -> Iterator[tuple[dict[str, object], Adapter]]:
    """Yield the message words of each adapter, and the adapter."""
    for task, adapter in d.adapters.items():
        yield {"task": task, "place": adapter.place, "adapter": adapter}, adapter


def _missing(d: DeploymentFacts) -> Cases:
    served = set(d.build["lora_target_modules"] or ())
    modules = [(words, [m for m in adapter.trtllm_modules if m not in served]) for words, adapter in _each(d)]
    return [
        {**words, "missing": listed(missing), "served": listed(sorted(served))} for words, missing in modules if missing
    ]


def _widths(d: DeploymentFacts) -> Cases:
    """Return adapters whose linears differ in size from the model's, each with the first such linear."""
    ours, cases = linear_widths(known(d.shape)), []
    for words, adapter in _each(d):
        linears = {module: module.rpartition(".")[2] for module in adapter.widths}
        wrong = [module for module, width in adapter.widths.items() if width != ours[linears[module]]]
        if wrong:
            more = f" ({len(wrong) - 1} more)" if len(wrong) > 1 else ""
            sizes = {"given": adapter.widths[wrong[0]], "ours": ours[linears[wrong[0]]]}
            cases.append({**words, **sizes, "name": wrong[0], "more": more})
    return cases


def _on_experts(d: DeploymentFacts) -> Cases:
    """Return adapters that change the MLP, where that is a mixture."""
    experts = known(d.shape).family.experts
    changed = [(words, [m for m in adapter.modules if experts and m in OF_MLP]) for words, adapter in _each(d)]
    return [{**words, "modules": listed(modules)} for words, modules in changed if modules]


def _host_cache(d: DeploymentFacts) -> Cases:
    """Return what the largest adapter of a rank takes, in 16 bit and whole MiB, if the host's cache holds none."""
    model, ranks, served = known(d.shape), d.build.tp_size, set(d.build["lora_target_modules"] or ())
    widths = {name: width for name, width in linear_widths(model).items() if MODULES[name] in served}
    values = sum(
        inputs // ranks + outputs if name in SPLIT_INPUTS else inputs + outputs // ranks
        for name, (inputs, outputs) in widths.items()
    )
    largest = 2 * values * (model.num_hidden_layers // d.build.pp_size) * d.triton.lora_cache_max_adapter_size
    needed = (largest // MIB + 1) * MIB  # pages are whole
    return ({"needed": needed},) if needed > d.triton.lora_cache_host_memory_bytes else ()


def _fused_swiglu(d: DeploymentFacts) -> Cases:
    """Return the FP8 SwiGLU plugins that are on while adapters may change a linear inside them."""
    modules = [module for module in d.build["lora_target_modules"] or () if module in INSIDE_SWIGLU]
    plugins = [name for name in SWIGLU_PLUGINS if d.build[name] == "fp8"]
    return [{"key": key_of(name), "modules": listed(modules)} for name in plugins] if modules else []


gpu_rule = partial(Rule, topic=TOPIC, engines=GPU)
gpu_warning = partial(gpu_rule, warns=True)
built_rule = partial(Rule, topic=TOPIC, engines=BUILT)
RULES = (
    gpu_rule(
        name="lora-plugin-and-modules-together",
        when=lambda d: (d.build["lora_plugin"] == "disable") != (d.build["lora_target_modules"] is None),
        failed="build.trtllm.lora_plugin={d.build[lora_plugin]} and build.trtllm.lora_target_modules="
        "{d.build[lora_target_modules]} go together only.",
        todo="Use lora=adapters, which sets both, or set neither.",
        source=f"{COMMAND}; {LORA}",
    ),
    gpu_rule(
        name="lora-has-no-fp4-linears",
        when=lambda d: d.build["lora_plugin"] != "disable" and d.qformat is QFormat.NVFP4,
        failed="build.trtllm.lora_plugin={d.build[lora_plugin]} cannot be combined with quant={d.qformat}: "
        "TensorRT-LLM's FP4 linears take no adapters.",
        todo="Use lora=none{quants:, or choose }.",
        source=LAYERS,
    ),
    gpu_rule(
        name="lora-is-outside-of-fused-swiglu",
        when=_fused_swiglu,
        failed="lora.target_modules has {modules}, which {key}=fp8 computes in one kernel without adapters.",
        todo="Set {key}=disable, or leave them out of lora.target_modules.",
        source=MLP,
    ),
    gpu_rule(
        name="dora-needs-the-lora-plugin",
        when=lambda d: d.build["dora_plugin"] == "enable" and d.build["lora_plugin"] == "disable",
        failed="build.trtllm.dora_plugin=enable needs the LoRA plugin; build.trtllm.lora_plugin is"
        " {d.build[lora_plugin]}.",
        todo="Set build.trtllm.lora_plugin=auto and build.trtllm.lora_target_modules.",
        source=LORA,
    ),
    gpu_rule(
        name="adapters-need-the-lora-plugin",
        when=lambda d: bool(d.adapters) and d.build["lora_plugin"] == "disable" and [{"tasks": listed(d.adapters)}],
        failed="lora.adapters has {tasks}, but the engine is built with lora_plugin={d.build[lora_plugin]}.",
        todo="Use lora=adapters, which sets build.trtllm.lora_plugin=auto.",
        source=LORA,
    ),
    built_rule(
        name="adapter-rank-fits",
        when=lambda d: [words for words, adapter in _each(d) if adapter.rank > d.build["max_lora_rank"]],
        failed="lora.adapters.{task}='{place}' has rank {adapter.rank}, more than"
        " lora.max_rank={d.build[max_lora_rank]}.",
        todo="Set lora.max_rank={adapter.rank}.",
        source=LORA,
    ),
    built_rule(
        name="adapter-modules-are-built-in",
        when=lambda d: _missing(d) if d.build["lora_plugin"] != "disable" else (),
        failed="lora.adapters.{task}='{place}' adapts {missing}, but lora.target_modules has {served}.",
        todo="Add them to lora.target_modules.",
        source=LORA,
    ),
    built_rule(
        name="adapter-fits-the-model",
        when=_widths,
        failed="lora.adapters.{task}='{place}' was trained for another model: its {name} has {given[0]} inputs and"
        " {given[1]} outputs, {d.label}'s has {ours[0]} and {ours[1]}{more}.",
        todo="Use an adapter for this model.",
        source=MANAGER,
    ),
    built_rule(
        name="adapters-are-not-for-experts",
        when=_on_experts,
        failed="lora.adapters.{task}='{place}' adapts {modules}, but {d.shape.architecture} is a mixture of experts,"
        " which have no such linear in common.",
        allowed="Adapters of attention work.",
        todo="Use an adapter of q_proj, k_proj, v_proj or o_proj alone.",
        source="tensorrt_llm/layers/moe.py (moe_h_to_4h); pipelines/engines/openvino/graph.py: _mixture",
    ),
    built_rule(
        name="adapter-layers-exist",
        when=lambda d: [words for words, adapter in _each(d) if adapter.layers > known(d.shape).num_hidden_layers],
        failed="lora.adapters.{task}='{place}' was trained for another model: it changes layers of a model that has at"
        " least {adapter.layers}; {d.label} has {d.shape.num_hidden_layers}.",
        todo="Use an adapter for this model.",
        source=MANAGER,
    ),
    gpu_rule(
        name="adapter-fits-the-cache",
        when=lambda d: (
            d.build["lora_plugin"] != "disable" and d.build["max_lora_rank"] > d.triton.lora_cache_max_adapter_size
        ),
        failed="lora.max_rank={d.build[max_lora_rank]} is more than triton.lora_cache_max_adapter_size="
        "{d.triton.lora_cache_max_adapter_size}: a page of the cache would not hold an adapter.",
        todo="Set triton.lora_cache_max_adapter_size={d.build[max_lora_rank]}.",
        source=MODEL_CONFIG,
    ),
    gpu_rule(
        name="adapter-fits-the-host-cache",
        when=lambda d: _host_cache(d) if d.build["lora_plugin"] != "disable" else (),
        failed="triton.lora_cache_host_memory_bytes={d.triton.lora_cache_host_memory_bytes} stops the server: an"
        " adapter of triton.lora_cache_max_adapter_size={d.triton.lora_cache_max_adapter_size} takes {needed}"
        " bytes of a rank.",
        todo="Set triton.lora_cache_host_memory_bytes={needed}, or a smaller lora_cache_max_adapter_size and rank.",
        source="NVIDIA/TensorRT-LLM cpp/tensorrt_llm/batch_manager/peftCacheManager.cpp (1.3.0rc3)",
    ),
    gpu_rule(
        name="adapters-have-the-engines-type",
        when=lambda d: bool(d.adapters) and d.dtype == "bfloat16",
        failed="lora.adapters with quant.dtype={d.dtype}: an adapter must have the engine's type, and its .npy file"
        " cannot be of that type.",
        todo="Set quant.dtype=float16.",
        source=f"{MANAGER}; cpp/tensorrt_llm/runtime/loraUtils.cpp, runtime/utils/numpyUtils.cpp",
    ),
    gpu_warning(
        name="adapters-want-float16",
        when=lambda d: bool(d.adapters) and d.dtype == "auto",
        failed="lora.adapters with quant.dtype={d.dtype}: only an engine of float16 (or float32) serves adapters, and"
        " many models are bfloat16.",
        todo="Set quant.dtype=float16.",
        source=f"{MANAGER}; cpp/tensorrt_llm/runtime/loraUtils.cpp, runtime/utils/numpyUtils.cpp",
    ),
    gpu_warning(
        name="adapters-with-speculation-are-untested",
        when=lambda d: d.build["lora_plugin"] != "disable" and d.speculation != "none",
        failed="lora with speculative={d.speculation} is listed as untested by NVIDIA.",
        todo="Compare answers with and without speculation.",
        source=COMBINATIONS,
    ),
)
