"""The builder's treatment of its arguments and the checkpoint: refusals, warnings, the final build_config."""

import json
from argparse import Namespace
from dataclasses import fields
from pathlib import Path
from typing import Any

from pipelines.checkpoint.config_json import Quantization
from tests.support.emulated_trtllm.talk import info, warning

MODEL_MAP = ("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "LlamaForCausalLM", "MedusaForCausalLM")
NOT_ON_SM100 = (
    "gemm_swiglu_plugin",
    "fp8_rowwise_gemm_plugin",
    "low_latency_gemm_plugin",
    "low_latency_gemm_swiglu_plugin",
    "bert_context_fmha_fp32_acc",
)
SPECULATIVE_MODES = {
    None: 1, "draft_tokens_external": 2, "medusa": 4, "lookahead_decoding": 8, "explicit_draft_tokens": 16, "eagle": 32,
}  # fmt: skip
"""Numbers of the flags of SpeculativeDecodingMode, which `EngineConfig.to_dict` writes."""
FP8 = ("FP8", "W4A8_AWQ", "NVFP4")
SIZES = ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "max_beam_width", "opt_num_tokens")
OTHERS = ("gather_context_logits", "gather_generation_logits", "max_draft_len", "weight_sparsity", "weight_streaming")


class Refused(RuntimeError):  # noqa: N818 - read in a log
    """Violations of this project's checkpoint rules, which would stop TensorRT-LLM's loader somewhere inside."""


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """Read config.json as strictly as `PretrainedConfig` does."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    known = {field.name for field in fields(Quantization)}
    for key in config.get("quantization") or {}:
        if key not in known:
            raise TypeError(f"QuantConfig.__init__() got an unexpected keyword argument '{key}'")
    mapping = {"world_size": 1, "tp_size": 1, "pp_size": 1} | (config.get("mapping") or {})
    return config | {"mapping": mapping}


def planned(args: Namespace, config: dict[str, Any], sm: float) -> dict[str, Any]:
    """Return build_config as the engine records it."""
    plugins = _plugins(args)
    if sm == 10.0:
        for name in NOT_ON_SM100:
            if plugins[name] not in (None, False):
                raise NotImplementedError(f"{name}={plugins[name]} is not supported on SM 100.")
    if args.multiple_profiles == "enable" and args.opt_num_tokens is not None:
        raise RuntimeError("multiple_profiles is enabled, while opt_num_tokens is set. ")
    assert not plugins["streamingllm"], "StreamingLLM is no longer supported because attention sink cannot work"
    assert not plugins["pp_reduce_scatter"], "PP reduce scatter is only supported in the mixtral model."
    architecture = config["architecture"]
    assert architecture in MODEL_MAP, f"Unsupported model architecture: {architecture}"
    quantization = config.get("quantization") or {}
    _sm100(quantization, sm)
    warning("Overriding paged_state to False")
    sizes = _sizes(args, config)
    _fusions(plugins, config)
    _attention(plugins, quantization, sm)
    built = {name: getattr(args, name) for name in OTHERS} | sizes
    built["speculative_decoding_mode"] = SPECULATIVE_MODES[args.speculative_decoding_mode]
    built["kv_cache_type"] = getattr(args, "kv_cache_type", "PAGED")
    lora = {"lora_dir": args.lora_dir or [], "max_lora_rank": args.max_lora_rank}
    built["lora_config"] = lora | {"lora_target_modules": args.lora_target_modules or []}
    return built | {"opt_batch_size": 8, "strongly_typed": True, "plugin_config": plugins}


def _plugins(args: Namespace) -> dict[str, Any]:
    """Convert "enable" and "disable" to booleans, and a disabled plugin to None."""
    switches = {"enable": True, "disable": False}
    found = {}
    for name, value in vars(args).items():
        if name.endswith("_plugin") and name != "dora_plugin":
            found[name] = None if value == "disable" else value
            info(f"Set {name} to {found[name]}.")
        elif isinstance(value, str) and value in switches:
            found[name] = switches[value]
            info(f"Set {name} to {found[name]}.")
    return found | {"tokens_per_block": args.tokens_per_block, "paged_state": False}


def _sm100(quantization: dict[str, Any], sm: float) -> None:
    algo = quantization.get("quant_algo") or ""
    if not 10.0 <= sm < 12.0:
        return
    if algo in ("W8A16", "W4A16", "W4A16_AWQ", "W4A8_AWQ") or quantization.get("kv_cache_quant_algo") == "INT8":
        raise RuntimeError("INT8/INT4 quantization is not supported on SM>=100.")
    if algo.startswith("W8A8_SQ"):
        raise RuntimeError("SmoothQuant is not supported on SM>=100.")


def _sizes(args: Namespace, config: dict[str, Any]) -> dict[str, Any]:
    """Return the limits as adjusted by `_init_max_seq_len` and `check_max_num_tokens`."""
    sizes = {name: getattr(args, name) for name in SIZES}
    positions = config.get("max_position_embeddings") or 2048
    if sizes["max_seq_len"] is None:
        sizes["max_seq_len"] = positions
        info(f"max_seq_len is not specified, using deduced value {positions}")
    sizes["max_input_len"] = min(sizes["max_input_len"], sizes["max_seq_len"])
    if sizes["opt_num_tokens"] is None and args.multiple_profiles != "enable":
        warning("remove_input_padding is enabled, while opt_num_tokens is not set, setting to ")
        sizes["opt_num_tokens"] = min(sizes["max_batch_size"] * sizes["max_beam_width"], sizes["max_num_tokens"])
    most = sizes["max_seq_len"] * sizes["max_batch_size"]
    if sizes["max_num_tokens"] > most:
        warning(f"max_num_tokens ({sizes['max_num_tokens']}) shouldn't be greater than max_seq_len * max_batch_size")
        sizes["max_num_tokens"] = most
    warning("padding removal and fMHA are both enabled, max_input_len is not required and will be ignored")
    if args.speculative_decoding_mode is not None:
        sizes["max_seq_len"] += args.max_draft_len
        sizes["max_num_tokens"] = max(sizes["max_num_tokens"], sizes["max_batch_size"] * (args.max_draft_len + 1))
    return sizes


def _fusions(plugins: dict[str, Any], config: dict[str, Any]) -> None:
    fits = config["architecture"] in ("LlamaForCausalLM", "Gemma2ForCausalLM", "MedusaForCausalLM")
    if plugins["reduce_fusion"] and not (fits and config["mapping"]["tp_size"] > 1):
        warning("Overriding reduce_fusion to False")
        plugins["reduce_fusion"] = False
    if plugins["user_buffer"] and not plugins["reduce_fusion"]:
        warning("Overriding user_buffer to False")
        plugins["user_buffer"] = False


def _attention(plugins: dict[str, Any], quantization: dict[str, Any], sm: float) -> None:
    """Adjust the kinds of context attention as the builder does."""
    fp8_kv, int8_kv = (quantization.get("kv_cache_quant_algo") == name for name in ("FP8", "INT8"))
    if not plugins["context_fmha"]:
        plugins["use_fp8_context_fmha"] = plugins["use_paged_context_fmha"] = False
        warning("Context FMHA is disabled, FP8 Context FMHA and Paged Context FMHA are disabled.")
    elif quantization.get("quant_algo") not in FP8 or sm < 8.9:
        plugins["use_fp8_context_fmha"] = False
        if plugins["use_paged_context_fmha"] and fp8_kv:
            plugins["use_paged_context_fmha"] = False
            warning("FP8 Paged Context FMHA is disabled because FP8 context FMHA is disabled.")
    elif plugins["use_paged_context_fmha"]:
        if plugins["use_fp8_context_fmha"] and not fp8_kv:
            warning("FP8 Paged Context FMHA is disabled because it must be used together with fp8 KV Cache.")
        plugins["use_fp8_context_fmha"] = fp8_kv
    if plugins["use_paged_context_fmha"] and int8_kv:
        plugins["use_paged_context_fmha"] = False
        warning("Paged Context FMHA is disabled because it doesn't work with int8 kv cache currently.")
