"""One tritonserver with the bundled Gemma on the CPU engine, for all tests of the repository's models."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("modelopt")
pytest.importorskip("openvino_genai")
pytest.importorskip("tritonclient.grpc")

from pipelines.serving.config import ServingSettings
from pipelines.serving.locate import why_no_server
from pipelines.serving.process import TritonServer
from tests.support.served_gemma import MODEL, Client, write_gemma

__all__ = ["MODEL", "QUEUE", "Client"]
SERVING = ServingSettings(drain_timeout_s=5, startup_timeout_s=60)
QUEUE = 8


@pytest.fixture(scope="package")
def repository(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Path:
    root = tmp_path_factory.mktemp("models")
    return write_gemma(root, shared=shared, max_queue_size=QUEUE, triton_max_batch_size=4, stats_check_period_ms=20)


@pytest.fixture(scope="package")
def engine(repository: Path) -> Path:
    return repository.parent / "engine"


@pytest.fixture(scope="package")
def server(repository: Path) -> Iterator[TritonServer]:
    if fault := why_no_server(SERVING):
        pytest.skip(str(fault))
    with TritonServer(repository, SERVING) as running:
        yield running


@pytest.fixture
def client(server: TritonServer) -> Iterator[Client]:
    made = Client(server.grpc_url)
    yield made
    made.close()
