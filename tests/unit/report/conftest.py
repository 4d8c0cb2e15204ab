"""Synthetic stores for the tests of the report."""

from pathlib import Path

import pytest

from pipelines.store.store import Store
from tests.support.report_store import full_store


@pytest.fixture(scope="session")
def two_formats(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """None and fp8, evaluated and benchmarked at concurrency 1, 4 and 16; nobody writes to it."""
    return full_store(Path(tmp_path_factory.mktemp("store")), ("none", "fp8"))
