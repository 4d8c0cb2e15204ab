"""An engine that fails inside tritonserver: its clients hear why, and the server ends with that reason.

Started again, it shows in its metrics how often it was.
"""

import shutil
import urllib.request
from pathlib import Path

import pytest

from pipelines.serving.locate import why_no_server
from pipelines.serving.logs import ServerFailedError
from pipelines.serving.process import TritonServer
from tests.contract.models.conftest import SERVING, Client

pytestmark = pytest.mark.thorough

FAILING = """

def _fail(self):
    raise RuntimeError("Exception from src/cpp/src/block_manager.hpp:17:\\nCheck 'has_block' failed at src/x.cpp:3")


Scheduler._iterate = _fail
"""


def test_the_assertion_of_the_engine_is_the_reason(repository: Path, tmp_path: Path) -> None:
    """Not that the server went on with an engine that answers nobody, nor what every start on a CPU logs."""
    if fault := why_no_server(SERVING):
        pytest.skip(str(fault))
    own = shutil.copytree(repository, tmp_path / "repository")
    with (own / "tensorrt_llm" / "1" / "model.py").open("a") as file:
        file.write(FAILING)
    with TritonServer(own, SERVING, log_file=tmp_path / "log") as server:
        client = Client(server.grpc_url)
        ids = {"input_ids": [2, 388], "input_lengths": 2, "request_output_len": 8}
        assert "The engine has failed: Exception from src/cpp" in client.ask("tensorrt_llm", **ids).error
        client.close()
        assert server._running.wait(60) == 1
        expected = (
            r"its process for model 'tensorrt_llm': exit code 1\. It said: .*Check 'has_block' failed at src/x\.cpp:3"
        )
        with pytest.raises(ServerFailedError, match=expected):
            server.check()
        server.restart()
        with urllib.request.urlopen(server.metrics_url) as page:
            assert "trtllm_pipelines_server_restarts 1" in page.read().decode()
