"""Look up a repository on the Hub, or in the local cache when HF_HUB_OFFLINE is set."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import HfApi, constants, snapshot_download

from pipelines.domain.errors import UserError
from pipelines.hub.choice import CONFIG, DATA_PATTERNS
from pipelines.hub.faults import check_token
from pipelines.hub.source import HubFile, HubListing, HubSource

SHA256 = re.compile(r"[0-9a-f]{64}")
SHA1 = re.compile(r"[0-9a-f]{40}")


def look_up(source: HubSource) -> HubListing:
    """Resolve the revision to a commit and list its files with sizes and hashes.

    Raises:
        UserError: the token, a file's name or a hash is malformed.
    """
    return _from_cache(source) if constants.HF_HUB_OFFLINE else _from_hub(source)


def _from_hub(source: HubSource) -> HubListing:
    check_token()
    info: Any = HfApi().repo_info(
        source.repo_id,
        repo_type=source.repo_type,
        revision=source.revision,
        files_metadata=True,
        timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,  # by default the client waits forever
    )
    files = {sibling.rfilename: _hub_file(source, sibling) for sibling in info.siblings or []}
    return HubListing(source, str(info.sha), files, offline=False, license=_license(info))


def _license(info: Any) -> str | None:
    """Return the licence in the metadata of the repository's card; what else stands there is not a name."""
    found = getattr(getattr(info, "card_data", None), "license", None)
    return found if isinstance(found, str) else None


def _hub_file(source: HubSource, sibling: Any) -> HubFile:
    name = str(sibling.rfilename)
    size, etag = (sibling.lfs.size, sibling.lfs.sha256) if sibling.lfs else (sibling.size, sibling.blob_id)
    if size is None or etag is None:
        return HubFile(name, 0, "", large=False)  # hidden without read access; the first fetch reports that
    # Name and hash become parts of local paths, so neither is trusted.
    path, pattern = PurePosixPath(name), SHA256 if sibling.lfs else SHA1
    if path.is_absolute() or ".." in path.parts or not pattern.fullmatch(etag):
        raise UserError(
            f"The Hub lists '{name}' of {source.repo_id} with the hash '{etag}'.",
            allowed="A relative name, and a SHA-256 or git SHA-1 hash.",
            todo="Check that HF_ENDPOINT names the Hub or a mirror that you trust.",
        )
    return HubFile(name, int(size), etag, large=sibling.lfs is not None)


def _from_cache(source: HubSource) -> HubListing:
    # The patterns only tell a client that cached the whole listing which missing files matter.
    patterns = DATA_PATTERNS if source.repo_type == "dataset" else (CONFIG,)
    folder = Path(
        snapshot_download(
            source.repo_id,
            repo_type=source.repo_type,
            revision=source.revision,
            local_files_only=True,
            allow_patterns=list(patterns),
        )
    )
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): _cached_file(folder, path) for path in paths}
    return HubListing(source, folder.name, files, offline=True)


def _cached_file(folder: Path, path: Path) -> HubFile:
    # The cache's layout: snapshots/<commit>/<name> is a link to blobs/<etag>. One step only, since a blob may itself
    # be a link into a store shared by repositories, where names are other hashes.
    etag = path.readlink().name if path.is_symlink() else ""
    return HubFile(path.relative_to(folder).as_posix(), path.stat().st_size, etag, bool(SHA256.fullmatch(etag)))
