"""Write a repository: a folder that holds all it needs, so that it can be copied and served elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.domain.errors import Fault, UserError
from pipelines.engines.description import ServerBackend
from pipelines.engines.limits import EngineLimits
from pipelines.engines.openvino.blocks import KV_BLOCK_TOKENS
from pipelines.settings.triton import TritonSettings
from triton_repo import lora, parameters, vocabulary
from triton_repo.consistency import config_faults
from triton_repo.draft import draft_faults
from triton_repo.files import copy_files, describe, engine_files, link_files, tokenizer_files, write_model
from triton_repo.generate import draft_config, repository_configs, to_text
from triton_repo.spec import RepositorySpec
from triton_repo.start import OF_NVIDIA
from triton_repo.tensors import DRAFT, ENSEMBLE, POSTPROCESSING, PREPROCESSING, TENSORRT_LLM

if TYPE_CHECKING:
    from tritonclient.grpc import model_config_pb2 as pb

__all__ = ["RepositorySpec", "write_repository"]

SOURCES = Path(__file__).resolve().parent / "models"


def write_repository(
    out_dir: Path,
    *,
    engine_dir: Path,
    tokenizer_dir: Path,
    settings: TritonSettings,
    spec: RepositorySpec,
    made_from: Mapping[str, Any] | None = None,
    draft_dir: Path | None = None,
    vision_dir: Path | None = None,
    adapters: Mapping[int, Path] | None = None,
) -> dict[str, Any]:
    """Write a model repository.

    The engine is hard links where the file system allows it and copies elsewhere, never symbolic links; the tokenizer
    and adapters, which are small and belong to the user, are copies.

    Args:
        out_dir: the folder; made when missing.
        engine_dir: what `make build` or trtllm-build wrote.
        tokenizer_dir: a Hugging Face folder with the tokenizer.
        settings: conf/triton.
        spec: what other groups of the configuration say.
        made_from: what to remember about the origin, as JSON; stands in repository.json if it is given.
        draft_dir: engine of the model that guesses tokens, where `spec.num_draft_tokens` is set.
        vision_dir: engine of the vision encoder, where `spec.images` is set.
        adapters: folders of peft LoRA adapters by task id; the tasks of `spec`.

    Returns:
        facts: flavour, models, world_size, engine_version, bytes.

    Raises:
        UserError: every fault at once: the engine, the settings and the tokenizer do not go together.
    """
    if spec.engine.server is ServerBackend.LLM_API:
        from triton_repo.llmapi import write_llmapi

        return write_llmapi(out_dir, engine_dir, settings, spec, made_from or {})
    tokenizer = tokenizer_files(tokenizer_dir)
    limits = EngineLimits.load(engine_dir)
    configs = _configs(limits, settings, spec, draft_dir, adapters or {})
    for name, config in configs.items():
        write_model(out_dir / name, to_text(config), None if _has_no_code(name, spec) else SOURCES / name)
    link_files(engine_files(engine_dir), engine_dir, out_dir / parameters.ENGINE_DIR)
    _put_features(out_dir, limits, draft_dir, adapters or {})
    for name in (PREPROCESSING, POSTPROCESSING):
        copy_files(tokenizer, tokenizer_dir, out_dir / parameters.TOKENIZER.format(model=name))
    if spec.images is not None and vision_dir is not None:
        link_files(engine_files(vision_dir), vision_dir, out_dir / parameters.VISION_DIR)
    if parameters.writes_vocabulary(settings, spec):
        vocabulary.write(tokenizer_dir, out_dir / parameters.VOCABULARY)
    ignored = parameters.changed(settings, parameters.PLACES) if spec.engine.server is ServerBackend.PYTHON else {}
    description = {
        "limits": limits.as_json(),
        "engine_version": limits.version,
        "world_size": limits.world_size,
        "logits_type": f"TYPE_{limits.logits_type}",
        "models": sorted(configs),
        **({"tokens_per_block": KV_BLOCK_TOKENS} if spec.engine.server is ServerBackend.PYTHON else {}),
        "settings_without_effect": sorted(ignored),
    }
    return describe(out_dir, settings, spec, made_from or {}, description)


def _adapter_faults(
    adapters: Mapping[int, Path], limits: EngineLimits, settings: TritonSettings, spec: RepositorySpec
) -> list[Fault]:
    if tuple(sorted(adapters)) != spec.lora_tasks:
        return [Fault(f"Adapters are given for the tasks {sorted(adapters)}, and named are {list(spec.lora_tasks)}.")]
    if adapters and settings.lora_prefetch_dir is not None:
        return [
            Fault(
                f"triton.lora_prefetch_dir='{settings.lora_prefetch_dir}' was given beside lora.adapters, which stand "
                f"in the repository under {parameters.LORA_DIR}.",
                todo="Leave one of them out.",
            )
        ]
    if spec.engine.server is ServerBackend.TENSORRTLLM:
        return lora.adapter_faults(adapters, limits)
    lora.check_values(adapters)
    return []


def _configs(
    limits: EngineLimits,
    settings: TritonSettings,
    spec: RepositorySpec,
    draft_dir: Path | None,
    adapters: Mapping[int, Path],
) -> dict[str, pb.ModelConfig]:
    """The configuration of every model.

    Raises:
        UserError: engine, settings, draft engine and adapters do not go together.
    """
    if faults := [*_faults(settings, limits, spec), *_adapter_faults(adapters, limits, settings, spec)]:
        raise UserError.of(faults)
    if spec.images is not None and settings.retention_tokens is not None:
        raise UserError(
            f"triton.retention_tokens={settings.retention_tokens} with images: tensorrt_llm_bls then has NVIDIA's "
            "code, which asks for no retention.",
            todo="Leave out triton.retention_tokens.",
        )
    draft = _draft(draft_dir, limits, settings, spec)
    configs = repository_configs(settings, limits, spec)
    if draft is not None and spec.engine.server is ServerBackend.TENSORRTLLM:
        configs[DRAFT] = draft_config(settings, draft, spec)
    if faults := config_faults(configs, limits):
        raise UserError.of(faults)
    return configs


def _put_features(out_dir: Path, limits: EngineLimits, draft_dir: Path | None, adapters: Mapping[int, Path]) -> None:
    """Draft engine and adapters; an adapter's own files for the CPU engine, converted ones for TensorRT-LLM."""
    own_server = limits.engine.server is ServerBackend.PYTHON
    if draft_dir is not None:
        place = parameters.CPU_DRAFT_DIR if own_server else parameters.DRAFT_ENGINE_DIR
        link_files(engine_files(draft_dir), draft_dir, out_dir / place)
    for task, folder in adapters.items():
        place_of_task = out_dir / parameters.LORA_DIR / str(task)
        if own_server:
            copy_files([folder / name for name in lora.PEFT_FILES], folder, place_of_task)
        else:
            lora.write(folder, place_of_task, limits.dtype)


def _draft(
    folder: Path | None, limits: EngineLimits, settings: TritonSettings, spec: RepositorySpec
) -> EngineLimits | None:
    """Limits of the draft engine.

    Raises:
        UserError: it does not go with the engine, or only one of engine and num_draft_tokens is given.
    """
    if (folder is None) != (spec.num_draft_tokens is None):
        raise UserError(
            f"num_draft_tokens={spec.num_draft_tokens} with the draft engine '{folder}'.",
            allowed="Both or neither.",
        )
    if folder is None:
        return None
    draft = EngineLimits.load(folder)
    if faults := draft_faults(limits, draft, settings, spec):
        raise UserError.of(faults)
    return draft


def _has_no_code(name: str, spec: RepositorySpec) -> bool:
    """The ensemble is wiring; TensorRT-LLM's backend is compiled."""
    of_nvidia = spec.images is not None and name in OF_NVIDIA
    return (
        name == ENSEMBLE
        or of_nvidia
        or (name in (TENSORRT_LLM, DRAFT) and spec.engine.server is ServerBackend.TENSORRTLLM)
    )


def _faults(settings: TritonSettings, limits: EngineLimits, spec: RepositorySpec) -> list[Fault]:
    """What does not go together before any file is written."""
    faults = parameters.setting_faults(settings, spec.engine)
    if limits.flavour != spec.flavour:
        faults.append(
            Fault(
                f"The engine is of flavour '{limits.flavour}', the repository was asked for as '{spec.flavour}'.",
                todo=f"Set engine={limits.flavour}, or build the engine with engine={spec.flavour}.",
            )
        )
    if (limits.tp_size, limits.pp_size) != (spec.tp_size, spec.pp_size):
        faults.append(
            Fault(
                f"build.tp_size={spec.tp_size} and build.pp_size={spec.pp_size} were given; the engine has "
                f"tp_size={limits.tp_size} and pp_size={limits.pp_size}.",
                todo="Set them as the engine has them, or build it again: make build",
            )
        )
    return faults
