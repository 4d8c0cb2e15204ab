"""The Hub on loopback does what tests and people ask of it."""

import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from huggingface_hub import HfApi, hf_hub_download, snapshot_download

from tests.support.hub_client import TOKEN, Client
from tests.support.hub_server import HubServer

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.usefixtures("client")


def test_the_client_can_do_without_us(hub: HubServer, repo: Path) -> None:
    """`snapshot_download` of the whole repository, tree included."""
    commit = hub.add("tiny/llama", repo).commit

    folder = Path(snapshot_download("tiny/llama"))

    assert folder.name == commit
    assert (folder / "original/consolidated.00.pth").is_file()


def test_the_tree_has_hashes(hub: HubServer, repo: Path) -> None:
    """As the Hub's own listing."""
    served = hub.add("tiny/llama", repo).files["model.safetensors"]

    tree = {entry.path: entry for entry in HfApi().list_repo_tree("tiny/llama", recursive=True)}

    assert tree["model.safetensors"].lfs.sha256 == served.sha256  # type: ignore[union-attr]
    assert tree["config.json"].lfs is None  # type: ignore[union-attr]


def test_it_knows_its_tokens(hub: HubServer) -> None:
    """Who a token belongs to."""
    assert HfApi(token=TOKEN).whoami()["name"] == "tester"


def test_slow_is_slow(hub: HubServer, repo: Path) -> None:
    """200 kB at 1 MB/s take 0.2 s."""
    hub.add("tiny/llama", repo)
    hub.fault("tiny/llama", "model.safetensors", bytes_per_s=1_000_000)
    start = time.monotonic()

    hf_hub_download("tiny/llama", "model.safetensors")

    assert time.monotonic() - start > 0.19
    assert hub.bytes_sent("model.safetensors") == (repo / "model.safetensors").stat().st_size


def test_it_runs_by_hand(repo: Path, client: Client) -> None:
    """The first line says what to set."""
    command = [sys.executable, "-m", "tests.support.hub_server", str(repo), "--repo", "my/model"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        address = line.split()[0].removeprefix("HF_ENDPOINT=")
        with urllib.request.urlopen(f"{address}/api/models/my/model") as answer:
            assert answer.status == 200
        server.terminate()
