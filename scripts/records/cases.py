"""The commands to run at a commit, and the outputs to record."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

GROUPS = ("checkpoints", "engines", "repositories", "numbers")
REPOSITORY = Path(__file__).resolve().parent.parent.parent
BENCHMARK = REPOSITORY / "tests" / "reference" / "benchmarks" / "aiperf_1_5.json"
SHARED_STORE = "paths.store=../store"
"""The store of cases that differ only in the Triton repository, so that they share a checkpoint and an engine."""


@dataclass(frozen=True, slots=True)
class Case:
    """Commands that run one after the other in an empty folder.

    Attributes:
        name: unique within its groups.
        groups: groups that record something of this case.
        commands: words after `python -m pipelines`, in order.
        outputs: files to record below the case's folder, as glob patterns by reader (see `scripts.records.outputs`).
        reads_plan: whether the last command prints a plan that is recorded.
        exit_code: required exit code of the last command; the others must end with 0.
        files: text files to write before the first command.
    """

    name: str
    groups: tuple[str, ...]
    commands: tuple[tuple[str, ...], ...]
    outputs: Mapping[str, str] = field(default_factory=dict)
    reads_plan: bool = False
    exit_code: int = 0
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        """Return the commands' words, which with the code determine the output; the recording keeps them."""
        return [word for command in self.commands for word in command]


def all_cases() -> list[Case]:
    """Return every case in the order in which they run."""
    return [*_builds(), *_repositories(), *_plans(), *_simulations(), *_sizings()]


CALIBRATED = ("fp8", "int8_sq", "int4_awq", "w4a8_awq", "nvfp4")
SHORT_CALIBRATION = "calibration.size=32"
"""A quarter of the default texts: AWQ's search takes most of the time, and its code paths are the same."""


def _builds() -> list[Case]:
    formats = {
        "tiny_gemma": ("none", "fp8", "int8_sq", "int4_awq", "w4a8_awq", "int8_wo", "int4_wo"),
        "tiny_llama": ("none", "fp8", "int8_sq", "int4_awq", "w4a8_awq", "nvfp4", "int8_wo", "int4_wo"),
    }
    cases = [_build(f"{model} {name}", model, name) for model, names in formats.items() for name in names]
    cases += [
        _build("tiny_gemma fp8, FP8 KV cache", "tiny_gemma", "fp8", "kv_cache=fp8"),
        _build("tiny_llama int8_sq, INT8 KV cache", "tiny_llama", "int8_sq", "kv_cache=int8"),
        _build("tiny_llama int8_wo, float16", "tiny_llama", "int8_wo", "quant.dtype=float16"),
        _build("tiny_llama fp8, magnitude 2:4", "tiny_llama", "fp8", "sparsity=magnitude_2_4"),
        _build("tiny_gemma int8_sq, SparseGPT 2:4", "tiny_gemma", "int8_sq", "sparsity=sparsegpt_2_4"),
        _build("tiny_llama fp8, TP 2", "tiny_llama", "fp8", "build.tp_size=2"),
        _build("tiny_llama int4_wo, PP 2", "tiny_llama", "int4_wo", "build.pp_size=2"),
        _build("tiny_gemma fp8, draft model", "tiny_gemma", "fp8", "speculative=draft_target"),
        _build("tiny_llama fp8, LLM API", "tiny_llama", "fp8", "engine=tensorrt_llm_llmapi"),
    ]
    return cases


def _build(name: str, model: str, qformat: str, *words: str) -> Case:
    sparse = any("sparsegpt" in word for word in words)
    text = [SHORT_CALIBRATION] if qformat in CALIBRATED or sparse else []
    engine = [] if any(word.startswith("engine=") for word in words) else ["engine=openvino"]
    command = ("build", f"model={model}", f"quant={qformat}", *text, *engine, *words)
    return Case(name, ("checkpoints", "engines"), (command,), {"artifacts": "artifacts/*/*"})


def _repositories() -> list[Case]:
    on_cpu: dict[str, tuple[str, ...]] = {
        "default": (),
        "triton=openai": ("triton=openai",),
        "triton=one_response": ("triton=one_response",),
        "tiny_llama, chunked prompts and a window": ("model=tiny_llama", "runtime=chunked", "window=sliding"),
        "LoRA adapters": ("quant=none", "lora=tiny_gemma"),
        "draft model": ("speculative=draft_target",),
    }
    cases = [_repository(f"openvino, {name}", "engine=openvino", *words) for name, words in on_cpu.items()]
    cases.append(_repository("LLM API", "engine=tensorrt_llm_llmapi", "model=tiny_llama"))
    built = ("engine.path=engine", "model=tiny_llama")
    changed = ("triton=openai", "triton.max_queue_size=100", "reuse=none")
    cases.append(_repository("tensorrt_llm", *built, files=_engine_folder(1)))
    cases.append(_repository("tensorrt_llm, TP 2, other settings", *built, *changed, files=_engine_folder(2)))
    repository = ("repository", "engine=openvino", SHARED_STORE)
    cases.append(
        Case(
            "manifests", ("repositories",), (repository, ("manifests", *repository[1:])), {"texts": "manifests/**/*.*"}
        )
    )
    over_nodes = ("engine=tensorrt_llm", "model=llama_3_1_70b", "hardware=h100_sxm", "parallel=tp8_pp2")
    for cluster, words in {"slurm": (), "mpi": ("cluster.hosts=[a,b]",)}.items():
        command = ("scripts", f"cluster={cluster}", *words, *over_nodes)
        cases.append(Case(f"scripts for {cluster}", ("repositories",), (command,), {"texts": "cluster/**/*"}))
    return cases


def _repository(name: str, *words: str, files: Mapping[str, str] | None = None) -> Case:
    command = ("repository", *words, SHARED_STORE)
    return Case(name, ("repositories",), (command,), {"artifacts": "../store/*/*"}, files=files or {})


def _engine_folder(tp_size: int) -> dict[str, str]:
    """Return the files that trtllm-build writes, without weights: a repository needs only config.json."""
    limits = {"max_batch_size": 8, "max_input_len": 64, "max_seq_len": 128, "max_num_tokens": 256, "max_beam_width": 1}
    config = {
        "version": "1.2.1",
        "pretrained_config": {
            "architecture": "LlamaForCausalLM",
            "dtype": "bfloat16",
            "logits_dtype": "float32",
            "vocab_size": 1920,
            "mapping": {"world_size": tp_size, "tp_size": tp_size, "pp_size": 1},
            "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None},
        },
        "build_config": {
            **limits,
            "gather_context_logits": False,
            "plugin_config": {"use_paged_context_fmha": True},
        },
    }
    ranks = {f"engine/rank{rank}.engine": "no weights\n" for rank in range(tp_size)}
    return {"engine/config.json": json.dumps(config), **ranks}


def _plans() -> list[Case]:
    """Return cases that plan for GPUs, with small models: a plan of a large one is refused when memory is short."""
    llama = ("engine=tensorrt_llm", "model=llama_3_2_1b", "hardware=h100_sxm")
    plans = {
        "gemma_2b fp8": ("engine=tensorrt_llm", "model=gemma_2b", "hardware=h100_sxm"),
        "experiment": ("engine=tensorrt_llm", "experiment=gemma_2b_h100_fp8"),
        "INT4 with lookahead": (*llama, "quant=int4_awq", "speculative=lookahead"),
        "draft model": (
            *llama,
            "model=llama_3_1_8b",
            "speculative=draft_target",
            "model@speculative.draft=llama_3_2_1b",
        ),
        "streamed weights, chunked prompts": (*llama, "weights=streaming", "runtime=chunked"),
        "TP 8, PP 2": (*llama, "parallel=tp8_pp2"),
        "INT8 on an L4 with a window": (*llama, "hardware=l4", "quant=int8_sq", "kv_cache=int8", "window=sliding"),
        "sparse": (*llama, "sparsity=sparsegpt_2_4"),
        "guided": (*llama, "guided=xgrammar", "reuse=system_prompt"),
        "LLM API on a B200": (*llama, "engine=tensorrt_llm_llmapi", "hardware=b200_sxm"),
        "chat at a rate": (*llama, "workload=chat", "benchmark.concurrency=[1,8,64]"),
    }
    cases = [Case(f"plan {name}", ("numbers",), (("plan", *words),), reads_plan=True) for name, words in plans.items()]
    refused = ("plan", "quant=nvfp4", "hardware=a10")
    return [*cases, Case("plan refused", ("numbers",), (refused,), reads_plan=True, exit_code=2)]


def _simulations() -> list[Case]:
    on_h100 = ("model=llama_3_8b", "quant=fp8", "hardware=h100_sxm")
    policies = "simulator.policy=[static,inflight,inflight_chunked,one_prefill]"
    little_cache = ("simulator.kv_blocks=24", "simulator.tokens_per_block=32", "simulator.admission=max_utilization")
    simulations = {
        "in ticks": (),
        "in ticks, every policy at a rate": (policies, "simulator.slots=8", *_poisson("0.1")),
        "in ticks, little KV cache": ("simulator.slots=8", *little_cache),
        "in seconds, chat": (*on_h100, "workload=chat", "benchmark.concurrency=25"),
        "in seconds, every policy at rates": (*on_h100, policies, *_poisson("[4,16]"), "benchmark.num_requests=300"),
        "in seconds, TP 4": (
            *("model=llama_3_1_70b", "quant=int4_awq", "kv_cache=fp8", "hardware=h200_sxm", "parallel=tp4"),
            *("workload=lognormal", "benchmark.concurrency=[8,32]", "benchmark.num_requests=200"),
        ),
    }
    return [
        Case(f"simulate {name}", ("numbers",), (("simulate", *words),), {"numbers": "runs/*/*"})
        for name, words in simulations.items()
    ]


def _poisson(rate: str) -> tuple[str, str]:
    return "workload=poisson", f"benchmark.request_rate={rate}"


def _sizings() -> list[Case]:
    on_h100 = ("model=llama_3_8b", "quant=fp8", "hardware=h100_sxm")
    lengths = ("workload.isl=2000", "workload.osl=200")
    limit = "sizing.slo.ttft_ms=500"
    bought = ("sizing.prices.server_usd=320000", "sizing.prices.years=4", "sizing.prices.licence_usd=4500")
    day = ("sizing=autoscaled", "sizing.autoscaling.cold_start_s=120", "sizing.prices.gpu_hour_usd=3")
    sizings = {
        "llama_3_8b on H100": (*on_h100, "sizing.average_rate=53", *lengths, limit),
        "a day": (*on_h100, *day, "kv_cache=fp8", "sizing.average_rate=53", *lengths, limit),
        "chat users": (
            *("model=llama_3_1_70b", "quant=int4_awq", "hardware=h200_sxm", *bought),
            *("sizing=chat", "sizing.users=100000", "sizing.requests_per_user_day=3"),
        ),
        "offline": (*on_h100, "sizing=offline", "sizing.average_rate=20", *lengths),
        "formats of a mixture of experts": (
            *("sizing.model=mixtral-8x7b", "hardware=h200_sxm", "sizing.formats=[none,fp8,int4_awq]"),
            "sizing.peak_rate=20",
        ),
        "from a benchmark": (
            *(f"sizing.measured={BENCHMARK}", "hardware=h100_sxm", "sizing.peak_rate=30"),
            "sizing.slo.ttft_ms=3000",
        ),
    }
    cases = [
        Case(f"size {name}", ("numbers",), (("size", *words),), {"numbers": "reports/*/*"})
        for name, words in sizings.items()
    ]
    served = ("model=llama_3_1_8b", "quant=fp8", "hardware=h100_sxm", "engine=tensorrt_llm")
    fit = ("calibrate", f"sizing.measured={BENCHMARK}", *served)
    return [*cases, Case("calibrate", ("numbers",), (fit,), {"numbers": "artifacts/fits/*"})]


def chosen(groups: Sequence[str]) -> list[Case]:
    """Return the cases that record something for one of these groups."""
    return [case for case in all_cases() if set(case.groups) & set(groups)]
