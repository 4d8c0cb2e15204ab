"""The llmapi flavour, TensorRT-LLM 1.3 and later: one model, its settings in model.yaml, and no TensorRT engine.

Source: `triton_backend/all_models/llmapi` of TensorRT-LLM. The model's code is NVIDIA's and comes with their container;
the command in repository.json puts it in its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.domain.errors import UserError
from triton_repo.generate import llmapi_configs, to_text
from triton_repo.parameters import changed
from triton_repo.settings import TritonSettings
from triton_repo.spec import RepositorySpec
from triton_repo.tensors import TENSORRT_LLM
from triton_repo.write import OF_THE_STORE, describe, link_files, tokenizer_files, write_model

CHECKPOINT_DIR = f"{TENSORRT_LLM}/1/checkpoint"
MODEL_YAML = "model.yaml"
CHECKPOINT_FILES = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")
READ = {
    "decoupled_mode",
    "kv_cache_free_gpu_mem_fraction",
    "kv_cache_host_memory_bytes",
    "max_tokens_in_paged_kv_cache",
}
"""The settings that this flavour has a place for; the others belong to the C++ backend."""


def write_llmapi(
    out_dir: Path,
    checkpoint: Path,
    tokenizer_dir: Path,
    settings: TritonSettings,
    spec: RepositorySpec,
    made_from: Mapping[str, Any],
) -> dict[str, Any]:
    """Write the repository of `tensorrt_llm.LLM`; see `triton_repo.write.write_repository`.

    Raises:
        UserError: the folder is no Hugging Face checkpoint, or an argument of LLM is given twice.
    """
    import yaml

    if not (checkpoint / "config.json").is_file() or not list(checkpoint.glob("*.safetensors")):
        raise UserError(
            f"'{checkpoint}' is not a Hugging Face checkpoint.",
            allowed="The llmapi flavour takes a folder with config.json and *.safetensors; it runs no TensorRT engine.",
            todo="Take the model's folder, or a quantized checkpoint in Hugging Face's layout.",
        )
    tokenizer = tokenizer_files(tokenizer_dir)
    content = model_yaml(settings, spec)
    for name, config in llmapi_configs(settings).items():
        write_model(out_dir / name, to_text(config), None)
    link_files(tokenizer, tokenizer_dir, out_dir / CHECKPOINT_DIR)
    link_files(checkpoint_files(checkpoint), checkpoint, out_dir / CHECKPOINT_DIR)  # its own config.json wins
    target = out_dir / TENSORRT_LLM / "1" / MODEL_YAML
    target.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    description: dict[str, Any] = {
        "limits": {},
        "engine_version": None,
        "world_size": spec.world_size,
        "models": [TENSORRT_LLM],
        "settings_without_effect": sorted(changed(settings, set(TritonSettings.model_fields) - READ)),
    }
    return describe(out_dir, settings, spec, made_from, description)


def checkpoint_files(folder: Path) -> list[Path]:
    """Weights, configuration and tokenizer, without the copies in other formats that the Hub often holds."""
    found = {path for pattern in CHECKPOINT_FILES for path in folder.glob(pattern) if path.is_file()}
    return sorted(path for path in found if path.name not in OF_THE_STORE)


def model_yaml(settings: TritonSettings, spec: RepositorySpec) -> dict[str, Any]:
    """Arguments of `tensorrt_llm.LLM`, and what the model tells Triton about itself.

    Raises:
        UserError: `spec.llm_args` says again what the configuration says.
    """
    kv_cache = {
        "enable_block_reuse": spec.enable_kv_cache_reuse,
        "free_gpu_memory_fraction": settings.kv_cache_free_gpu_mem_fraction,
        "host_cache_size": settings.kv_cache_host_memory_bytes,
        "max_tokens": settings.max_tokens_in_paged_kv_cache,
    }
    ours = {
        "model": CHECKPOINT_DIR,
        "backend": "pytorch",
        "tensor_parallel_size": spec.tp_size,
        "pipeline_parallel_size": spec.pp_size,
        "enable_chunked_prefill": spec.enable_chunked_context,
        "kv_cache_config": {name: value for name, value in kv_cache.items() if value is not None},
        "triton_config": {"max_batch_size": 0, "decoupled": settings.decoupled_mode},
    }
    if twice := sorted(set(ours) & set(spec.llm_args)):
        raise UserError(
            f"llm_args gives {', '.join(twice)}, which the configuration already says.",
            allowed="Any other argument of tensorrt_llm.LLM.",
        )
    return {**ours, **spec.llm_args}
