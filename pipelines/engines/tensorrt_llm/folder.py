"""Engine folders of trtllm-build: compare one with what was requested, and record the machine it belongs to."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from pipelines.checkpoint.config import CheckpointConfig
from pipelines.document.show import count
from pipelines.domain.errors import Fault
from pipelines.engines.port import BuildLimits
from pipelines.engines.tensorrt_llm.command import ALWAYS
from pipelines.settings.build import BuildSettings

BUILT_ON = "built_on.json"
"""Written beside the engine: trtllm-build itself records only its own version."""
CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class BuiltOn:
    """GPU and versions that an engine is tied to.

    Attributes:
        gpu: name of the GPU it was tuned on.
        sm: its compute capability, e.g. 9.0.
        tensorrt_llm: version of TensorRT-LLM.
        tensorrt: version of TensorRT.
    """

    gpu: str
    sm: float
    tensorrt_llm: str
    tensorrt: str

    @classmethod
    def here(cls, gpu: str, sm: float) -> BuiltOn:
        """Return this machine's versions, without importing the packages."""
        return cls(gpu, sm, _version("tensorrt_llm"), _version("tensorrt"))

    @classmethod
    def load(cls, engine_dir: Path) -> BuiltOn | None:
        """Read the record of an engine that this project built; None for an engine from elsewhere."""
        path = engine_dir / BUILT_ON
        return cls(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None

    def save(self, engine_dir: Path) -> None:
        """Write the record beside the engine."""
        (engine_dir / BUILT_ON).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @property
    def file_name(self) -> str:
        """Return a name for files that belong to this GPU and these versions, e.g. timing caches."""
        gpu = re.sub(r"[^a-zA-Z0-9]+", "_", self.gpu).strip("_")
        return f"{gpu}-sm{self.sm:g}-tensorrt_llm{self.tensorrt_llm}-tensorrt{self.tensorrt}".replace("/", "_")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"


def read_back(engine_dir: Path, build: BuildSettings, limits: BuildLimits, checkpoint: CheckpointConfig) -> list[Fault]:
    """Compare trtllm-build's output with what was requested; an empty list means a good engine."""
    path = engine_dir / CONFIG
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        pretrained, built = raw["pretrained_config"], raw["build_config"]
        version = str(raw["version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [Fault(f"trtllm-build wrote no engine configuration: {path}: {error!r}.")]
    faults = [*_files(engine_dir, checkpoint.world_size), *_model(pretrained, checkpoint)]
    faults += _limits(built, build, limits)
    here = _version("tensorrt_llm")
    if here not in ("absent", version):
        faults.append(
            Fault(
                f"The engine records TensorRT-LLM {version}; the package here is {here}.",
                "trtllm-build and tensorrt_llm must come from the same installation.",
                "Check: which trtllm-build",
            )
        )
    return faults


def _files(engine_dir: Path, world_size: int) -> Iterator[Fault]:
    for rank in range(world_size):
        path = engine_dir / f"rank{rank}.engine"
        if not path.is_file() or path.stat().st_size == 0:
            yield Fault(f"trtllm-build wrote no {path.name}; the checkpoint has {count(world_size, 'rank')}.")


def _model(pretrained: dict[str, Any], checkpoint: CheckpointConfig) -> Iterator[Fault]:
    mapping, quantization = pretrained.get("mapping") or {}, pretrained.get("quantization") or {}
    pairs = {
        "architecture": (pretrained.get("architecture"), checkpoint.architecture),
        "quant_algo": (quantization.get("quant_algo"), checkpoint.quantization.quant_algo),
        "kv_cache_quant_algo": (
            quantization.get("kv_cache_quant_algo"),
            checkpoint.quantization.kv_cache_quant_algo,
        ),
        "tp_size": (mapping.get("tp_size", 1), checkpoint.tp_size),
        "pp_size": (mapping.get("pp_size", 1), checkpoint.pp_size),
    }
    for name, (found, wanted) in pairs.items():
        if found != wanted:
            yield Fault(f"The engine has {name}={found}, the checkpoint {name}={wanted}.")


def _limits(built: dict[str, Any], build: BuildSettings, limits: BuildLimits) -> Iterator[Fault]:
    wanted = adjusted(build, limits)
    speculative = build.speculative_decoding_mode is not None  # increases these two by the number of draft tokens
    for name in ALWAYS:
        asked, found = wanted[name], built.get(name)
        if speculative and name in ("max_seq_len", "max_num_tokens") and isinstance(found, int) and found >= asked:
            continue
        if found != asked:
            yield Fault(f"The engine has {name}={found}; {name}={asked} was requested.")


def adjusted(build: BuildSettings, limits: BuildLimits) -> dict[str, int]:
    """Return the limits as the builder adjusts them: it warns and continues.

    Source: TensorRT-LLM `builder.py` (`_init_max_seq_len`) and `_common.py` (`check_max_num_tokens`).
    """
    found = {name: int(getattr(limits, name)) for name in ALWAYS}
    found["max_input_len"] = min(found["max_input_len"], found["max_seq_len"])
    most = found["max_batch_size"] * found["max_seq_len"]
    if build.remove_input_padding == "disable":
        found["max_num_tokens"] = most
        return found
    tokens = min(found["max_num_tokens"], most)
    least = limits.tokens_per_block if build.context_fmha == "enable" else found["max_input_len"]
    return found | {"max_num_tokens": max(tokens, least)}
