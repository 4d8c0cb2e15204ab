"""The scripts of `make scripts` on one machine with two GPUs: mpirun starts the ranks as it would over several."""

import json
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request

import pytest

from tests.gpu_trtllm.conftest import MODEL

START_S = 600
READY = "http://127.0.0.1:8000/v2/health/ready"


@pytest.fixture(scope="module", autouse=True)
def _two_gpus():
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False).stdout
    if len(listed.splitlines()) < 2:
        pytest.skip("two ranks need two GPUs")
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not on PATH")


def answers() -> bool:
    try:
        with urllib.request.urlopen(READY, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def test_the_scripts_build_and_serve_two_ranks(cli):
    words = ["engine=tensorrt_llm", f"model.path={MODEL}", "quant=none", "build.tp_size=2"]
    cli.run("scripts", "cluster=mpi", "cluster.hosts=[localhost]", *words)
    (folder,) = (path for path in (cli.folder / "cluster").iterdir() if not path.name.endswith(".runs"))
    subprocess.run(["bash", folder / "build.sh"], check=True, timeout=1800)
    with subprocess.Popen(["bash", folder / "serve.sh"], start_new_session=True) as server:
        try:
            end = time.monotonic() + START_S
            while not answers():
                assert server.poll() is None, "the server ended before it answered"
                assert time.monotonic() < end, f"no answer after {START_S} s"
                time.sleep(1)
            body = json.dumps({"text_input": "The river of Githbrel is", "max_tokens": 8}).encode()
            url = READY.replace("health/ready", "models/ensemble/generate")
            with urllib.request.urlopen(url, body, timeout=60) as answer:
                assert json.loads(answer.read())["text_output"].strip()
        finally:
            server.send_signal(signal.SIGTERM)
