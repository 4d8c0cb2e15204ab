"""Dimensions of the model against quantization groups, ranks and sparsity."""

from collections.abc import Iterator
from functools import partial

from pipelines.domain.formats import FORMATS, QFormat
from pipelines.domain.model_shape import ModelShape
from pipelines.rules.record import BUILT, GPU, Cases, DeploymentFacts, Engines, Rule, known, listed

# Sources of the rules: public files at a commit, and issues, of github.com/NVIDIA/TensorRT-LLM unless noted.

BUILDER = "tensorrt_llm/builder.py@008b2b8"
LAYERS = "tensorrt_llm/quantization/layers.py (1.3.0rc3)"
MLP = "tensorrt_llm/layers/mlp.py (1.3.0rc3)"
TREES = (
    "NVIDIA/TensorRT-LLM cpp/tensorrt_llm/runtime/utils/speculativeChoicesUtils.cpp, cpp/tensorrt_llm/batch_manager/"
    "createNewDecoderRequests.cpp (1.3.0rc3)"
)
RUNTIME = "NVIDIA/TensorRT-LLM cpp/tensorrt_llm/batch_manager/trtGptModelInflightBatching.cpp (1.3.0rc3)"
PLUGIN = "tensorrt_llm/plugin/plugin.py@c20322f"
COMMAND = "tensorrt_llm/commands/build.py@65f1d15"
SUPPORT = "docs/source/legacy/reference/support-matrix.md@6e1dd9c"
PRECISION = "docs/source/legacy/reference/precision.md@b2ae043"
REUSE = "docs/source/legacy/advanced/kv-cache-reuse.md@6418590"
SPECULATIVE = "docs/source/legacy/advanced/speculative-decoding.md@fbbc05d"
SCHEDULER = (
    "docs/source/legacy/performance/performance-tuning-guide/tuning-max-batch-size-and-max-num-tokens.md@04ecb91"
)
FP8_GUIDE = "docs/source/legacy/performance/performance-tuning-guide/fp8-quantization.md@1a349cd"
FLAGS_GUIDE = "docs/source/legacy/performance/performance-tuning-guide/useful-build-time-flags.md"
COMBINATIONS = "docs/source/features/feature-combination-matrix.md@01edcea"
GEMMA = "examples/models/core/gemma/README.md@b35ac1b"
GEMMA_CONVERT = "examples/models/core/gemma/convert_checkpoint.py@fbbc05d"
MEDUSA = "examples/medusa/README.md@0f041b7"
EAGLE = "examples/eagle/README.md@06255cb"
REDRAFTER = "examples/redrafter/README.md@2d23435"
LOOKAHEAD = "examples/lookahead/README.md@7ed07f0"
DRAFT_TARGET = "examples/draft_target_model/README.md@11925f6"
LORA = "docs/source/advanced/lora.md (0.14)"
STREAMING = "docs/source/advanced/weight-streaming.md (0.14)"
MULTIMODAL = "examples/models/core/multimodal/README.md@89fd9b7"
MODEL_CONFIG = "triton-inference-server/tensorrtllm_backend docs/model_config.md"
BACKEND = "triton-inference-server/tensorrtllm_backend inflight_batcher_llm/src/model_instance_state.cc@c2e65b8"
GUIDED = "triton_backend/inflight_batcher_llm/src/model_instance_state.cc: getGuidedDecodingConfigFromParams (1.3.0rc3)"
SWIGLU_PLUGINS = ("gemm_swiglu_plugin", "low_latency_gemm_swiglu_plugin")
FP8_PLUGINS = (*SWIGLU_PLUGINS, "low_latency_gemm_plugin")
TEMPLATES = "triton_backend/all_models/inflight_batcher_llm/tensorrt_llm/config.pbtxt@2a9abd9"
LLM_FORMATS = "docs/source/features/quantization.md"
LLM_ARGS = "tensorrt_llm/llmapi/llm_args.py@029c15c"
LLM_MODEL = "triton_backend/all_models/llmapi/tensorrt_llm/config.pbtxt@c8c6df0"
MODELOPT = "NVIDIA/Model-Optimizer modelopt/torch/export (0.37.0)"
ROPE = "tensorrt_llm/functional.py (1.2): RopeEmbeddingUtils.create_sinusoidal_positions_for_attention_plugin"

TOPIC = "Sizes and ranks"
INPUT_SPLIT = ("attention.dense", "mlp.proj")
"""Linears that tensor parallelism splits along their input."""
SHARDS = "tensorrt_llm/models/modeling_utils.py: ranks hold whole heads and equal slices of the MLP"


def gpu_groups(qformat: QFormat) -> tuple[int, ...]:
    """Return the group sizes that TensorRT-LLM's kernels for grouped INT4 weights know, largest first."""
    return (128,) if FORMATS[qformat].activation == "fp8" else (128, 64)


def _rank_inputs(d: DeploymentFacts) -> Iterator[tuple[str, int]]:
    """Yield (linear, inputs of one rank); a split that does not divide evenly is reported by its own rule."""
    model, whole = known(d.shape), whole_attention(d)
    of_expert = max(d.build.tp_size // d.build.moe_ep_size, 1)
    split = {
        "attention.dense": 1 if whole else d.build.tp_size,
        "mlp.proj": 1 if whole and model.num_experts == 1 else of_expert,
    }
    for name, (_, combined) in model.linear_shapes.items():
        width = model.intermediate_size if name == "mlp.proj" else combined
        ranks = split.get(name, 1)
        yield name, width // ranks if width % ranks == 0 else width


def _per_rank(name: str, d: DeploymentFacts) -> str:
    return f" per rank (tp_size={d.build.tp_size})" if d.build.tp_size > 1 and name in INPUT_SPLIT else ""


def _divisors(count: int) -> str:
    return listed(n for n in range(1, min(count, 64) + 1) if count % n == 0)


def uneven(d: DeploymentFacts) -> Cases:
    """Return what the ranks cannot hold in equal parts."""
    model, ranks = known(d.shape), d.build.tp_size
    sharing = max(ranks // d.build.moe_ep_size, 1)  # an expert
    counts = {"num_attention_heads": (model.num_attention_heads, ranks)}
    counts["intermediate_size"] = (model.intermediate_size, sharing)
    return [
        {
            "name": "moe_tp_size" if size < ranks else "tp_size",
            "size": size,
            "what": what,
            "count": count,
            "divisors": _divisors(count),
        }
        for what, (count, size) in counts.items()
        if count % size
    ]


def whole_attention(d: DeploymentFacts) -> bool:
    """Whether each rank of the LLM API has all heads: attention is data parallel."""
    return not d.writes_engine and d.llm_api.others.get("enable_attention_dp") is True


def _experts_uneven(d: DeploymentFacts) -> Cases:
    experts = known(d.shape).num_experts if known(d.shape).family.experts else 1
    what = f"the {experts} experts" if experts > 1 else "the one MLP"
    size, ranks = d.build.moe_ep_size, d.build.tp_size
    works = listed(n for n in range(1, ranks + 1) if ranks % n == 0 and experts % n == 0)
    return [{"what": what, "works": works}] if ranks % size or experts % size else []


def _stages_uneven(d: DeploymentFacts) -> Cases:
    layers = known(d.shape).num_hidden_layers
    return ({"divisors": _divisors(layers)},) if layers % d.build.pp_size else ()


def _groups(d: DeploymentFacts) -> Cases:
    """Return linears whose inputs are not whole groups. Source: ModelOpt `postprocess.check_weight_shape_valid`."""
    group = FORMATS[d.qformat].weights.group_size(d.group_size)
    if not group:
        return ()
    names: dict[tuple[int, str], list[str]] = {}
    for name, width in _rank_inputs(d):
        if width % group:
            names.setdefault((width, _per_rank(name, d)), []).append(name)
    works, change = _working_groups(d)
    return [
        {"group": group, "name": ", ".join(alike), "width": width, "where": where, "works": works, "change": change}
        for (width, where), alike in names.items()
    ]


def _working_groups(d: DeploymentFacts) -> tuple[str, str]:
    weights = FORMATS[d.qformat].weights
    if weights.group_is_fixed:
        return f"{d.qformat.upper()} always uses groups of {weights.group}.", _larger_parts(d)
    widths = [width for _, width in _rank_inputs(d)]
    sizes = gpu_groups(d.qformat) if d.needs_gpu else (128, 64, 32, 16)
    if works := [group for group in sizes if not any(width % group for width in widths)]:
        return f"Works here: quant.group_size={'/'.join(map(str, works))}.", "Set it"
    return "No usual group size works here.", _larger_parts(d)


def _larger_parts(d: DeploymentFacts) -> str:
    return "Lower tp_size" if d.build.tp_size > 1 else "Use another model"


def _odd_rows(d: DeploymentFacts) -> Cases:
    if not FORMATS[d.qformat].weights.pairs_outputs:
        return ()
    sizes = {
        name: rows if name in INPUT_SPLIT else rows // d.build.tp_size
        for name, (rows, _) in known(d.shape).linear_shapes.items()
    }
    odd = [f"{name} ({rows})" for name, rows in sizes.items() if rows % 2]
    return ({"odd": listed(odd), "change": _larger_parts(d)},) if odd else ()


def _sparse_inputs(d: DeploymentFacts) -> Cases:
    """Return inputs of a rank that are not whole groups of 4, or that ModelOpt's magnitude mode would leave dense."""
    if d.sparsity == "none":
        return ()
    multiple = 16 if d.sparsity == "magnitude" else 4
    if d.build.tp_size > 1:
        multiple = 4
    return [
        {"multiple": multiple, "name": name, "width": width, "where": _per_rank(name, d)}
        for name, width in _rank_inputs(d)
        if width % multiple
    ]


def _sparse_outputs(d: DeploymentFacts) -> Cases:
    if d.sparsity != "magnitude":
        return ()
    model: ModelShape = known(d.shape)
    rows = {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "K and V rows": model.num_key_value_heads * model.head_dim,
    }
    return [{"what": what, "count": count} for what, count in rows.items() if count % 8]


def _heads_of_a_rank(d: DeploymentFacts) -> Cases:
    """Return the heads of a rank where each query head has its own KV head and more than one is there."""
    model, ranks = known(d.shape), d.build.tp_size
    heads, kv_heads = model.num_attention_heads // ranks, max(model.num_key_value_heads // ranks, 1)
    mixed = bool(model.family.head_norms) and heads == kv_heads > 1
    return [{"heads": heads}] if mixed else ()


uneven_rule = partial(
    Rule,
    failed="{name}={size} does not divide {what}={count}.",
    allowed="Divisors: {divisors}.",
    todo="Change tp_size.",
)
rule = partial(Rule, topic=TOPIC, engines=BUILT)
RULES = (
    rule(
        name="head-norms-need-shared-kv-heads",
        engines=GPU,
        when=_heads_of_a_rank,
        failed="{d.shape.architecture} has {heads} query heads and as many KV heads on each rank: TensorRT-LLM 1.2 then"
        " reads q, k and v as if they were interleaved by head before it applies the norms of heads.",
        allowed="Models with fewer KV heads than query heads, as all published ones of this family, work.",
        todo="Use engine=tensorrt_llm_llmapi or engine=openvino.",
        source="tensorrt_llm/layers/attention.py (qk_layernorm)",
    ),
    rule(
        name="gemma-has-no-pipeline",
        when=lambda d: known(d.shape).family.head_is_embedding and d.build.pp_size > 1,
        failed="pp_size={d.build.pp_size} does not work with {d.shape.architecture}: its embedding is also its head,"
        " and both ends of a pipeline would need it.",
        todo="Set pp_size=1 and split with tp_size.",
        source=f"{GEMMA_CONVERT}: no pipeline parallelism",
    ),
    rule(
        name="phi-3-has-no-pipeline",
        engines=GPU,
        when=lambda d: known(d.shape).family.name == "phi3" and d.build.pp_size > 1,
        failed="pp_size={d.build.pp_size} does not work with {d.shape.architecture}: TensorRT-LLM 1.2 gives its whole"
        " model to every stage.",
        todo="Set pp_size=1 and split with tp_size.",
        source="tensorrt_llm/models/phi3/model.py: Phi3Model",
    ),
    uneven_rule(name="ranks-divide-heads-and-mlp", topic=TOPIC, engines=BUILT, when=uneven, source=SHARDS),
    rule(
        name="experts-are-divided-evenly",
        when=_experts_uneven,
        failed="build.moe_ep_size={d.build.moe_ep_size} must divide tp_size={d.build.tp_size} and {what} of"
        " {d.shape.architecture}.",
        allowed="Here: {works}.",
        todo="Change build.moe_ep_size; each expert is shared by tp_size / moe_ep_size ranks.",
        source="tensorrt_llm/mapping.py (moe_tp_size x moe_ep_size = tp_size), layers/moe.py",
    ),
    rule(
        name="ranks-share-kv-heads-evenly",
        engines=Engines(on_device=False),
        when=lambda d: (
            not whole_attention(d)
            and bool(known(d.shape).num_key_value_heads % d.build.tp_size)
            and bool(d.build.tp_size % known(d.shape).num_key_value_heads)
        ),
        failed="tp_size={d.build.tp_size} and num_key_value_heads={d.shape.num_key_value_heads} do not divide one"
        " another.",
        todo="Change tp_size so that ranks get whole KV heads, or whole copies of one.",
        source=f"{SHARDS}; tensorrt_llm/_torch/models/modeling_utils.py: duplicate_kv_weight",
    ),
    rule(
        name="smoothquant-cannot-copy-kv-heads",
        when=lambda d: (
            FORMATS[d.qformat].weights.scale_per_output and d.build.tp_size > known(d.shape).num_key_value_heads
        ),
        failed="quant={d.qformat} with tp_size={d.build.tp_size} needs copies of the {d.shape.num_key_value_heads} KV"
        " head(s), which ModelOpt cannot create for weights with one scale per channel.",
        allowed="tp_size up to {d.shape.num_key_value_heads} works.",
        todo="Lower tp_size{quants:, or choose }.",
        source=f"{MODELOPT}: layer_utils.build_qkv raises",
    ),
    rule(
        name="stages-divide-layers",
        when=_stages_uneven,
        failed="pp_size={d.build.pp_size} does not divide num_hidden_layers={d.shape.num_hidden_layers}.",
        allowed="Divisors: {divisors}.",
        todo="Change pp_size.",
        source=f"{MODELOPT}: postprocess.py cuts layers into equal stages",
    ),
    rule(
        name="mix-has-no-pipeline",
        when=lambda d: d.qformat is QFormat.AUTO and d.build.pp_size > 1,
        failed="pp_size={d.build.pp_size} does not work with quant=auto: TensorRT-LLM looks up a stage's formats by"
        " the numbers of its own layers, and one file has to do for all stages.",
        todo="Set pp_size=1 and split with tp_size{quants:, or choose }.",
        source=f"{MODELOPT}: model_config_export.py writes quant_cfg.json of the last rank; LayerQuantConfig in"
        " tensorrt_llm/models/modeling_utils.py",
    ),
    rule(
        name="groups-divide-inputs",
        engines=Engines(on_device=False),
        when=_groups,
        failed="quant={d.qformat} has groups of {group} inputs, which do not divide the {width} inputs of"
        " {name}{where}.",
        allowed="{works}",
        todo="{change}{quants:, or choose }.",
        source=f"{MODELOPT}: postprocess.check_weight_shape_valid; tensorrt_llm/_torch/modules/linear.py (1.3.0rc3)",
    ),
    rule(
        name="int4-packs-pairs-of-outputs",
        when=_odd_rows,
        failed="quant={d.qformat} packs two output channels into a byte, but some linears have an odd number: {odd}.",
        todo="{change}{quants:, or choose }.",
        source=f"{MODELOPT}: INT4 weights are int8 [out/2, in] (measured exports of 0.37 and 0.47)",
    ),
    rule(
        name="sparsity-needs-whole-groups-of-inputs",
        when=_sparse_inputs,
        failed="2:4 sparsity by {d.sparsity} needs inputs in multiples of {multiple}; {name} has {width}{where}.",
        todo="Set sparsity=none, or choose another tp_size.",
        source="NVIDIA A100 whitepaper, structured sparsity; NVIDIA/Model-Optimizer weight_sparsity/magnitude.py leaves"
        " other widths dense",
    ),
    rule(
        name="magnitude-sparsity-needs-outputs-in-eights",
        when=_sparse_outputs,
        failed="2:4 sparsity by {d.sparsity} needs outputs in multiples of 8; {what} is {count}.",
        todo="Set sparsity=none, or use sparsity=sparsegpt_2_4.",
        source="NVIDIA/Model-Optimizer weight_sparsity/magnitude.py leaves other shapes dense, with a warning",
    ),
)
