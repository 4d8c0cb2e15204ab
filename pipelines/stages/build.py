"""Build: a TensorRT-LLM checkpoint in, an engine out."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pipelines.checkpoint.config_json import CheckpointConfig
from pipelines.checkpoint.verify import verify
from pipelines.domain.errors import refuse
from pipelines.domain.progress import Progress
from pipelines.domain.units import show_bytes
from pipelines.engines.port import BuildLimits, OnGpu, without_table
from pipelines.engines.registry import describe, load_function, open_engine
from pipelines.engines.tensorrt_llm.config import BuildSettings

_LIMITS = {each.name for each in fields(BuildLimits)}


@dataclass(frozen=True)
class Build:
    """Checkpoint in, engine folder (`config.json` and the engine's own files) out.

    Its input is `checkpoint`, verified tensor by tensor, or `converted`, which TensorRT-LLM's own script wrote.

    Attributes:
        engine: by name, see `pipelines.engines.registry`.
        build: limits of the engine; the ranks are those of the checkpoint.
        libraries: of the engine; their versions determine the bytes.
        on_gpu: the GPU to build for; None for the CPU.
        longest: the model's longest sequence in tokens, used when max_seq_len is not set; None if not known yet.
        predicted: modelled memory of the fullest rank, bytes by part, to compare with what the build reports.
        options: of the engine, that change what is built.
    """

    engine: str
    build: BuildSettings
    libraries: tuple[str, ...]
    needs: tuple[str, ...]
    on_gpu: OnGpu | None = None
    longest: int | None = None
    predicted: Mapping[str, float] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    name = "build"
    measures = False
    writes = "engine"

    @property
    def version(self) -> str:
        """Of the CPU engine's graph; engines that only a GPU builds take minutes, and stay as they are."""
        return "4" if describe(self.engine).needs_gpu else "5"

    def identity(self) -> dict[str, Any]:
        """Return the engine, the settings that determine its bytes, and the kind of GPU."""
        identity = describe(self.engine).identity
        decide = (
            load_function(identity)(self.build) if identity else without_table(self.build.model_dump(include=_LIMITS))
        )
        sm = {} if self.on_gpu is None else {"sm": self.on_gpu.sm}
        return {"engine": self.engine, **decide, **sm, **self.options}

    def headline(self, facts: Mapping[str, Any]) -> str:
        """See `Stage`."""
        return show_bytes(facts["engine_bytes"])

    def run(self, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> dict[str, Any]:
        """Verify the checkpoint, then build."""
        checkpoint = inputs.get("converted") or inputs["checkpoint"]
        if "checkpoint" in inputs:
            refuse(verify(checkpoint))
        limits = limits_for(self.build, CheckpointConfig.load(checkpoint).max_position_embeddings)
        options = dict(self.options) if self.on_gpu is None else {"build": self.build, "on_gpu": self.on_gpu}
        facts = open_engine(self.engine, **options).build(checkpoint, limits, out_dir, progress)
        predicted = {"memory_predicted": dict(self.predicted)} if self.predicted else {}
        return {"engine_bytes": facts.engine_bytes, **predicted, **facts.details}


def limits_for(build: BuildSettings, positions: int | None) -> BuildLimits:
    """Return the limits; max_seq_len defaults to the model's longest sequence, as in trtllm-build."""
    return BuildLimits(**{**build.model_dump(include=_LIMITS), "max_seq_len": build.max_seq_len or positions})
