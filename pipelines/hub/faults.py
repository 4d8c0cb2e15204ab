"""Turn client errors into messages a user can act on: what failed, what was given, what is allowed, what to do."""

import errno
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast
from urllib.parse import urlsplit

from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    EntryNotFoundError,
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from pipelines.domain.errors import UserError, masked
from pipelines.host.disk import disk_error
from pipelines.host.files import FileRecord

# Records of the Hub: a repository to download from, its files, and what was downloaded.

RepoType = Literal["model", "dataset"]


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository on the Hub.

    Attributes:
        repo_id: "owner/name", e.g. "google/gemma-2b".
        revision: branch, tag or commit.
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
        etag: the Hub's name for the content, and for the file in its cache: SHA-256 if `large`, else git's SHA-1;
            "" if it is unknown because the cache has no links.
    """

    name: str
    size: int
    etag: str
    large: bool


@dataclass(frozen=True, slots=True)
class HubListing:
    """The files of a repository at one commit.

    Attributes:
        commit: 40 hex digits.
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


# The client uses httpx (1.x) or requests (0.36); the base classes of its own error reveal which.
TRANSPORT_ERRORS: tuple[type[Exception], ...] = tuple(
    base for base in HfHubHTTPError.__mro__[1:] if base.__module__ != "builtins" and issubclass(base, Exception)
)
CLIENT_ERRORS: tuple[type[Exception], ...] = (*TRANSPORT_ERRORS, OSError, ValueError)
FULL = (errno.ENOSPC, errno.EDQUOT)
TRANSIENT = (408, 429, 500, 502, 503, 504)
PATIENCE_S = 30.0
LONGEST_WAIT_S = 300.0
"""The Hub counts requests in windows of five minutes."""
AGAIN = "Run the same command again: it resumes where this one stopped."
T = TypeVar("T")


@contextmanager
def explained(source: HubSource) -> Iterator[None]:
    """Turn client errors caused by the user or the network into a `UserError`; anything else is a crash."""
    try:
        yield
    except CLIENT_ERRORS as error:
        fault = _explain(error, source)
        if fault is None:
            raise
        raise fault from None  # the client's own error may contain request headers


def check_token() -> None:
    """Reject a token that cannot be sent, because the client's error would quote it.

    Raises:
        UserError: the token contains anything but printable ASCII.
    """
    token = get_token()
    if token and not (token.isascii() and token.isprintable()):
        raise UserError(
            f"The access token ({_token_origin()}) contains a character that is not allowed in tokens.",
            allowed="Letters, digits and '_', starting with 'hf_'.",
            todo="Copy the token again.",
        )


def shown_endpoint() -> str:
    """Return the Hub's address without any user name and password in it."""
    return scrub(constants.ENDPOINT)


def scrub(text: object) -> str:
    """Remove the access token, and credentials in addresses, from a text."""
    scrubbed, token = masked(str(text)).replace("***@", ""), get_token()
    return scrubbed.replace(token, "<token>") if token else scrubbed


def short(error: BaseException) -> str:
    """Return the class and first line of an error, safe to show."""
    text = scrub(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def http_status(error: BaseException) -> int | None:
    """Return the HTTP status behind an error, or None if there was no response.

    The error's class is not enough: some versions of the client raise their HTTP library's own error after retries.
    """
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def patiently(
    ask: Callable[[], T],
    note: Callable[[str], None],
    *,
    sleep: Callable[[float], object] | None = None,
    longest_s: float = LONGEST_WAIT_S,
) -> T:
    """Repeat a request for half a minute while its answer is a transient status; the client gives up at the first.

    Args:
        ask: sends the request.
        note: shows that the request is repeated, and when.
        sleep: waits, and may end early.
        longest_s: raise the error rather than wait longer than this at a time, also where the server asks for it.
    """
    end, wait = time.monotonic() + PATIENCE_S, 1.0
    while True:
        try:
            return ask()
        except CLIENT_ERRORS as error:
            if (status := http_status(error)) not in TRANSIENT or time.monotonic() > end:
                raise
            response = cast(HfHubHTTPError, error).response
            if (pause := _asked_wait(response.headers) or wait) > longest_s:
                raise
            note(f"{_host(response.url)} answered {status}; asking again in {pause:.0f} s.")
        (sleep or time.sleep)(pause)
        wait *= 2


def _asked_wait(headers: Mapping[str, str]) -> float:
    """Return the seconds that a server asks to wait; the Hub states a used-up limit as `"api";r=0;t=55`. 0 if none."""
    stated = headers.get("Retry-After", "").strip(), headers.get("RateLimit", "")
    asked = re.fullmatch(r"(\d+)", stated[0]) or re.search(r";r=0;t=(\d+)", stated[1])
    return float(asked[1]) if asked else 0.0


def _host(address: object) -> str:
    parts = urlsplit(scrub(address))
    return f"{parts.scheme}://{parts.netloc}"


def _explain(error: Exception, source: HubSource) -> UserError | None:
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # the client fell back to its cache after this error
    if isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled):
        return UserError(
            f"HF_HUB_OFFLINE is set, and the {source.kind} {source.repo_id} at '{source.revision}' is not complete in "
            f"{constants.HF_HUB_CACHE}.",
            allowed="Offline, only what is in that cache can be used.",
            todo="Unset HF_HUB_OFFLINE to download it, or set HF_HOME to the folder that has it.",
        )
    if (status := http_status(error)) is not None:
        return _refused(error, status, source)
    if isinstance(error, HFValidationError):
        return UserError(
            f"'{source.repo_id}' is not the name of a {source.kind} on the Hub.",
            allowed="owner/name of letters, digits, '-', '_' and '.', at most 96 characters.",
        )
    if isinstance(error, FileMetadataError) or type(error).__name__ == "JSONDecodeError":
        return UserError(
            f"{shown_endpoint()} does not answer like a Hugging Face Hub ({short(error)}).",
            todo="Check HF_ENDPOINT, and whether a proxy or a login page answers instead.",
        )
    if isinstance(error, TRANSPORT_ERRORS):
        return UserError(
            f"{shown_endpoint()} cannot be reached for {source.repo_id} ({short(error)}).",
            todo="Check the network and HF_ENDPOINT, or set HF_HUB_OFFLINE=1 to use what is already in "
            f"{constants.HF_HUB_CACHE}.",
        )
    return _disk(error) if isinstance(error, OSError) else None


def _refused(error: Any, status: int, source: HubSource) -> UserError:
    token, address = get_token(), scrub(error.response.url)
    if isinstance(error, GatedRepoError):
        reason = (
            f"the account of the access token ({_token_origin()}) has not" if token else "no access token was given"
        )
        return UserError(
            f"The {source.kind} {source.repo_id} is gated, and {reason}.",
            allowed="Only accounts that accepted its licence can download it.",
            todo=f"Accept the licence at {_page(source)} and set HF_TOKEN to a token of that account.",
        )
    if isinstance(error, RevisionNotFoundError):
        return UserError(
            f"The {source.kind} {source.repo_id} has no revision '{source.revision}' at {shown_endpoint()}.",
            allowed=f"A branch, a tag or a commit of 40 hex digits: see {_page(source)}.",
            todo="Unless you need another one, use revision 'main'.",
        )
    if isinstance(error, EntryNotFoundError):
        return UserError(
            f"{source.repo_id} lists a file that {shown_endpoint()} does not serve: {address}.",
            todo="Try again later, or choose another revision.",
        )
    missing, host = isinstance(error, RepositoryNotFoundError), _host(error.response.url)
    if status in (401, 403, 404) and not missing and host != _host(constants.ENDPOINT):
        return UserError(
            f"{host}, where {shown_endpoint()} keeps a file of {source.repo_id}, answered {status}: {address}.",
            todo=f"Check that no firewall or proxy blocks {host}. {AGAIN}",
        )
    if status == 401 and token and not missing:
        return UserError(
            f"{shown_endpoint()} rejects the access token for {source.repo_id} ({_token_origin()}).",
            allowed="A token that has not expired and has read access to the repository.",
            todo=f"Create one at {shown_endpoint()}/settings/tokens and set HF_TOKEN; a public repository needs none.",
        )
    if status in (401, 404):
        return _missing(source, token)
    if status == 403:
        return UserError(
            f"The access token ({_token_origin()}) may not read {source.repo_id}."
            if token
            else f"{shown_endpoint()} forbids reading {source.repo_id} without an access token.",
            todo=f"Set HF_TOKEN to a token with read access to {_page(source)}.",
        )
    wait = f"Wait {seconds:.0f} s" if (seconds := _asked_wait(error.response.headers)) else "Wait"
    return UserError(
        f"{host} answered {status} for {source.repo_id} ({short(error)}).", todo=f"{wait} and try again. {AGAIN}"
    )


def _missing(source: HubSource, token: str | None) -> UserError:
    reader = f"to the account of the access token ({_token_origin()})" if token else "without an access token"
    return UserError(
        f"There is no {source.kind} '{source.repo_id}' at {shown_endpoint()} that is visible {reader}.",
        allowed="A public repository, or a private one with a member's token.",
        todo="Check the spelling; if it is private, set HF_TOKEN.",
    )


def _disk(error: OSError) -> UserError | None:
    """Return the error in the user's words if it is of the client's folders; whoever writes elsewhere explains that."""
    cache = Path(constants.HF_HUB_CACHE)
    place = Path(error.filename2 or error.filename or cache)  # of a copy the file that is written
    token = Path(constants.HF_TOKEN_PATH)
    if place == token:
        return UserError(
            f"The access token in {token} cannot be read ({os.strerror(error.errno or 0)}).",
            todo="Set HF_TOKEN, or HF_TOKEN_PATH to a file that you may read.",
        )
    own = (cache, Path(constants.HF_HOME))
    if not {*own} & {place, *place.parents} and place not in cache.parents:
        return None
    if error.errno in FULL:
        return UserError(
            f"The disk is full: {place} could not be written ({os.strerror(error.errno)}).",
            todo=f"Free some space, or set HF_HOME to a larger disk. {AGAIN}",
        )
    if error.errno == errno.ENOTDIR:
        return UserError(
            f"{place} cannot be written ({os.strerror(error.errno)}).", todo="Set HF_HOME to a folder of your own."
        )
    return disk_error(error, "The download", place, "HF_HOME=/some/folder")


def _page(source: HubSource) -> str:
    return f"{shown_endpoint()}/{'datasets/' if source.repo_type == 'dataset' else ''}{source.repo_id}"


def _token_origin() -> str:
    return "HF_TOKEN" if os.environ.get("HF_TOKEN") else f"the one saved in {constants.HF_TOKEN_PATH}"
