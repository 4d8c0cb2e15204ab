"""Fetch files into the Hub's own cache: resumed, verified, each byte transferred and hashed once.

Large files are received here and not by `hf_hub_download`, which since 1.x restarts a file in every process. Partial
content is kept as blobs/<sha256>.incomplete and gets its name in the cache only when its SHA-256 is right.
"""

import io
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeVar

from huggingface_hub import constants, hf_hub_download, hf_hub_url, try_to_load_from_cache

# The public functions fetch a file from its start only, and do not say where the cache keeps it.
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented, but its stub lists none of them
    WeakFileLock,
    are_progress_bars_disabled,
    build_hf_headers,
    disable_progress_bars,
    enable_progress_bars,
)

from pipelines.domain.errors import UserError
from pipelines.domain.progress import Advance, Progress
from pipelines.domain.units import show_bytes
from pipelines.host.files import git_blob_sha1, one_at_a_time, sha256_file, write_text
from pipelines.hub.faults import (
    AGAIN,
    CLIENT_ERRORS,
    TRANSIENT,
    TRANSPORT_ERRORS,
    HubFile,
    HubListing,
    HubSource,
    http_status,
    patiently,
    short,
    shown_endpoint,
)

T = TypeVar("T")
WORKERS = 4  # files at a time; a few streams fill a link, and more would only annoy the server


@dataclass(frozen=True, slots=True)
class _Job:
    """State shared by all files of one download."""

    listing: HubListing
    advance: Advance
    progress: Progress
    stop: Event = field(default_factory=Event)

    def patiently(self, ask: Callable[[], T]) -> T:
        """Repeat a request while its answer is transient, until the job stops."""
        return patiently(ask, self.progress.note, sleep=self.stop.wait)


class _StoppedError(Exception):
    """Raised to stop a transfer because another file failed."""


def fetch(listing: HubListing, files: Sequence[HubFile], progress: Progress) -> dict[str, Path]:
    """Fetch files into the cache, each verified against the Hub's hash.

    Returns:
        name -> path in the cache (a link, in the Hub's layout).

    Raises:
        UserError: a hash is wrong, or the connection broke and could not be restored.
    """
    total = sum(file.size for file in files)
    with progress.task(f"fetching {listing.source.repo_id}", total, "bytes") as show, ExitStack() as stack:
        if not are_progress_bars_disabled():  # the client's own, while ours is shown
            disable_progress_bars()
            stack.callback(enable_progress_bars)
        job = _Job(listing, one_at_a_time(show), progress)
        running = {Future[Path](): file for file in files}
        waiting = iter(list(running.items()))
        try:
            for _ in range(WORKERS):  # that end with the process: Ctrl-C cannot end the client's own waits
                Thread(target=_work, args=(job, waiting), daemon=True).start()
            return {running[done].name: done.result() for done in as_completed(running)}
        finally:
            job.stop.set()  # after an error, gigabytes may still be on their way in other threads


def _work(job: _Job, waiting: Iterator[tuple[Future[Path], HubFile]]) -> None:
    for future, file in waiting:
        try:
            future.set_result(_fetch_one(job, file))
        except BaseException as error:  # noqa: BLE001  # raised where the result is awaited
            future.set_exception(error)


def missing_bytes(listing: HubListing, files: Sequence[HubFile]) -> int:
    """Return how many bytes of these files the cache still lacks."""
    absent = [file for file in files if _cached(listing, file) is None and not _blob(listing.source, file).exists()]
    return sum(file.size - _size(_partial(listing.source, file)) for file in absent)


def remember_revision(listing: HubListing) -> None:
    """Record in the cache which commit the revision means, so that it can be found offline.

    This is done last, not by the client at the start: an interrupted download must not be found offline.
    """
    source = listing.source
    if listing.offline or source.revision == listing.commit:
        return
    ref = _storage(source) / "refs" / source.revision
    if ref.is_file() and ref.read_text() == listing.commit:
        return  # nothing to write, so a complete cache may be read-only
    write_text(ref, listing.commit)


def _fetch_one(job: _Job, file: HubFile) -> Path:
    if job.stop.is_set():
        raise _StoppedError
    path = _cached(job.listing, file)
    if path is not None:
        if _is_right(file, path):
            job.advance(file.size)
            return path
        if job.listing.offline:
            raise _wrong_hash(job.listing, file, path)
        job.progress.note(f"{file.name} in the cache is damaged; fetching it again.")
        _remove(path)
    received = file.large and file.size <= constants.MAX_HTTP_DOWNLOAD_SIZE  # otherwise the client downloads it
    if received:
        _receive(job, file)
    source, commit = job.listing.source, job.listing.commit
    # Gives a received blob its name in the cache; downloads the file if it was not received.
    path = Path(
        job.patiently(lambda: hf_hub_download(source.repo_id, file.name, repo_type=source.repo_type, revision=commit))
    )
    if not received:
        if not _is_right(file, path):
            raise _wrong_hash(job.listing, file, path)
        job.advance(file.size)
    return path


def _receive(job: _Job, file: HubFile) -> None:
    """Receive the blob of a large file into the cache, resuming where an earlier run stopped."""
    source = job.listing.source
    blob, partial = _blob(source, file), _partial(source, file)
    lock = Path(constants.HF_HUB_CACHE) / ".locks" / blob.parent.parent.name / f"{file.etag}.lock"  # the client's own
    for folder in (lock.parent, blob.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if blob.exists() and _is_right(file, blob):
            job.advance(file.size)
            return
        _stream(job, file, partial)
        if not _is_right(file, partial):
            raise _wrong_hash(job.listing, file, partial)
        partial.replace(blob)


def _stream(job: _Job, file: HubFile, partial: Path) -> None:
    """Append what is missing, retrying as long as each attempt makes progress."""
    source = job.listing.source
    url = hf_hub_url(source.repo_id, file.name, repo_type=source.repo_type, revision=job.listing.commit)
    # No compression: an offset into a compressed stream is not an offset into the file.
    headers = build_hf_headers() | {"accept-encoding": "identity"}
    if _size(partial) > file.size:
        partial.unlink()
    job.advance(_size(partial))

    def receive() -> None:
        with _Receiver(partial, job) as out:
            http_get(url, out, resume_size=_size(partial), headers=headers, expected_size=file.size)

    while True:
        before = _size(partial)
        try:
            return job.patiently(receive)
        except CLIENT_ERRORS as error:
            # The server responded, or the disk failed; the client reports a truncated body as an OSError without errno.
            interrupted = isinstance(error, TRANSPORT_ERRORS) or (isinstance(error, OSError) and error.errno is None)
            status = http_status(error)
            if not interrupted or status not in (None, *TRANSIENT) or (status and _size(partial) <= before):
                raise
            if _size(partial) <= before:
                raise _broken(job.listing, file, _size(partial), error) from None


class _Receiver(io.FileIO):
    """A file opened for appending that reports progress and stops when the job stops."""

    def __init__(self, path: Path, job: _Job) -> None:
        super().__init__(path, "a")
        self._job = job

    def write(self, data: Any) -> int:
        if self._job.stop.is_set():
            raise _StoppedError
        rest = memoryview(data)
        while rest:
            rest = rest[super().write(rest) :]
        self._job.advance(len(data))
        return len(data)

    def truncate(self, size: int | None = None) -> int:
        """Discard what the server will send again because it cannot resume, and correct the progress."""
        before = _size(Path(str(self.name)))
        size_now = super().truncate(size)
        self._job.advance(size_now - before)
        return size_now


def _broken(listing: HubListing, file: HubFile, received: int, error: BaseException) -> UserError:
    return UserError(
        f"The connection to {shown_endpoint()} broke while fetching {file.name} of {listing.source.repo_id}: "
        f"{show_bytes(received)} of {show_bytes(file.size)} have arrived ({short(error)}).",
        todo=AGAIN,
    )


def _wrong_hash(listing: HubListing, file: HubFile, path: Path) -> UserError:
    """Describe a hash mismatch and, unless offline, remove the file so that it can be fetched again."""
    algorithm = "SHA-256" if file.large else "git SHA-1"
    todo = "Unset HF_HUB_OFFLINE to fetch it again."
    digest = _digest(file, path)
    if not listing.offline:
        _remove(path)
        todo = f"It was removed: run again to fetch it. If this repeats, {shown_endpoint()} serves different bytes."
    return UserError(
        f"{file.name} of {listing.place} has {algorithm} {digest}.",
        allowed=f"The Hub lists {file.etag}." if file.etag else "The Hub's hash is unknown.",
        todo=todo,
    )


def _is_right(file: HubFile, path: Path) -> bool:
    return _digest(file, path) == file.etag


def _digest(file: HubFile, path: Path) -> str:
    return sha256_file(path) if file.large else git_blob_sha1(path)


def _remove(path: Path) -> None:
    """Remove a file from the cache: the link and the blob it points to."""
    if path.is_symlink():
        (path.parent / path.readlink()).unlink(missing_ok=True)
    path.unlink()


def _cached(listing: HubListing, file: HubFile) -> Path | None:
    source = listing.source
    path = try_to_load_from_cache(source.repo_id, file.name, revision=listing.commit, repo_type=source.repo_type)
    return Path(path) if isinstance(path, str) else None


def _storage(source: HubSource) -> Path:
    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=source.repo_id, repo_type=source.repo_type)


def _blob(source: HubSource, file: HubFile) -> Path:
    return _storage(source) / "blobs" / file.etag


def _partial(source: HubSource, file: HubFile) -> Path:
    return _storage(source) / "blobs" / f"{file.etag}.incomplete"


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
