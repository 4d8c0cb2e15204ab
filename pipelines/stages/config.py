"""Settings of the command `diagnose`."""

from pathlib import Path

from pipelines.settings.base import Group


class DiagnoseSettings(Group):
    """Input of `make diagnose`.

    Attributes:
        checkpoint: folder of a TensorRT-LLM checkpoint to examine instead of making the one of this configuration. If
            this or one of the next two is given, nothing is made, and stages that are not given are left out.
        engine: folder of an engine of the CPU, built from that checkpoint.
        repository: Triton repository of that engine, which is served to be asked.
        simulate: calibrate ModelOpt's simulation again, to tell whether a fault was there before the export.
        serve: start a server on the repository; false leaves out what is served, unless eval.url names a server.
    """

    checkpoint: Path | None = None
    engine: Path | None = None
    repository: Path | None = None
    simulate: bool = True
    serve: bool = True

    @property
    def given(self) -> dict[str, Path]:
        """The folders to examine instead of making them, by name."""
        folders = {"checkpoint": self.checkpoint, "engine": self.engine, "repository": self.repository}
        return {name: path for name, path in folders.items() if path is not None}
