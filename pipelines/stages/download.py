"""Download: a model or a data set from the Hub, at one commit, verified file by file."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pipelines.domain.errors import UserError
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.progress import Progress
from pipelines.domain.units import show_bytes


@dataclass(frozen=True)
class Download:
    """A Hub repository in, a folder of its files out.

    Attributes:
        repo_id: "google/gemma-2b".
        revision: branch, tag or commit; the commit it resolves to is recorded.
        shape: that the model's config.json must have; None accepts any known architecture.
        copy_setting: the setting that takes a local copy in place of the download, for errors; empty if there is none.
    """

    repo_id: str
    revision: str
    repo_type: Literal["model", "dataset"] = "model"
    shape: ModelShape | None = None
    copy_setting: str = ""
    name = "download"
    version = "1"
    measures = False
    writes = "model"
    libraries: tuple[str, ...] = ()  # the bytes are the Hub's, whichever client fetches them
    needs: tuple[str, ...] = ("huggingface_hub",)

    def identity(self) -> dict[str, Any]:
        """Return the repository and revision; the expected shape does not change the bytes."""
        return {"repo_id": self.repo_id, "revision": self.revision, "repo_type": self.repo_type}

    def headline(self, facts: Mapping[str, Any]) -> str:
        """See `Stage`."""
        return f"{show_bytes(facts['bytes'])}, commit {str(facts['commit'])[:8]}"

    def run(self, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> dict[str, Any]:
        """Fetch and verify."""
        from pipelines.hub import HubSource, download_dataset, download_model

        source = HubSource(self.repo_id, self.revision, self.repo_type)
        try:
            if self.repo_type == "model":
                snapshot = download_model(source, out_dir, expected_shape=self.shape, progress=progress)
            else:
                snapshot = download_dataset(source, out_dir, progress=progress)
        except UserError as error:
            raise self._without_the_hub(error) if self.copy_setting else error from None
        total = sum(int(entry["size"]) for entry in snapshot.files.values())
        return {"commit": snapshot.commit, "bytes": total, "files": snapshot.files, "license": snapshot.license}

    def _without_the_hub(self, error: UserError) -> UserError:
        """Return an error of the Hub with the way that needs no Hub."""
        copy = (
            f"Without the Hub, give {self.copy_setting}=/copy, a folder with the files of {self.repo_id} as parquet, "
            "JSON lines or CSV, in the layout and with the columns that they have there."
        )
        return UserError.of([replace(fault, todo=f"{fault.todo} {copy}".lstrip()) for fault in error.faults])
