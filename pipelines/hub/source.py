"""Records of the Hub: a repository to download from, its files, and what was downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipelines.host.hashing import FileRecord

RepoType = Literal["model", "dataset"]


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository on the Hub.

    Attributes:
        repo_id: "owner/name", e.g. "google/gemma-2b".
        revision: branch, tag or commit.
        repo_type: model or data set.
    """

    repo_id: str
    revision: str = "main"
    repo_type: RepoType = "model"

    @property
    def kind(self) -> str:
        """Return the repository type in words."""
        return "data set" if self.repo_type == "dataset" else "model"


@dataclass(frozen=True, slots=True)
class HubSnapshot:
    """The files of one commit that are now in a folder.

    Attributes:
        commit: 40 hex digits that the revision resolved to.
        files: relative name -> size in bytes and SHA-256.
        license: as the repository's card states it; None if it states none, or if that is not known without the Hub.
    """

    commit: str
    files: dict[str, FileRecord]
    license: str | None = None


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file in a repository's listing.

    Attributes:
        name: relative, with "/" between folders.
        size: in bytes.
        etag: the Hub's name for the content, and for the file in its cache: SHA-256 if `large`, else git's SHA-1;
            "" if it is unknown because the cache has no links.
        large: whether it is in large file storage.
    """

    name: str
    size: int
    etag: str
    large: bool


@dataclass(frozen=True, slots=True)
class HubListing:
    """The files of a repository at one commit.

    Attributes:
        source: the repository.
        commit: 40 hex digits.
        files: by name.
        offline: whether it was read from the local cache, which may lack files of the repository.
        license: as the repository's card states it; None if it states none, or offline.
    """

    source: HubSource
    commit: str
    files: dict[str, HubFile]
    offline: bool
    license: str | None = None

    @property
    def place(self) -> str:
        """Return repository and revision, for messages."""
        cached = " in the local cache" if self.offline else ""
        return f"{self.source.repo_id} at {self.source.revision}{cached}"
