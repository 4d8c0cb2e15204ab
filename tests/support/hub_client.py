"""Client-side helpers shared by the tests of the Hub."""

from dataclasses import dataclass
from pathlib import Path

from pipelines.domain.model_shape import ModelShape
from pipelines.domain.progress import SilentProgress
from pipelines.hub import HubSnapshot, HubSource, download_model

TOKEN = "hf_loopbackSecretThatNobodyMaySee"


class Notes(SilentProgress):
    """Keeps the notes that were shown."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        """See `Progress.note`."""
        self.lines.append(text)


@dataclass
class Client:
    """Downloads of `tiny/llama` into one folder."""

    out: Path
    cache: Path
    notes: Notes

    def download(self, revision: str = "main", expected_shape: ModelShape | None = None) -> HubSnapshot:
        """Download the model."""
        source = HubSource("tiny/llama", revision)
        return download_model(source, self.out, expected_shape=expected_shape, progress=self.notes)
