"""A Hub on loopback and a client that knows only this Hub and an empty cache."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, file_download

from tests.support.hub_client import TOKEN, Client, Notes
from tests.support.hub_repos import write_model
from tests.support.hub_server import HubServer


@pytest.fixture
def hub() -> Iterator[HubServer]:
    """A Hub without repositories."""
    with HubServer(tokens=(TOKEN,)) as server:
        yield server


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """The folder of a model repository."""
    return write_model(tmp_path / "repo")


@pytest.fixture
def client(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    """A client of this Hub. The constants are what the variables HF_ENDPOINT and HF_HOME become at import."""
    cache = tmp_path / "hf" / "hub"
    addresses = {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
    }
    for module in (constants, file_download):  # 0.36 keeps copies in the second
        for name, value in addresses.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    return Client(tmp_path / "out", cache, Notes())
