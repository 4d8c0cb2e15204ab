"""Limits of a built engine, read from its config.json; the source of every limit in a Triton repository.

Source of the fields: TensorRT-LLM 1.2 `EngineConfig` (`builder.py`) and `PretrainedConfig` (`modeling_utils.py`). An
OpenVINO engine of this project has the same file plus the key `engine`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from pipelines.domain.errors import Fault, UserError, refuse
from pipelines.engines.registry import ENGINES, TENSORRT_LLM, EngineDescription
from pipelines.host.files import json_object

CONFIG = "config.json"
SIZES = ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "max_beam_width")
FEATURES = ("max_draft_len", "lookahead", "max_lora_rank", "lora_modules", "max_prompt_embedding_table_size")
LOOKAHEAD = 8
"""Number of SpeculativeDecodingMode.LOOKAHEAD_DECODING in config.json. Source: `modeling_utils.py`."""
TRITON_TYPES = {"float32": "FP32", "float16": "FP16", "bfloat16": "BF16"}
REBUILD = "Rebuild the engine: make build"


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits and features that one engine was built with.

    Attributes:
        flavour: name of the engine, see `pipelines.engines.registry`.
        version: version of OpenVINO or TensorRT-LLM that built it; no other version may run it.
        architecture: Hugging Face's class name.
        dtype: type of activations, e.g. "bfloat16".
        logits_dtype: "float32", "float16" or "bfloat16".
        quant_algo: quantization, e.g. "FP8"; None means 16 bit.
        tp_size: tensor parallel ranks.
        pp_size: pipeline parallel ranks.
        world_size: total number of ranks.
        max_batch_size: most requests scheduled together.
        max_input_len: longest prompt, tokens.
        max_seq_len: longest prompt plus output, tokens.
        max_num_tokens: most tokens of all requests in one iteration.
        max_beam_width: most beams per request.
        paged_context_fmha: feature required by chunked context and KV reuse; None if the engine does not record it.
        max_draft_len: draft tokens that it verifies at once; 0 means no speculative decoding.
        lookahead: whether its draft tokens are its own n-grams.
        max_lora_rank: largest rank of an adapter; 0 means built without LoRA.
        lora_modules: linear layers that an adapter may change, by TensorRT-LLM's names.
        max_prompt_embedding_table_size: rows of all running requests' prompt tables; 0 means built without them.
    """

    flavour: str
    version: str
    architecture: str
    dtype: str
    logits_dtype: str
    quant_algo: str | None
    vocab_size: int
    tp_size: int
    pp_size: int
    world_size: int
    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_num_tokens: int
    max_beam_width: int
    gather_context_logits: bool
    gather_generation_logits: bool
    paged_context_fmha: bool | None
    max_draft_len: int = 0
    lookahead: bool = False
    max_lora_rank: int = 0
    lora_modules: tuple[str, ...] = ()
    max_prompt_embedding_table_size: int = 0

    @classmethod
    def load(cls, engine_dir: Path) -> Self:
        """Read an engine folder.

        Raises:
            UserError: all faults at once: not an engine folder, a limit missing or not a number, a rank missing.
        """
        raw, pretrained, build = read_engine_config(engine_dir)
        mapping = pretrained.get("mapping") or {}
        tp_size, pp_size = int(mapping.get("tp_size", 1)), int(mapping.get("pp_size", 1))
        flavour = str((raw.get("engine") or {}).get("flavour", TENSORRT_LLM.name))
        logits_dtype = str(pretrained.get("logits_dtype", "float32"))
        world_size = int(mapping.get("world_size", tp_size * pp_size))
        sizes: dict[str, Any] = {name: build.get(name) for name in SIZES}
        faults = [
            Fault(
                f"{engine_dir / CONFIG} has build_config.{name}={size!r}.",
                "It must be an integer of at least 1.",
                REBUILD,
            )
            for name, size in sizes.items()
            if not isinstance(size, int) or isinstance(size, bool) or size < 1
        ]
        faults += _file_faults(flavour, world_size, engine_dir)
        if logits_dtype not in TRITON_TYPES:
            types = ", ".join(TRITON_TYPES)
            faults.append(
                Fault(f"{engine_dir / CONFIG} has logits_dtype='{logits_dtype}'.", f"Known: {types}.", REBUILD)
            )
        refuse(faults)
        plugins = build.get("plugin_config") or {}
        # an engine lists modules even if it was built without the plugin
        lora = (build.get("lora_config") or {}) if plugins.get("lora_plugin") not in (None, "disable", False) else None
        return cls(
            flavour=flavour,
            version=str(raw.get("version", "")),
            architecture=str(pretrained.get("architecture", "")),
            dtype=str(pretrained.get("dtype", "")),
            logits_dtype=logits_dtype,
            quant_algo=(pretrained.get("quantization") or {}).get("quant_algo"),
            vocab_size=int(pretrained.get("vocab_size", 0)),
            tp_size=tp_size,
            pp_size=pp_size,
            world_size=world_size,
            gather_context_logits=bool(build.get("gather_context_logits", False)),
            gather_generation_logits=bool(build.get("gather_generation_logits", False)),
            paged_context_fmha=plugins.get("use_paged_context_fmha"),
            max_draft_len=int(build.get("max_draft_len") or 0),
            lookahead=build.get("speculative_decoding_mode") == LOOKAHEAD,
            max_lora_rank=0 if lora is None else int(lora.get("max_lora_rank", 64)),
            lora_modules=() if lora is None else tuple(lora.get("lora_target_modules") or ()),
            max_prompt_embedding_table_size=int(build.get("max_prompt_embedding_table_size") or 0),
            **sizes,
        )

    @property
    def engine(self) -> EngineDescription:
        """Description of the engine."""
        return ENGINES[self.flavour]

    @property
    def logits_type(self) -> str:
        """Triton's type for the logits, without "TYPE_"."""
        return TRITON_TYPES[self.logits_dtype]

    def as_json(self) -> dict[str, Any]:
        """Return a JSON object for repository.json, without features that the engine was not built with."""
        return {name: value for name, value in asdict(self).items() if value or name not in FEATURES}


def read_engine_config(folder: Path) -> tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]:
    """Return an engine's config.json, and of it the blocks `pretrained_config` and `build_config`.

    Raises:
        UserError: the file is missing, not JSON, or that of something else.
    """
    raw = _read(folder / CONFIG)
    return raw, _block(raw, "pretrained_config", folder), _block(raw, "build_config", folder)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return json_object(path, todo=REBUILD)
    except FileNotFoundError:
        raise UserError(
            f"'{path.parent}' is not an engine folder: it has no {path.name}.",
            allowed="An engine folder is the output of `make build` or trtllm-build.",
            todo="Build it: make build",
        ) from None


def _block(raw: Mapping[str, Any], name: str, folder: Path) -> Mapping[str, Any]:
    block = raw.get(name)
    if not isinstance(block, dict):
        raise UserError(
            f"{folder / CONFIG} has no '{name}'.",
            allowed="The config.json of a checkpoint or of a Hugging Face model is not that of an engine.",
            todo="Build the engine: make build",
        )
    return block


def _file_faults(flavour: str, world_size: int, folder: Path) -> list[Fault]:
    names = [engine.name for engine in ENGINES.values() if engine.files]
    if flavour not in names:
        return [Fault(f"{folder / CONFIG} has engine='{flavour}', which is not known.", f"Known: {', '.join(names)}.")]
    missing = [name for name in ENGINES[flavour].files_of(world_size) if not (folder / name).is_file()]
    if not missing:
        return []
    return [
        Fault(f"The engine '{folder}' lacks {', '.join(missing)}.", f"It is built for {world_size} rank(s).", REBUILD)
    ]
