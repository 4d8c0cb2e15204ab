"""KV cache, reuse, chunked context, windows: which setting rules out which."""

from functools import partial

from pipelines.domain.formats import KvFormat, QFormat, rules_out_reuse
from pipelines.engines.tensorrt_llm.config import key_of
from pipelines.rules.record import BUILT, CPU, GPU, ON_GPUS, Cases, DeploymentFacts, Rule, known, listed
from pipelines.rules.split import BUILDER, COMMAND, PLUGIN, REUSE, RUNTIME, SCHEDULER, TEMPLATES

FP8_ATTENTION = (QFormat.FP8, QFormat.W4A8_AWQ, QFormat.NVFP4)
"""Formats whose prompts can be attended to in FP8."""
HEAD_SIZES = (32, 48, 64, 80, 96, 104, 112, 128, 144, 160, 192, 224, 256)
OUTGROWN = (
    "{d.shape.architecture} was trained with an attention window of {d.shape.sliding_window} tokens, but sequences of"
    " up to {d.longest} tokens would attend to all of them"
)


def wanted(d: DeploymentFacts) -> Cases:
    """Return the words for requested features that need paged context attention, with the way to do without each."""
    features = (
        ("KV-cache reuse", d.kv_reuse, "kv_cache.enable_block_reuse=false"),
        ("chunked context", d.chunked_context, "runtime.enable_chunked_context=false"),
    )
    if not any(on for _, on, _ in features):
        return ()
    lost = " and ".join(name for name, on, _ in features if on)
    return ({"lost": lost, "without": " ".join(off for _, on, off in features if on)},)


def _switched_off(d: DeploymentFacts, option: str) -> Cases:
    return wanted(d) if d.build[option] == "disable" else ()


def gathers(d: DeploymentFacts) -> Cases:
    """Return the options with which an engine returns the logits of the prompt."""
    return [{"key": key_of(name)} for name in ("gather_context_logits", "gather_all_token_logits") if d.build[name]]


def _paged_context(d: DeploymentFacts) -> bool:
    """Whether attention over a prompt reads blocks of the KV cache."""
    on = all(d.build[option] == "enable" for option in ("context_fmha", "use_paged_context_fmha"))
    return on and not rules_out_reuse(d.kv_format, d.qformat)


def _beams_past_a_window(d: DeploymentFacts) -> Cases:
    """Return the beams of sequences that can outgrow a window by a block; the LLM API reads only the engine's."""
    width = (d.triton.max_beam_width if d.writes_engine else None) or d.build.max_beam_width
    windows = d.triton.max_attention_window_size
    outgrown = windows is not None and (d.longest or 0) >= min(windows) + d.build.tokens_per_block
    return ({"windows": listed(windows or ()), "width": width},) if width > 1 and outgrown else ()


def _shifted_windows(d: DeploymentFacts) -> Cases:
    """Return the windows of layers if they do not repeat with each pipeline stage."""
    windows = [min(window, d.longest or window) for window in d.triton.max_attention_window_size or ()]
    a_stage = known(d.shape).num_hidden_layers // d.build.pp_size
    shifted = any(window != windows[(n + a_stage) % len(windows)] for n, window in enumerate(windows))
    return [{"windows": listed(windows), "layers": a_stage}] if d.build.pp_size > 1 and shifted else ()


def _own_window_unset(d: DeploymentFacts) -> Cases:
    """Return the windows of the layers if the runtime is configured with others."""
    if not known(d.shape).family.trtllm_build or not d.outgrows_window:
        return ()
    windows = d.triton.max_attention_window_size or ()
    pattern = [min(window, d.longest or window) for window in known(d.shape).windows]
    same = windows and all(
        windows[n % len(windows)] == pattern[n % len(pattern)] for n in range(len(windows) * len(pattern))
    )
    return () if same else [{"windows": listed(pattern)}]


rule = partial(Rule, topic="KV cache and attention")
gpu_rule = partial(rule, engines=GPU)
gpu_warning = partial(gpu_rule, warns=True)
RULES = (
    gpu_rule(
        name="a-models-window-is-told",
        when=_own_window_unset,
        failed=f"{OUTGROWN}: a TensorRT-LLM checkpoint does not state the window.",
        todo="Set triton.max_attention_window_size=[{windows}], or build.max_seq_len={d.shape.sliding_window}.",
        source=f"{TEMPLATES}; tensorrt_llm/models/llama/model.py",
    ),
    rule(
        name="cpu-attends-to-everything",
        engines=CPU,
        when=lambda d: d.outgrows_window and not known(d.shape).family.states_window,
        failed=f"{OUTGROWN} with engine=openvino.",
        todo="Set build.max_seq_len={d.shape.sliding_window} or less.",
        source="pipelines/engines/openvino/graph.py",
    ),
    rule(
        name="kv-format-takes-reuse-and-chunks",
        engines=BUILT,
        # INT8 always does, FP8 without FP8 context attention.
        when=lambda d: wanted(d) if rules_out_reuse(d.kv_format, d.qformat) else (),
        failed="kv_cache={d.kv_format} with quant={d.qformat} rules out {lost}: TensorRT-LLM's builder switches paged"
        " context attention off.",
        allowed="They work with {kv_caches}{quants:, or with }.",
        todo="Change kv_cache, or do without: {without}",
        source=BUILDER,
    ),
    gpu_rule(
        name="no-context-fmha-no-reuse",
        when=lambda d: _switched_off(d, "context_fmha"),
        failed="build.trtllm.context_fmha=disable rules out {lost}: it also disables paged and FP8 context attention.",
        todo="Set build.trtllm.context_fmha=enable, or do without: {without}",
        source=BUILDER,
    ),
    gpu_rule(
        name="no-paged-context-no-reuse",
        when=lambda d: _switched_off(d, "use_paged_context_fmha"),
        failed="build.trtllm.use_paged_context_fmha=disable rules out {lost}, which read earlier blocks of the KV"
        " cache.",
        todo="Set build.trtllm.use_paged_context_fmha=enable, or do without: {without}",
        source=f"{PLUGIN}; {REUSE}",
    ),
    gpu_warning(
        name="without-context-fmha",
        when=lambda d: d.build["context_fmha"] == "disable" and not wanted(d),
        failed="build.trtllm.context_fmha=disable switches FP8 and paged context attention off as well, and prompts are"
        " slower.",
        source=BUILDER,
    ),
    gpu_rule(
        name="fp8-cache-brings-fp8-attention",
        when=lambda d: (
            d.build["use_fp8_context_fmha"] == "disable"
            and d.kv_format is KvFormat.FP8
            and d.qformat in FP8_ATTENTION
            and _paged_context(d)
        ),
        failed="build.trtllm.use_fp8_context_fmha=disable has no effect with quant={d.qformat} and kv_cache=fp8:"
        " trtllm-build switches it on again, because paged attention reads an FP8 cache in FP8.",
        todo="Leave it out, set kv_cache=auto, or set build.trtllm.use_paged_context_fmha=disable.",
        source="tensorrt_llm/builder.py (1.3.0rc3): FP8 Context FMHA is enabled to support FP8 Paged Context FMHA",
    ),
    gpu_rule(
        name="features-need-a-paged-kv-cache",
        when=lambda d: d.build.kv_cache_type != "paged",
        failed="build.kv_cache_type={d.build.kv_cache_type} has no blocks, but in-flight batching, KV-cache reuse and"
        " chunked context need them.",
        todo="Set build.kv_cache_type=paged.",
        source=f"{COMMAND}; docs/source/features/paged-attention-ifb-scheduler.md",
    ),
    gpu_rule(
        name="paged-kv-cache-is-deprecated",
        when=lambda d: d.build["paged_kv_cache"] == "disable",
        failed="build.trtllm.paged_kv_cache=disable is the deprecated spelling of kv_cache_type, which says"
        " '{d.build.kv_cache_type}'.",
        todo="Set build.kv_cache_type instead.",
        source=COMMAND,
    ),
    gpu_rule(
        name="in-flight-batching-packs-its-input",
        when=lambda d: d.build["remove_input_padding"] == "disable",
        failed="build.trtllm.remove_input_padding=disable: in-flight batching needs packed tokens.",
        todo="Set build.trtllm.remove_input_padding=enable.",
        source="docs/source/features/paged-attention-ifb-scheduler.md",
    ),
    gpu_rule(
        name="streamingllm-cannot-be-built",
        when=lambda d: d.build["streamingllm"] == "enable",
        failed="build.trtllm.streamingllm=enable stops TensorRT-LLM 1.2 with an assertion.",
        todo="Set build.trtllm.streamingllm=disable; attention sinks run with engine=openvino.",
        source=COMMAND,
    ),
    gpu_rule(
        name="sinks-need-streamingllm",
        when=lambda d: bool(d.triton.sink_token_length),
        failed="triton.sink_token_length={d.triton.sink_token_length} needs an engine built with --streamingllm, which"
        " TensorRT-LLM 1.2 cannot build.",
        allowed="A window without sinks works: window=sliding.",
        todo="Set triton.sink_token_length=null, or use engine=openvino.",
        source=f"{COMMAND}; {TEMPLATES}",
    ),
    rule(
        name="sinks-need-a-window",
        when=lambda d: bool(d.triton.sink_token_length) and d.triton.max_attention_window_size is None,
        failed="triton.sink_token_length={d.triton.sink_token_length} is set without a window, and then every"
        " token is kept.",
        todo="Set triton.max_attention_window_size as well, or use window=sinks.",
        source=TEMPLATES,
    ),
    rule(
        name="sinks-fit-their-window",
        when=lambda d: (
            d.triton.max_attention_window_size is not None
            and (d.triton.sink_token_length or 0) >= min(d.triton.max_attention_window_size)
        ),
        failed="triton.sink_token_length={d.triton.sink_token_length} leaves no room in the window of"
        " {d.triton.max_attention_window_size} tokens.",
        todo="Set a larger window or fewer sinks.",
        source=TEMPLATES,
    ),
    gpu_warning(
        name="a-passed-window-ends-reuse",
        when=lambda d: (
            (windows := d.triton.max_attention_window_size) is not None
            and d.kv_reuse
            and [{"windows": listed(windows)}]
        ),
        failed="triton.max_attention_window_size=[{windows}] with KV-cache reuse: requests that grow longer than the"
        " smallest window overwrite their own prefix, and TensorRT-LLM does not reuse it.",
        todo="Keep shared prefixes within the window, or remove the window.",
        source="issues #2983, #2912",
    ),
    rule(
        name="heads-have-a-kernel",
        engines=ON_GPUS,
        when=lambda d: (
            known(d.shape).head_dim not in HEAD_SIZES
            and (d.writes_engine or d.llm_api.others.get("attn_backend", "TRTLLM") == "TRTLLM")
        ),
        failed="{d.label} has heads of {d.shape.head_dim}, for which TensorRT-LLM has no attention kernel.",
        allowed=f"It has kernels for {listed(HEAD_SIZES)}.",
        todo="Use another model, or engine=openvino.",
        source="NVIDIA/TensorRT-LLM cpp/tensorrt_llm/kernels/decoderMaskedMultiheadAttention.cu (1.3.0rc3)",
    ),
    rule(
        name="windows-have-no-beams",
        engines=ON_GPUS,
        when=_beams_past_a_window,
        failed="triton.max_attention_window_size=[{windows}] cannot be combined with max_beam_width={width}:"
        " TensorRT-LLM stops at a sequence of several beams that grows longer than the window.",
        todo="Set build.max_beam_width=1 and triton.max_beam_width=null, or a build.max_seq_len within the window.",
        source="docs/source/features/long-sequence.md; cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp (1.3.0rc3):"
        " detachFrontBlock",
    ),
    rule(
        name="windows-repeat-with-each-stage",
        engines=ON_GPUS,
        when=_shifted_windows,
        failed="triton.max_attention_window_size=[{windows}] cannot be combined with build.pp_size={d.build.pp_size}:"
        " TensorRT-LLM's KV cache starts the list anew with each stage of {layers} layers, and attention does not, so"
        " blocks that a layer still reads would be freed.",
        todo="Set build.pp_size=1 and split with build.tp_size, or set one window.",
        source="NVIDIA/TensorRT-LLM cpp/tensorrt_llm/batch_manager/transformerBuffers.cpp: maxAttentionWindows,"
        " kvCacheManager.cpp: groupLayersByWindowSize; tensorrt_llm/_torch/pyexecutor/resource_manager.py (1.3.0rc3)",
    ),
    gpu_rule(
        name="host-blocks-come-back-first",
        when=lambda d: not d.triton.kv_cache_onboard_blocks and _paged_context(d),
        failed="triton.kv_cache_onboard_blocks=false stops the server: paged context attention reads no blocks in host"
        " memory.",
        todo="Set triton.kv_cache_onboard_blocks=true.",
        source=RUNTIME,
    ),
    gpu_warning(
        name="context-logits-end-reuse",
        when=lambda d: gathers(d) if d.kv_reuse else (),
        failed="{key}=true: the server switches KV-cache reuse off, because reused tokens have no logits.",
        todo="Set kv_cache.enable_block_reuse=false, or {key}=false.",
        source=RUNTIME,
    ),
    rule(
        name="kv-cache-leaves-some-memory",
        engines=ON_GPUS,
        when=lambda d: d.triton.kv_cache_free_gpu_mem_fraction >= 1.0,
        failed="triton.kv_cache_free_gpu_mem_fraction={d.triton.kv_cache_free_gpu_mem_fraction} stops the server, which"
        " takes less than 1.",
        todo="Set it to 0.95.",
        source="NVIDIA/TensorRT-LLM cpp/tensorrt_llm/executor/kvCacheConfig.cpp (1.3.0rc3): setFreeGpuMemoryFraction;"
        " tensorrt_llm/_torch/pyexecutor/resource_manager.py: calculate_max_num_blocks",
    ),
    rule(
        name="host-blocks-are-for-reuse",
        engines=ON_GPUS,
        when=lambda d: d.triton.kv_cache_host_memory_bytes > 0 and not d.kv_reuse,
        failed="triton.kv_cache_host_memory_bytes={d.triton.kv_cache_host_memory_bytes} keeps blocks for reuse, but"
        " KV-cache reuse is off.",
        todo="Set kv_cache.enable_block_reuse=true, or triton.kv_cache_host_memory_bytes=0.",
        source=f"{REUSE}; {TEMPLATES}",
    ),
    Rule(
        name="prompts-fit-one-iteration",
        topic="Limits",
        when=lambda d: not d.chunked_context and d.build.max_num_tokens < d.build.max_input_len,
        failed="build.max_num_tokens={d.build.max_num_tokens} is less than max_input_len={d.build.max_input_len}:"
        " without chunked context a prompt must fit one iteration.",
        todo="Set build.max_num_tokens={d.build.max_input_len} or more, lower build.max_input_len, or set"
        " runtime.enable_chunked_context=true.",
        source=f"{SCHEDULER}; issues #2702, #2717",
    ),
)
