"""Limits of the CPU engine: unsupported settings and combinations."""

from functools import partial

from pipelines.domain.formats import FORMATS, UNIFORM
from pipelines.engines.openvino.memory import KV_BLOCK_TOKENS, least_window, nearest_window
from pipelines.rules.record import CPU, Cases, DeploymentFacts, Rule, listed

DRAFTING = ("none", "draft_target")
WINDOW = "pipelines/engines/openvino/memory.py: openvino_genai CacheEvictionConfig drops whole blocks (2026.4)"


def _window(d: DeploymentFacts) -> int:
    """Return the tokens of the window; 0 where every token is kept."""
    windows = d.triton.max_attention_window_size or ()
    window, limit = (windows[0] if windows else 0), d.longest
    return 0 if limit is not None and window >= limit else window


def _not_in_blocks(d: DeploymentFacts) -> Cases:
    """Return windows whose exact number of tokens the engine cannot keep."""
    window, sinks = _window(d), d.triton.sink_token_length or 0
    works = nearest_window(window, sinks)
    if not window or works == window:
        return ()
    return ({"window": window, "least": least_window(sinks), "works": works},)


def _sizes(d: DeploymentFacts) -> Cases:
    windows = d.triton.max_attention_window_size or ()
    return ({"windows": listed(windows), "one": max(windows)},) if len(set(windows)) > 1 else ()


def _rounded_otherwise(d: DeploymentFacts) -> Cases:
    """Return a format that leaves nothing to dynamic quantization, if a number of activations is given."""
    formats = d.candidates or (d.qformat,)
    other = [qformat for qformat in formats if not FORMATS[qformat].weight_only]
    works = listed([qformat for qformat in UNIFORM if FORMATS[qformat].weight_only])
    return [{"other": other[0], "works": works}] if d.dynamic_quantization not in ("auto", "off") and other else ()


def _beside_table(d: DeploymentFacts) -> Cases:
    """Return the first other model that cannot read a prompt table, where there is one."""
    others = ["lora.adapters"] if d.adapters else []
    others += [f"speculative={d.speculation}"] if d.speculation == "draft_target" else []
    return [{"other": others[0]}] if d.build.max_prompt_embedding_table_size and others else ()


rule = partial(Rule, topic="CPU engine", engines=CPU)
RULES = (
    rule(
        name="cpu-rounds-activations-of-weight-only-formats",
        when=_rounded_otherwise,
        failed="engine.openvino.dynamic_quantization={d.dynamic_quantization} has no effect on quant={other}.",
        allowed="It applies to formats that quantize weights only: {works}.",
        todo="Leave it out.",
        source="pipelines/engines/openvino/runtime.py: formats with activation scales round activations in the graph",
    ),
    rule(
        name="cpu-kernels-are-dense",
        warns=True,
        when=lambda d: d.sparsity != "none",
        failed="sparsity={d.sparsity} saves no time and no memory with engine=openvino, whose kernels are dense: it"
        " shows what the zeros cost in accuracy.",
        source="openvinotoolkit/openvino docs: sparse_weights_decompression_rate: INT8 on AMX alone, off by default",
    ),
    rule(
        name="cpu-windows-are-whole-blocks",
        when=_not_in_blocks,
        failed="triton.max_attention_window_size={window} with sink_token_length={d.triton.sink_token_length} is not"
        " supported by engine=openvino, which drops whole blocks of 32 tokens.",
        allowed="A multiple of 32, at least {least}.",
        todo="Set triton.max_attention_window_size=[{works}].",
        source=WINDOW,
    ),
    rule(
        name="cpu-layers-share-a-window",
        when=_sizes,
        failed="triton.max_attention_window_size=[{windows}] is not supported by engine=openvino:"
        " all layers share one.",
        todo="Set one number, e.g. [{one}].",
        source=WINDOW,
    ),
    rule(
        name="cpu-windows-exclude-reuse",
        when=lambda d: d.kv_reuse and bool(_window(d)) and [{"window": _window(d)}],
        failed="triton.max_attention_window_size=[{window}] with KV-cache reuse is not supported by engine=openvino:"
        " openvino_genai 2026.4 frees dropped blocks twice when they are shared.",
        todo="Set kv_cache.enable_block_reuse=false, as window=sliding and window=sinks do.",
        source=WINDOW,
    ),
    rule(
        name="cpu-windows-exclude-drafts",
        when=lambda d: d.speculation == "draft_target" and bool(_window(d)) and [{"window": _window(d)}],
        failed="triton.max_attention_window_size=[{window}] with speculative={d.speculation} is not supported by"
        " engine=openvino.",
        todo="Remove one of the two.",
        source=WINDOW,
    ),
    rule(
        name="cpu-blocks-have-32-tokens",
        when=lambda d: d.build.tokens_per_block != KV_BLOCK_TOKENS,
        failed="build.tokens_per_block={d.build.tokens_per_block} is not supported by engine=openvino.",
        allowed="OpenVINO's CPU cache has blocks of 32 tokens.",
        todo="Set it to 32, or build for engine=tensorrt_llm.",
        source="openvinotoolkit/openvino src/plugins/intel_cpu: KV-cache blocks of 32 tokens (measured, 2026.4)",
    ),
    rule(
        name="the-cpu-engine-drafts-with-a-model",
        when=lambda d: d.speculation not in DRAFTING,
        failed="speculative={d.speculation} is not supported by engine=openvino.",
        allowed="The CPU engine supports speculative=draft_target.",
        todo="Use that, or engine=tensorrt_llm.",
        source="openvinotoolkit/openvino.genai ContinuousBatchingPipeline: a draft model or prompt lookup (2026.4)",
    ),
    rule(
        name="the-cpu-engine-guides-with-llguidance",
        when=lambda d: d.triton.guided_decoding_backend not in (None, "llguidance"),
        failed="triton.guided_decoding_backend={d.triton.guided_decoding_backend} is not supported by engine=openvino.",
        todo="Set guided=llguidance, or use engine=tensorrt_llm.",
        source="pipelines/engines/openvino/serving_options.py: it refuses the others; xgrammar needs triton",
    ),
    rule(
        name="cpu-adapters-see-scaled-activations",
        when=lambda d: not FORMATS[d.qformat].plain_activations and bool(d.adapters),
        failed="lora.adapters with quant={d.qformat} is not supported by engine=openvino: the format scales or"
        " rounds the activations, and an adapter would receive the altered values.",
        allowed="Adapters work with {quants}.",
        todo="Choose one of these, or engine=tensorrt_llm.",
        source="pipelines/engines/openvino/lora.py: y = W x + B (A x), Hu et al., 2021",
    ),
    rule(
        name="cpu-prompt-tables-exclude-adapters-and-drafts",
        when=_beside_table,
        failed="build.max_prompt_embedding_table_size={d.build.max_prompt_embedding_table_size} with {other} is not"
        " supported by engine=openvino: its prompt table is read by one model.",
        todo="Remove one of the two.",
        source="pipelines/engines/openvino/prompt_table.py: one table in the graph's mapped file",
    ),
    rule(
        name="the-cpu-engine-keeps-its-weights",
        when=lambda d: d.build.weight_streaming,
        failed="build.weight_streaming={d.build.weight_streaming} is not supported by engine=openvino: there is no"
        " second memory to stream from.",
        todo="Use weights=resident, or engine=tensorrt_llm.",
        source="pipelines/engines/openvino: weights are constants of the graph",
    ),
)
