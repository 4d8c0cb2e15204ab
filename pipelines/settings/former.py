"""Words that are no settings: those that are gone or were renamed, and what other tools call ours."""

from pipelines.domain.errors import Fault

RENAMED = {"sizing.calibration": "sizing.fit", "sizing.autoscaling.trace": "workload.trace"}
"""Former names of settings whose nearest word would mislead: `calibration` is ModelOpt's text."""
IN_AN_OVERLAY = "Patch it in an overlay of your own."
REMOVED = {
    "calibration.seed": "Nothing is drawn: the first calibration.size texts are read.",
    "diagnose.new_tokens": "An answer has 24 tokens.",
    "diagnose.seed": "The prompts are always the same.",
    "eval.attempts": "A request is sent up to 6 times; the same command goes on from the answers that it has.",
    "eval.power": "The number of further questions is that which decides in 80 % of cases.",
    "image.ipc_host": "Give image.shm_size as much as the host has.",
    "manifests.mpi_prefix": "It is /opt/hpcx/ompi, as in NVIDIA's image.",
    "manifests.pre_stop_s": f"It is 5 s. {IN_AN_OVERLAY}",
    "manifests.read_mib_per_s": "For slow storage, raise serving.startup_timeout_s.",
    "manifests.scrape_interval_s": f"It is 15 s. {IN_AN_OVERLAY}",
    "nightly.least": "Four earlier nights are enough to know the noise.",
}
"""Former settings that nobody has to choose, and what holds now."""

ELSEWHERE = {
    "build.tp_size": "tp tensor_parallel tensor_parallel_size",
    "build.pp_size": "pp pipeline_parallel pipeline_parallel_size",
    "build.moe_ep_size": "ep ep_size expert_parallel_size moe_expert_parallel_size",
    "build.max_batch_size": "max_num_seqs",
    "build.max_num_tokens": "max_num_batched_tokens",
    "build.max_seq_len": "max_model_len context_length",
    "build.tokens_per_block": "block_size page_size",
    "kv_cache.dtype": "kv_cache_dtype kv_dtype kv_cache",
    "kv_cache.enable_block_reuse": "enable_prefix_caching prefix_caching",
    "runtime.enable_chunked_context": "enable_chunked_prefill chunked_prefill",
    "triton.kv_cache_free_gpu_mem_fraction": "gpu_memory_utilization free_gpu_memory_fraction"
    " kv_cache_free_gpu_memory_fraction",
    "engine.openvino.num_threads": "threads num_threads",
    "quant": "quantization quant_algo",
    "hardware": "gpu gpus gpu_type",
    "model.path": "model_path model_dir",
    "serving.http_port": "port",
    "serving.openai_port": "port",
    "speculative.draft": "draft_model speculative_model",
    "speculative.num_draft_tokens": "num_speculative_tokens",
    "calibration.size": "calib_size",
    "calibration.dataset": "calib_dataset",
    "calibration.seq_len": "calib_seq",
    "eval.task": "tasks",
    "eval.num_fewshot": "shots num_shots fewshot few_shot",
    "workload.isl": "input_len input_length prompt_len prompt_tokens",
    "workload.osl": "output_len output_length max_tokens max_new_tokens",
    "benchmark.concurrency": "users num_users clients max_concurrency num_concurrent",
    "benchmark.request_rate": "rate qps rps",
    "sizing.average_rate": "qps rps",
    "benchmark.num_requests": "num_prompts",
}
"""Setting -> what TensorRT-LLM, vLLM, ModelOpt, lm-eval and load generators call it."""
CHOICES_ELSEWHERE = {
    "quant=none": "16bit bf16 fp16 bfloat16 float16",
    "quant=fp8": "e4m3 fp8_e4m3 w8a8_fp8",
    "quant=int8_sq": "smoothquant smooth_quant w8a8 w8a8_sq_per_channel",
    "quant=int8_wo": "w8a16",
    "quant=int4_awq": "w4a16 w4a16_awq",
    "quant=int4_gptq": "w4a16 w4a16_gptq",
    "quant=nvfp4": "fp4 w4a4",
    "kv_cache=auto": "16bit bf16 fp16 bfloat16 float16",
    "kv_cache=fp8": "e4m3 fp8_e4m3",
    "engine=openvino": "cpu",
    "engine=tensorrt_llm": "trtllm trt_llm trt",
    "engine=tensorrt_llm_llmapi": "llmapi llm_api pytorch",
    "speculative=eagle": "eagle3 eagle_3",
}
"""Choice of a group -> its name elsewhere."""


def former(key: str) -> Fault | None:
    """Say what became of a setting that was renamed or removed."""
    if key in RENAMED:
        return Fault(f"{key} is not a known setting.", f"It is now '{RENAMED[key]}'.")
    return Fault(f"{key} is no longer a setting.", REMOVED[key]) if key in REMOVED else None


def elsewhere(key: str) -> list[str]:
    """List the settings that other tools call so, those of the same group first of all: tp is build.tp_size."""
    group, _, name = key.lower().replace("-", "_").rpartition(".")
    ours = [setting for setting, names in ELSEWHERE.items() if name in names.split()]
    return [setting for setting in ours if setting.partition(".")[0] == group] or ours


def choices_elsewhere(group: str, choice: str) -> list[str]:
    """List the choices of a group that other tools call so: smoothquant is int8_sq."""
    name = choice.lower().replace("-", "_")
    ours = [each.split("=") for each, names in CHOICES_ELSEWHERE.items() if name in names.split()]
    return [choice for of, choice in ours if of == group]
