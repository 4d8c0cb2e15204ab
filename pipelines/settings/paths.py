"""The groups `paths`, `store`, `plan`, `stage` and `verify`, and where the project itself is."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from pipelines.settings.base import Group

PROJECT_ROOT = Path(__file__).resolve().parents[2]


class PathSettings(Group):
    """Where things are kept, relative to the current folder, and where NVIDIA's tools are.

    Attributes:
        store: folder of finished artifacts, which every run reuses.
        runs: parent of one folder per run, with its log, configuration and results.
        edge: environment of TensorRT Edge-LLM, which `make setup-edge` makes.
        trtllm_examples: TensorRT-LLM's example scripts, of release 1.2, in NVIDIA's container.
    """

    store: Path = Path("artifacts")
    runs: Path = Path("runs")
    edge: Path = Path(".venv-edge")
    trtllm_examples: Path = Path("/app/examples")


class StoreSettings(Group):
    """Retention of the store, and options of `make prune`.

    Attributes:
        keep_days: days for which `make prune` keeps an artifact after the last run that used it.
        remove: whether `make prune` removes what nothing needs, or only shows it.
    """

    keep_days: Annotated[int, Field(ge=0, le=36500)] = 30
    remove: bool = False


class PlanSettings(Group):
    """Settings of the command `plan`.

    Attributes:
        target: command to plan for; null is the farthest that the engine can go, usually all.
    """

    target: Literal["build", "evaluate", "repository", "serve", "benchmark", "fidelity", "diagnose", "all"] | None = (
        None
    )


class StageSettings(Group):
    """Settings of the command `stage`.

    Attributes:
        name: stage to run, with what it needs, as `plan` lists it: quantize, build, baseline.quantize, ...
        link: where a link to its result is put, so that the folder has a name known beforehand; null puts none.
    """

    name: str | None = None
    link: Path | None = None


class VerifySettings(Group):
    """Settings of the command `verify`.

    Attributes:
        path: folder of an artifact or of a TensorRT-LLM checkpoint; null is the checkpoint of this configuration, or
            with no other setting the whole store.
    """

    path: Path | None = None
