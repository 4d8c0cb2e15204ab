"""Say for every setting what predictions of speed make of it: modelled, without effect, or refused.

`unmodelled` names what a configuration sets that changes the speed in a way nothing here can compute; `make size`,
`make simulate` and the table of `make plan` then refuse to answer. docs/sizing.md shows the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pipelines.domain.errors import Fault
from pipelines.engines.tensorrt_llm.config import key_of
from pipelines.settings.root import Settings

Treatment = Literal["modelled", "no effect", "refused"]
Finding = Callable[[Settings], str | None]


@dataclass(frozen=True, slots=True)
class Coverage:
    """What predictions make of some settings.

    Attributes:
        keys: dotted keys; `*` stands for any part of one.
        treatment: "refused": a value that changes the speed is refused, any other has no effect.
        how: the model of it, or why it has no effect or cannot be modelled.
        found: refused: returns the setting at fault, as an override, or None.
        without: refused: what to leave out or change, as a sentence.
    """

    keys: tuple[str, ...]
    treatment: Treatment
    how: str
    found: Finding = lambda _settings: None
    without: str = ""


def _set(key: str, usual: object) -> Finding:
    def found(settings: Settings) -> str | None:
        group, *_, name = key.split(".")
        value = settings.build[name] if group == "build" else getattr(getattr(settings, group), name)
        if value == usual:
            return None
        return f"{key}={str(value).lower() if isinstance(value, bool) else value}"

    return found


def _first(*findings: Finding) -> Finding:
    return lambda settings: next((text for each in findings if (text := each(settings))), None)


def _adapters(settings: Settings) -> str | None:
    ids = ",".join(map(str, settings.lora.adapters))
    return f"lora.adapters with id {ids}" if ids else None


NO_KERNELS = {"context_fmha": "enable", "remove_input_padding": "enable", "kv_cache_type": "paged"}
NO_KERNELS |= {"paged_kv_cache": "enable", "gpt_attention_plugin": "auto", "streamingllm": "disable"}
LOGITS = ("gather_context_logits", "gather_generation_logits", "gather_all_token_logits")

COVERAGE = (
    Coverage(
        ("model.*", "sizing.model"), "modelled", "FLOPs and bytes of the model's dimensions; weights only by their size"
    ),
    Coverage(
        ("hardware.*",),
        "modelled",
        "rates, memory and links of the data sheet; `sparse_multiplier` bounds the speed-up of 2:4 sparsity",
    ),
    Coverage(
        ("quant.qformat", "quant.group_size"), "modelled", "bytes of weights and scales, rate of the tensor cores"
    ),
    Coverage(
        ("quant.effective_bits", "quant.candidates"),
        "refused",
        "how fast a mix is depends on which linear gets which format",
        _set("quant.effective_bits", None),
        "Choose one format, e.g. quant=fp8",
    ),
    Coverage(
        ("recover.*",),
        "no effect",
        "trained weights are as many and as large as before",
    ),
    Coverage(
        ("prune.*",),
        "refused",
        "sizing and simulation take the sizes of the model as it is named; give those of the pruned one as model.shape",
        lambda settings: f"prune={settings.prune.method}" if settings.prune.prunes else None,
        "Leave pruning out, and give the smaller sizes as the model's own (model.path=/its/folder or model.shape.*)",
    ),
    Coverage(
        ("sparsity.method", "build.weight_sparsity"),
        "modelled",
        "in 16 bit and FP8 fewer bytes and 1.27 times the FLOP/s (assumed; users measured 0 to 5 %); in the other "
        "formats nothing, because their kernels are dense",
    ),
    Coverage(("kv_cache.dtype",), "modelled", "bytes of a token, in memory and in traffic"),
    Coverage(
        ("tuning.*",),
        "modelled",
        "the FP8 KV cache and the share of memory that it sets; its kernels are those of the fitted engines",
    ),
    Coverage(
        ("kv_cache.enable_block_reuse", "workload.shared_prefix_share"),
        "modelled",
        "with reuse, the shared prefix is in the cache and is not prefilled; earlier turns of a conversation are",
    ),
    Coverage(
        ("runtime.enable_chunked_context",),
        "modelled",
        "prompts in pieces that fill an iteration beside the decoding requests",
    ),
    Coverage(
        ("triton.batching_strategy", "triton.batch_scheduler_policy"),
        "modelled",
        "in-flight or static batching, and how requests get KV blocks",
    ),
    Coverage(
        (
            *("build.max_batch_size", "build.max_num_tokens", "build.max_seq_len", "build.max_input_len"),
            *("build.tokens_per_block", "build.user_buffer"),
        ),
        "modelled",
        "limits of the scheduler, memory of activations and buffers",
    ),
    Coverage(
        ("build.tp_size", "build.pp_size"),
        "modelled",
        "a share of the model per GPU, all-reduces over NVLink or PCIe, a batch per pipeline stage; TP within a server",
    ),
    Coverage(
        ("build.weight_streaming", "triton.gpu_weights_percent"),
        "modelled",
        "weights on the host cross its link in every iteration, hidden by nothing, so figures are on the safe side",
    ),
    Coverage(
        ("triton.kv_cache_free_gpu_mem_fraction", "triton.max_tokens_in_paged_kv_cache"),
        "modelled",
        "size of the KV pool",
    ),
    Coverage(
        ("triton.max_attention_window_size",),
        "modelled",
        "KV memory and traffic within the window, for one size of window",
    ),
    Coverage(
        ("workload.*", "benchmark.concurrency", "benchmark.request_rate", "benchmark.num_requests"),
        "modelled",
        "the load: lengths, turns, arrivals; answers are as long as stated, also with `ignore_eos=false`",
    ),
    Coverage(("sizing.*", "simulator.*"), "modelled", "they ask the question"),
    Coverage(
        ("speculative.*", "build.speculative_decoding_mode", "build.max_draft_len", "triton.decoding_mode"),
        "refused",
        "it depends on how many draft tokens are accepted, which only a measurement tells",
        lambda settings: f"speculative={mode}" if (mode := settings.speculative.mode) != "none" else None,
        "Leave speculative out for the speed without it, or measure with make benchmark",
    ),
    Coverage(
        ("lora.*", "build.trtllm.lora_*", "build.trtllm.dora_plugin", "build.trtllm.max_lora_rank", "triton.lora_*"),
        "refused",
        "the products of adapters take time that depends on the mix of adapters in a batch",
        _first(_adapters, _set("build.trtllm.lora_plugin", "disable"), _set("build.trtllm.dora_plugin", "disable")),
        "Leave lora out for the speed of the model alone, or measure with make benchmark",
    ),
    Coverage(
        ("multimodal.*", "build.max_prompt_embedding_table_size"),
        "refused",
        "the vision encoder's time is not known",
        lambda settings: f"multimodal={kind}" if (kind := settings.multimodal.model_type) != "none" else None,
        "Leave multimodal out for the speed with text alone, or measure with make benchmark",
    ),
    Coverage(
        ("build.max_beam_width", "triton.max_beam_width"),
        "refused",
        "beams share their prompt's KV cache and are chosen on the host",
        _set("build.max_beam_width", 1),
        "Set build.max_beam_width=1, or measure with make benchmark",
    ),
    Coverage(
        tuple(map(key_of, LOGITS)),
        "refused",
        "the logits of every token are computed and kept",
        _first(*(_set(key_of(name), False) for name in LOGITS)),
        "Leave it out, or measure with make benchmark",
    ),
    Coverage(
        tuple(map(key_of, NO_KERNELS)),
        "refused",
        "engines without packed tokens, paged KV cache and fused attention are much slower, and were not measured",
        _first(*(_set(key_of(name), usual) for name, usual in NO_KERNELS.items())),
        "Leave it out, or measure with make benchmark",
    ),
    Coverage(
        ("triton.max_queue_delay_microseconds",),
        "refused",
        "how long a request waits for company depends on Triton's own batcher",
        _set("triton.max_queue_delay_microseconds", 0),
        "Leave it out: in-flight batching needs no delay",
    ),
    Coverage(
        (
            *("build.*_plugin", "build.*_fusion", "build.multiple_profiles", "build.opt_num_tokens"),
            *("build.trtllm.use_*", "build.trtllm.fuse_fp4_quant", "build.trtllm.fast_build"),
            *("build.trtllm.logits_dtype", "build.trtllm.pp_reduce_scatter"),
            *("triton.cuda_graph_*", "triton.multi_block_mode", "triton.enable_context_fmha_fp32_acc"),
        ),
        "no effect",
        "they choose among kernels: the model is fitted to published figures of tuned engines, and how much one option "
        "is worth is part of its usual error",
    ),
    Coverage(
        (
            "quant.dtype",
            "quant.smoothquant_alpha",
            "quant.awq_alpha_step",
            "quant.int4_scales",
            "quant.fp4_inputs",
            "quant.scoring*",
            "calibration.*",
        ),
        "no effect",
        "they change the values of weights and scales, not their number",
    ),
    Coverage(
        ("triton.gpu_device_ids", "triton.draft_gpu_device_ids", "triton.participant_ids", "triton.num_nodes"),
        "no effect",
        "figures are of one instance; `make size` counts instances",
    ),
    Coverage(
        ("triton.kv_cache_host_memory_bytes", "triton.kv_cache_onboard_blocks", "triton.retention_*"),
        "no effect",
        "a prefix that all requests share stays in the GPU's cache; nothing else is reused",
    ),
    Coverage(
        ("triton.guided_decoding_backend", "triton.xgrammar_tokenizer_info_path", "triton.fold_token_ids"),
        "no effect",
        "only requests with a guide are slower, and the requests of a workload have none",
    ),
    Coverage(
        ("triton.max_queue_size",), "no effect", "the queue is modelled without a bound: overload is shown as waiting"
    ),
    Coverage(
        ("triton.*", "serving.*", "benchmark.*"),
        "no effect",
        "pre- and postprocessing, transport and measurement: their time is in the fitted overhead of a request",
    ),
    Coverage(
        ("build.*", "engine.*"),
        "no effect",
        "how the engine is built and logged, other kinds of models, and the CPU engine",
    ),
    Coverage(
        (
            *("eval.*", "fidelity.*", "report.*", "image.*", "manifests.*", "cluster.*", "nightly.*"),
            *("paths.*", "store.*", "plan.*", "stage.*", "verify.*", "doctor.*", "diagnose.*"),
        ),
        "no effect",
        "other stages",
    ),
)
"""The first row with a matching key counts."""


def unmodelled(settings: Settings) -> list[Fault]:
    """Return a fault for each thing that changes the speed and is not modelled."""
    return [
        Fault(f"{setting} changes the speed in a way that is not modelled: {row.how}.", todo=f"{row.without}.")
        for row, setting in ((row, row.found(settings)) for row in COVERAGE)
        if setting
    ]
