"""Repository: an engine and a tokenizer in, a Triton model repository out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipelines import __version__
from pipelines.document.show import count
from pipelines.domain.errors import UserError
from pipelines.domain.progress import Progress
from pipelines.engines.config import EngineOptions, all_options
from pipelines.host.hashing import sha256_file
from triton_repo.config import TritonSettings
from triton_repo.parameters import ImageSpec, RepositorySpec

MODELS = Path(__file__).resolve().parents[2] / "triton_repo" / "models"
"""Sources of the Python models, which are copied into each repository."""


@dataclass(frozen=True)
class WriteRepository:
    """Engine folder and tokenizer folder in, a folder that tritonserver serves out.

    Attributes:
        options: the engine's own settings; None where it has none.
        enable_block_reuse: reuse KV blocks of equal prompt prefixes.
        enable_chunked_context: split prompts longer than max_num_tokens.
        tp_size: tensor-parallel ranks of the engine.
        pp_size: its pipeline stages.
        num_draft_tokens: tokens that a draft model guesses at a time; the input `draft_engine` is its engine.
        lora_tasks: ids of LoRA adapters; the input `lora.<id>` is the folder of each.
        images: settings of a vision encoder, with the input `vision_engine`; None for text alone.
    """

    flavour: str
    triton: TritonSettings
    options: EngineOptions | None
    enable_block_reuse: bool
    enable_chunked_context: bool
    model: str
    variant: str
    tp_size: int
    pp_size: int
    num_draft_tokens: int | None = None
    lora_tasks: tuple[int, ...] = ()
    images: ImageSpec | None = None
    name = "repository"
    version = "6"
    measures = False
    writes = "repository"
    libraries: tuple[str, ...] = ()  # only text and links; the engine's versions are in its digest
    needs: tuple[str, ...] = ("tritonclient",)

    def identity(self) -> dict[str, Any]:
        """Return everything written into the files, and the digest of the copied model sources."""
        return {
            "flavour": self.flavour,
            "triton": self.triton.model_dump(mode="json"),
            "options": all_options(self.options),
            "enable_block_reuse": self.enable_block_reuse,
            "enable_chunked_context": self.enable_chunked_context,
            "model": self.model,
            "variant": self.variant,
            "ranks": [self.tp_size, self.pp_size],
            **({} if self.num_draft_tokens is None else {"num_draft_tokens": self.num_draft_tokens}),
            **({"lora_tasks": list(self.lora_tasks)} if self.lora_tasks else {}),
            **({} if self.images is None else {"images": asdict(self.images)}),
            "pipelines_version": __version__,
            "sources": {
                path.relative_to(MODELS).as_posix(): sha256_file(path) for path in sorted(MODELS.rglob("*.py"))
            },
        }

    def headline(self, facts: Mapping[str, Any]) -> str:
        """See `Stage`."""
        return f"{count(len(facts['models']), 'model')} for {facts['flavour']}"

    def run(self, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> dict[str, Any]:
        """Write the repository, then read it back and check it against its engine."""
        from triton_repo.check import check_repository  # with NumPy and the messages of Triton's client
        from triton_repo.write import write_repository

        facts = write_repository(
            out_dir,
            engine_dir=inputs["engine"],
            tokenizer_dir=inputs["model"],
            spec=RepositorySpec(
                flavour=self.flavour,
                label=self.model,
                variant=self.variant,
                tp_size=self.tp_size,
                pp_size=self.pp_size,
                enable_kv_cache_reuse=self.enable_block_reuse,
                enable_chunked_context=self.enable_chunked_context,
                num_draft_tokens=self.num_draft_tokens,
                lora_tasks=self.lora_tasks,
                images=self.images,
                options=all_options(self.options),
            ),
            settings=self.triton,
            draft_dir=inputs.get("draft_engine"),
            vision_dir=inputs.get("vision_engine"),
            adapters={task: inputs[f"lora.{task}"] for task in self.lora_tasks},
        )
        if faults := check_repository(out_dir, to_be_served=False):
            raise UserError.of(faults)
        return facts
