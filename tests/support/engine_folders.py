"""Engine and tokenizer folders with real configurations and empty weights."""

import json
from pathlib import Path
from typing import Any

import yaml

from pipelines.compress.config import KvCacheSettings
from pipelines.engines.tensorrt_llm.config import BuildSettings
from pipelines.engines.tensorrt_llm.llm_api import merged
from pipelines.stages.unified import ConfigureLlm
from triton_repo.config import TritonSettings
from triton_repo.llmapi import CHECKPOINT, OPTIONS

LIMITS = {"max_batch_size": 8, "max_input_len": 64, "max_seq_len": 128, "max_num_tokens": 256, "max_beam_width": 1}
VERSIONS = {"tensorrt_llm": "1.2.1", "openvino": "2026.4.1"}


def engine_config(flavour: str, *, tp_size: int, pp_size: int, logits_dtype: str, **build: Any) -> dict[str, Any]:
    """Return config.json as trtllm-build and our OpenVINO build write it."""
    world_size = tp_size * pp_size
    config: dict[str, Any] = {
        "version": VERSIONS[flavour],
        "pretrained_config": {
            "architecture": "LlamaForCausalLM",
            "dtype": "bfloat16",
            "logits_dtype": logits_dtype,
            "vocab_size": 1920,
            "mapping": {"world_size": world_size, "tp_size": tp_size, "pp_size": pp_size},
            "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None},
        },
        "build_config": {
            **LIMITS,
            "gather_context_logits": False,
            "plugin_config": {"use_paged_context_fmha": True} if flavour == "tensorrt_llm" else {},
            **build,
        },
    }
    if flavour == "openvino":
        config["engine"] = {"flavour": "openvino", "openvino_version": VERSIONS[flavour]}
    return config


def write_engine(
    folder: Path,
    flavour: str = "tensorrt_llm",
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    logits_dtype: str = "float32",
    **build: Any,
) -> Path:
    """Write an engine folder; `build` replaces keys of its build_config."""
    folder.mkdir(parents=True, exist_ok=True)
    config = engine_config(flavour, tp_size=tp_size, pp_size=pp_size, logits_dtype=logits_dtype, **build)
    (folder / "config.json").write_text(json.dumps(config))
    names = ["openvino_model.xml", "openvino_model.bin"]
    if flavour == "tensorrt_llm":
        names = [f"rank{rank}.engine" for rank in range(tp_size * pp_size)]
    for name in names:
        (folder / name).write_bytes(b"weights")
    return folder


def write_tokenizer(folder: Path) -> Path:
    """Write a Hugging Face folder, including weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "model.safetensors", "README.md"):
        (folder / name).write_text("{}")
    return folder


def write_llm_folder(folder: Path, **arguments: Any) -> Path:
    """Write the folder that the LLM API uses instead of an engine: a checkpoint and its arguments."""
    write_tokenizer(folder / CHECKPOINT)
    own = ConfigureLlm(BuildSettings(), TritonSettings(), KvCacheSettings(), enable_chunked_context=False).arguments
    (folder / OPTIONS).write_text(yaml.safe_dump(merged(own, arguments), sort_keys=False))
    return folder
