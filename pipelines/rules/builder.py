"""Options of trtllm-build: against one another, the format and the model."""

from functools import partial

from pipelines.domain.families import Architecture, titles
from pipelines.domain.formats import FORMATS, QFormat
from pipelines.engines.tensorrt_llm.config import key_of
from pipelines.rules.attention import gathers
from pipelines.rules.record import BUILT, GPU, ON_GPUS, Cases, DeploymentFacts, Engines, Rule, either, known, listed
from pipelines.rules.split import (
    BUILDER,
    COMMAND,
    FLAGS_GUIDE,
    FP8_GUIDE,
    FP8_PLUGINS,
    GEMMA,
    LAYERS,
    MLP,
    PLUGIN,
    REUSE,
    STREAMING,
    SWIGLU_PLUGINS,
    gpu_groups,
)
from pipelines.settings.features import WITHOUT_REDUCE_FUSION

NO_SPEED_UP = "issues #1559, #1802, #1731, #1913, #2670; NVIDIA/Model-Optimizer issues #36, #1974"


def _fp8_plugins(d: DeploymentFacts) -> Cases:
    plugins = [name for name in FP8_PLUGINS if d.build[name] == "fp8"]
    plugins += ["gemm_plugin"] if d.build.gemm_plugin == "fp8" else []
    return [{"key": key_of(name)} for name in plugins] if d.qformat is not QFormat.FP8 else []


def _longer(d: DeploymentFacts) -> Cases:
    """Compare with the positions that engines have a table of; the LLM API counts scaled ones as `Rotary.reach` does.

    Models that are to be scaled are published with the positions without it (Qwen2.5, Vicuna 16k).
    """
    asked, limit, rotary = d.build.max_seq_len or 0, known(d.shape).max_position_embeddings, d.rotary
    if asked <= limit or (not d.writes_engine and rotary and rotary.kind in ("linear", "dynamic")):
        return ()
    if rotary is None or asked > rotary.reach:
        return ({"todo": ""},)
    todo = f"Its config.json scales positions by {rotary.kind} up to {rotary.reach}: to use them, set"
    return ({"todo": f"{todo} max_position_embeddings={rotary.reach} there."},)


def _fuses(d: DeploymentFacts) -> bool:
    """Whether the builder keeps reduce_fusion; of Gemma 2 it does, too, but nobody advises it."""
    shape = known(d.shape)
    fuses = "reduce_fusion" in shape.family.features or shape.architecture == Architecture.GEMMA2
    return fuses and d.build.tp_size > 1 and d.speculation not in WITHOUT_REDUCE_FUSION


def _swiglu(d: DeploymentFacts) -> Cases:
    plugins = [name for name in SWIGLU_PLUGINS if d.build[name] == "fp8"]
    return [{"key": key_of(name)} for name in plugins] if "swiglu" not in known(d.shape).family.features else []


def _group_without_kernel(d: DeploymentFacts) -> Cases:
    weights = FORMATS[d.qformat].weights
    if not (weights.integer and weights.group) or d.group_size in gpu_groups(d.qformat):
        return ()
    return ({"known": listed(gpu_groups(d.qformat))},)


def _padded(d: DeploymentFacts) -> Cases:
    """Return the linears whose sizes the builder rounds up, while the checkpoint has the model's own."""
    if not FORMATS[d.qformat].weights.integer or FORMATS[d.qformat].activation == "int8":
        return ()
    multiple = _multiple(d) * d.build.tp_size
    sizes = _sizes(d, d.build.tp_size).items()
    wrong = [f"{name} ({rows} x {width})" for name, (rows, width) in sizes if rows % multiple or width % multiple]
    return ({"multiple": multiple, "wrong": listed(wrong), "works": _unpadded_ranks(d)},) if wrong else ()


def _multiple(d: DeploymentFacts) -> int:
    """Return what every size of one rank's linears is rounded up to. Source: layers.py:720, 816, 977."""
    spec = FORMATS[d.qformat]
    return max(128 if spec.activation == "fp8" else 64, spec.weights.group_size(d.group_size))


def _scatters(d: DeploymentFacts) -> Cases:
    """Return what comes of pp_reduce_scatter where it has no effect."""
    if d.build["pp_reduce_scatter"] != "enable":
        return ()
    if known(d.shape).architecture != Architecture.MIXTRAL:
        return ({"why": f"stops with an assertion for {known(d.shape).architecture}"},)
    return ({"why": "ignores it with pp_size=1"},) if d.build.pp_size == 1 else ()


def _not_streamed(d: DeploymentFacts) -> Cases:
    """Return the weights that are inside of plugins, though they are to be streamed."""
    experts = d.shape is not None and bool(d.shape.family.experts) and d.build["moe_plugin"] != "disable"
    inside = {"INT8 or INT4 weights": FORMATS[d.qformat].weights.integer, "experts (moe_plugin)": experts}
    return [{"what": what} for what, given in inside.items() if given and d.build.weight_streaming]


def _sizes(d: DeploymentFacts, ranks: int) -> dict[str, tuple[int, int]]:
    """Return [out, in] of each linear of all ranks together, with the KV heads that ranks hold copies of."""
    model = known(d.shape)
    copies = max(0, ranks - model.num_key_value_heads) * 2 * model.head_dim
    sizes = dict(model.linear_shapes)
    rows, width = sizes["attention.qkv"]
    return sizes | {"attention.qkv": (rows + copies, width)}


def _unpadded_ranks(d: DeploymentFacts) -> str:
    fits = [
        ranks
        for ranks in (1, 2, 4, 8, 16)
        if not any(size % (_multiple(d) * ranks) for sizes in _sizes(d, ranks).values() for size in sizes)
    ]
    return f"tp_size={'/'.join(map(str, fits))} works." if fits else "No tp_size works."


plugin_rule = partial(Rule, topic="Plugins and fusions", engines=GPU)
plugin_warning = partial(plugin_rule, warns=True)
integers_rule = partial(Rule, topic="INT8 or INT4 weights", engines=GPU)
weights_rule = partial(Rule, topic="Sparse and streamed weights", engines=GPU)
weights_warning = partial(weights_rule, warns=True)
limit_rule = partial(Rule, topic="Limits", engines=BUILT)
RULES = (
    limit_rule(
        name="longer-than-the-model",
        engines=Engines(on_device=False),
        when=_longer,
        failed="build.max_seq_len={d.build.max_seq_len} is more than {d.label} supports.",
        allowed="Its limit is {d.shape.max_position_embeddings} tokens.",
        todo="{todo}",
        source=f"{BUILDER}; tensorrt_llm/_torch/pyexecutor/model_engine.py: _init_max_seq_len cuts a longer one",
    ),
    limit_rule(
        name="prompt-longer-than-the-sequence",
        when=lambda d: d.build.max_input_len > (d.longest or d.build.max_input_len),
        failed="build.max_input_len={d.build.max_input_len} is more than max_seq_len={d.longest}, which counts prompt"
        " and output together.",
        todo="Set build.max_input_len={d.longest} or less.",
        source=BUILDER,
    ),
    limit_rule(
        name="kv-blocks-are-powers-of-two",
        engines=Engines(on_device=False),
        when=lambda d: bool(d.build.tokens_per_block & (d.build.tokens_per_block - 1)),
        failed="build.tokens_per_block={d.build.tokens_per_block} is not a power of two.",
        allowed="Allowed: 8, 16, 32, 64, 128.",
        source=REUSE,
    ),
    plugin_rule(
        name="profiles-or-a-tuning-point",
        when=lambda d: d.build.multiple_profiles == "enable" and d.build.opt_num_tokens is not None,
        failed="build.opt_num_tokens={d.build.opt_num_tokens} cannot be combined with multiple_profiles=enable, which"
        " has tuning points of its own.",
        todo="Set build.opt_num_tokens=null or build.multiple_profiles=disable.",
        source=COMMAND,
    ),
    plugin_rule(
        name="tuning-point-within-the-tokens",
        when=lambda d: (d.build.opt_num_tokens or 0) > d.build.max_num_tokens,
        failed="build.opt_num_tokens={d.build.opt_num_tokens} would be ignored: it is more than"
        " max_num_tokens={d.build.max_num_tokens}, which trtllm-build takes instead.",
        todo="Set build.opt_num_tokens={d.build.max_num_tokens} or less.",
        source="tensorrt_llm/_common.py: check_max_num_tokens",
    ),
    plugin_rule(
        name="packed-prompts-need-the-attention-plugin",
        when=lambda d: d.build["gpt_attention_plugin"] == "disable" and d.build["remove_input_padding"] == "enable",
        failed="build.trtllm.gpt_attention_plugin=disable stops the build with an assertion: prompts without padding"
        " need the plugin.",
        todo="Set build.trtllm.gpt_attention_plugin=auto.",
        source="tensorrt_llm/layers/attention.py: AttentionParams.is_valid",
    ),
    plugin_rule(
        name="redrafter-has-one-profile",
        when=lambda d: d.build.multiple_profiles == "enable" and d.speculation == "redrafter",
        failed="build.multiple_profiles=enable cannot be combined with speculative={d.speculation}, whose class in"
        " TensorRT-LLM defines its inputs for one profile.",
        todo="Set build.multiple_profiles=disable.",
        source="tensorrt_llm/models/redrafter/model.py, tensorrt_llm/models/generation_mixin.py (1.3.0rc3)",
    ),
    plugin_rule(
        name="context-logits-without-drafts",
        when=lambda d: gathers(d) if d.build.max_draft_len > 0 else (),
        failed="{key}=true cannot be combined with max_draft_len={d.build.max_draft_len}: an engine that checks drafts"
        " cannot return the logits of the prompt.",
        todo="Set {key}=false, or speculative=none.",
        source=COMMAND,
    ),
    plugin_warning(
        name="generation-logits-need-no-flag",
        when=lambda d: d.build["gather_generation_logits"],
        failed="build.trtllm.gather_generation_logits=true is deprecated and has no effect: the runtime decides.",
        todo="Remove it.",
        source=COMMAND,
    ),
    plugin_rule(
        name="fp8-plugins-need-fp8",
        when=_fp8_plugins,
        failed="{key}=fp8 multiplies in FP8; quant={d.qformat} has no FP8 weights and activations.",
        todo="Remove {key}{quants:, or choose }.",
        source=PLUGIN,
    ),
    plugin_rule(
        name="swiglu-plugins-need-swiglu",
        when=_swiglu,
        failed="{key}=fp8 computes a SwiGLU without bias; TensorRT-LLM's MLP of {d.shape.architecture} is none.",
        allowed=f"It supports {either(titles('swiglu'))}.",
        todo="Set {key}=disable.",
        source=MLP,
    ),
    plugin_rule(
        name="swiglu-plugins-need-a-fused-mlp",
        when=lambda d: (
            d.build["use_fused_mlp"] == "disable"
            and [{"key": key_of(name)} for name in SWIGLU_PLUGINS if d.build[name] == "fp8"]
        ),
        failed="{key}=fp8 stops the build with build.trtllm.use_fused_mlp=disable.",
        todo="Set one of the two to its default.",
        source=f"{BUILDER}: optimize_model_with_config",
    ),
    plugin_rule(
        name="one-swiglu-plugin",
        when=lambda d: all(d.build[name] == "fp8" for name in SWIGLU_PLUGINS),
        failed="build.gemm_swiglu_plugin=fp8 would be ignored beside low_latency_gemm_swiglu_plugin=fp8.",
        todo="Set one of the two to disable.",
        source=f"{FP8_GUIDE}; {MLP}",
    ),
    integers_rule(
        name="group-size-has-a-kernel",
        engines=ON_GPUS,
        when=_group_without_kernel,
        failed="quant={d.qformat} with quant.group_size={d.group_size} has no kernel in TensorRT-LLM.",
        allowed="Its kernels know groups of {known}.",
        todo="Set quant.group_size=128.",
        source="tensorrt_llm/quantization/functional.py, cpp/tensorrt_llm/kernels/cutlass_kernels/fpA_intB_gemm/"
        "fpA_intB_gemm_template.h (1.3.0rc3)",
    ),
    integers_rule(
        name="integer-linears-are-not-padded",
        when=_padded,
        failed="quant={d.qformat} with tp_size={d.build.tp_size} needs linears in multiples of {multiple}, and"
        " {d.label} has {wrong}: trtllm-build rounds them up, and then does not load the checkpoint.",
        allowed="{works}",
        todo="Change build.tp_size{quants:, or choose }.",
        source=LAYERS,
    ),
    plugin_rule(
        name="rowwise-plugin-needs-rowwise-scales",
        when=lambda d: d.build["fp8_rowwise_gemm_plugin"] != "disable",
        failed="build.trtllm.fp8_rowwise_gemm_plugin={d.build[fp8_rowwise_gemm_plugin]} needs FP8 scales per token and"
        " channel; quant={d.qformat} has none.",
        todo="Set build.trtllm.fp8_rowwise_gemm_plugin=disable.",
        source=PLUGIN,
    ),
    plugin_rule(
        name="nvfp4-plugin-needs-nvfp4",
        when=lambda d: (
            d.qformat is not QFormat.NVFP4 and (d.build.gemm_plugin == "nvfp4" or d.build["fuse_fp4_quant"] == "enable")
        ),
        failed="build.gemm_plugin={d.build.gemm_plugin} and fuse_fp4_quant={d.build[fuse_fp4_quant]} are for NVFP4;"
        " given is quant={d.qformat}.",
        todo="Remove them{quants:, or choose }.",
        source=PLUGIN,
    ),
    plugin_rule(
        name="fused-fp4-needs-context-attention",
        when=lambda d: d.build["fuse_fp4_quant"] == "enable" and d.build["context_fmha"] == "disable",
        failed="build.trtllm.fuse_fp4_quant={d.build[fuse_fp4_quant]} needs fused context attention; given is"
        " context_fmha={d.build[context_fmha]}.",
        todo="Set build.trtllm.context_fmha=enable, or fuse_fp4_quant=disable.",
        source=f"{PLUGIN}; cpp/tensorrt_llm/common/attentionOp.cpp (1.3.0rc3): AttentionOp::initialize",
    ),
    plugin_rule(
        name="nvfp4-has-its-own-gemm-plugin",
        when=lambda d: d.qformat is QFormat.NVFP4 and d.build.gemm_plugin not in (None, "nvfp4", "disable", "fp8"),
        failed="build.gemm_plugin={d.build.gemm_plugin} would be ignored: with quant=nvfp4 trtllm-build sets nvfp4.",
        todo="Set build.gemm_plugin=nvfp4 or disable.",
        source=BUILDER,
    ),
    plugin_warning(
        name="fp8-is-slower-with-gemm-plugin",
        when=lambda d: (
            d.qformat is QFormat.FP8
            and d.build.gemm_plugin not in (None, "disable", "fp8")
            and not d.build.weight_sparsity
        ),
        failed="build.gemm_plugin={d.build.gemm_plugin} is discouraged with quant=fp8: TensorRT's own kernels are"
        " faster.",
        todo="Remove build.gemm_plugin.",
        source=f"{FLAGS_GUIDE}; {GEMMA}; {FP8_GUIDE}",
    ),
    plugin_rule(
        name="reduce-fusion-would-be-ignored",
        when=lambda d: d.build.reduce_fusion == "enable" and not _fuses(d),
        failed="build.reduce_fusion=enable would be ignored: it needs tp_size of 2 or more, given {d.build.tp_size},"
        f" and Gemma 2 or {either(titles('reduce_fusion'))} without the heads of {either(WITHOUT_REDUCE_FUSION)},"
        " given {d.shape.architecture} and speculative={d.speculation}.",
        todo="Set build.reduce_fusion=disable.",
        source=BUILDER,
    ),
    plugin_warning(
        name="reduce-fusion-is-left-off",
        when=lambda d: (
            d.build.reduce_fusion == "disable" and _fuses(d) and "reduce_fusion" in known(d.shape).family.features
        ),
        failed="build.reduce_fusion=disable with tp_size={d.build.tp_size}: NVIDIA measured 6 % less time per"
        " token with it (Llama 3.3 70B on 4 H100, ITL 15.41 -> 14.45 ms, published; in the worst case no difference).",
        todo="Set build.reduce_fusion=enable.",
        source=FLAGS_GUIDE,
    ),
    plugin_rule(
        name="user-buffers-need-reduce-fusion",
        when=lambda d: d.build.user_buffer == "enable" and d.build.reduce_fusion == "disable",
        failed="build.user_buffer=enable would be ignored with reduce_fusion={d.build.reduce_fusion}.",
        todo="Set build.reduce_fusion=enable, or build.user_buffer=disable.",
        source=BUILDER,
    ),
    plugin_rule(
        name="user-buffers-are-for-fp8-llama",
        when=lambda d: (
            d.build.user_buffer == "enable"
            and ("user_buffer" not in known(d.shape).family.features or d.qformat is not QFormat.FP8)
        ),
        failed=f"build.user_buffer=enable supports only {either(titles('user_buffer'))} in FP8;"
        " given are {d.shape.architecture} and quant={d.qformat}.",
        todo="Set build.user_buffer=disable.",
        source=f"{FP8_GUIDE}; {PLUGIN}",
    ),
    plugin_rule(
        name="norm-quant-fusion-would-be-ignored",
        when=lambda d: (
            d.build["norm_quant_fusion"] == "enable"
            and not ("norm_quant_fusion" in known(d.shape).family.features and d.qformat is QFormat.NVFP4)
        ),
        failed="build.trtllm.norm_quant_fusion=enable would be ignored: it supports only"
        f" {either(titles('norm_quant_fusion'))} in NVFP4; given are"
        " {d.shape.architecture} and quant={d.qformat}.",
        todo="Set build.trtllm.norm_quant_fusion=disable.",
        source=BUILDER,
    ),
    plugin_rule(
        name="norm-quant-fusion-or-reduce-fusion",
        when=lambda d: d.build["norm_quant_fusion"] == "enable" and d.build.reduce_fusion == "enable",
        failed="build.trtllm.norm_quant_fusion=enable would be ignored with reduce_fusion={d.build.reduce_fusion}.",
        todo="Choose one of the two.",
        source=BUILDER,
    ),
    plugin_rule(
        name="pp-reduce-scatter-is-for-mixtral",
        when=_scatters,
        failed="build.trtllm.pp_reduce_scatter=enable is for Mixtral with pp_size of 2 or more: trtllm-build {why}.",
        todo="Set build.trtllm.pp_reduce_scatter=disable.",
        source=COMMAND,
    ),
    weights_rule(
        name="streaming-is-for-weights-without-plugin",
        when=lambda d: d.build.weight_streaming and d.build.gemm_plugin != "disable" and not _not_streamed(d),
        failed="build.weight_streaming=true needs gemm_plugin=disable, given '{d.build.gemm_plugin}': weights inside a"
        " plugin cannot stay on the host.",
        todo="Set build.gemm_plugin=disable, or use weights=streaming, which sets it.",
        source=STREAMING,
    ),
    weights_rule(
        name="plugins-keep-their-weights",
        when=_not_streamed,
        failed="build.weight_streaming=true does not stream {what}: plugins multiply them, and their weights stay"
        " on the GPU.",
        todo="Use weights=resident{quants:, or choose }.",
        source=STREAMING,
    ),
    weights_rule(
        name="weights-on-the-host-need-streaming",
        when=lambda d: d.triton.gpu_weights_percent < 1.0 and not d.build.weight_streaming,
        failed="triton.gpu_weights_percent={d.triton.gpu_weights_percent} needs an engine built with weight streaming.",
        todo="Set triton.gpu_weights_percent=1.0, or use weights=streaming.",
        source=STREAMING,
    ),
    weights_rule(
        name="sparse-kernels-without-plugin",
        when=lambda d: d.build.weight_sparsity and d.build.gemm_plugin != "disable",
        failed="build.weight_sparsity=true needs gemm_plugin=disable, given '{d.build.gemm_plugin}': the plugin's"
        " kernels are dense.",
        todo="Set build.gemm_plugin=disable.",
        source="NVIDIA/Model-Optimizer issue #1974",
    ),
    weights_warning(
        name="sparse-kernels-need-sparse-weights",
        when=lambda d: d.build.weight_sparsity and d.sparsity == "none",
        failed="build.weight_sparsity=true with sparsity={d.sparsity}: dense weights run in dense kernels.",
        todo="Use sparsity=sparsegpt_2_4, unless the model itself is already 2:4 sparse.",
        source=NO_SPEED_UP,
    ),
    weights_warning(
        name="zeros-need-sparse-kernels",
        when=lambda d: d.sparsity != "none" and not d.build.weight_sparsity,
        failed="build.weight_sparsity=false with sparsity={d.sparsity}: the zeros cost accuracy and save nothing.",
        todo="Set build.weight_sparsity=true.",
        source=COMMAND,
    ),
    weights_warning(
        name="no-sparse-kernels",
        when=lambda d: d.sparsity != "none" and not FORMATS[d.qformat].products_of_tensorrt,
        failed="sparsity={d.sparsity} with quant={d.qformat} saves no time and no memory: plugins multiply these"
        " linears, and their kernels are dense.",
        todo="Use sparsity=none, or prune in 16 bit or FP8.",
        source=BUILDER,
    ),
    weights_warning(
        name="sparsity-may-not-be-faster",
        when=lambda d: d.build.weight_sparsity and d.sparsity != "none" and FORMATS[d.qformat].products_of_tensorrt,
        failed="sparsity={d.sparsity}: users measured a speed-up of 0 to 5 %; small batches are memory-bound.",
        todo="Compare with sparsity=none before you deploy it.",
        source=NO_SPEED_UP,
    ),
)
