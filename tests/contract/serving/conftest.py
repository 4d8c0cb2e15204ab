"""One echoing server and one OpenAI service in front of it for all tests that leave them as they are."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("tritonclient.grpc")

from pipelines.serving.config import ServingSettings
from pipelines.serving.frontend import OpenAiFrontend
from pipelines.serving.locate import why_no_server
from pipelines.serving.process import TritonServer
from tests.contract.serving.echo_repository import write_served_echo

SETTINGS = ServingSettings(openai=True, drain_timeout_s=5, startup_timeout_s=60)


@pytest.fixture(scope="package")
def echo_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The echoing model with a tokenizer of its words, a chat template and a room of 64 tokens."""
    return write_served_echo(tmp_path_factory.mktemp("echo"))


@pytest.fixture(scope="package")
def echo_server(echo_repository: Path) -> Iterator[TritonServer]:
    if fault := why_no_server(SETTINGS):
        pytest.skip(str(fault))
    with TritonServer(echo_repository, SETTINGS) as server:
        yield server


@pytest.fixture(scope="package")
def frontend(echo_server: TritonServer) -> Iterator[OpenAiFrontend]:
    with OpenAiFrontend(echo_server) as service:
        yield service
