"""A Hugging Face Hub on loopback for the real client; repositories are local folders, and files can have faults.

It answers the requests that `huggingface_hub` (0.36 and 1.x) makes to inspect a repository and to download it: the
repository's description with sizes and hashes, its tree, the files with ETag and Range, and the owner of a token.
Requests for files in large file storage are redirected to another host name, as on a real Hub.

    with HubServer() as hub:
        hub.add("tiny/llama", folder)
        hub.fault("tiny/llama", "model.safetensors", drop_after=100_000, times=1)
        run({"HF_ENDPOINT": hub.url, "HF_HOME": ...})
        assert hub.bytes_sent("model.safetensors") == size

By hand: `python -m tests.support.hub_server FOLDER [--repo tiny/llama] [--port 8899]`, then `HF_ENDPOINT=http://...`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Lock, Thread
from types import TracebackType
from typing import Any, ClassVar, Literal, Self
from urllib.parse import unquote, urlsplit

RepoType = Literal["model", "dataset"]
CHUNK_BYTES = 1 << 16
LARGE_BYTES = 10 << 20
LARGE_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".model", ".parquet", ".gz")
STORAGE_HOST = "localhost"  # differs from the Hub's own 127.0.0.1, so that clients treat it as another host


@dataclass(frozen=True, slots=True)
class ServedFile:
    """One file of a repository: path, size in bytes, git SHA-1 and, if in large file storage, SHA-256."""

    path: Path
    size: int
    blob_id: str
    sha256: str | None

    @classmethod
    def of(cls, path: Path) -> ServedFile:
        """Read and hash a file."""
        content = path.read_bytes()
        large = path.name.endswith(LARGE_SUFFIXES) or len(content) > LARGE_BYTES
        blob_id = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
        return cls(path, len(content), blob_id, hashlib.sha256(content).hexdigest() if large else None)

    @property
    def etag(self) -> str:
        """Return the ETag that a Hub gives this content."""
        return self.sha256 or self.blob_id


@dataclass(slots=True)
class Fault:
    """A fault in serving one file.

    Attributes:
        drop_after: close the connection after this many bytes of the body ...
        times: ... in this many responses, or answer `status` in as many; later ones are complete.
        hold_after: send this many bytes and then nothing until the server stops.
        bytes_per_s: send at this rate.
        corrupt: change one of the bytes that are sent.
        no_range: ignore the Range header, as some intermediate caches do.
        hide: list the file, but answer 404 for it.
        status: answer this HTTP status instead of the file; of the file "", instead of the description ...
        at: ... on the Hub itself, or in its storage.
        headers: of that answer.
    """

    drop_after: int | None = None
    times: int = 1
    hold_after: int | None = None
    bytes_per_s: float | None = None
    corrupt: bool = False
    no_range: bool = False
    hide: bool = False
    status: int | None = None
    at: Literal["hub", "storage"] = "hub"
    headers: dict[str, str] = field(default_factory=dict)

    def refuse(self, at: str) -> None:
        """Answer the status here, if this fault has one that was not answered often enough."""
        if self.status is not None and self.at == at and self.times > 0:
            self.times -= 1
            raise _RefusedError(self.status, f"requested fault: {self.status}", headers=self.headers)


@dataclass(slots=True)
class Repo:
    """One repository that is served.

    Attributes:
        repo_id: "owner/name".
        repo_type: model or dataset.
        commit: 40 hex digits, made from the content.
        files: name -> file.
        branches: names that refer to this commit.
        gated: whether files need a token whose owner accepted the licence ...
        accepted: ... and the tokens for which this is the case.
        private: whether it appears not to exist without a token.
        license: that its card states; empty if it states none.
        faults: file name -> its fault.
    """

    repo_id: str
    repo_type: RepoType
    commit: str
    files: dict[str, ServedFile]
    branches: tuple[str, ...] = ("main",)
    gated: bool = False
    accepted: tuple[str, ...] = ()
    private: bool = False
    license: str = ""
    faults: dict[str, Fault] = field(default_factory=dict)

    def describe(self, *, readable: bool = True) -> dict[str, Any]:
        """Return the response to /api/models/... with blobs=true; without read access it contains only file names."""
        siblings = [
            {"rfilename": name, "size": file.size, "blobId": file.blob_id, "lfs": _pointer(file)}
            if readable
            else {"rfilename": name}
            for name, file in self.files.items()
        ]
        found = {"id": self.repo_id, "sha": self.commit, "private": self.private, "tags": [], "siblings": siblings}
        return found | ({"cardData": {"license": self.license}} if self.license else {})

    def tree(self) -> list[dict[str, Any]]:
        """Return the response to .../tree/<revision>?recursive=true."""
        return [
            {"type": "file", "path": name, "size": file.size, "oid": file.blob_id} | _optional("lfs", _pointer(file))
            for name, file in self.files.items()
        ]


@dataclass(frozen=True, slots=True)
class Request:
    """One received request and the status of its response.

    Attributes:
        method: GET or HEAD.
        path: path without the query.
        host: host name that the client used.
        file: name of the repository's file, or "".
        first_byte: requested start of the body.
        authorized: whether it had an Authorization header.
        status: HTTP status of the response.
    """

    method: str
    path: str
    host: str
    file: str
    first_byte: int
    authorized: bool
    status: int


class HubServer:
    """The server; use it as a context manager. It listens on loopback only, on a free port unless one is given."""

    def __init__(self, *, tokens: tuple[str, ...] = (), offers_xet: bool = False, port: int = 0) -> None:
        """Configure the server without starting it.

        Args:
            tokens: tokens whose owner may read every repository here; any other token is refused.
            offers_xet: whether the headers offer the Hub's other transfer protocol (not implemented: its use fails).
            port: port to listen on; 0 chooses a free one.
        """
        self.tokens = tokens
        self.offers_xet = offers_xet
        self.requests: list[Request] = []
        self.repos: dict[tuple[RepoType, str], Repo] = {}
        self.stopping = Event()
        self._sent: dict[str, int] = {}
        self._lock = Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", port), _Handler.of(self))
        self._http.daemon_threads = True
        self._thread = Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def url(self) -> str:
        """Return the value for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self._http.server_port}"

    @property
    def storage_url(self) -> str:
        """Return the URL to which requests for large files are redirected."""
        return f"http://{STORAGE_HOST}:{self._http.server_port}/storage"

    def __enter__(self) -> Self:
        """Start serving."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop serving, which also ends responses that are held back."""
        self.stopping.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def add(
        self,
        repo_id: str,
        folder: Path,
        *,
        repo_type: RepoType = "model",
        branches: tuple[str, ...] = ("main",),
        gated: bool = False,
        accepted: tuple[str, ...] = (),
        private: bool = False,
    ) -> Repo:
        """Serve a folder as a repository; adding it again replaces it, with a new commit if its content changed."""
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        files = {path.relative_to(folder).as_posix(): ServedFile.of(path) for path in paths}
        content = json.dumps({name: file.blob_id for name, file in files.items()})
        commit = hashlib.sha1(content.encode(), usedforsecurity=False).hexdigest()
        repo = Repo(repo_id, repo_type, commit, files, branches, gated, accepted, private)
        self.repos[repo_type, repo_id] = repo
        return repo

    def fault(self, repo_id: str, name: str, **what: Any) -> None:
        """Give one file a fault, see `Fault`; without `what` the fault is removed."""
        for repo in self.repos.values():
            if repo.repo_id == repo_id:
                repo.faults[name] = Fault(**what)

    def bytes_sent(self, name: str) -> int:
        """Return the number of bytes of a file's content that were sent, over all responses."""
        with self._lock:
            return self._sent.get(name, 0)

    def asked(self, name: str, method: str = "GET") -> list[Request]:
        """Return the requests for a file's content, oldest first; a redirect and its target count as two."""
        return [request for request in self.requests if request.file == name and request.method == method]

    def forget(self) -> None:
        """Forget all requests and byte counts."""
        with self._lock:
            self.requests.clear()
            self._sent.clear()

    def count(self, name: str, amount: int) -> None:
        """Count bytes of a file that were sent."""
        with self._lock:
            self._sent[name] = self._sent.get(name, 0) + amount


class _RefusedError(Exception):
    """A request that is answered with an error status."""

    def __init__(self, status: int, message: str, code: str = "", headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.headers = status, message, code, headers or {}


class _Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    protocol_version = "HTTP/1.1"
    hub: ClassVar[HubServer]

    @classmethod
    def of(cls, hub: HubServer) -> type[_Handler]:
        """Return a handler class that is bound to its server."""
        return type("_BoundHandler", (cls,), {"hub": hub})

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing; `HubServer.requests` is the log."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.file = ""
        parts = urlsplit(self.path).path.strip("/").split("/")
        try:
            self._route([unquote(part) for part in parts])
        except _RefusedError as refused:
            about = {"X-Error-Message": refused.message} | _optional("X-Error-Code", refused.code)
            headers = about | dict(refused.headers)
            self._send_json(refused.status, {"error": refused.message}, headers)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _route(self, parts: list[str]) -> None:
        match parts:
            case ["api", "whoami-v2"]:
                if self._token() is None:
                    raise _RefusedError(401, "Invalid credentials in Authorization header")
                self._send_json(200, {"type": "user", "name": "tester", "auth": {"type": "access_token"}})
            case ["api", ("models" | "datasets") as kind, owner, name, *rest]:
                repo = self._repo("model" if kind == "models" else "dataset", f"{owner}/{name}")
                self._describe(repo, rest)
            case ["storage", owner, name, kind, *rest]:
                repo = self.hub.repos["model" if kind == "model" else "dataset", f"{owner}/{name}"]
                self._send_file(repo, "/".join(rest))
            case ["datasets", owner, name, "resolve", revision, *rest]:
                self._resolve(self._repo("dataset", f"{owner}/{name}"), revision, "/".join(rest))
            case [owner, name, "resolve", revision, *rest]:
                self._resolve(self._repo("model", f"{owner}/{name}"), revision, "/".join(rest))
            case _:
                raise _RefusedError(404, "Not found")

    def _token(self) -> str | None:
        """Return the caller's token; an unknown token is refused for every request."""
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if given and given not in self.hub.tokens:
            raise _RefusedError(401, "Invalid credentials in Authorization header")
        return given or None

    def _repo(self, repo_type: RepoType, repo_id: str) -> Repo:
        repo, token = self.hub.repos.get((repo_type, repo_id)), self._token()
        if repo is None or (repo.private and token is None):
            # A Hub does not reveal whether a repository is missing or only private.
            raise _RefusedError(404 if token else 401, "Repository not found", "RepoNotFound")
        return repo

    def _may_read(self, repo: Repo) -> bool:
        return not repo.gated or self._token() in repo.accepted

    def _describe(self, repo: Repo, rest: list[str]) -> None:
        match rest:
            case [] | ["revision", _]:
                self._check_revision(repo, rest[1] if rest else "main")
                repo.faults.get("", Fault()).refuse("hub")
                self._send_json(200, repo.describe(readable=self._may_read(repo)))
            case ["tree", revision]:
                self._check_revision(repo, revision)
                self._send_json(200, repo.tree())
            case _:
                raise _RefusedError(404, "Not found")

    def _check_revision(self, repo: Repo, revision: str) -> None:
        if revision not in (*repo.branches, repo.commit):
            raise _RefusedError(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def _resolve(self, repo: Repo, revision: str, name: str) -> None:
        self._check_revision(repo, revision)
        self.file = name
        if not self._may_read(repo):
            raise _RefusedError(403 if self._token() else 401, f"Access to {repo.repo_id} is restricted.", "GatedRepo")
        fault, file = repo.faults.get(name, Fault()), repo.files.get(name)
        if file is None or fault.hide:
            raise _RefusedError(404, "Entry not found", "EntryNotFound")
        fault.refuse("hub")
        if file.sha256 is None:
            self._send_file(repo, name)
            return
        about = self._about(repo, file) | {"X-Linked-Size": str(file.size), "X-Linked-Etag": f'"{file.etag}"'}
        if self.hub.offers_xet:
            route = f"{self.hub.url}/api/{repo.repo_type}s/{repo.repo_id}/xet-read-token/{revision}"
            about |= {"X-Xet-Hash": file.sha256, "X-Xet-Refresh-Route": route}
        target = f"{self.hub.storage_url}/{repo.repo_id}/{repo.repo_type}/{name}"
        self._send(302, about | {"Location": target, "Content-Length": "0"})

    def _send_file(self, repo: Repo, name: str) -> None:
        self.file = name
        file, fault = repo.files[name], repo.faults.get(name, Fault())
        if file.sha256 is not None:
            fault.refuse("storage")
        start = 0 if fault.no_range else self._first_byte()
        if start >= file.size > 0:
            raise _RefusedError(416, "Requested range not satisfiable")
        headers = self._about(repo, file) | {"Content-Length": str(file.size - start), "Accept-Ranges": "bytes"}
        if start:
            headers["Content-Range"] = f"bytes {start}-{file.size - 1}/{file.size}"
        self._send(206 if start else 200, headers)
        if self.command == "GET":
            self._send_body(file, start, fault)

    def _send_body(self, file: ServedFile, start: int, fault: Fault) -> None:
        drop = fault.drop_after if fault.times > 0 else None
        limit = min((n for n in (drop, fault.hold_after) if n is not None), default=file.size)
        for chunk in _chunks(file, start, start + limit, fault):
            # Counted first: a client that has everything may ask for the count before this thread runs again.
            self.hub.count(self.file, len(chunk))
            self.wfile.write(chunk)
        if start + limit >= file.size:
            return
        self.wfile.flush()
        if drop is not None:
            fault.times -= 1
        else:
            self.hub.stopping.wait()
        self.close_connection = True

    def _about(self, repo: Repo, file: ServedFile) -> dict[str, str]:
        return {"ETag": f'"{file.etag}"', "X-Repo-Commit": repo.commit, "Content-Type": "application/octet-stream"}

    def _first_byte(self) -> int:
        given = self.headers.get("Range", "bytes=0-")
        return int(given.removeprefix("bytes=").split("-")[0])

    def _send_json(self, status: int, value: object, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        known = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        self._send(status, known | (headers or {}))
        if self.command == "GET":
            with suppress(BrokenPipeError, ConnectionResetError):
                self.wfile.write(body)

    def _send(self, status: int, headers: dict[str, str]) -> None:
        host = self.headers.get("Host", "").split(":")[0]
        start = self._first_byte()
        authorized = "Authorization" in self.headers
        path = urlsplit(self.path).path
        self.hub.requests.append(Request(self.command, path, host, self.file, start, authorized, status))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


def _chunks(file: ServedFile, start: int, end: int, fault: Fault) -> Iterator[bytes]:
    """Yield the bytes [start, end) of a file, corrupted and slowed down according to the fault."""
    with file.path.open("rb") as source:
        source.seek(start)
        position = start
        while chunk := source.read(max(0, min(CHUNK_BYTES, end - position))):
            if fault.corrupt and position <= file.size // 2 < position + len(chunk):
                middle = file.size // 2 - position
                chunk = chunk[:middle] + bytes([chunk[middle] ^ 1]) + chunk[middle + 1 :]
            if fault.bytes_per_s:
                time.sleep(len(chunk) / fault.bytes_per_s)
            yield chunk
            position += len(chunk)


def _pointer(file: ServedFile) -> dict[str, Any] | None:
    return {"sha256": file.sha256, "oid": file.sha256, "size": file.size, "pointerSize": 134} if file.sha256 else None


def _optional(name: str, value: Any) -> dict[str, Any]:
    return {name: value} if value else {}


def main() -> int:
    """Serve one folder until Ctrl-C."""
    parser = argparse.ArgumentParser(description="Serve a folder as a repository of a Hub on loopback.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repo", default="tiny/model", help="owner/name (default: %(default)s)")
    parser.add_argument("--type", default="model", choices=("model", "dataset"), dest="repo_type")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 chooses a free one")
    given = parser.parse_args()
    with HubServer(port=given.port) as hub:
        repo = hub.add(given.repo, given.folder, repo_type=given.repo_type)
        sys.stdout.write(f"HF_ENDPOINT={hub.url} serves {repo.repo_id} at {repo.commit}; Ctrl-C stops it.\n")
        sys.stdout.flush()
        with suppress(KeyboardInterrupt):
            Event().wait()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
