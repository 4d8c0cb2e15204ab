"""With HF_HUB_OFFLINE the cache is the Hub: complete and verified, or a clear no."""

from pathlib import Path

import pytest
from huggingface_hub import constants, hf_hub_download

from pipelines.domain.errors import UserError
from pipelines.hub import HubSource, download_dataset
from tests.support.hub_client import Client
from tests.support.hub_repos import write_dataset, write_model
from tests.support.hub_server import HubServer

WEIGHTS = "model.safetensors"


def go_offline(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As HF_HUB_OFFLINE=1 at the start of a process; the server forgets everything, so that it cannot help."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.repos.clear()
    hub.forget()


@pytest.mark.parametrize("shards", [1, 2])
def test_a_cached_model_needs_no_network(
    hub: HubServer, tmp_path: Path, client: Client, monkeypatch: pytest.MonkeyPatch, shards: int
) -> None:
    """The same commit and files as online, and no request."""
    hub.add("tiny/llama", write_model(tmp_path / "model", shards=shards))
    online = client.download()
    go_offline(hub, monkeypatch)

    assert client.download() == online
    assert hub.requests == []


def test_nothing_cached(hub: HubServer, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which repository, which revision, which cache, and what to do."""
    go_offline(hub, monkeypatch)

    with pytest.raises(
        UserError, match=rf"model tiny/llama at 'main' is not complete in {client.cache}.*Unset HF_HUB_OFFLINE"
    ):
        client.download()


def test_another_revision_is_not_taken_instead(
    hub: HubServer, repo: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only main is cached."""
    hub.add("tiny/llama", repo, branches=("main", "v2"))
    client.download()
    go_offline(hub, monkeypatch)

    with pytest.raises(UserError, match=r"tiny/llama at 'v2' is not complete"):
        client.download(revision="v2")


def test_a_download_that_was_broken_off_is_not_found(
    hub: HubServer, repo: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its revision gets a name in the cache only at the end."""
    hub.add("tiny/llama", repo)
    hub.fault("tiny/llama", WEIGHTS, hide=True)
    with pytest.raises(UserError, match=r"does not serve"):
        client.download()
    go_offline(hub, monkeypatch)

    with pytest.raises(UserError, match=r"tiny/llama at 'main' is not complete"):
        client.download()


def test_a_tokenizer_that_another_tool_cached_is_no_model(
    hub: HubServer, repo: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache is shared; what is there of the repository may be a part."""
    hub.add("tiny/llama", repo)
    for name in ("config.json", "tokenizer.json"):
        hf_hub_download("tiny/llama", name)
    go_offline(hub, monkeypatch)

    with pytest.raises(UserError, match=r"tiny/llama at main in the local cache has neither model.safetensors nor"):
        client.download()


def test_a_missing_shard_is_named(
    hub: HubServer, tmp_path: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index tells which files make the model."""
    hub.add("tiny/llama", write_model(tmp_path / "model", shards=2))
    client.download()
    next(client.cache.rglob("model-00002-of-00002.safetensors")).unlink()
    go_offline(hub, monkeypatch)

    with pytest.raises(UserError, match=r"1 of 2 shards .*: model-00002-of-00002.safetensors. Unset HF_HUB_OFFLINE"):
        client.download()


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json"])
def test_a_damaged_file_is_refused_and_kept(
    hub: HubServer, repo: Path, client: Client, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """There is no better copy to fetch."""
    hub.add("tiny/llama", repo)
    client.download()
    cached = next(client.cache.rglob(f"snapshots/*/{name}"))
    cached.write_bytes(b"damaged")
    go_offline(hub, monkeypatch)

    with pytest.raises(
        UserError, match=rf"{name} of tiny/llama at main in the local cache has .* Unset HF_HUB_OFFLINE"
    ):
        client.download()
    assert cached.read_bytes() == b"damaged"


def test_a_cache_without_hashes_is_refused(
    hub: HubServer, repo: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where links are not possible the cache holds files whose hash nobody recorded."""
    hub.add("tiny/llama", repo)
    client.download()
    cached = next(client.cache.rglob("snapshots/*/config.json"))
    content = cached.read_bytes()
    cached.unlink()
    cached.write_bytes(content)
    go_offline(hub, monkeypatch)

    with pytest.raises(UserError, match=r"config.json .* The Hub.s hash is unknown"):
        client.download()


def test_a_cached_data_set_needs_no_network(
    hub: HubServer, tmp_path: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for data."""
    hub.add("tiny/data", write_dataset(tmp_path / "data"), repo_type="dataset")
    source = HubSource("tiny/data", repo_type="dataset")
    online = download_dataset(source, client.out, progress=client.notes)
    go_offline(hub, monkeypatch)

    assert download_dataset(source, client.out, progress=client.notes) == online
