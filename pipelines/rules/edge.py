"""Limits of engine=tensorrt_edge (TensorRT Edge-LLM 0.11.0), and of what is exported for it."""

from functools import partial

from pipelines.domain.families import titles
from pipelines.domain.formats import FORMATS, KvFormat, QFormat
from pipelines.rules.llmapi import NO_CHECKPOINT, set_by_hand
from pipelines.rules.record import EDGE, Cases, DeploymentFacts, Rule, either, known, listed

TOPIC = "Edge-LLM"
WHEELS = "NVIDIA/TensorRT-Edge-LLM: _native/variants.json in the wheels of 0.11.0 for x86_64 and aarch64"
TRIED = "NVIDIA/TensorRT-Edge-LLM: tensorrt-edgellm-export 0.11.0 on what this project exports, docs/gpu.md"
TOOLS = "NVIDIA/TensorRT-Edge-LLM 0.11.0: --help of llm_build and tensorrt-edgellm-{export,build,serve,insert-lora}"

GPUS = {
    8.0: "A100, A30", 8.6: "A10", 8.7: "Jetson Orin", 10.0: "B200", 11.0: "Thor", 12.0: "RTX 50, RTX PRO",
    12.1: "DGX Spark",
}  # fmt: skip
"""Compute capability -> GPUs; 8.7, 11.0 and 12.1 are of machines with an Arm processor."""
READ = ("max_batch_size", "max_input_len", "max_seq_len")
"""Options of conf/build that become limits of the device's engine."""
WHY_NOT = {
    QFormat.W4A8_AWQ: "its exporter leaves out most of the checkpoint's tensors, without an error",
    QFormat.INT8_WO: NO_CHECKPOINT,
    QFormat.INT4_WO: NO_CHECKPOINT,
}
"""Why a format is not exported, for all that are not."""
GROUP = 128
"""Inputs that share a scale in its INT4 kernels."""
LONGEST = 8192
"""Tokens of a sequence that tensorrt-edgellm-serve takes unless it is told otherwise."""
WITH_FP8_KV = (QFormat.FP8, QFormat.NVFP4, QFormat.INT8_SQ)
"""Formats whose scales of an FP8 KV cache it reads."""
LOOKAHEAD = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")


def _in_groups(d: DeploymentFacts) -> bool:
    weights = FORMATS[d.qformat].weights
    return weights.group_size(d.group_size) not in (0, weights.group if weights.group_is_fixed else GROUP)


def _features(d: DeploymentFacts) -> Cases:
    missing = {
        f"sparsity={d.sparsity}": d.sparsity != "none" and "sparsity=none",
        f"speculative={d.speculation}": d.speculation != "none" and "speculative=none",
        f"lora.adapters={listed(d.adapters)}": bool(d.adapters) and "lora=none",
        "multimodal": d.images is not None and "multimodal=none",
        "more than one GPU": d.world_size > 1 and "build.tp_size=1 build.pp_size=1",
    }
    return [{"feature": feature, "without": without} for feature, without in missing.items() if without]


def _options(d: DeploymentFacts) -> Cases:
    """Return what is set of trtllm-build, tritonserver and the runtime, except by features."""
    usual, spared = type(d.triton)().model_dump(), ("decoding_mode", *LOOKAHEAD)
    changed = [(name, value) for name, value in d.triton.model_dump().items() if value != usual[name]]
    cases = [{"key": f"triton.{name}", "value": value} for name, value in changed if name not in spared]
    cases += [{"key": "runtime.enable_chunked_context", "value": True}] if d.chunked_context else []
    of_build = [case for case in set_by_hand(d, READ) if case["key"] not in ("build.tp_size", "build.pp_size")]
    return [*of_build, *({**case, "read": listed(READ)} for case in cases)]


def _window(d: DeploymentFacts) -> Cases:
    """Return the model's own window, where sequences can grow longer than it."""
    window = known(d.shape).sliding_window
    limit = d.build.max_seq_len or min(LONGEST, known(d.shape).max_position_embeddings)
    return [{"window": window, "limit": limit}] if window and limit > window else ()


rule = partial(Rule, topic=TOPIC, engines=EDGE)
RULES = (
    rule(
        name="edge-formats",
        when=lambda d: () if FORMATS[d.qformat].edge else [{"why": WHY_NOT[d.qformat]}],
        failed="engine=tensorrt_edge does not support quant={d.qformat}: {why}.",
        allowed="It supports {quants.names}.",
        source=TRIED,
    ),
    rule(
        name="edge-gpus",
        when=lambda d: known(d.sm) not in GPUS,
        failed="engine=tensorrt_edge has no kernels for compute capability {d.sm}: tensorrt-edgellm 0.11.0 has them for"
        f" {', '.join(f'{capability} ({name})' for capability, name in GPUS.items())}.",
        todo="Choose one of these GPUs, or engine=tensorrt_llm.",
        source=WHEELS,
    ),
    rule(
        name="edge-families",
        when=lambda d: "edge" not in known(d.shape).family.features,
        failed="engine=tensorrt_edge does not support {d.shape.architecture}: its exporter takes models that it does"
        " not know, too, and then the graph computes something else.",
        allowed=f"The graphs of {either(titles('edge'), 'and')} were compared with the models.",
        todo="Choose one of these models, or another engine.",
        source=TRIED,
    ),
    rule(
        name="edge-has-no-windows",
        when=_window,
        failed="{d.shape.architecture} was trained with an attention window of {window} tokens, but sequences of up to"
        " {limit} tokens would attend to all of them with engine=tensorrt_edge: its exporter leaves out the window.",
        todo="Set build.max_seq_len={window}, or use another engine.",
        source=TRIED,
    ),
    rule(
        name="edge-rotates-whole-heads",
        when=lambda d: d.rotary is not None and d.rotary.fraction != 1.0,
        failed="{d.label} rotates only a part of each head (partial_rotary_factor={d.rotary.fraction:g}); the graphs of"
        " such models were not compared with the models.",
        todo="Use another engine.",
        source=TRIED,
    ),
    rule(
        name="edge-int4-in-groups-of-128",
        when=_in_groups,
        failed="quant.group_size={d.group_size} of quant={d.qformat} is not supported by engine=tensorrt_edge.",
        allowed=f"Its INT4 kernels have groups of {GROUP}.",
        todo=f"Set quant.group_size={GROUP}.",
        source="NVIDIA/TensorRT-Edge-LLM 0.6.1: getting_started/supported-models",
    ),
    rule(
        name="edge-kv-cache",
        when=lambda d: (
            d.kv_format is KvFormat.INT8
            or (d.kv_format is KvFormat.FP8 and d.qformat not in (*WITH_FP8_KV, QFormat.AUTO))
        ),
        failed="engine=tensorrt_edge does not support kv_cache={d.kv_format} with quant={d.qformat}: its exporter"
        " leaves out the scales, without an error.",
        allowed=f"kv_cache=fp8 works with {either(WITH_FP8_KV, 'and')}.",
        todo="Set kv_cache=auto.",
        source=TRIED,
    ),
    rule(
        name="edge-features",
        when=_features,
        failed="engine=tensorrt_edge does not support {feature}.",
        allowed="A plain model is exported, for one GPU.",
        todo="Set {without}, or use another engine.",
        source=TOOLS,
    ),
    rule(
        name="edge-reads-limits",
        when=_options,
        failed="engine=tensorrt_edge does not support {key}={value}: the device builds and serves with programs of"
        " Edge-LLM.",
        allowed="Of build, it reads {read}.",
        todo="Leave it out, or use another engine.",
        source=TOOLS,
    ),
)
