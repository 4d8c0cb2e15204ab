"""Repository: an engine and a tokenizer in, a Triton model repository out."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipelines import __version__
from pipelines.document.show import count
from pipelines.domain.errors import refuse
from pipelines.domain.progress import Progress
from pipelines.host.files import sha256_file
from triton_repo.config import TritonSettings
from triton_repo.parameters import RepositorySpec

MODELS = Path(__file__).resolve().parents[2] / "triton_repo" / "models"
"""Sources of the Python models, which are copied into each repository."""


@dataclass(frozen=True)
class WriteRepository:
    """Engine folder and tokenizer folder in, a folder that tritonserver serves out.

    The inputs `draft_engine`, `vision_engine` and `lora.<id>` belong to `spec.num_draft_tokens`, `spec.images` and
    `spec.lora_tasks`.
    """

    triton: TritonSettings
    spec: RepositorySpec
    name = "repository"
    version = "8"
    measures = False
    writes = "repository"
    libraries: tuple[str, ...] = ()  # only text and links; the engine's versions are in its digest
    needs: tuple[str, ...] = ("tritonclient",)

    def identity(self) -> dict[str, Any]:
        """Return everything written into the files, and the digest of the copied model sources."""
        spec = self.spec
        return {
            "flavour": spec.flavour,
            "triton": self.triton.model_dump(mode="json"),
            "options": spec.options,
            "enable_block_reuse": spec.enable_kv_cache_reuse,
            "enable_chunked_context": spec.enable_chunked_context,
            "model": spec.label,
            "variant": spec.variant,
            "ranks": [spec.tp_size, spec.pp_size],
            **({} if spec.num_draft_tokens is None else {"num_draft_tokens": spec.num_draft_tokens}),
            **({"lora_tasks": list(spec.lora_tasks)} if spec.lora_tasks else {}),
            **({} if spec.images is None else {"images": asdict(spec.images)}),
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
            spec=self.spec,
            settings=self.triton,
            draft_dir=inputs.get("draft_engine"),
            vision_dir=inputs.get("vision_engine"),
            adapters={task: inputs[f"lora.{task}"] for task in self.spec.lora_tasks},
        )
        refuse(check_repository(out_dir, to_be_served=False))
        return facts
