"""One tritonserver with the bundled Gemma on the CPU engine, for all tests of the repository's models."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("modelopt")
pytest.importorskip("openvino_genai")
grpc = pytest.importorskip("tritonclient.grpc")

import pipelines.zoo  # noqa: E402 - after the skips
from pipelines.compress import CalibrationSpec, QuantSpec, quantize  # noqa: E402
from pipelines.domain.formats import KvFormat, QFormat  # noqa: E402
from pipelines.domain.progress import SilentProgress  # noqa: E402
from pipelines.engines.openvino.engine import OpenVinoEngine  # noqa: E402
from pipelines.engines.port import BuildLimits  # noqa: E402
from pipelines.serving.locate import why_no_server  # noqa: E402
from pipelines.serving.process import TritonServer  # noqa: E402
from pipelines.serving.settings import ServingSettings  # noqa: E402
from triton_repo.settings import TritonSettings  # noqa: E402
from triton_repo.spec import RepositorySpec  # noqa: E402
from triton_repo.write import write_repository  # noqa: E402

MODEL = Path(pipelines.zoo.__file__).parent / "models" / "tiny_gemma"
LIMITS = BuildLimits(max_batch_size=4, max_input_len=256, max_seq_len=1024, max_num_tokens=512, max_beam_width=3)
SERVING = ServingSettings(drain_timeout_s=5, startup_timeout_s=60)
QUEUE = 8


@dataclass
class Answer:
    """All responses to one request.

    Attributes:
        parts: tensors by name, one dict per response that had any.
        error: the error, or empty.
    """

    parts: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""

    @property
    def text(self) -> str:
        """All text, joined."""
        assert not self.error
        return "".join(part["text_output"].reshape(-1)[0].decode() for part in self.parts)

    @property
    def tokens(self) -> list[int]:
        """All token ids of the first beam, joined."""
        assert not self.error
        return [token for part in self.parts for token in part["output_ids"][0, 0].tolist()]


class Client:
    """Sends requests over one gRPC stream."""

    def __init__(self, url: str) -> None:
        self._client = grpc.InferenceServerClient(url)
        self._found: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._client.start_stream(lambda result, error: self._found.put((result, error)))

    def send(self, model: str, request_id: str, **inputs: Any) -> None:
        """Send without waiting."""
        tensors = []
        for name, value in inputs.items():
            array = tensor(value)
            made = grpc.InferInput(name, array.shape, DTYPES[array.dtype.char])
            made.set_data_from_numpy(array)
            tensors.append(made)
        self._client.async_stream_infer(model, tensors, request_id=request_id, enable_empty_final_response=True)

    def take(self, *ids: str) -> dict[str, Answer]:
        """Wait for the ends of these requests."""
        answers = {name: Answer() for name in ids}
        open_ids = set(ids)
        while open_ids:
            result, error = self._found.get(timeout=30)
            if error is not None:
                # errors on a stream do not say whose they are; tests that make them send one request at a time
                answers[min(open_ids)].error = str(error)
                open_ids.discard(min(open_ids))
                continue
            response = result.get_response()
            if response.outputs:
                answers[response.id].parts.append({o.name: result.as_numpy(o.name) for o in response.outputs})
            if response.parameters["triton_final_response"].bool_param:
                open_ids.discard(response.id)
        return answers

    def ask(self, model: str, **inputs: Any) -> Answer:
        """Send one request and wait for its end."""
        self.send(model, "one", **inputs)
        return self.take("one")["one"]

    def first(self) -> dict[str, Any]:
        """Wait for one response of any request."""
        result, error = self._found.get(timeout=30)
        assert error is None
        return {o.name: result.as_numpy(o.name) for o in result.get_response().outputs}

    def close(self, *, cancel: bool = False) -> None:
        """Close the stream."""
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()


DTYPES = {"i": "INT32", "f": "FP32", "?": "BOOL", "O": "BYTES", "L": "UINT64"}


def tensor(value: Any) -> np.ndarray[Any, Any]:
    """A scalar or list becomes [1, n]; what has two dimensions stays."""
    if isinstance(value, np.ndarray):
        return value
    values = value if isinstance(value, list) else [value]
    if isinstance(values[0], str | bytes):
        return np.array([[v.encode() if isinstance(v, str) else v for v in values]], dtype=object)
    kind = np.bool_ if isinstance(values[0], bool) else np.int32 if isinstance(values[0], int) else np.float32
    return np.array([values], dtype=kind)


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    calibration = CalibrationSpec(size=1, seq_len=16, batch_size=1)
    quantize(MODEL, root / "checkpoint", QuantSpec(QFormat.NONE, KvFormat.AUTO), ["a"], calibration)
    OpenVinoEngine().build(root / "checkpoint", LIMITS, root / "engine", SilentProgress())
    return root / "engine"


@pytest.fixture(scope="session")
def repository(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("served") / "repository"
    settings = TritonSettings(max_queue_size=QUEUE, triton_max_batch_size=4, stats_check_period_ms=20)
    spec = RepositorySpec(flavour="openvino", label="tiny_gemma", variant="none", enable_chunked_context=True)
    write_repository(out, engine_dir=engine, tokenizer_dir=MODEL, settings=settings, spec=spec, made_from={})
    return out


@pytest.fixture(scope="session")
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
