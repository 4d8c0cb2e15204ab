"""The command `verify`: read artifacts back, byte by byte, and check checkpoints against their format's rules."""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from pipelines.checkpoint.describe import describe, render
from pipelines.checkpoint.verify import verify as checkpoint_faults
from pipelines.document.show import count
from pipelines.domain.errors import Fault, UserError, collecting, refuse
from pipelines.domain.units import show_bytes
from pipelines.host.disk import why_no_folder
from pipelines.host.machine import gather
from pipelines.host.screen import ScreenProgress, warn
from pipelines.plan.plan import make_plan
from pipelines.settings.compose import load
from pipelines.settings.root import Settings
from pipelines.store.manifest import MANIFEST, Json, check_files, read_manifest, read_manifests, unlisted_files
from pipelines.store.store import Store


def verify(overrides: Sequence[str]) -> int:
    """Check one folder, the checkpoint of a configuration, or without either the whole store."""
    settings = load(overrides)
    store = Store(settings.paths.store)
    if settings.verify.path is None and all(word.startswith("paths.") for word in overrides):
        _check_there("paths.store", settings.paths.store)
        faults: list[Fault] = []
        manifests = read_manifests(store.folders(), faults)
        if not (manifests or faults):
            sys.stdout.write(f"{store.root}: it holds no artifact\nnothing was verified\n")
            return 0
        sys.stdout.write(f"{store.root}: {_checked(manifests, faults, store)}\nverified: no faults found\n")
        return 0
    folder = _folder(settings, store)
    sys.stdout.write(f"{folder}\n")
    has_manifest = (folder / MANIFEST).is_file()
    if has_manifest:
        sys.stdout.write(f"{_checked({folder: read_manifest(folder)}, [], store)}\n")
    if not has_manifest or (folder / "rank0.safetensors").is_file():
        refuse(checkpoint_faults(folder))
        sys.stdout.write(f"{render(describe(folder))}\n")
    sys.stdout.write("verified: no faults found\n")
    return 0


def _check_there(key: str, folder: Path) -> None:
    if why := why_no_folder(folder.absolute()) or ("" if folder.is_dir() else "there is no such folder"):
        raise UserError(
            f"{key}='{folder}' cannot be verified: {why}.", todo=f"Give one that is there: {key}=/its/folder"
        )


def _checked(manifests: Mapping[Path, Json], faults: list[Fault], store: Store) -> str:
    """Read every byte of artifacts from the disk, and say how many there were; raise all faults."""
    entries = [entry for manifest in manifests.values() for entry in manifest["files"].values()]
    total = sum(int(entry["size"]) for entry in entries)
    with ScreenProgress().task("verifying", total, "bytes") as advance:
        for folder, manifest in manifests.items():
            with collecting(faults):
                if added := unlisted_files(folder, manifest):
                    named = f"{', '.join(added[:3])}{', ...' if len(added) > 3 else ''}"
                    warn(f"{folder} has {count(len(added), 'file')} that its manifest does not list: {named}.")
                check_files(folder, manifest, partial(store.hashes.from_disk, advance=advance))
    store.hashes.save()
    refuse(faults)
    artifacts = f"{count(len(manifests), 'artifact')}, " if len(manifests) > 1 else ""
    return f"{artifacts}{count(len(entries), 'file')}, {show_bytes(total)}, each byte as its manifest says"


def _folder(settings: Settings, store: Store) -> Path:
    if settings.verify.path is not None:
        folder = settings.verify.path.absolute()
        _check_there("verify.path", folder)
        return folder
    made = make_plan(settings, "build", store, gather())
    step = next(step for step in made.steps if step.node.id == "quantize")
    if step.artifact is None:
        raise UserError(
            f"There is no checkpoint of {step.node.label} yet ({step.why}).",
            todo="Build it first (`make build` with the same settings), or name one: verify.path=/some/checkpoint",
        )
    return step.artifact.path
