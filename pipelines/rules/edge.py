"""Limits of engine=tensorrt_edge (TensorRT Edge-LLM 0.11.0), and of what is exported for it."""

from __future__ import annotations

from functools import partial

from pipelines.domain.families import titles
from pipelines.domain.formats import FORMATS, KvFormat, QFormat
from pipelines.rules.llmapi import NO_CHECKPOINT, set_by_hand
from pipelines.rules.record import EDGE, DeploymentFacts, Rule, either, listed, shape, sm

TOPIC = "Edge-LLM"
WHEELS = "NVIDIA/TensorRT-Edge-LLM: _native/variants.json in the wheels of 0.11.0 for x86_64 and aarch64"
TRIED = "NVIDIA/TensorRT-Edge-LLM: tensorrt-edgellm-export 0.11.0 on what this project exports, docs/gpu.md"
MATRIX = "NVIDIA's support matrix of 0.11.1: getting_started/support-matrix"
TOOLS = "NVIDIA/TensorRT-Edge-LLM 0.11.0:"
LOADER = "NVIDIA/TensorRT-Edge-LLM: tensorrt_edgellm/config.py _parse_quant, checkpoint/repacking.py (0.11.0)"

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
    QFormat.AUTO: "this project exports one format for all linears",
}
"""Why a format is not exported, for all that are not."""
GROUP = 128
"""Inputs that share a scale in its INT4 kernels."""
WITH_FP8_KV = (QFormat.FP8, QFormat.NVFP4, QFormat.INT8_SQ)
"""Formats whose scales of an FP8 KV cache it reads."""


def _in_groups(d: DeploymentFacts) -> bool:
    weights = FORMATS[d.qformat].weights
    return weights.group_size(d.group_size) not in (0, weights.group if weights.group_is_fixed else GROUP)


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
        needs=("sm",),
        when=lambda d: sm(d) not in GPUS,
        failed="engine=tensorrt_edge has no kernels for compute capability {d.sm}: tensorrt-edgellm 0.11.0 has them for"
        f" {', '.join(f'{capability} ({name})' for capability, name in GPUS.items())}.",
        todo="Choose one of these GPUs, or engine=tensorrt_llm.",
        source=f"{WHEELS}; {MATRIX}",
    ),
    rule(
        name="edge-families",
        needs=("shape",),
        when=lambda d: "edge" not in shape(d).family.features,
        failed="engine=tensorrt_edge does not support {d.shape.architecture}: its exporter takes models that it does"
        " not know, too, and then the graph computes something else.",
        allowed=f"The graphs of {either(titles('edge'), 'and')} were compared with the models.",
        todo="Choose one of these models, or another engine.",
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
        when=lambda d: d.kv_format is KvFormat.INT8 or (d.kv_format is KvFormat.FP8 and d.qformat not in WITH_FP8_KV),
        failed="engine=tensorrt_edge does not support kv_cache={d.kv_format} with quant={d.qformat}: its exporter"
        " leaves out the scales, without an error.",
        allowed=f"kv_cache=fp8 works with {either(WITH_FP8_KV, 'and')}.",
        todo="Set kv_cache=auto.",
        source=f"{LOADER}; {TRIED}",
    ),
    rule(
        name="edge-takes-one-rank",
        when=lambda d: d.world_size > 1,
        failed="engine=tensorrt_edge is exported for one GPU, not for tp_size={d.build.tp_size} and"
        " pp_size={d.build.pp_size}.",
        todo="Set tp_size=1 and pp_size=1.",
        source=f"{TOOLS} tensorrt-edgellm-export --tp-size is for two DGX Spark",
    ),
    rule(
        name="edge-has-no-sparsity",
        when=lambda d: d.sparsity != "none",
        failed="engine=tensorrt_edge does not support sparsity={d.sparsity}: it lists no 2:4 format.",
        todo="Set sparsity=none, or use engine=tensorrt_llm.",
        source=LOADER,
    ),
    rule(
        name="edge-drafts-nothing",
        when=lambda d: d.speculation != "none",
        failed="speculative={d.speculation} is not supported by engine=tensorrt_edge: its drafts are trained in formats"
        " of their own.",
        todo="Set speculative=none.",
        source=f"{TOOLS} tensorrt-edgellm-export --help: EAGLE3, MTP, DFlash, JetSpec, DSpark",
    ),
    rule(
        name="edge-has-no-adapters",
        when=lambda d: bool(d.adapters) and [{"tasks": listed(d.adapters)}],
        failed="lora.adapters has {tasks}, but engine=tensorrt_edge is exported without adapters.",
        todo="Set lora=none, or insert them with NVIDIA's tensorrt-edgellm-insert-lora.",
        source=f"{TOOLS} tensorrt-edgellm-insert-lora",
    ),
    rule(
        name="edge-sees-no-images",
        needs=("images",),
        when=lambda d: d.images is not None,
        failed="engine=tensorrt_edge does not support multimodal={d.images.model_type}.",
        todo="Set multimodal=none.",
        source=f"{TOOLS} tensorrt-edgellm-export takes whole vision models",
    ),
    rule(
        name="edge-builds-on-the-device",
        when=lambda d: set_by_hand(d, READ),
        failed="engine=tensorrt_edge does not support {key}={value}: it is an option of trtllm-build.",
        allowed="It reads {read}.",
        todo="Remove it, or use engine=tensorrt_llm.",
        source=f"{TOOLS} llm_build, tensorrt-edgellm-build",
    ),
)
