"""These tests need a CUDA GPU; elsewhere they are skipped with the reason."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.fixture(autouse=True)
def _gpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU is visible to PyTorch")
