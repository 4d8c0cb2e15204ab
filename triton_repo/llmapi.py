"""Repositories of the LLM API (TensorRT-LLM 1.3 and later): one model, its settings in model.yaml, no TensorRT engine.

Source: `triton_backend/all_models/llmapi` of TensorRT-LLM. The model's code is NVIDIA's and comes with their container;
the command in repository.json puts it in its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.domain.errors import Fault, UserError
from pipelines.settings.triton import TritonSettings
from triton_repo.files import OF_THE_STORE, VOCABULARIES, describe, link_files, write_model
from triton_repo.generate import llmapi_configs, to_text
from triton_repo.llm_args import CHECKPOINT, DRAFT, OPTIONS, LlmArgs
from triton_repo.parameters import changed
from triton_repo.spec import RepositorySpec
from triton_repo.tensors import TENSORRT_LLM

CHECKPOINT_DIR, DRAFT_DIR = f"{TENSORRT_LLM}/1/{CHECKPOINT}", f"{TENSORRT_LLM}/1/{DRAFT}"
MODEL_YAML = "model.yaml"
BESIDE_THE_ARGUMENTS = ("model", "backend", "triton_config")
AGAIN = "Make the repository again: make repository"
CHECKPOINT_FILES = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")
LIMITS = ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "max_beam_width")
READ = {
    "batch_scheduler_policy",
    "cancellation_check_period_ms",
    "decoupled_mode",
    "guided_decoding_backend",
    "kv_cache_free_gpu_mem_fraction",
    "kv_cache_host_memory_bytes",
    "max_attention_window_size",
    "max_tokens_in_paged_kv_cache",
}
"""The settings that the LLM API supports; the others belong to the C++ backend."""


def write_llmapi(
    out_dir: Path,
    engine_dir: Path,
    settings: TritonSettings,
    spec: RepositorySpec,
    made_from: Mapping[str, Any],
) -> dict[str, Any]:
    """Write the repository of `tensorrt_llm.LLM`; see `triton_repo.write.write_repository`.

    Raises:
        UserError: the folder was not written by `make build engine=tensorrt_llm_llmapi`, or is for other ranks.
    """
    import yaml

    checkpoint, options = engine_dir / CHECKPOINT, engine_dir / OPTIONS
    if not (checkpoint / "config.json").is_file() or not options.is_file():
        raise UserError(
            f"'{engine_dir}' is not made for the LLM API: it lacks {CHECKPOINT}/config.json or {OPTIONS}.",
            todo="Make it:",
            command=("make", "build", "engine=tensorrt_llm_llmapi"),
        )
    arguments = LlmArgs.from_yaml(options.read_text(encoding="utf-8"), str(options))
    if faults := _rank_faults(arguments, spec):
        raise UserError.of(faults)
    for name, config in llmapi_configs(settings).items():
        write_model(out_dir / name, to_text(config), None)
    link_files(checkpoint_files(checkpoint), checkpoint, out_dir / CHECKPOINT_DIR)
    link_files(checkpoint_files(engine_dir / DRAFT), engine_dir / DRAFT, out_dir / DRAFT_DIR)
    target = out_dir / TENSORRT_LLM / "1" / MODEL_YAML
    target.write_text(yaml.safe_dump(model_yaml(arguments, settings), sort_keys=False), encoding="utf-8")
    description: dict[str, Any] = {
        "limits": {name: getattr(arguments, name) for name in LIMITS},
        "engine_version": None,
        "world_size": spec.world_size,
        "models": [TENSORRT_LLM],
        "settings_without_effect": sorted(changed(settings, set(TritonSettings.model_fields) - READ)),
    }
    return describe(out_dir, settings, spec, made_from, description)


def checkpoint_files(folder: Path) -> list[Path]:
    """List weights, configuration and tokenizer, without the copies in other formats that the Hub often has."""
    found = {path for pattern in CHECKPOINT_FILES for path in folder.glob(pattern) if path.is_file()}
    return sorted(path for path in found if path.name not in OF_THE_STORE)


def model_yaml(arguments: LlmArgs, settings: TritonSettings) -> dict[str, Any]:
    """Return the arguments of `tensorrt_llm.LLM`, and the model's own configuration for Triton."""
    triton = {"max_batch_size": 0, "decoupled": settings.decoupled_mode}
    if settings.cancellation_check_period_ms != TritonSettings.model_fields["cancellation_check_period_ms"].default:
        triton["cancellation_check_period_ms"] = settings.cancellation_check_period_ms
    given = arguments.as_dict()
    if "speculative_config" in given:
        given["speculative_config"]["speculative_model"] = DRAFT_DIR
    return {"model": CHECKPOINT_DIR, "backend": "pytorch", **given, "triton_config": triton}


def _rank_faults(arguments: LlmArgs, spec: RepositorySpec) -> list[Fault]:
    given = arguments.tensor_parallel_size, arguments.pipeline_parallel_size
    if given == (spec.tp_size, spec.pp_size):
        return []
    return [
        Fault(
            f"build.tp_size={spec.tp_size} and build.pp_size={spec.pp_size} were given; the LLM API was configured for "
            f"tensor_parallel_size={given[0]} and pipeline_parallel_size={given[1]}.",
            todo="Build it again:",
            command=("make", "build", "engine=tensorrt_llm_llmapi"),
        )
    ]


def llmapi_faults(folder: Path) -> list[Fault]:
    """Find everything that would stop the LLM API from loading this repository."""
    import yaml

    path = folder / TENSORRT_LLM / "1" / MODEL_YAML
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        return [Fault(f"{path} holds a {type(content).__name__}.", "It must be a mapping.", AGAIN)]
    arguments = {name: value for name, value in content.items() if name not in BESIDE_THE_ARGUMENTS}
    try:
        LlmArgs.from_yaml(yaml.safe_dump(arguments), str(path))
    except UserError as error:
        return list(error.faults)
    draft = (arguments.get("speculative_config") or {}).get("speculative_model")
    places = {str(content.get("model", CHECKPOINT_DIR)): True, **({} if draft is None else {str(draft): False})}
    return [fault for place, has_tokenizer in places.items() for fault in _missing(folder / place, has_tokenizer)]


def _missing(checkpoint: Path, has_tokenizer: bool) -> list[Fault]:
    """Find what a checkpoint lacks; a draft model uses its target's tokenizer."""
    missing = [] if (checkpoint / "config.json").is_file() else ["config.json"]
    missing += [] if list(checkpoint.glob("*.safetensors")) else ["*.safetensors"]
    if has_tokenizer and not any((checkpoint / name).is_file() for name in VOCABULARIES):
        missing.append("a tokenizer")
    return [Fault(f"The checkpoint '{checkpoint}' lacks {', '.join(missing)}.", todo=AGAIN)] if missing else []
