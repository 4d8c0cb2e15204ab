"""Limits of engine=tensorrt_llm_llmapi (TensorRT-LLM 1.3 and later, PyTorch backend)."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from pipelines.domain.errors import did_you_mean
from pipelines.domain.families import titles
from pipelines.domain.formats import FORMATS, KvFormat, QFormat, lacks_fp8_kv
from pipelines.engines.tensorrt_llm.config import BuildSettings, key_of
from pipelines.engines.tensorrt_llm.llm_api import (
    OLD_DRAFTS,
    Complaint,
    complaints,
    doubts,
    sampling_option,
    settings_in,
    split_fault,
    tables_of,
    tuned_files,
)
from pipelines.rules.attention import OUTGROWN, wanted
from pipelines.rules.record import LLM_API, Cases, DeploymentFacts, Rule, either, known, listed
from pipelines.rules.split import (
    COMMAND,
    LLM_ARGS,
    LLM_FORMATS,
    LLM_MODEL,
    SUPPORT,
    uneven,
    uneven_rule,
    whole_attention,
)

TOPIC = "LLM API"
OPTIONS = "pipelines/engines/tensorrt_llm/llm_api_options (NVIDIA's llm_args.py, a commit per version)"
GPT_OSS = "tensorrt_llm/_torch/models/modeling_gpt_oss.py@050b6cb: load_hf_weights, pp_size == 1"
EFFECTS = "pipelines/engines/tensorrt_llm/llm_api_options/effects.json"
READ = (
    "max_batch_size",
    "max_input_len",
    "max_seq_len",
    "max_num_tokens",
    "max_beam_width",
    "tokens_per_block",
    "tp_size",
    "pp_size",
)
"""Options of conf/build that the LLM API supports."""
HOW_BUILT = ("workers",)
"""Has no effect on an engine: files of the group `parallel` set it for every flavour."""
SPECULATION = ("speculative_decoding_mode", "max_draft_len")
LORA = ("lora_plugin", "lora_target_modules", "max_lora_rank")
SPARSITY = ("weight_sparsity", "gemm_plugin")
IMAGES = ("max_prompt_embedding_table_size",)
"""Options set by an engine feature: the feature is judged instead, once."""
DRAFTING = ("none", "draft_target")
DECODING = ("medusa", "redrafter", "lookahead", "eagle")
ONE_ENGINE = ("Eagle", "Eagle3", "SA", "PARD", "DFlash", "DSpark")
"""Kinds of speculation whose drafts the target model's own class makes."""


NO_CHECKPOINT = "its loader reads such checkpoints, but ModelOpt's export in Hugging Face's layout writes none"
WHY_NOT = {
    QFormat.INT8_SQ: "its PyTorch backend has no method for INT8 activations",
    QFormat.INT8_WO: NO_CHECKPOINT,
    QFormat.INT4_WO: NO_CHECKPOINT,
}
"""Why a format does not run with the LLM API, for all that do not."""
NOT_LISTED: dict[QFormat, tuple[str, ...]] = {
    QFormat.FP8: ("phi3",),
    QFormat.NVFP4: ("gemma3", "mistral", "phi3"),
    **dict.fromkeys((QFormat.INT4_AWQ, QFormat.INT4_GPTQ, QFormat.INT4_RTN), ("mixtral", "phi3")),  # one kernel
    QFormat.W4A8_AWQ: ("mistral", "mixtral", "qwen3", "qwen3_moe"),
}
"""Families that NVIDIA's matrix does not list for a format."""


def set_by_hand(d: DeploymentFacts, read: Sequence[str]) -> Cases:
    """Return the options of conf/build that were set by hand, except those that are read and those of features."""
    spared = {*read, *HOW_BUILT}
    spared |= {*SPECULATION} if d.speculation != "none" else set()
    spared |= {*SPARSITY} if d.sparsity != "none" else set()
    spared |= {*LORA} if d.adapters else set()
    spared |= {*IMAGES} if d.images is not None else set()
    usual = BuildSettings()
    return [
        {"key": key_of(name), "value": d.build[name], "read": listed(read)}
        for name in d.build.every()
        if name not in spared and d.build[name] != usual[name]
    ]


FILE, EXTRA = "llm_api.file: ", "llm_api.extra."


def _cases(wrong: Iterable[Complaint]) -> Cases:
    faults = [each.fault for each in wrong]
    return [{"failed": each.message, "allowed": each.allowed, "todo": each.todo} for each in faults]


def _refused_options(d: DeploymentFacts) -> Cases:
    """Return what TensorRT-LLM would refuse, each option once."""
    options = d.llm_api
    refused = [*complaints(options.file, options.version, FILE), *complaints(options.extra, options.version, EXTRA)]
    refused += split_fault(options.others, d.build.tp_size, "llm_api: ")
    return _cases(each for each in refused if not each.ignored)


def _ignored_options(options: Mapping[str, Any], version: str | None, source: str) -> Cases:
    return _cases(each for each in complaints(options, version, source) if each.ignored)


def _doubtful(d: DeploymentFacts) -> Cases:
    """Return what the versions before and after this one take differently."""
    disputed = doubts(d.llm_api.others, d.llm_api.version)
    return [
        {"judge": judge, "does": "ignores" if ignored else "refuses", "options": listed(names)}
        for judge, ignored, names in disputed
    ]


def _unread(d: DeploymentFacts) -> Cases:
    """Return the options that are given for another engine."""
    options = d.llm_api
    unread = {"llm_api.tuned": options.tuned, "llm_api.file": options.file and not options.tuned}
    unread |= {f"llm_api.extra.{name}": True for name in options.extra}
    return [{"option": name} for name, value in unread.items() if value]


def _uneven_ranks(d: DeploymentFacts) -> Cases:
    """Return what the ranks cannot hold in equal parts; with attention_dp each has all heads, experts are divided."""
    if whole_attention(d):
        return ()
    dense = known(d.shape).num_experts == 1
    return [case for case in uneven(d) if dense or case["what"] == "num_attention_heads"]


def _narrowed(d: DeploymentFacts) -> Cases:
    """Return the windows of the KV cache if a layer's is narrower than its attention."""
    longest, windows, own = known(d.longest), d.triton.max_attention_window_size or (), known(d.shape).windows
    pattern = [min(window, longest) for window in own or (longest,)]
    narrower = any(windows[n % len(windows)] < pattern[n % len(pattern)] for n in range(len(windows) * len(pattern)))
    allowed = f"Its layers attend to {listed(pattern)} tokens." if own else ""
    return ({"windows": listed(windows), "allowed": allowed},) if narrower else ()


def _reads_fp8_blocks(d: DeploymentFacts) -> Cases:
    """Return what makes attention over a prompt read an FP8 KV cache on a GPU without FP8 arithmetic."""
    if not lacks_fp8_kv(d.kv_format, known(d.sm)):
        return ()
    ours, drafts = d.speculation != "none", "speculative_config" in d.llm_api.others
    without = "speculative=none" if ours else "llm_api's speculative_config"
    return [*wanted(d), *([{"lost": "draft tokens", "without": without}] if ours or drafts else ())]


def _drafts_inside(d: DeploymentFacts) -> Cases:
    """Return what drafts in the target model's engine."""
    options = d.llm_api.others.get("speculative_config") or {}
    kind, judges = options.get("decoding_type"), [table.version for table in tables_of(d.llm_api.version)]
    apart = options.get("eagle3_one_model") is False and judges[0] != "1.4"
    one_engine = judges[-1] not in OLD_DRAFTS
    if d.speculation == "draft_target" and one_engine:
        return [{"option": "speculative=draft_target"}]
    inside = (kind in ONE_ENGINE and not apart) or (kind == "Draft_Target" and one_engine)
    return [{"option": f"decoding_type={kind}"}] if inside else ()


def _holds_drafts(d: DeploymentFacts) -> bool:
    return "drafts_inside" in known(d.shape).family.features


def _drafts_greedily(d: DeploymentFacts) -> Cases:
    """Return the kind of speculation with which requests may not sample; that of a draft model sets the option."""
    sampled = (d.llm_api.others.get("speculative_config") or {}).get("allow_advanced_sampling")
    greedy = d.speculation == "none" and not sampled and sampling_option(d.llm_api.version)
    return _drafts_inside(d) if greedy and _holds_drafts(d) else ()


def _ends_reuse(d: DeploymentFacts) -> Cases:
    """Return the attention backend that reads no block of another request."""
    backend = str(d.llm_api.others.get("attn_backend"))
    return [{"backend": backend}] if d.kv_reuse and backend.startswith("FLASHINFER") else ()


def _is_gpt_oss(d: DeploymentFacts) -> bool:
    return d.shape is not None and d.shape.family.gpt_oss


rule = partial(Rule, topic=TOPIC, engines=LLM_API)
warning = partial(rule, warns=True)
RULES = (
    rule(
        name="llm-api-formats",
        when=lambda d: () if FORMATS[d.qformat].llm_api or _is_gpt_oss(d) else [{"why": WHY_NOT[d.qformat]}],
        failed="engine=tensorrt_llm_llmapi does not support quant={d.qformat}: {why}.",
        allowed="It supports {quants.names}.",
        todo="Choose one of these, or engine=tensorrt_llm (up to TensorRT-LLM 1.2).",
        source=LLM_FORMATS,
    ),
    rule(
        name="llm-api-has-no-int4-on-sm120",
        when=lambda d: (limit := FORMATS[d.qformat].llm_api_below) is not None and known(d.sm) >= limit,
        failed="engine=tensorrt_llm_llmapi does not support quant={d.qformat} on compute capability {d.sm}.",
        allowed="The PyTorch backend runs INT4 weights up to 10.3 (B300). Supported here: {quants}.",
        source=f"{LLM_FORMATS}: Hardware Support Matrix (1.3.0rc3; no AWQ on sm120)",
    ),
    rule(
        name="llm-api-formats-of-families",
        when=lambda d: known(d.shape).family.name in NOT_LISTED.get(d.qformat, ()),
        failed="quant={d.qformat} of {d.shape.architecture} is not in TensorRT-LLM's matrix of models and formats.",
        allowed="Supported here: {quants}.",
        source=f"{LLM_FORMATS}: Model Supported Matrix (1.3.0rc3)",
    ),
    rule(
        name="llm-api-has-no-sinks",
        when=lambda d: bool(d.triton.sink_token_length),
        failed="triton.sink_token_length={d.triton.sink_token_length} has no effect with engine=tensorrt_llm_llmapi:"
        " its PyTorch backend keeps no attention sinks and drops the option.",
        todo="Set triton.sink_token_length=null, or use engine=openvino.",
        source="tensorrt_llm/llmapi/llm_args.py (1.4): KvCacheConfig.sink_token_length is deprecated and ignored",
    ),
    rule(
        name="llm-api-windows-are-the-models",
        when=_narrowed,
        failed="triton.max_attention_window_size=[{windows}] is narrower than {d.label} attends:"
        " engine=tensorrt_llm_llmapi would free blocks of the KV cache that attention still reads, because its PyTorch"
        " backend takes windows from the model alone.",
        allowed="{allowed}",
        todo="Set window=full, or use engine=tensorrt_llm.",
        source="tensorrt_llm/_torch/attention_backend/trtllm.py (1.3.0rc3): attention_window_size; issue #11244",
    ),
    warning(
        name="llm-api-beams-are-for-every-request",
        when=lambda d: d.build.max_beam_width > 1,
        failed="build.max_beam_width={d.build.max_beam_width}: TensorRT-LLM's PyTorch backend fails every request of"
        " another number of beams, as those of benchmarks and evaluations, which have one.",
        todo="Set build.max_beam_width=1, unless all requests ask for {d.build.max_beam_width} beams.",
        source="tensorrt_llm/_torch/pyexecutor/py_executor.py (1.3.0rc3): _validate_request; issue #7368",
    ),
    rule(
        name="llm-api-has-no-int8-kv",
        when=lambda d: d.kv_format is KvFormat.INT8,
        failed="engine=tensorrt_llm_llmapi does not support kv_cache={d.kv_format}: ModelOpt exports no INT8 scales"
        " for it.",
        allowed="Supported here: {kv_caches}.",
        source="NVIDIA/Model-Optimizer modelopt/torch/export/quant_utils.py (0.47)",
    ),
    rule(
        name="llm-api-fp8-kv-below-sm89",
        when=_reads_fp8_blocks,
        failed="kv_cache={d.kv_format} on compute capability {d.sm} rules out {lost}: the PyTorch backend then attends"
        " to the cache in FP8, which needs 8.9.",
        todo="Set kv_cache=auto, or do without: {without}",
        source=f"{LLM_FORMATS}: Hardware Support Matrix; cpp/tensorrt_llm/thop/attentionOp.cpp: mFP8ContextFMHA"
        " (1.3.0rc3)",
    ),
    rule(
        name="llm-api-has-no-sparsity",
        when=lambda d: d.sparsity != "none",
        failed="engine=tensorrt_llm_llmapi does not support sparsity={d.sparsity}: the PyTorch backend lists no 2:4"
        " format.",
        todo="Set sparsity=none, or use engine=tensorrt_llm.",
        source=LLM_FORMATS,
    ),
    rule(
        name="mixtures-are-exported-in-fp8-and-nvfp4",
        when=lambda d: (
            bool(known(d.shape).family.experts)
            and not _is_gpt_oss(d)
            and d.qformat not in (QFormat.NONE, QFormat.FP8, QFormat.NVFP4, *known(d.shape).published)
        ),
        failed="quant={d.qformat} of {d.shape.architecture} cannot be exported: of models with experts that"
        " Transformers 5 holds in one tensor, ModelOpt 0.47 exports FP8 and NVFP4 only.",
        allowed="Supported here: {quants}.",
        source="NVIDIA/Model-Optimizer modelopt/torch/export/layer_utils.py, unified_export_hf.py (0.47)",
    ),
    rule(
        name="llm-api-reads-gpt-oss-as-published",
        when=lambda d: _is_gpt_oss(d) and d.qformat is not QFormat.NONE,
        failed="engine=tensorrt_llm_llmapi does not support quant={d.qformat} of {d.shape.architecture}: it reads the"
        " model's folder, with experts in MXFP4 or 16 bit.",
        todo="Set quant=none.",
        source=GPT_OSS,
    ),
    rule(
        name="llm-api-has-gpt-oss-in-one-stage",
        when=lambda d: _is_gpt_oss(d) and d.build.pp_size > 1,
        failed="build.pp_size={d.build.pp_size} of {d.shape.architecture} stops TensorRT-LLM's PyTorch backend: it has"
        " no pipeline parallelism for gpt-oss.",
        todo="Set build.pp_size=1.",
        source=GPT_OSS,
    ),
    rule(
        name="mxfp4-needs-hopper",
        when=lambda d: known(d.shape).mxfp4 and known(d.sm) < 9.0,
        failed="{d.label} has experts in MXFP4, which TensorRT-LLM runs on Hopper and newer; this GPU has compute"
        " capability {d.sm}.",
        todo="Choose another GPU, or engine=openvino.",
        source="docs/source/deployment-guide/deployment-guide-for-gpt-oss-on-trtllm.md (1.4): MoE backends",
    ),
    rule(
        name="llm-api-has-gemma-3-only",
        when=lambda d: "llm_api" not in known(d.shape).family.features,
        failed="engine=tensorrt_llm_llmapi cannot serve {d.shape.architecture}: TensorRT-LLM's PyTorch backend supports"
        f" {either(titles('llm_api'), 'and')}, and of Gemma only Gemma 3.",
        allowed="Other models run on TensorRT engines, up to TensorRT-LLM 1.2.",
        todo=f"Use a {either(titles('llm_api'))} model, or engine=tensorrt_llm.",
        source=SUPPORT,
    ),
    rule(
        name="llm-api-leaves-out-windows",
        when=lambda d: d.outgrows_window and (known(d.shape).family.qwen_type or known(d.shape).family.name == "phi3"),
        failed=f"{OUTGROWN} with engine=tensorrt_llm_llmapi: its PyTorch backend does not read the window.",
        todo="Set build.max_seq_len={d.shape.sliding_window}, or use engine=tensorrt_llm.",
        source="tensorrt_llm/_torch/models/modeling_qwen.py@047098b, modeling_qwen3.py, modeling_phi3.py@000a01d: no"
        " attention_window_size",
    ),
    uneven_rule(
        name="llm-api-ranks-divide-heads-and-mlp",
        topic=TOPIC,
        engines=LLM_API,
        when=_uneven_ranks,
        source="tensorrt_llm/_torch/modules/attention.py, linear.py: ranks hold whole heads and equal slices",
    ),
    rule(
        name="llm-api-builds-nothing",
        when=lambda d: set_by_hand(d, READ),
        failed="engine=tensorrt_llm_llmapi does not support {key}={value}: it is an option of trtllm-build.",
        allowed="It reads {read}.",
        todo="Remove it, or use engine=tensorrt_llm.",
        source=f"{COMMAND}; {LLM_ARGS}",
    ),
    rule(
        name="llm-api-options-of-its-version",
        when=_refused_options,
        failed="{failed}",
        allowed="{allowed}",
        todo="{todo}",
        source=OPTIONS,
    ),
    rule(
        name="llm-api-extra-has-an-effect",
        when=lambda d: _ignored_options(d.llm_api.extra, d.llm_api.version, EXTRA),
        failed="{failed}",
        todo="{todo}",
        source=EFFECTS,
    ),
    warning(
        name="llm-api-file-has-an-effect",
        when=lambda d: _ignored_options(d.llm_api.file, d.llm_api.version, FILE),
        failed="{failed}",
        source=EFFECTS,
    ),
    warning(
        name="llm-api-options-are-of-every-judge",
        when=_doubtful,
        failed="llm_api: TensorRT-LLM {judge} {does} {options}; what {d.llm_api.version} does is not known here.",
        todo="Leave it out if {d.llm_api.version} does not start.",
        source=OPTIONS,
    ),
    rule(
        name="llm-api-tuned-file-is-here",
        when=lambda d: (
            d.llm_api.tuned is not None
            and d.llm_api.tuned not in tuned_files()
            and [{"hint": did_you_mean(d.llm_api.tuned, tuned_files())}]
        ),
        failed="llm_api.tuned='{d.llm_api.tuned}' is none of NVIDIA's files of which there is a copy here.",
        allowed="Files of your own are llm_api.file=... {hint}",
        source="pipelines/engines/tensorrt_llm/llm_api_options/tuned.json",
    ),
    rule(
        name="llm-api-options-have-one-place",
        when=lambda d: [{"option": name, "key": key} for name, key in settings_in(d.llm_api.extra).items()],
        failed="llm_api.extra.{option} is a setting here: {key}.",
        todo="Set {key} instead.",
        source=OPTIONS,
    ),
    rule(
        name="llm-api-drafts-one-way",
        when=lambda d: d.speculation == "draft_target" and "speculative_config" in d.llm_api.others,
        failed="speculative=draft_target and llm_api set speculative_config, of which there is one.",
        todo="Set speculative=none, or leave out the llm_api option.",
        source=OPTIONS,
    ),
    rule(
        name="llm-api-has-no-mtp-of-these-families",
        when=lambda d: (
            (d.llm_api.others.get("speculative_config") or {}).get("decoding_type") == "MTP" and bool(known(d.shape))
        ),
        failed="llm_api's speculative_config of MTP stops TensorRT-LLM for {d.shape.architecture}: it has MTP layers of"
        " DeepSeek V3, GLM 4.5, EXAONE, Nemotron H and Qwen3-Next, which are not made here.",
        todo="Choose another decoding_type (NGram).",
        source="tensorrt_llm/_torch/models/modeling_speculative.py (1.3.0rc3 and later): MTPForCausalLM",
    ),
    rule(
        name="llm-api-drafts-inside-some-families",
        when=lambda d: () if _holds_drafts(d) else _drafts_inside(d),
        failed="{option} stops TensorRT-LLM for {d.shape.architecture}: its PyTorch backend runs such a draft inside"
        f" the target model, which only {listed(titles('drafts_inside'))} can hold.",
        todo="Set speculative=none, or llm_api's decoding_type NGram, which needs no draft model.",
        source="tensorrt_llm/_torch/models (1.3.0rc3 and later): SpecDecOneEngineForCausalLM; pull request #11758",
    ),
    warning(
        name="llm-api-flashinfer-ends-reuse",
        when=_ends_reuse,
        failed="llm_api's attn_backend={backend}: the server switches KV-cache reuse off.",
        todo="Leave it out, or set kv_cache.enable_block_reuse=false.",
        source="tensorrt_llm/_torch/pyexecutor/py_executor_creator.py (1.3.0rc3)",
    ),
    warning(
        name="llm-api-drafts-answer-greedily",
        when=_drafts_greedily,
        failed="{option}: TensorRT-LLM before 1.3.0rc24 may answer greedily where the target model drafts inside"
        " itself: temperature, top_k and top_p of a request then have no effect.",
        todo="Set speculative_config.allow_advanced_sampling=true beside it.",
        source="tensorrt_llm/_torch/pyexecutor/py_executor_creator.py (1.3.0rc3); pull request #14745",
    ),
    rule(
        name="llm-api-runs-no-remote-code",
        when=lambda d: bool(d.llm_api.extra.get("trust_remote_code")),
        failed="llm_api.extra.trust_remote_code=true is refused: code of a model's repository is never run.",
        todo="Remove it; the models supported here need none.",
        source=OPTIONS,
    ),
    warning(
        name="llm-api-leaves-out-remote-code",
        when=lambda d: bool(d.llm_api.file.get("trust_remote_code")),
        failed="llm_api.file: trust_remote_code=true is left out: code of a model's repository is never run.",
        source=OPTIONS,
    ),
    Rule(
        name="llm-api-options-are-for-the-llm-api",
        topic=TOPIC,
        when=lambda d: _unread(d) if d.writes_engine or d.on_device else (),
        failed="{option} is given, but only engine=tensorrt_llm_llmapi reads it.",
        todo="Remove it, or use that engine.",
        source=OPTIONS,
    ),
    rule(
        name="llm-api-drafts-with-a-model",
        when=lambda d: d.speculation not in DRAFTING,
        failed="speculative={d.speculation} is not supported by engine=tensorrt_llm_llmapi: of its kinds only"
        " draft_target is configured.",
        todo="Use that, speculative=none, or engine=tensorrt_llm.",
        source=f'{LLM_ARGS}: Medusa and lookahead are "not in (pytorch, _autodeploy)"',
    ),
    rule(
        name="llm-api-has-no-decoding-mode",
        when=lambda d: d.triton.decoding_mode in DECODING and d.triton.decoding_mode != d.speculation,
        failed="engine=tensorrt_llm_llmapi does not support triton.decoding_mode={d.triton.decoding_mode}: it belongs"
        " to TensorRT engines.",
        todo="Remove it, or use engine=tensorrt_llm.",
        source=LLM_ARGS,
    ),
    rule(
        name="llm-api-serves-no-adapters",
        when=lambda d: bool(d.adapters) and [{"tasks": listed(d.adapters)}],
        failed="lora.adapters has {tasks}, but engine=tensorrt_llm_llmapi does not support lora: its Triton model has"
        " no LoRA inputs.",
        todo="Set lora=none, or engine=tensorrt_llm.",
        source=LLM_MODEL,
    ),
    rule(
        name="llm-api-prefetches-no-adapters",
        when=lambda d: d.triton.lora_prefetch_dir is not None,
        failed="engine=tensorrt_llm_llmapi does not support triton.lora_prefetch_dir='{d.triton.lora_prefetch_dir}':"
        " PeftCacheConfig rejects it.",
        todo="Remove it.",
        source=LLM_ARGS,
    ),
    rule(
        name="llm-api-sees-no-images",
        when=lambda d: d.images is not None,
        failed="engine=tensorrt_llm_llmapi does not support multimodal={d.images.model_type}: its Triton model has no"
        " image inputs.",
        todo="Set multimodal=none, or engine=tensorrt_llm.",
        source=LLM_MODEL,
    ),
)
