"""One tritonserver and one OpenAI service on the bundled Gemma, for clients that misbehave."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("modelopt")
pytest.importorskip("openvino_genai")
pytest.importorskip("tritonclient.grpc")

from pipelines.serving.config import ServingSettings
from pipelines.serving.frontend import OpenAiFrontend
from pipelines.serving.locate import why_no_server
from pipelines.serving.process import TritonServer
from tests.contract.faults.well_behaved import References
from tests.support.served_gemma import LIMITS, Client, write_gemma

SERVING = ServingSettings(openai=True, drain_timeout_s=5, startup_timeout_s=60)
QUEUE = 256
KV_TOKENS = 8192
"""16 MiB of KV cache: its pages are first touched when first used, and a pool that is not yet full would look like a
leak (100 KiB per request of the default 1 GiB)."""
SETTINGS = {
    "max_queue_size": QUEUE,
    "triton_max_batch_size": 8,
    "stats_check_period_ms": 20,
    "max_tokens_in_paged_kv_cache": KV_TOKENS,
    "guided_decoding_backend": "llguidance",
}


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Iterator[TritonServer]:
    if fault := why_no_server(SERVING):
        pytest.skip(str(fault))
    root = tmp_path_factory.mktemp("faults")
    repository = write_gemma(
        root, limits=replace(LIMITS, max_batch_size=8), shared=shared, cancellation_check_period_ms=10, **SETTINGS
    )
    with TritonServer(repository, SERVING) as server:
        yield server


@pytest.fixture(scope="package")
def openai_service(served: TritonServer) -> Iterator[OpenAiFrontend]:
    with OpenAiFrontend(served) as service:
        yield service


@pytest.fixture(scope="package")
def references(served: TritonServer) -> References:
    """What well-behaved clients got before anybody misbehaved."""
    return References(served)


@pytest.fixture
def client(served: TritonServer) -> Iterator[Client]:
    made = Client(served.grpc_url)
    yield made
    made.close()
