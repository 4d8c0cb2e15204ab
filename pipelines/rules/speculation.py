"""Speculative decoding: requirements of each kind on the engine, the server and the model."""

from functools import partial

from pipelines.domain.families import titles
from pipelines.domain.formats import QFormat
from pipelines.rules.record import GPU, ON_GPUS, Cases, DeploymentFacts, Engines, Rule, either, known, listed
from pipelines.rules.split import (
    BACKEND,
    BUILDER,
    COMBINATIONS,
    DRAFT_TARGET,
    EAGLE,
    LOOKAHEAD,
    MEDUSA,
    REDRAFTER,
    RUNTIME,
    SPECULATIVE,
    TREES,
)
from pipelines.settings.features import HEADS, lookahead_draft_len, tree_nodes

TOPIC = "Speculative decoding"
DECODING = {
    "medusa": "medusa",
    "explicit_draft_tokens": "redrafter",
    "eagle": "eagle",
    "lookahead_decoding": "lookahead",
}
"""build.speculative_decoding_mode -> triton.decoding_mode; draft tokens from elsewhere need no mode."""


def _tokens(d: DeploymentFacts) -> Cases:
    build = d.build
    needed = build.max_batch_size * (build.max_draft_len + 1)
    fits = build.max_num_tokens // (build.max_draft_len + 1)
    short = build.speculative_decoding_mode is not None and build.max_num_tokens < needed
    return ({"needed": needed, "fits": fits},) if short else ()


def _wrong_decoding(d: DeploymentFacts) -> Cases:
    """Return the words if the server's mode does not match the engine's."""
    expected = DECODING.get(d.build.speculative_decoding_mode or "")
    mode = d.triton.decoding_mode
    if mode == expected or (expected is None and mode not in DECODING.values()):
        return ()
    return ({"wanted": expected or "null"},)


def _lookahead(d: DeploymentFacts) -> Cases:
    triton = d.triton
    sizes = (triton.lookahead_window_size, triton.lookahead_ngram_size, triton.lookahead_verification_set_size)
    if d.build.speculative_decoding_mode != "lookahead_decoding" or None in sizes:
        return ()
    needed = lookahead_draft_len(*(size or 0 for size in sizes))
    return ({"sizes": sizes, "needed": needed},) if d.build.max_draft_len != needed else ()


def _tree(d: DeploymentFacts) -> tuple[str, list[tuple[int, ...]]]:
    """Return the setting that holds the tree of guesses, and its nodes; none for other kinds of speculation."""
    name = {"medusa": "medusa_choices", "eagle": "eagle_choices"}.get(d.build.speculative_decoding_mode or "", "")
    return name, tree_nodes(getattr(d.triton, name)) if name else []


def _wide_tree(d: DeploymentFacts) -> Cases:
    name, nodes = _tree(d)
    return ({"name": name, "nodes": len(nodes)},) if len(nodes) > d.build.max_draft_len else ()


def _deep_tree(d: DeploymentFacts) -> Cases:
    """Medusa's tree may be shallower than its heads; EAGLE's must be as deep as its layers."""
    name, nodes = _tree(d)
    depth, most = max(map(len, nodes), default=0), known(d.draft_depth)
    right = depth <= most if name == "medusa_choices" else depth == most
    key = "num_heads" if name == "medusa_choices" else "num_layers"
    return ({"name": name, "depth": depth, "given": key},) if nodes and not right else ()


def _torn_tree(d: DeploymentFacts) -> Cases:
    name, nodes = _tree(d)
    alone = [node for node in nodes if node[:-1] and node[:-1] not in nodes]
    return ({"name": name, "node": listed(alone[0]), "parent": listed(alone[0][:-1])},) if alone else ()


def _speculates(d: DeploymentFacts) -> Cases:
    """Return how the deployment speculates, if it does."""
    if d.speculation != "none":
        return ({"how": f"speculative={d.speculation}"},)
    if d.build.speculative_decoding_mode is not None:
        return ({"how": f"build.speculative_decoding_mode={d.build.speculative_decoding_mode}"},)
    config = {} if d.writes_engine else d.llm_api.others.get("speculative_config") or {}
    kind = config.get("decoding_type")
    return ({"how": f"llm_api's speculative_config of {kind}"},) if kind else ()


def _beams(d: DeploymentFacts) -> Cases:
    """Return the setting of several beams where the deployment speculates; the LLM API reads only the engine's."""
    widths = {"build": d.build.max_beam_width, "triton": (d.triton.max_beam_width or 1) if d.writes_engine else 1}
    wide = next((f"{group}.max_beam_width={width}" for group, width in widths.items() if width > 1), None)
    return tuple({**case, "wide": wide} for case in _speculates(d)) if wide else ()


def _rewound_windows(d: DeploymentFacts) -> Cases:
    """Return the windows of layers that differ, where the runtime takes rejected tokens out of the KV cache again."""
    windows = {min(window, d.longest or window) for window in d.triton.max_attention_window_size or ()}
    rewinds = d.build.speculative_decoding_mode in DECODING
    given = {"windows": listed(d.triton.max_attention_window_size or ())}
    return tuple({**case, **given} for case in _speculates(d)) if rewinds and len(windows) > 1 else ()


gpu_rule = partial(Rule, topic=TOPIC, engines=GPU)
gpu_warning = partial(gpu_rule, warns=True)
drafting_rule = partial(Rule, topic=TOPIC, engines=Engines(on_device=False))
RULES = (
    gpu_rule(
        name="drafts-fit-one-iteration",
        when=_tokens,
        failed="build.max_num_tokens={d.build.max_num_tokens} is less than max_batch_size * (max_draft_len + 1) ="
        " {d.build.max_batch_size} * {d.build.max_draft_len} + {d.build.max_batch_size} = {needed}.",
        todo="Set build.max_num_tokens={needed} or more, or build.max_batch_size={fits} or less.",
        source=BUILDER,
    ),
    gpu_rule(
        name="a-mode-needs-a-draft-length",
        when=lambda d: d.build.speculative_decoding_mode is not None and d.build.max_draft_len == 0,
        failed="build.speculative_decoding_mode={d.build.speculative_decoding_mode} with"
        " max_draft_len={d.build.max_draft_len} verifies no draft tokens.",
        todo="Set build.max_draft_len, or use a file of the group `speculative`, which does.",
        source=SPECULATIVE,
    ),
    gpu_rule(
        name="a-draft-length-needs-a-mode",
        when=lambda d: d.build.speculative_decoding_mode is None and d.build.max_draft_len > 0,
        failed="build.max_draft_len={d.build.max_draft_len} is set without build.speculative_decoding_mode.",
        todo="Use a file of the group `speculative`, or set build.max_draft_len=0.",
        source=SPECULATIVE,
    ),
    gpu_rule(
        name="server-and-engine-speculate-alike",
        when=_wrong_decoding,
        failed="triton.decoding_mode={d.triton.decoding_mode} cannot be combined with an engine of"
        " speculative_decoding_mode={d.build.speculative_decoding_mode}.",
        allowed="For this engine: triton.decoding_mode={wanted}.",
        source=f"{SPECULATIVE}; {BACKEND}",
    ),
    drafting_rule(
        name="speculation-has-no-beams",
        when=_beams,
        failed="{wide} cannot be combined with {how}.",
        todo="Set build.max_beam_width=1 and triton.max_beam_width=null.",
        source=f"{SPECULATIVE}; tensorrt_llm/_torch/pyexecutor/sampler.py (1.3.0rc3): TorchSampler;"
        " _torch/speculative/mtp.py: MTPSampler",
    ),
    gpu_rule(
        name="rewound-layers-share-a-window",
        when=_rewound_windows,
        failed="triton.max_attention_window_size=[{windows}] cannot be combined with {how}:"
        " the server stops, because TensorRT-LLM takes back rejected tokens only where all layers share one window.",
        todo="Set one window, or speculative=none and build.speculative_decoding_mode=null.",
        source=RUNTIME,
    ),
    Rule(
        name="speculation-has-no-pipeline",
        topic=TOPIC,
        engines=ON_GPUS,
        when=lambda d: _speculates(d) if d.build.pp_size > 1 else (),
        failed="build.pp_size={d.build.pp_size} cannot be combined with {how}.",
        todo="Set build.pp_size=1 and split with build.tp_size.",
        source=f"{COMBINATIONS}; {EAGLE}; tensorrt_llm/_torch/pyexecutor/py_executor.py (1.3.0rc3)",
    ),
    gpu_rule(
        name="drafting-reads-the-kv-cache-again",
        when=lambda d: d.speculation == "draft_target" and not d.kv_reuse,
        failed="speculative=draft_target needs KV-cache reuse in both engines; kv_cache.enable_block_reuse is"
        " {d.kv_reuse}.",
        todo="Set kv_cache.enable_block_reuse=true, with a KV format that supports it.",
        source=f"{DRAFT_TARGET}; {SPECULATIVE}",
    ),
    drafting_rule(
        name="draft-and-target-share-a-vocabulary",
        when=lambda d: d.same_vocabulary is False,
        failed="speculative.draft has a different vocabulary from {d.label}: tokens would not mean the same.",
        todo="Choose a draft model of the same family and tokenizer: model@speculative.draft=...",
        source=DRAFT_TARGET,
    ),
    drafting_rule(
        name="draft-and-target-have-as-many-tokens",
        when=lambda d: known(d.draft).vocab_size != known(d.shape).vocab_size,
        failed="speculative.draft has {d.draft.vocab_size} tokens, {d.label} has {d.shape.vocab_size}.",
        allowed="Both need one vocab_size, padding included: Qwen2.5 up to 3B has another than 7B.",
        todo="Choose a draft model of that size: model@speculative.draft=...",
        source=DRAFT_TARGET,
    ),
    drafting_rule(
        name="a-draft-reaches-as-far",
        when=lambda d: d.shape is not None and (d.longest or 0) > known(d.draft).max_position_embeddings,
        failed="speculative.draft supports {d.draft.max_position_embeddings} tokens; {d.label} is built for"
        " {d.longest}.",
        todo="Set build.max_seq_len={d.draft.max_position_embeddings} or less.",
        source=DRAFT_TARGET,
    ),
    drafting_rule(
        name="a-draft-is-smaller",
        warns=True,
        when=lambda d: known(d.draft).num_params >= known(d.shape).num_params,
        failed="speculative.draft has {d.draft.num_params:,} parameters, {d.label} has {d.shape.num_params:,}: drafting"
        " costs more than it saves.",
        todo="Choose a smaller draft model.",
        source=SPECULATIVE,
    ),
    gpu_warning(
        name="two-models-share-the-memory",
        when=lambda d: d.speculation == "draft_target" and d.triton.kv_cache_free_gpu_mem_fraction > 0.5,
        failed="triton.kv_cache_free_gpu_mem_fraction={d.triton.kv_cache_free_gpu_mem_fraction} leaves the second model"
        " of speculative=draft_target little memory on the same GPU.",
        todo="Set it to 0.45, or place the models with triton.gpu_device_ids.",
        source="triton-inference-server/tensorrtllm_backend issues #303, #577, #59",
    ),
    gpu_rule(
        name="heads-are-for-llama",
        when=lambda d: d.speculation in HEADS and "decoding_heads" not in known(d.shape).family.features,
        failed="speculative={d.speculation} is prepared only for"
        f" {either(titles('decoding_heads'))}: this project runs TensorRT-LLM's conversion of heads for no other family"
        " (the script of Medusa also takes Mixtral and Qwen2, that of ReDrafter Qwen2); given is"
        " {d.shape.architecture}.",
        todo=f"Use speculative=draft_target, or a {either(titles('decoding_heads'))} model.",
        source=f"{MEDUSA}; {EAGLE}; {REDRAFTER}",
    ),
    gpu_rule(
        name="heads-are-converted-in-16-bit",
        when=lambda d: d.speculation in HEADS and (d.qformat is not QFormat.NONE or d.sparsity != "none"),
        failed="speculative={d.speculation} is converted by TensorRT-LLM's own script in 16 bit; given are"
        " quant={d.qformat} and sparsity={d.sparsity}.",
        todo="Use quant=none sparsity=none, or speculative=draft_target.",
        source=f"{MEDUSA}; {EAGLE}; {REDRAFTER}",
    ),
    gpu_rule(
        name="heads-are-converted-with-a-16-bit-cache",
        when=lambda d: d.speculation in HEADS and d.kv_format != "auto",
        failed="speculative={d.speculation} is converted by TensorRT-LLM's own script without KV-cache scales; given is"
        " kv_cache={d.kv_format}.",
        todo="Use kv_cache=auto.",
        source=f"{MEDUSA}; {EAGLE}; {REDRAFTER}",
    ),
    gpu_warning(
        name="heads-answer-greedily",
        when=lambda d: d.speculation in ("medusa", "eagle"),
        failed="speculative={d.speculation} accepts tokens greedily: temperature, top_k and top_p of a request have no"
        " effect.",
        source=f"{MEDUSA}; {EAGLE}",
    ),
    gpu_warning(
        name="pickled-heads-can-run-code",
        when=lambda d: bool(d.pickled_heads) and [{"names": listed(d.pickled_heads)}],
        failed="speculative.heads_path has pickled weights ({names}), which can run code when TensorRT-LLM's script"
        " loads them.",
        todo="Use only heads that you trust.",
        source=f"{MEDUSA}; pickle module of Python: security",
    ),
    gpu_rule(
        name="trees-fit-the-draft-tokens",
        when=_wide_tree,
        failed="triton.{name} has {nodes} nodes, more than build.max_draft_len={d.build.max_draft_len}.",
        todo="Set speculative.num_draft_tokens={nodes}, or give a smaller tree.",
        source=TREES,
    ),
    gpu_rule(
        name="trees-are-as-deep-as-the-draft",
        when=_deep_tree,
        failed="triton.{name} is {depth} tokens deep; speculative.{given} is {d.draft_depth}.",
        allowed="Medusa's tree is at most as deep as it has heads, EAGLE's exactly as deep as it has layers.",
        todo="Give another tree, or speculative.{given}={depth} if the heads were trained for it.",
        source=TREES,
    ),
    gpu_rule(
        name="trees-have-whole-branches",
        when=_torn_tree,
        failed="triton.{name} has the node ({node}) without its parent ({parent}).",
        todo="Add the parent.",
        source=TREES,
    ),
    gpu_rule(
        name="lookahead-is-not-for-every-family",
        when=lambda d: (
            d.build.speculative_decoding_mode == "lookahead_decoding"
            and "lookahead" not in known(d.shape).family.features
        ),
        failed="speculative=lookahead does not build with {d.shape.architecture}: TensorRT-LLM's class of the model"
        " does not take its inputs (spec_decoding_params).",
        allowed=f"It supports {either(titles('lookahead'))}.",
        todo="Use speculative=draft_target or none.",
        source="tensorrt_llm/models/gemma/model.py, tensorrt_llm/models/modeling_utils.py (1.3.0rc3)",
    ),
    gpu_rule(
        name="eagle-bounds",
        when=lambda d: (
            d.build.speculative_decoding_mode == "eagle"
            and (d.build.max_batch_size > 512 or d.build.max_draft_len > 256)
        ),
        failed="EAGLE supports at most 512 requests and 256 draft tokens; given are build.max_batch_size="
        "{d.build.max_batch_size} and build.max_draft_len={d.build.max_draft_len}.",
        todo="Lower the value that is too large.",
        source=BUILDER,
    ),
    gpu_rule(
        name="eagle-needs-paged-context",
        when=lambda d: (
            d.build.speculative_decoding_mode == "eagle"
            and "disable" in (d.build["use_paged_context_fmha"], d.build["context_fmha"])
        ),
        failed="EAGLE needs paged context attention; given are build.trtllm.use_paged_context_fmha="
        "{d.build[use_paged_context_fmha]} and build.trtllm.context_fmha={d.build[context_fmha]}.",
        todo="Set both to enable.",
        source=EAGLE,
    ),
    gpu_rule(
        name="eagle-takes-whole-prompts",
        when=lambda d: d.build.speculative_decoding_mode == "eagle" and d.chunked_context,
        failed="runtime.enable_chunked_context={d.chunked_context} is not supported with EAGLE.",
        todo="Set runtime.enable_chunked_context=false.",
        source=EAGLE,
    ),
    gpu_rule(
        name="eagle-has-no-cuda-graphs",
        when=lambda d: d.build.speculative_decoding_mode == "eagle" and d.triton.cuda_graph_mode,
        failed="triton.cuda_graph_mode={d.triton.cuda_graph_mode} is not supported with EAGLE.",
        todo="Set triton.cuda_graph_mode=false.",
        source=EAGLE,
    ),
    gpu_rule(
        name="lookahead-sizes-give-the-draft-length",
        when=_lookahead,
        failed="build.max_draft_len={d.build.max_draft_len} does not match the lookahead sizes {sizes} (window, n-gram,"
        " verification) need: {needed}.",
        todo="Set build.max_draft_len={needed}, or let speculative=lookahead set it.",
        source=LOOKAHEAD,
    ),
)
