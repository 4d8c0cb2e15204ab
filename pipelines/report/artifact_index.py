"""Read access to the store for reports: manifests are read once and found by digest, files are checked when read."""

import gzip
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, TypeVar

from eval.perplexity import PerplexityResult
from pipelines.domain.errors import Fault, UserError, refuse
from pipelines.host.files import disk_faults
from pipelines.report.data import ArtifactInput, ReportedArtifact
from pipelines.store.manifest import MANIFEST, read_manifests
from pipelines.store.store import Store

Result = TypeVar("Result")
READ = "perplexity"
"""What an evaluation is called here if the model read texts instead of answering questions."""
STAGES = (
    "download", "prune_model", "sparsify", "recover", "quantize", "build", "reference", "evaluate", READ, "fidelity",
    "bounds", "repository", "benchmark",
)  # fmt: skip
"""Stages in order of dependency."""


class ArtifactIndex:
    """All artifacts of a store, newest first."""

    def __init__(self, store: Store) -> None:
        """Read every manifest.

        Raises:
            UserError: names every manifest that is damaged.
        """
        self.root = store.root
        folders = (folder for folder in store.folders() if folder.parent.name in STAGES)
        faults: list[Fault] = []
        manifests = read_manifests([folder for folder in folders if (folder / MANIFEST).exists()], faults)
        refuse(faults)
        newest_first = sorted(manifests.items(), key=lambda item: str(item[1]["created"]), reverse=True)
        newest_first.sort(key=lambda item: STAGES.index(item[1]["stage"]))
        places = {folder.relative_to(store.root).as_posix(): manifest for folder, manifest in newest_first}
        self._files: dict[str, Mapping[str, Any]] = {place: m["files"] for place, m in places.items()}
        by_digest: dict[str, list[str]] = {}
        for place, manifest in places.items():
            by_digest.setdefault(str(manifest["digest"]), []).append(place)
        self.artifacts = tuple(_artifact(place, manifest, by_digest) for place, manifest in places.items())
        self._by_place = {artifact.place: artifact for artifact in self.artifacts}

    def of(self, stage: str) -> list[ReportedArtifact]:
        """Return the artifacts of a stage, newest first."""
        return [artifact for artifact in self.artifacts if artifact.stage == stage]

    def chain(self, artifact: ReportedArtifact) -> tuple[ReportedArtifact, ...]:
        """Return an artifact and all artifacts of the store that it was made from, sources first.

        The 16-bit engine that was asked in turns with an evaluated one is left out.
        """
        artifacts: dict[str, ReportedArtifact] = {}

        def walk(at: ReportedArtifact) -> None:
            for source in at.inputs:
                if source.in_store and source.name != "baseline" and source.source not in artifacts:
                    walk(self._by_place[source.source])
            artifacts[at.place] = at

        walk(artifact)
        return tuple(sorted(artifacts.values(), key=lambda item: STAGES.index(item.stage)))

    def read(self, artifact: ReportedArtifact, name: str, from_json: Callable[[Any, str], Result]) -> Result:
        """Read a stored result; raises as `read_json` does, or for one that is not of its kind."""
        return from_json(self.read_json(artifact, name), str(self.root / artifact.place / name))

    def read_json(self, artifact: ReportedArtifact, name: str) -> Any:
        """Read a JSON file of an artifact, optionally `.gz`, and check it against the manifest's SHA-256.

        Raises:
            UserError: the file is missing, was changed, or is not JSON.
        """
        path = self.root / artifact.place / name
        entry = self._files[artifact.place].get(name)
        if entry is None:
            raise UserError(
                f"The {MANIFEST} in {self.root / artifact.place} does not list {name}.", todo=_again(artifact)
            )
        with disk_faults(f"{path} cannot be read", _again(artifact)):
            raw = path.read_bytes()
        if hashlib.sha256(raw).hexdigest() != entry["sha256"]:
            raise UserError(f"{path} was changed after it was made.", todo=_again(artifact))
        try:
            return json.loads(gzip.decompress(raw) if name.endswith(".gz") else raw)
        except (ValueError, OSError, EOFError) as error:
            raise UserError(f"{path} is not readable JSON: {error}.", todo=_again(artifact)) from None


def _again(artifact: ReportedArtifact) -> str:
    return f"Remove the folder {artifact.place} of the store and make it again: {artifact.repeat}"


def _artifact(place: str, manifest: Mapping[str, Any], by_digest: Mapping[str, list[str]]) -> ReportedArtifact:
    try:
        made_from = manifest["made_from"]
        paths = manifest["input_paths"]
        return ReportedArtifact(
            stage=READ if PerplexityResult.FILE in manifest["files"] else str(manifest["stage"]),
            label=str(manifest["label"]),
            place=place,
            digest=str(manifest["digest"]),
            created=str(manifest["created"]),
            seconds=None if manifest["seconds"] is None else float(manifest["seconds"]),
            peak_memory_bytes=manifest.get("peak_memory_bytes"),
            repeat=str(manifest["repeat"]),
            version=str(manifest["pipelines_version"]),
            commit=str(manifest["git_commit"]),
            machine=manifest["machine"],
            libraries=made_from["libraries"],
            settings=made_from["settings"],
            facts=manifest["facts"],
            inputs=tuple(
                _input(name, digest, str(paths.get(name, "")), by_digest)
                for name, digest in made_from["inputs"].items()
            ),
            model=_model_label(manifest),
            tuning=(manifest["settings"].get("tuning") or {}).get("name"),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{place}/{MANIFEST} is not a manifest of this version: {error}.",
            todo="Remove that folder of the store and make it again.",
        ) from None


def _input(name: str, digest: str, path: str, by_digest: Mapping[str, list[str]]) -> ArtifactInput:
    """Name an input: the artifact with its content (of equal ones the recorded one), else the recorded folder."""
    parts = PurePath(path).parts
    recorded = "/".join(parts[-2:])
    equals = by_digest.get(digest, [])
    if equals:
        return ArtifactInput(name, digest, recorded if recorded in equals else equals[0], in_store=True, path=path)
    return ArtifactInput(name, digest, parts[-1] if parts else "unknown", in_store=False, path=path)


def _model_label(manifest: Mapping[str, Any]) -> str | None:
    """Return the model's label as in the settings, see `pipelines.settings.model.ModelSettings.label`."""
    model = manifest["settings"].get("model")
    if not model:
        return None  # a benchmark of an external server has no model of ours
    if model.get("path"):
        return PurePath(model["path"]).name
    return str(model["hub_id"]).replace("/", "--") if model["name"] == "hub" else str(model["name"])
