"""Derive the string parameters of each model from settings and engine.

A parameter that is not set is left out. TensorRT-LLM's C++ backend (`model_instance_state.cc`, `model_state.cc`) reads
every number and boolean inside a try block and takes its default, with a line in the log, when the key is absent. An
empty string would do the same there, but where it reads text it is a value: `lora_prefetch_dir` would be a folder
named "". Three keys it reads without a try block, so that an absent one fails the load: `tokenizer_dir`,
`xgrammar_tokenizer_info_path` and `guided_decoding_backend`. Those are written empty.
The tree `mc_sim_7b_63` is the backend's own default but not a name that it parses, so it is left out too.
"""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipelines import __version__
from pipelines.domain.errors import Fault
from pipelines.engines.limits import EngineLimits
from pipelines.engines.registry import EngineDescription, ServerBackend, describe
from triton_repo.config import TritonSettings
from triton_repo.tensors import BLS, DRAFT, ENCODERS, PREPROCESSING, TENSORRT_LLM

# Specification of a repository, collected from other groups of the configuration.


@dataclass(frozen=True, slots=True)
class ImageSpec:
    """Images in prompts.

    Attributes:
        model_type: of the encoder, as TensorRT-LLM's build_multimodal_engine.py names it.
        hf_model_path: Hugging Face folder of the whole model, on the machine that serves; empty on the CPU, whose
            encoder needs none.
    """

    model_type: str
    hf_model_path: str
    max_images: int


@dataclass(frozen=True, slots=True)
class RepositorySpec:
    """One repository to write.

    Attributes:
        flavour: name of the engine, see `pipelines.engines.registry`.
        label: the model's name, for display and for OpenAI clients.
        variant: its compression as one word, e.g. "fp8".
        enable_kv_cache_reuse: whether to share KV blocks of equal prompt prefixes.
        enable_chunked_context: whether to split prompts longer than max_num_tokens.
        tp_size: tensor parallel ranks the engine must have.
        num_draft_tokens: tokens that a draft model proposes at a time; None without one.
        lora_tasks: ids of the LoRA adapters in it, sorted.
        images: settings of a vision encoder; None for text alone.
        options: the engine's own settings by name, where Triton serves it in Python; None is its default.
    """

    flavour: str
    label: str
    variant: str
    enable_kv_cache_reuse: bool = True
    enable_chunked_context: bool = False
    tp_size: int = 1
    pp_size: int = 1
    num_draft_tokens: int | None = None
    lora_tasks: tuple[int, ...] = ()
    images: ImageSpec | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def engine(self) -> EngineDescription:
        """The engine that the repository serves."""
        return describe(self.flavour)

    @property
    def world_size(self) -> int:
        """Ranks, each with a GPU of its own."""
        return self.tp_size * self.pp_size


# The commands that start a server on a repository, for repository.json.
#
# Source: `scripts/launch_triton_server.py` of TensorRT-LLM's Triton backend. All run inside the repository's folder,
# against which the C++ backend resolves its relative paths.

SERVER = ("tritonserver", "--model-repository=.", "--disable-auto-complete-config")
MPIRUN = ("mpirun", "--allow-run-as-root")
OF_NVIDIA = {
    PREPROCESSING: "/app/all_models/inflight_batcher_llm",
    BLS: "/app/all_models/inflight_batcher_llm",
    ENCODERS: "/app/all_models/multimodal",
}
"""Models that use NVIDIA's code for images -> path of that code in their container."""
LLMAPI_SOURCES = "/app/all_models/llmapi/tensorrt_llm/1"
"""Where NVIDIA's container keeps model.py and helpers.py of the LLM API, which only they may distribute."""


def start_commands(settings: TritonSettings, spec: RepositorySpec) -> dict[str, Any]:
    """Return every way to start this repository: mode -> one shell line."""
    if spec.engine.server is ServerBackend.PYTHON:
        lines = {"one_process": _line({}, [*SERVER, "--backend-directory=BACKENDS"])}
        needs = (
            "BACKENDS: a folder with Triton's python backend and the stub of this Python; `make serve` prepares one."
        )
    elif spec.engine.server is ServerBackend.LLM_API:
        lines = {"one_process": f"cp {LLMAPI_SOURCES}/*.py {TENSORRT_LLM}/1/ && {_line({}, SERVER)}"}
        needs = "a Triton with TensorRT-LLM 1.3 or later (none is released)."
    else:
        models = [TENSORRT_LLM] if spec.num_draft_tokens is None else [TENSORRT_LLM, DRAFT]
        lines = _tensorrt_llm(settings, spec.world_size, models)
        needs = "NVIDIA's Triton container with the TensorRT-LLM that built the engine."
    if spec.images is not None and spec.engine.server is ServerBackend.TENSORRTLLM:
        once = " && ".join(f"cp -r {source}/{name}/1/. {name}/1/" for name, source in OF_NVIDIA.items())
        lines = {name: f"{once} && {line}" for name, line in lines.items()}
    return {"inside": "the folder of this file", "needs": needs, "commands": lines}


def _tensorrt_llm(settings: TritonSettings, world_size: int, models: list[str]) -> dict[str, str]:
    """Return the commands for one process per rank (leader), or one that spawns the ranks (orchestrator)."""
    if settings.participant_ids is not None:
        env = {"TRTLLM_ORCHESTRATOR": "1", "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES": "0"}
        ranks = 1 + max(rank for group in settings.participant_ids for rank in group)
        return {"orchestrator_without_spawning": _line(env, _ranks(ranks, models))}
    leader = _ranks(world_size, models) if world_size > 1 else [*SERVER]
    values = {"leader": _line({}, leader)}
    if settings.num_nodes == 1:  # spawning works on one machine only
        pools = [f"--cuda-memory-pool-byte-size={gpu}:0" for gpu in range(world_size)]
        spawning = [*SERVER, "--pinned-memory-pool-byte-size=0", "--enable-peer-access=false", *pools]
        values["orchestrator"] = _line({"TRTLLM_ORCHESTRATOR": "1"}, spawning)
    return values


def _ranks(count: int, models: list[str]) -> list[str]:
    """Return the ranks: rank 0 serves every model; the others load only models with an engine."""
    command = [*MPIRUN]
    for rank in range(count):
        loaded = [f"--load-model={name}" for name in models]
        helper = [] if rank == 0 else ["--model-control-mode=explicit", *loaded]
        prefix = f"--backend-config=python,shm-region-prefix-name=prefix{rank}_"
        command += ["-n", "1", *SERVER, prefix, *helper, ":"]
    return command


def _line(env: dict[str, str], command: list[str] | tuple[str, ...]) -> str:
    return " ".join([*(f"{name}={value}" for name, value in env.items()), shlex.join(command)])


ENGINE_DIR = f"{TENSORRT_LLM}/1/engine"
DRAFT_ENGINE_DIR = f"{DRAFT}/1/engine"
CPU_DRAFT_DIR = f"{TENSORRT_LLM}/1/draft_engine"
LORA_DIR = f"{TENSORRT_LLM}/1/lora"
VISION_DIR = f"{ENCODERS}/1/engine"
ENCODER_OPTIONS = ("inference_precision", "num_threads")
"""Settings of the CPU engine that the vision model reads too."""
VOCABULARY = f"{TENSORRT_LLM}/1/xgrammar_tokenizer_info.json"
TOKENIZER = "{model}/1/tokenizer"
MUST_BE_THERE = ("tokenizer_dir", "xgrammar_tokenizer_info_path", "guided_decoding_backend")

BUILT_IN_TREE = "mc_sim_7b_63"

BOTH = (
    "decoding_mode",
    "max_tokens_in_paged_kv_cache",
    "guided_decoding_backend",
    "batch_scheduler_policy",
    "exclude_input_in_output",
    "normalize_log_probs",
    "cancellation_check_period_ms",
    "stats_check_period_ms",
    "iter_stats_max_iterations",
    "request_stats_max_iterations",
    "max_attention_window_size",
    "sink_token_length",
    "lora_prefetch_dir",
)
"""Parameters that `tensorrt_llm` reads with either backend."""
SPECULATION = (
    "lookahead_window_size",
    "lookahead_ngram_size",
    "lookahead_verification_set_size",
    "speculative_decoding_fast_logits",
    "medusa_choices",
    "eagle_choices",
)
"""Parameters of speculative decoding, which the CPU engine lacks and a user would miss, so it refuses them."""
PLACES = (
    "xgrammar_tokenizer_info_path",
    "kv_cache_free_gpu_mem_fraction",
    "kv_cache_host_memory_bytes",
    "kv_cache_onboard_blocks",
    "gpu_device_ids",
    "draft_gpu_device_ids",
    "participant_ids",
    "retention_tokens",
    "retention_priority",
    "retention_duration_ms",
    "num_nodes",
    "executor_worker_path",
    "gpu_weights_percent",
    "enable_context_fmha_fp32_acc",
    "multi_block_mode",
    "cuda_graph_mode",
    "cuda_graph_cache_size",
    "lora_cache_optimal_adapter_size",
    "lora_cache_max_adapter_size",
    "lora_cache_gpu_memory_fraction",
    "lora_cache_host_memory_bytes",
)
"""Parameters that only matter on GPUs; a CPU repository omits them, so that one configuration serves both."""

GPU_PLACES = tuple(name for name in PLACES if not name.startswith(("retention_", "draft_")))
"""Those that `tensorrt_llm` itself reads; the others are for tensorrt_llm_bls and the draft model."""
TARGET_ONLY = ("lora_prefetch_dir", "guided_decoding_backend", "xgrammar_tokenizer_info_path", "decoding_mode")

OF_THE_LLM_API = {
    "batch_scheduler_policy",
    "cancellation_check_period_ms",
    "decoupled_mode",
    "guided_decoding_backend",
    "kv_cache_free_gpu_mem_fraction",
    "kv_cache_host_memory_bytes",
    "max_attention_window_size",
    "max_tokens_in_paged_kv_cache",
    "num_nodes",
}
"""The settings that the LLM API supports; the others belong to the C++ backend."""
ONLY_WITH = {
    "retention_priority": "retention_tokens",
    "retention_duration_ms": "retention_tokens",
    "cuda_graph_cache_size": "cuda_graph_mode",
    "kv_cache_onboard_blocks": "kv_cache_host_memory_bytes",
    **dict.fromkeys(SPECULATION[:3], "decoding_mode=lookahead"),
    "medusa_choices": "decoding_mode=medusa",
    "eagle_choices": "decoding_mode=eagle",
}
"""Setting -> another one without which TensorRT-LLM's backend does not look at it."""

CPU_WORDS = {"decoding_mode": ("top_k", "top_p", "top_k_top_p", "beam_search")}


def text(value: Any) -> str:
    """Format a value as the C++ backend parses it: "true", "0.9", "1,2", "0,1;2,3"."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return (";" if isinstance(value[0], tuple) else ",").join(text(part) for part in value)
    return str(value)


def preprocessing(settings: TritonSettings, spec: RepositorySpec) -> dict[str, str]:
    """Return the parameters of preprocessing, which also prepares images."""
    folder = TOKENIZER.format(model="preprocessing")
    values = {"tokenizer_dir": folder, "add_special_tokens": text(settings.add_special_tokens)}
    if spec.images is not None:
        images = {"multimodal_model_path": VISION_DIR, "gpt_model_path": ENGINE_DIR}
        values |= images | {"max_num_images": text(spec.images.max_images)}
    return values


def encoders(images: ImageSpec, spec: RepositorySpec) -> dict[str, str]:
    """Return the parameters of the vision model; on the CPU it computes as the engine does."""
    of_nvidia = {"hf_model_path": images.hf_model_path} if images.hf_model_path else {}
    return {"multimodal_model_path": VISION_DIR, **of_nvidia, **_options(spec, ENCODER_OPTIONS)}


def postprocessing(settings: TritonSettings) -> dict[str, str]:
    """Return the parameters of postprocessing."""
    folder = TOKENIZER.format(model="postprocessing")
    return {"tokenizer_dir": folder, "skip_special_tokens": text(settings.skip_special_tokens)}


def bls(settings: TritonSettings, spec: RepositorySpec) -> dict[str, str]:
    """Return the parameters of tensorrt_llm_bls; on the CPU, drafts and KV blocks are handled by the engine."""
    values = {"accumulate_tokens": text(settings.accumulate_tokens), "tensorrt_llm_model_name": TENSORRT_LLM}
    if spec.images is not None:
        values["multimodal_encoders_name"] = ENCODERS
    if spec.engine.server is ServerBackend.PYTHON:
        return values
    if spec.num_draft_tokens is not None:
        values["tensorrt_llm_draft_model_name"] = DRAFT
        values["exclude_input_in_output"] = text(settings.exclude_input_in_output)
    if settings.retention_tokens is not None:
        values |= _set(settings, ("retention_tokens", "retention_priority", "retention_duration_ms"))
    return values


def tensorrt_llm(settings: TritonSettings, limits: EngineLimits, spec: RepositorySpec) -> dict[str, str]:
    """Return the parameters of the engine's model, for the C++ backend or for the CPU engine."""
    values = {
        "gpt_model_type": settings.batching_strategy,
        "gpt_model_path": ENGINE_DIR,
        "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
        "max_beam_width": text(settings.max_beam_width or limits.max_beam_width),
        "enable_kv_cache_reuse": text(spec.enable_kv_cache_reuse),
        "enable_chunked_context": text(spec.enable_chunked_context),
        **_set(settings, BOTH),
        **({"lora_prefetch_dir": LORA_DIR} if spec.lora_tasks else {}),
    }
    if spec.engine.server is ServerBackend.PYTHON:
        options = _options(spec, spec.options)
        if spec.num_draft_tokens is not None:
            options |= {"openvino_draft_dir": CPU_DRAFT_DIR, "openvino_num_draft_tokens": text(spec.num_draft_tokens)}
        if settings.fold_token_ids:
            options["openvino_fold_token_ids"] = "true"
        if settings.max_queue_size:
            options["openvino_max_queue_size"] = text(settings.max_queue_size)
        tokenizer = TOKENIZER.format(model=PREPROCESSING)  # for characters and guides
        return {**values, "tokenizer_dir": tokenizer, **options, "pipelines_version": __version__}
    vocabulary = {"xgrammar_tokenizer_info_path": VOCABULARY} if writes_vocabulary(settings, spec) else {}
    return {**dict.fromkeys(MUST_BE_THERE, ""), **values, **vocabulary, **_set(settings, (*SPECULATION, *GPU_PLACES))}


def _options(spec: RepositorySpec, names: Iterable[str]) -> dict[str, str]:
    """Return the CPU engine's own settings that have a value."""
    values = ((name, spec.options.get(name)) for name in names)
    return {f"{spec.flavour}_{name}": text(value) for name, value in values if value is not None}


def writes_vocabulary(settings: TritonSettings, spec: RepositorySpec) -> bool:
    """Return whether the repository contains the vocabulary file of guided decoding, because the user gives none."""
    needed = settings.guided_decoding_backend == "xgrammar" and settings.xgrammar_tokenizer_info_path is None
    return needed and spec.engine.server is ServerBackend.TENSORRTLLM


def draft(settings: TritonSettings, limits: EngineLimits, spec: RepositorySpec) -> dict[str, str]:
    """Return the draft model's parameters: the target's, with its own engine and GPUs, without target-only ones."""
    values = tensorrt_llm(settings, limits, spec)
    for name in (*TARGET_ONLY, "gpu_device_ids"):
        values.pop(name, None)
    values |= dict.fromkeys(MUST_BE_THERE, "")
    devices = settings.draft_gpu_device_ids or settings.gpu_device_ids
    own = {"gpt_model_path": DRAFT_ENGINE_DIR, "max_beam_width": "1"}
    return {**values, **own, **({} if devices is None else {"gpu_device_ids": text(devices)})}


def _set(settings: TritonSettings, names: Iterable[str]) -> dict[str, str]:
    values = ((name, getattr(settings, name)) for name in names)
    return {name: text(value) for name, value in values if value is not None and value != BUILT_IN_TREE}


def unread(settings: TritonSettings, engine: EngineDescription) -> list[str]:
    """Return the settings that are given for an engine whose repository leaves them out."""
    if engine.server is ServerBackend.TENSORRTLLM:
        return []
    whole = set(TritonSettings.model_fields)
    return sorted(settings.changed(PLACES if engine.server is ServerBackend.PYTHON else whole - OF_THE_LLM_API))


def lone(settings: TritonSettings) -> dict[str, str]:
    """Return the settings that are given without another one, which they belong to."""
    given = settings.changed(TritonSettings.model_fields)
    present = {*given, *(f"{name}={value}" for name, value in given.items())}
    return {name: other for name, other in ONLY_WITH.items() if name in given and other not in present}


def setting_faults(settings: TritonSettings, engine: EngineDescription) -> list[Fault]:
    """Find settings that an engine cannot honour or would silently ignore; needs no engine, so a plan can use it."""
    if engine.server is ServerBackend.PYTHON:
        return cpu_faults(settings)
    if settings.fold_token_ids:
        failed = f"triton.fold_token_ids=true is not supported by engine={engine.name}."
        return [Fault(failed, todo="Leave triton.fold_token_ids out, or take engine=openvino.")]
    return []


def cpu_faults(settings: TritonSettings) -> list[Fault]:
    """Find settings that the CPU engine does not support."""
    faults = [
        Fault(
            f"triton.{name}='{text(value)}' is not supported by engine=openvino.",
            "It is a feature of TensorRT-LLM.",
            f"Leave triton.{name} out, or take engine=tensorrt_llm.",
        )
        for name, value in settings.changed(SPECULATION).items()
    ]
    if delay := settings.max_queue_delay_microseconds:
        faults.append(
            Fault(
                f"triton.max_queue_delay_microseconds={delay} has no effect on engine=openvino: it batches in flight.",
                todo="Leave it out, or take engine=tensorrt_llm.",
            )
        )
    for name, allowed in CPU_WORDS.items():
        word = getattr(settings, name)
        if word is not None and word not in allowed:
            faults.append(
                Fault(
                    f"triton.{name}='{word}' is not supported by engine=openvino.",
                    f"It has {', '.join(allowed)}.",
                )
            )
    return faults
