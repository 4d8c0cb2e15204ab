"""The model files of the Triton repository, imported with a stand-in for the module the server provides."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import triton_repo
from pipelines.checkpoint import tokenizer_folder

MODELS = Path(triton_repo.__file__).parent / "models"


class Tensor:
    """A named array."""

    def __init__(self, name: str, values: Any) -> None:
        self._name, self._values = name, values

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._values


class TritonError:
    """An error with its kind."""

    INVALID_ARG, UNAVAILABLE, INTERNAL = 1, 2, 3

    def __init__(self, message: str, kind: int) -> None:
        self.message, self.kind = message, kind


class Response:
    """Output tensors or an error."""

    def __init__(self, tensors: list[Tensor] | None = None, error: TritonError | None = None) -> None:
        self.tensors = {tensor.name(): tensor.as_numpy() for tensor in tensors or []}
        self.error = error


class Request:
    """Input tensors and the outputs wanted."""

    def __init__(self, inputs: dict[str, Any], outputs: list[str]) -> None:
        self.given = {name: Tensor(name, values) for name, values in inputs.items()}
        self._outputs = outputs

    def requested_output_names(self) -> list[str]:
        return self._outputs


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Import the model.py of a model by its name."""
    utils: Any = ModuleType("triton_python_backend_utils")
    utils.Tensor, utils.TritonError, utils.InferenceResponse = Tensor, TritonError, Response
    utils.TritonModelException = RuntimeError
    utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    utils.get_input_tensor_by_name = lambda request, name: request.given.get(name)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", utils)

    def make(name: str) -> Any:
        monkeypatch.syspath_prepend(str(MODELS / name))  # as the server does
        monkeypatch.syspath_prepend(str(Path(tokenizer_folder.__file__).parent))  # which a repository has beside it
        spec = importlib.util.spec_from_file_location(f"model_{name}", MODELS / name / "model.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return make


def texts(*values: bytes) -> np.ndarray[Any, Any]:
    """Strings of a batch, [n, 1]."""
    return np.array([[value] for value in values], dtype=object)
