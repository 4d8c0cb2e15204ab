"""Each thing that goes wrong between a user and the Hub is one message that names it, and never the token."""

import errno
import re
import shutil
import socket
import time
import types
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread, get_ident

import pytest
from huggingface_hub import constants

from pipelines.domain.errors import UserError
from pipelines.domain.progress import SilentProgress
from pipelines.hub import HubSource, download_model, faults, fetch
from pipelines.hub.download import look_up
from pipelines.hub.faults import HubFile
from tests.support.hub_client import TOKEN, Client
from tests.support.hub_repos import write_model
from tests.support.hub_server import HubServer, Repo
from tests.support.records import differing

WEIGHTS = "model.safetensors"


def refusal(client: Client, match: str, revision: str = "main") -> str:
    """The message of a download that must fail."""
    with pytest.raises(UserError, match=match) as caught:
        client.download(revision)
    assert TOKEN not in repr(caught.value)
    assert caught.value.__cause__ is None
    return str(caught.value)


def test_gated_without_a_token(hub: HubServer, repo: Path, client: Client) -> None:
    """Where to accept the licence, and which variable to set."""
    hub.add("tiny/llama", repo, gated=True)

    text = refusal(client, r"The model tiny/llama is gated, and no access token was given")

    assert f"Accept the licence at {hub.url}/tiny/llama and set HF_TOKEN" in text


def test_gated_with_the_token_of_another_account(
    hub: HubServer, repo: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The account has to accept; a token alone does not help."""
    hub.add("tiny/llama", repo, gated=True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)

    refusal(client, r"tiny/llama is gated, and the account of the access token \(HF_TOKEN\) has not")


def test_a_refused_token(hub: HubServer, repo: Path, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expired or mistyped; a public repository is refused too, as the Hub does it."""
    hub.add("tiny/llama", repo)
    monkeypatch.setenv("HF_TOKEN", "hf_expired")

    text = refusal(client, rf"{hub.url} rejects the access token for tiny/llama \(HF_TOKEN\)")

    assert "hf_expired" not in text


def test_a_refused_token_from_a_file(hub: HubServer, repo: Path, client: Client) -> None:
    """The message says where the client found it."""
    hub.add("tiny/llama", repo)
    Path(constants.HF_TOKEN_PATH).parent.mkdir()
    Path(constants.HF_TOKEN_PATH).write_text("hf_expired")

    assert "hf_expired" not in refusal(client, rf"the one saved in {constants.HF_TOKEN_PATH}")


def test_a_token_that_cannot_be_sent(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pasted with something invisible; the HTTP library would quote it."""
    monkeypatch.setenv("HF_TOKEN", "hf_pasted\x1b[0m")

    assert "pasted" not in refusal(client, r"The access token \(HF_TOKEN\) contains a character that is not allowed")


def test_a_missing_repository(client: Client) -> None:
    """Which one, and that a private one looks the same."""
    assert "or a private one" in refusal(client, "There is no model 'tiny/llama'.* without an access token")


def test_a_missing_repository_with_a_token(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token was good, so it is the name or the membership."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)

    refusal(client, r"There is no model 'tiny/llama'.* visible to the account of the access token \(HF_TOKEN\)")


def test_a_private_repository_opens_with_a_token(
    hub: HubServer, repo: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First it does not exist, then it does."""
    hub.add("tiny/llama", repo, private=True)
    refusal(client, "There is no model 'tiny/llama'")
    monkeypatch.setenv("HF_TOKEN", TOKEN)

    client.download()


def test_a_missing_revision(hub: HubServer, repo: Path, client: Client) -> None:
    """Which one, and what a revision may be."""
    hub.add("tiny/llama", repo)

    refusal(client, r"tiny/llama has no revision 'v9'.*A branch, a tag or a commit", revision="v9")


def test_a_name_that_is_none(client: Client) -> None:
    """Told before anything is asked."""
    with pytest.raises(UserError, match=r"'a/b/c' is not the name of a model on the Hub. owner/name"):
        download_model(HubSource("a/b/c"), client.out, expected_shape=None, progress=SilentProgress())


@pytest.mark.parametrize("name", ["tokenizer.json", WEIGHTS])
def test_a_file_that_is_listed_but_not_given(hub: HubServer, repo: Path, client: Client, name: str) -> None:
    """Small or large, the file is named."""
    hub.add("tiny/llama", repo)
    hub.fault("tiny/llama", name, hide=True)

    refusal(client, f"tiny/llama lists a file that .* does not serve: .*{name}")


@pytest.mark.parametrize("name", ["tokenizer.json", WEIGHTS])
def test_a_server_out_of_order(
    hub: HubServer, repo: Path, client: Client, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The status is named; the client has tried again by then."""
    without_waiting(monkeypatch)
    hub.add("tiny/llama", repo)
    hub.fault("tiny/llama", name, status=503, times=100)

    refusal(client, "answered 503 for tiny/llama.*Wait and try again")


@pytest.mark.parametrize(("name", "at"), [("", "hub"), (WEIGHTS, "hub"), (WEIGHTS, "storage")])
def test_a_server_busy_for_a_moment_is_asked_again(
    hub: HubServer, repo: Path, client: Client, name: str, at: str
) -> None:
    """One 503 of the Hub or its storage does not end a download, and the wait is shown."""
    hub.add("tiny/llama", repo)
    hub.fault("tiny/llama", name, status=503, at=at)

    assert differing(client.out, client.download().files) == []
    host = "localhost" if at == "storage" else "127.0.0.1"
    assert [re.sub(r":\d+", "", line) for line in client.notes.lines] == [
        f"http://{host} answered 503; asking again in 1 s."
    ]


@pytest.mark.parametrize("header", [{"Retry-After": "2"}, {"RateLimit": '"api";r=0;t=2'}])
def test_the_wait_is_what_the_hub_asks_for(
    hub: HubServer, repo: Path, client: Client, monkeypatch: pytest.MonkeyPatch, header: dict[str, str]
) -> None:
    """Too many requests: the Hub says how long."""
    without_waiting(monkeypatch)
    monkeypatch.setattr(faults, "PATIENCE_S", 30)
    hub.add("tiny/llama", repo)
    hub.fault("tiny/llama", "", status=429, headers=header)

    client.download()

    assert client.notes.lines == [f"{hub.url} answered 429; asking again in 2 s."]


def test_an_hour_is_not_waited_for(hub: HubServer, repo: Path, client: Client) -> None:
    """But told."""
    hub.add("tiny/llama", repo)
    hub.fault("tiny/llama", "", status=429, headers={"Retry-After": "3600"})

    refusal(client, "answered 429 for tiny/llama.*Wait 3600 s and try again")


@pytest.mark.parametrize("status", [401, 403, 404])
def test_storage_that_refuses_is_not_taken_for_the_hub(hub: HubServer, repo: Path, client: Client, status: int) -> None:
    """A firewall knows the Hub but not its storage: the model is there, and no token helps."""
    hub.add("tiny/llama", repo)
    hub.fault("tiny/llama", WEIGHTS, status=status, at="storage")

    refusal(client, f"localhost:.*, where {hub.url} keeps a file of tiny/llama, answered {status}: .*no firewall")


def test_nobody_listens(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connection refused: the address, and the way to work without a network."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", address)

    assert "HF_HUB_OFFLINE=1" in refusal(client, f"{address} cannot be reached for tiny/llama")


def test_a_host_without_address(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that does not resolve; a password in the address is not shown."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://me:secret@hub.invalid")
    monkeypatch.setenv("NO_PROXY", "*")

    assert "secret" not in refusal(client, "http://hub.invalid cannot be reached")


def test_an_address_without_protocol(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual slip in HF_ENDPOINT."""
    monkeypatch.setattr(constants, "ENDPOINT", "hub.invalid")

    refusal(client, "hub.invalid cannot be reached .*Check the network and HF_ENDPOINT")


def test_a_server_that_never_answers(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait ends; the client's own default is to wait for ever."""
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")

        refusal(client, r"cannot be reached for tiny/llama \(ReadTimeout")


def test_an_address_that_is_no_hub(tmp_path: Path, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A login page answers 200 with HTML whatever is asked for."""

    class LoginPage(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>please log in</html>")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), LoginPage) as server:
        Thread(target=server.handle_request, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")

        refusal(client, "does not answer like a Hugging Face Hub.*Check HF_ENDPOINT")


@pytest.mark.parametrize(("name", "algorithm"), [(WEIGHTS, "SHA-256"), ("tokenizer.json", "git SHA-1")])
def test_a_file_with_other_bytes(hub: HubServer, repo: Path, client: Client, name: str, algorithm: str) -> None:
    """File, what it has and what it should have; it is removed, so that the next run can succeed."""
    served = hub.add("tiny/llama", repo).files[name]
    hub.fault("tiny/llama", name, corrupt=True)

    text = refusal(client, f"{name} of tiny/llama at main has {algorithm} [0-9a-f]+. The Hub lists {served.etag}")

    assert "run again to fetch it" in text
    hub.fault("tiny/llama", name)
    assert differing(client.out, client.download().files) == []


def test_no_room_is_told_before_the_first_byte(
    hub: HubServer, repo: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is needed, what is free, and where."""
    hub.add("tiny/llama", repo)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=2048))

    refusal(client, rf"needs 195.\d KiB more space in {client.cache}, which has 2.0 KiB free.*HF_HOME")
    assert hub.bytes_sent(WEIGHTS) == 0


def test_what_has_arrived_is_not_needed_again(
    hub: HubServer, repo: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that holds the rest is large enough."""
    served = hub.add("tiny/llama", repo).files[WEIGHTS]
    partial = client.cache / "models--tiny--llama" / "blobs" / f"{served.sha256}.incomplete"
    partial.parent.mkdir(parents=True)
    partial.write_bytes((repo / WEIGHTS).read_bytes()[:-1000])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=2048))

    client.download()

    assert hub.bytes_sent(WEIGHTS) == 1000


def test_a_disk_that_fills_up(hub: HubServer, repo: Path, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program took the space meanwhile."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    hub.add("tiny/llama", repo)
    monkeypatch.setattr(fetch._Receiver, "write", full)

    refusal(client, "The disk is full: .*hub.*Free some space, or set HF_HOME to a larger disk.*resumes where")


def test_a_file_larger_than_the_caches_disk_takes(
    hub: HubServer, repo: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the Hub's cache lies is not set by paths.store."""

    def too_large(*_: object) -> int:
        raise OSError(errno.EFBIG, "File too large")

    hub.add("tiny/llama", repo)
    monkeypatch.setattr(fetch._Receiver, "write", too_large)

    refusal(client, f"{client.cache} would be larger than a file may be here.*HF_HOME=/some/folder")


def test_a_full_store_is_not_taken_for_the_cache(
    hub: HubServer, repo: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another HF_HOME would not help; whoever runs the stage knows what does."""

    def full(origin: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(origin), None, str(target))

    hub.add("tiny/llama", repo)
    monkeypatch.setattr(shutil, "copyfile", full)

    with pytest.raises(OSError, match=f"No space left on device.*{client.out}"):
        client.download()


def test_a_cache_that_may_not_be_written(
    hub: HubServer, repo: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a file stands where the cache's folder should be."""
    hub.add("tiny/llama", repo)
    client.cache.parent.mkdir()
    client.cache.write_text("not a folder")

    refusal(client, f"{client.cache}.* cannot be written .Not a directory.*HF_HOME")


def test_a_token_that_cannot_be_read(
    hub: HubServer, repo: Path, client: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Here a file stands where the token's folder should be."""
    hub.add("tiny/llama", repo)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "file" / "token"))

    refusal(client, f"The access token in {tmp_path}/file/token cannot be read .Not a directory.*HF_TOKEN_PATH")


def test_many_files_take_few_threads(
    hub: HubServer, repo: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data set may have thousands."""
    hub.add("tiny/llama", repo)
    listing, threads = look_up(HubSource("tiny/llama")), set[int]()

    def fetched(job: object, file: HubFile) -> Path:
        threads.add(get_ident())
        time.sleep(0.002)
        return repo / file.name

    monkeypatch.setattr(fetch, "_fetch_one", fetched)
    files = [HubFile(f"part{number}", 2, "", large=False) for number in range(40)]
    assert len(fetch.fetch(listing, files, SilentProgress())) == 40
    assert len(threads) == fetch.WORKERS


def test_a_dropped_connection_is_taken_up_again(
    hub: HubServer, tmp_path: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice in the middle of 25 MB: what had arrived in whole blocks is not sent again."""
    without_waiting(monkeypatch)
    size = hub.add("tiny/llama", write_model(tmp_path / "large", weight_bytes=25_000_000)).files[WEIGHTS].size
    hub.fault("tiny/llama", WEIGHTS, drop_after=12_000_000, times=2)

    snapshot = client.download()

    block = constants.DOWNLOAD_CHUNK_SIZE  # what the client holds in memory is lost: 12,000,000 - 10,485,760 twice
    starts = [request.first_byte for request in hub.asked(WEIGHTS) if request.host == "localhost"]
    assert starts == [0, block, 2 * block]
    assert hub.bytes_sent(WEIGHTS) == size + 2 * (12_000_000 - block)
    assert differing(client.out, snapshot.files) == []


def test_a_connection_that_stays_broken(
    hub: HubServer, repo: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How far it came, and that nothing is lost."""
    without_waiting(monkeypatch)
    hub.add("tiny/llama", repo)
    hub.fault("tiny/llama", WEIGHTS, drop_after=1000, times=100)

    refusal(client, rf"broke while fetching {WEIGHTS} of tiny/llama: 0 B of 195.\d KiB have arrived.*resumes where")


def test_a_server_that_cannot_continue_sends_all_again(hub: HubServer, repo: Path, client: Client) -> None:
    """A cache in between that ignores Range must not make a file of the wrong bytes."""
    served = hub.add("tiny/llama", repo).files[WEIGHTS]
    partial = client.cache / "models--tiny--llama" / "blobs" / f"{served.sha256}.incomplete"
    partial.parent.mkdir(parents=True)
    partial.write_bytes((repo / WEIGHTS).read_bytes()[:5000])
    hub.fault("tiny/llama", WEIGHTS, no_range=True)

    assert differing(client.out, client.download().files) == []


def test_a_partial_file_that_is_too_long_is_dropped(hub: HubServer, repo: Path, client: Client) -> None:
    """It cannot be the beginning of this file."""
    served = hub.add("tiny/llama", repo).files[WEIGHTS]
    partial = client.cache / "models--tiny--llama" / "blobs" / f"{served.sha256}.incomplete"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(bytes(served.size + 1))

    assert differing(client.out, client.download().files) == []


def test_a_listing_that_leaves_the_folder_is_refused(hub: HubServer, repo: Path, client: Client) -> None:
    """Names and hashes of a server become paths here."""
    listed = hub.add("tiny/llama", repo)
    listed.files["../../outside.json"] = listed.files["tokenizer.json"]

    refusal(client, r"lists '../../outside.json' of tiny/llama")


def test_a_mirror_without_hashes_is_refused(
    hub: HubServer, repo: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be verified is not used."""
    described = hub.add("tiny/llama", repo).describe(readable=False)
    monkeypatch.setattr(Repo, "describe", lambda *_, **__: described)

    refusal(client, "config.json of tiny/llama at main has .* The Hub.s hash is unknown")


def without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the client try again at once instead of after seconds, and ours not at all."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(faults, "PATIENCE_S", 0)
