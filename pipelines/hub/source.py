"""What is asked of the Hub, what it has, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipelines.host.hashing import FileRecord

RepoType = Literal["model", "dataset"]


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository of the Hub.

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
        """The repository type in words."""
        return "data set" if self.repo_type == "dataset" else "model"


@dataclass(frozen=True, slots=True)
class HubSnapshot:
    """The files of one commit that are now in a folder.

    Attributes:
        commit: 40 hex digits; what the revision meant at that moment.
        files: relative name -> size in bytes and SHA-256.
    """

    commit: str
    files: dict[str, FileRecord]


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file that a repository lists.

    Attributes:
        name: relative, with "/" between folders.
        size: in bytes.
        etag: the Hub's name of the content, and of the file in its cache: SHA-256 when `large`, else git's SHA-1;
            "" when a cache without links does not tell.
        large: kept in large file storage.
    """

    name: str
    size: int
    etag: str
    large: bool


@dataclass(frozen=True, slots=True)
class HubListing:
    """What a repository has at one commit.

    Attributes:
        source: the repository.
        commit: 40 hex digits.
        files: by name.
        offline: it was read from the local cache, so it may lack files of the repository.
    """

    source: HubSource
    commit: str
    files: dict[str, HubFile]
    offline: bool

    @property
    def place(self) -> str:
        """Where the files are looked for, for messages."""
        cached = " in the local cache" if self.offline else ""
        return f"{self.source.repo_id} at {self.source.revision}{cached}"
