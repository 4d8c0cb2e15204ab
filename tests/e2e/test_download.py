"""Downloads as a process of their own, told by HF_* variables alone: killed, repeated, offline, two at once."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.hub_repos import write_model
from tests.support.hub_server import HubServer
from tests.support.records import differing

ROOT = Path(__file__).parents[2]
TOKEN = "hf_loopbackSecretThatNobodyMaySee"
WEIGHTS = "model.safetensors"
LARGE = 25_000_000

# Prints the snapshot, and what else the process reached for: loaded transfer libraries and contacted addresses.
PROGRAM = """
import json, logging, sys
from pathlib import Path
contacted = set()
sys.addaudithook(lambda event, args: contacted.add(args[1][0]) if event == "socket.connect" else None)
logging.basicConfig(level=logging.DEBUG)
from pipelines.domain.errors import UserError
from pipelines.domain.progress import SilentProgress
from pipelines.hub import HubSource, download_model
try:
    found = download_model(HubSource("tiny/llama"), Path(sys.argv[1]), expected_shape=None, progress=SilentProgress())
except UserError as error:
    sys.exit(f"UserError: {error}")
print(json.dumps({"commit": found.commit, "files": found.files, "contacted": sorted(contacted),
                  "xet": "hf_xet" in sys.modules, "torch": "torch" in sys.modules}))
"""


@pytest.fixture
def hub() -> Iterator[HubServer]:
    """A Hub without repositories."""
    with HubServer(tokens=(TOKEN,), offers_xet=True) as server:
        yield server


def start(hub: HubServer, folder: Path, out: str = "out", **variables: str) -> subprocess.Popen[str]:
    """Start a download into a folder; its cache is next to it."""
    kept = {name: value for name, value in os.environ.items() if not name.upper().startswith(("HF_", "HUGGING"))}
    env = {
        **kept,
        "PYTHONPATH": str(ROOT),
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(folder / "hf"),
        "NO_PROXY": "127.0.0.1,localhost",
        **variables,
    }
    command = [sys.executable, "-c", PROGRAM, str(folder / out)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What the download printed."""
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return dict(json.loads(output))


def test_a_killed_download_goes_on(hub: HubServer, tmp_path: Path) -> None:
    """Killed after half of the weights: the next run asks for the other half only."""
    size = hub.add("tiny/llama", write_model(tmp_path / "repo", weight_bytes=LARGE)).files[WEIGHTS].size
    hub.fault("tiny/llama", WEIGHTS, hold_after=12_000_000)
    first = start(hub, tmp_path)
    wait_until(lambda: partial_size(tmp_path) >= 10 << 20, first)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    kept = partial_size(tmp_path)
    hub.fault("tiny/llama", WEIGHTS)
    hub.forget()

    second = finish(start(hub, tmp_path))

    assert [request.first_byte for request in hub.asked(WEIGHTS)] == [kept, kept]  # the redirect and the file
    assert hub.bytes_sent(WEIGHTS) == size - kept
    assert hub.bytes_sent("config.json") == 0
    assert differing(tmp_path / "out", second["files"]) == []
    assert partial_size(tmp_path) == 0


def test_an_interruption_waits_for_no_server(hub: HubServer, tmp_path: Path) -> None:
    """Ctrl-C during a transfer that stands still; the client's own wait for more lasts ten seconds."""
    hub.add("tiny/llama", write_model(tmp_path / "repo"))
    hub.fault("tiny/llama", WEIGHTS, hold_after=1000)
    process = start(hub, tmp_path)
    wait_until(lambda: hub.bytes_sent(WEIGHTS) >= 1000, process)
    process.send_signal(signal.SIGINT)
    begun = time.monotonic()

    process.communicate(timeout=60)

    assert time.monotonic() - begun < 5


def test_two_at_once_fetch_one_copy(hub: HubServer, tmp_path: Path) -> None:
    """The second waits for the first, then links the same file."""
    size = hub.add("tiny/llama", write_model(tmp_path / "repo")).files[WEIGHTS].size
    hub.fault("tiny/llama", WEIGHTS, bytes_per_s=200_000)

    both = [start(hub, tmp_path, out) for out in ("a", "b")]
    for process in both:
        finish(process)

    assert hub.bytes_sent(WEIGHTS) == size
    assert (tmp_path / "a" / WEIGHTS).stat().st_ino == (tmp_path / "b" / WEIGHTS).stat().st_ino


def test_nothing_but_the_hub_is_contacted(hub: HubServer, tmp_path: Path) -> None:
    """Only loopback here; the transfer library that bypasses the endpoint is not even loaded, nor is torch."""
    hub.add("tiny/llama", write_model(tmp_path / "repo"))

    found = finish(start(hub, tmp_path))

    assert found["contacted"] == ["127.0.0.1"]
    assert not found["xet"]
    assert not found["torch"]


def test_the_token_is_nowhere(hub: HubServer, tmp_path: Path) -> None:
    """Not in the output, not in the log at its loudest, not in any file; with a good token and with a bad one."""
    hub.add("tiny/llama", write_model(tmp_path / "repo"), gated=True, accepted=(TOKEN,))

    texts = []
    for token in (TOKEN, f"{TOKEN}Expired"):
        texts += start(hub, tmp_path, HF_TOKEN=token, HF_DEBUG="1").communicate(timeout=240)

    assert "rejects the access token" in texts[-1]
    assert not any(TOKEN in text for text in texts)
    files = [path for folder in ("hf", "out") for path in (tmp_path / folder).rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not any(TOKEN.encode() in path.read_bytes() for path in files)


def test_offline_with_and_without_a_cache(hub: HubServer, tmp_path: Path) -> None:
    """HF_HUB_OFFLINE=1 works from HF_HOME, and says so when it cannot."""
    hub.add("tiny/llama", write_model(tmp_path / "repo"))
    refused = start(hub, tmp_path, HF_HUB_OFFLINE="1").communicate(timeout=240)[1]
    online = finish(start(hub, tmp_path))
    hub.forget()

    offline = finish(start(hub, tmp_path, HF_HUB_OFFLINE="1"))

    assert "UserError: HF_HUB_OFFLINE is set, and the model tiny/llama at 'main' is not complete" in refused
    assert offline["files"] == online["files"]
    assert hub.requests == []


def partial_size(folder: Path) -> int:
    """Bytes of weights that have arrived but are not complete."""
    return sum(path.stat().st_size for path in folder.glob("hf/hub/models--*/blobs/*.incomplete"))


def wait_until(reached: Any, process: subprocess.Popen[str]) -> None:
    """Wait for a condition while a process lives."""
    deadline = time.monotonic() + 200
    while not reached():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
