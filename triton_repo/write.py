"""Write a repository: a folder that holds all it needs, so that it can be copied and served elsewhere."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tritonclient.grpc import model_config_pb2 as pb

from pipelines.checkpoint import adapter_files
from pipelines.checkpoint.adapter_files import AdapterFiles, place
from pipelines.checkpoint.tokenizer import opened
from pipelines.domain.adapter import MODULES
from pipelines.domain.errors import Fault, UserError, refuse
from pipelines.engines.limits import SIZES, EngineLimits
from pipelines.engines.openvino.memory import KV_BLOCK_TOKENS
from pipelines.engines.registry import ServerBackend
from triton_repo import llmapi, parameters
from triton_repo.config import TritonSettings
from triton_repo.consistency import config_faults, draft_faults
from triton_repo.generate import draft_config, llmapi_config, repository_configs, to_text
from triton_repo.parameters import OF_NVIDIA, RepositorySpec
from triton_repo.tensors import DRAFT, ENSEMBLE, POSTPROCESSING, PREPROCESSING, TENSORRT_LLM

Array = np.ndarray[Any, Any]

# The vocabulary file that xgrammar needs in TensorRT-LLM's backend.
#
# Source: TensorRT-LLM `examples/generate_xgrammar_tokenizer_info.py` @7ed07f0 and `_xgrammar_tokenizer_info` in
# `tensorrt_llm/tokenizer/tokenizer.py`: tokens by id as the tokenizer writes them, the tokenizer itself (xgrammar reads
# from it how tokens become text), and the token that ends an answer.


def tokenizer_info(folder: Path) -> dict[str, Any]:
    """Content of the file for a Hugging Face tokenizer.

    Returns:
        encoded_vocab (tokens in the order of their ids; an id without a token is ""), tokenizer_str, stop_token_ids.

    Raises:
        UserError: there is no tokenizer.json, or no end token is named.
    """
    opened_folder = opened(folder, "triton.guided_decoding_backend=xgrammar")
    by_token: dict[str, int] = opened_folder.tokenizer.get_vocab(with_added_tokens=True)
    vocabulary = [""] * (max(by_token.values()) + 1)
    for token, number in by_token.items():
        vocabulary[number] = token
    if not opened_folder.end_ids:
        raise UserError(
            f"triton.guided_decoding_backend=xgrammar: '{folder}' names no end token among its {len(by_token)} tokens.",
            todo="Set eos_token in tokenizer_config.json, or give the file: "
            "triton.xgrammar_tokenizer_info_path=/its/path",
        )
    return {
        "encoded_vocab": vocabulary,
        "tokenizer_str": opened_folder.tokenizer.to_str(),
        "stop_token_ids": list(opened_folder.end_ids),
    }


# Convert a peft LoRA adapter to the two arrays that TensorRT-LLM's Triton backend reads.
#
# Source: TensorRT-LLM `examples/hf_lora_convert.py` @05316d3 (layout, scaling) and `tensorrt_llm/lora_manager.py`
# (module ids). `model.lora_weights.npy` is [1, rows, width]: a row holds A [rank, inputs] and then B [outputs, rank]
# times the adapter's scaling, both flattened, and zeros up to the widest row. `model.lora_config.npy` is int32
# [1, rows, 3]: module id, layer, rank; rank and scaling may differ by row. Rows are sorted by layer and module here;
# each identifies itself, so their order does not matter. A tensor that the script does not know is skipped there with a
# line of output, and refused here, because the adapter would silently answer differently.

WEIGHTS, CONFIG = "model.lora_weights.npy", "model.lora_config.npy"
PEFT_FILES = (adapter_files.CONFIG, adapter_files.WEIGHTS)
MODULE_IDS = {
    "attn_qkv": 0,
    "attn_q": 1,
    "attn_k": 2,
    "attn_v": 3,
    "attn_dense": 4,
    "mlp_h_to_4h": 5,
    "mlp_4h_to_h": 6,
    "mlp_gate": 7,
}
STORED = ("float16", "float32")
"""Engine types whose adapters can be stored: `runtime/utils/numpyUtils.cpp` reads no bfloat16 from a .npy file, and
`runtime/loraUtils.cpp` takes weights of the engine's own type only."""


def convert(folder: Path, dtype: str = "float16") -> tuple[Array, Array]:
    """Read an adapter.

    Args:
        folder: with adapter_config.json and adapter_model.safetensors, as peft saves them.
        dtype: of the converted weights, "float16" or "float32".

    Returns:
        weights [1, rows, width] and config [1, rows, 3].

    Raises:
        UserError: it is not a LoRA adapter, or has more than LoRA matrices of linears.
    """
    files = AdapterFiles.read(folder)
    rows, keys = [], []
    order = {name: MODULE_IDS[module] for name, module in MODULES.items()}
    places = {module: place(module) for module in files.scalings}
    ids = {module: (layer, order[name.partition(".")[2]]) for module, (layer, name) in places.items()}
    for module, (layer, number) in sorted(ids.items(), key=lambda item: item[1]):
        inside, outside = files.matrices(module)
        rows.append(np.concatenate([inside.reshape(-1), outside.reshape(-1)]))
        keys.append([number, layer, len(inside)])
    weights = np.zeros((1, len(rows), max(len(row) for row in rows)), dtype=dtype)
    for number, row in enumerate(rows):
        weights[0, number, : len(row)] = row
    if not np.isfinite(weights).all():
        raise UserError(f"The adapter '{folder}' holds values that {dtype} cannot hold.", todo="Train it again.")
    return weights, np.array([keys], dtype=np.int32)


def adapter_faults(adapters: Mapping[int, Path], limits: EngineLimits) -> Iterator[Fault]:
    """Find adapters that the GPU engine cannot serve."""
    if adapters and limits.dtype not in STORED:
        yield Fault(
            f"The engine computes in {limits.dtype}; an adapter must have the engine's type, and a .npy file of "
            f"{limits.dtype} cannot be read.",
            f"LoRA is served by engines of {' and '.join(STORED)}.",
            "Build the engine from a float16 checkpoint: quant.dtype=float16",
        )
    if adapters and not limits.lora_modules:
        yield Fault(
            "lora.adapters is set, but the engine was built without the LoRA plugin.",
            todo="Build it with lora=adapters.",
        )
        return
    for task, folder in adapters.items():
        _, config = convert(folder, "float32")
        rank, ids = int(config[..., 2].max()), {int(number) for number in config[..., 0].reshape(-1)}
        if rank > limits.max_lora_rank:
            yield Fault(
                f"lora.adapters.{task}='{folder}' has rank {rank}; the engine was built for {limits.max_lora_rank}.",
                todo=f"Build it with lora.max_rank={rank}.",
            )
        missing = [name for name, number in MODULE_IDS.items() if number in ids and name not in limits.lora_modules]
        if missing:
            yield Fault(
                f"lora.adapters.{task}='{folder}' changes {', '.join(missing)}; the engine was built for "
                f"{', '.join(limits.lora_modules)}.",
                todo="Build it with these in lora.target_modules.",
            )


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
        UserError: every fault at once: the engine, the settings and the tokenizer do not match.
    """
    if spec.engine.server is ServerBackend.LLM_API:
        return write_llmapi(out_dir, engine_dir, settings, spec, made_from or {})
    tokenizer = llmapi.tokenizer_files(tokenizer_dir)
    limits = EngineLimits.load(engine_dir)
    configs = _configs(limits, settings, spec, draft_dir, adapters or {})
    for name, config in configs.items():
        llmapi.write_model(out_dir / name, to_text(config), None if _has_no_code(name, spec) else SOURCES / name)
    llmapi.link_files(llmapi.engine_files(engine_dir), engine_dir, out_dir / parameters.ENGINE_DIR)
    _put_features(out_dir, limits, draft_dir, adapters or {})
    for name in (PREPROCESSING, POSTPROCESSING):
        llmapi.copy_files(tokenizer, tokenizer_dir, out_dir / parameters.TOKENIZER.format(model=name))
    if spec.images is not None and vision_dir is not None:
        llmapi.link_files(llmapi.engine_files(vision_dir), vision_dir, out_dir / parameters.VISION_DIR)
    if parameters.writes_vocabulary(settings, spec):
        vocabulary = json.dumps(tokenizer_info(tokenizer_dir))
        (out_dir / parameters.VOCABULARY).write_text(vocabulary, encoding="utf-8")
    return llmapi.describe(
        out_dir, settings, spec, made_from or {}, _description(limits, settings, spec, sorted(configs))
    )


def _description(
    limits: EngineLimits, settings: TritonSettings, spec: RepositorySpec, models: list[str]
) -> dict[str, Any]:
    on_cpu = spec.engine.server is ServerBackend.PYTHON
    return {
        "limits": limits.as_json(),
        "engine_version": limits.version,
        "world_size": limits.world_size,
        "logits_type": f"TYPE_{limits.logits_type}",
        "models": models,
        **({"tokens_per_block": KV_BLOCK_TOKENS} if on_cpu else {}),
        "settings_without_effect": parameters.unread(settings, spec.engine),
    }


def _adapter_faults(
    adapters: Mapping[int, Path], limits: EngineLimits, settings: TritonSettings, spec: RepositorySpec
) -> Iterator[Fault]:
    if tuple(sorted(adapters)) != spec.lora_tasks:
        yield Fault(f"The adapters are for tasks {sorted(adapters)}, but the named tasks are {list(spec.lora_tasks)}.")
        return
    if adapters and settings.lora_prefetch_dir is not None:
        yield Fault(
            f"triton.lora_prefetch_dir='{settings.lora_prefetch_dir}' conflicts with lora.adapters, which are "
            f"in the repository under {parameters.LORA_DIR}.",
            todo="Leave one of them out.",
        )
        return
    if spec.engine.server is ServerBackend.TENSORRTLLM:
        yield from adapter_faults(adapters, limits)
        return
    for folder in adapters.values():  # served as they are: every matrix is read once
        files = AdapterFiles.read(folder)
        for module in files.scalings:
            files.matrices(module)


def _configs(
    limits: EngineLimits,
    settings: TritonSettings,
    spec: RepositorySpec,
    draft_dir: Path | None,
    adapters: Mapping[int, Path],
) -> dict[str, pb.ModelConfig]:
    refuse([*_faults(settings, limits, spec), *_adapter_faults(adapters, limits, settings, spec)])
    if spec.images is not None and settings.retention_tokens is not None:
        raise UserError(
            f"triton.retention_tokens={settings.retention_tokens} with images: tensorrt_llm_bls then has NVIDIA's "
            "code, which asks for no retention.",
            todo="Leave out triton.retention_tokens.",
        )
    if (draft_dir is None) != (spec.num_draft_tokens is None):
        raise UserError(
            f"num_draft_tokens={spec.num_draft_tokens} with the draft engine '{draft_dir}'.",
            allowed="Both or neither.",
        )
    draft = None if draft_dir is None else EngineLimits.load(draft_dir)
    if draft:
        refuse(draft_faults(limits, draft, settings, spec))
    configs = repository_configs(settings, limits, spec)
    if draft and spec.engine.server is ServerBackend.TENSORRTLLM:
        configs[DRAFT] = draft_config(settings, draft, spec)
    refuse(config_faults(configs, limits))
    return configs


def _put_features(out_dir: Path, limits: EngineLimits, draft_dir: Path | None, adapters: Mapping[int, Path]) -> None:
    """Draft engine and adapters; an adapter's own files for the CPU engine, converted ones for TensorRT-LLM."""
    own_server = limits.engine.server is ServerBackend.PYTHON
    if draft_dir is not None:
        place = parameters.CPU_DRAFT_DIR if own_server else parameters.DRAFT_ENGINE_DIR
        llmapi.link_files(llmapi.engine_files(draft_dir), draft_dir, out_dir / place)
    for task, folder in adapters.items():
        place_of_task = out_dir / parameters.LORA_DIR / str(task)
        if own_server:
            llmapi.copy_files([folder / name for name in PEFT_FILES], folder, place_of_task)
        else:
            place_of_task.mkdir(parents=True, exist_ok=True)
            for name, values in zip((WEIGHTS, CONFIG), convert(folder, limits.dtype), strict=True):
                np.save(place_of_task / name, values)


def _has_no_code(name: str, spec: RepositorySpec) -> bool:
    """The ensemble is wiring; TensorRT-LLM's backend is compiled."""
    compiled = (TENSORRT_LLM, DRAFT, *(OF_NVIDIA if spec.images is not None else ()))
    return name == ENSEMBLE or (name in compiled and spec.engine.server is ServerBackend.TENSORRTLLM)


def _faults(settings: TritonSettings, limits: EngineLimits, spec: RepositorySpec) -> Iterator[Fault]:
    yield from parameters.setting_faults(settings, spec.engine)
    if limits.flavour != spec.flavour:
        yield Fault(
            f"The engine has flavour '{limits.flavour}', but the repository is for '{spec.flavour}'.",
            todo=f"Set engine={limits.flavour}, or build the engine with engine={spec.flavour}.",
        )
    if (limits.tp_size, limits.pp_size) != (spec.tp_size, spec.pp_size):
        yield Fault(
            f"build.tp_size={spec.tp_size} and build.pp_size={spec.pp_size} are set, but the engine has "
            f"tp_size={limits.tp_size} and pp_size={limits.pp_size}.",
            todo="Set them as the engine has them, or build it again: make build",
        )


# Repositories of the LLM API: one model, whose code is NVIDIA's.


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
    checkpoint, options = engine_dir / llmapi.CHECKPOINT, engine_dir / llmapi.OPTIONS
    if not (checkpoint / "config.json").is_file() or not options.is_file():
        raise UserError(
            f"'{engine_dir}' is not made for the LLM API: it lacks {llmapi.CHECKPOINT}/config.json or"
            f" {llmapi.OPTIONS}.",
            todo="Make it:",
            command=("make", "build", "engine=tensorrt_llm_llmapi"),
        )
    arguments = llmapi.read_arguments(options)
    ranks = arguments["tensor_parallel_size"], arguments["pipeline_parallel_size"]
    if ranks != (spec.tp_size, spec.pp_size):
        raise UserError(
            f"build.tp_size={spec.tp_size} and build.pp_size={spec.pp_size} are set, but the LLM API has "
            f"tensor_parallel_size={ranks[0]} and pipeline_parallel_size={ranks[1]}.",
            todo="Build it again:",
            command=("make", "build", "engine=tensorrt_llm_llmapi"),
        )
    llmapi.write_model(out_dir / TENSORRT_LLM, to_text(llmapi_config(settings)), None)
    for source, target in ((checkpoint, llmapi.CHECKPOINT_DIR), (engine_dir / llmapi.DRAFT, llmapi.DRAFT_DIR)):
        llmapi.link_files(llmapi.checkpoint_files(source), source, out_dir / target)
    text = yaml.safe_dump(model_yaml(arguments, settings), sort_keys=False)
    (out_dir / TENSORRT_LLM / "1" / llmapi.MODEL_YAML).write_text(text, encoding="utf-8")
    description: dict[str, Any] = {
        "limits": {name: arguments.get(name) for name in SIZES},
        "engine_version": None,
        "world_size": spec.world_size,
        "models": [TENSORRT_LLM],
        "settings_without_effect": parameters.unread(settings, spec.engine),
    }
    return llmapi.describe(out_dir, settings, spec, made_from, description)


def model_yaml(arguments: Mapping[str, Any], settings: TritonSettings) -> dict[str, Any]:
    """Return the arguments of `tensorrt_llm.LLM`, and the model's own configuration for Triton."""
    triton = {"max_batch_size": 0, "decoupled": settings.decoupled_mode}
    if settings.cancellation_check_period_ms != TritonSettings.model_fields["cancellation_check_period_ms"].default:
        triton["cancellation_check_period_ms"] = settings.cancellation_check_period_ms
    options = dict(arguments)
    if options.get("speculative_config", {}).get("speculative_model") == llmapi.DRAFT:
        options["speculative_config"] = {**options["speculative_config"], "speculative_model": llmapi.DRAFT_DIR}
    return {"model": llmapi.CHECKPOINT_DIR, "backend": "pytorch", **options, "triton_config": triton}
