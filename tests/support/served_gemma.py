"""The bundled Gemma on the CPU engine in a real Triton repository, and a client that collects answers."""

import queue
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpc

from pipelines.compress.config import CalibrationSettings
from pipelines.compress.quantizing import quantize
from pipelines.domain.formats import KvFormat, QFormat
from pipelines.domain.progress import SilentProgress
from pipelines.engines.openvino.engine import OpenVinoEngine
from pipelines.engines.openvino.runtime import OpenVinoOptions
from pipelines.engines.port import BuildLimits
from pipelines.settings.model import BUNDLED
from tests.support.made_once import made_once
from tests.support.specs import quant_spec
from triton_repo.config import TritonSettings
from triton_repo.parameters import RepositorySpec
from triton_repo.write import write_repository

MODEL = BUNDLED / "models" / "tiny_gemma"
COMPUTES = OpenVinoOptions(inference_precision="f32", num_threads=1)
"""How the served engine computes: in bf16 its tokens depend on who else is in the batch."""
LIMITS = BuildLimits(max_batch_size=4, max_input_len=256, max_seq_len=1024, max_num_tokens=512, max_beam_width=3)


def write_gemma(root: Path, *, limits: BuildLimits = LIMITS, shared: Path | None = None, **settings: Any) -> Path:
    """Build the engine and write a repository for it.

    Args:
        root: folder to work in.
        limits: limits of the engine.
        shared: folder of all workers of the tests, where the checkpoint is made once.
        settings: values of `TritonSettings`.

    Returns:
        the repository.
    """
    checkpoint = made_once((shared or root) / "gemma-16-bit", _sixteen_bit)
    OpenVinoEngine().build(checkpoint, limits, root / "engine", SilentProgress())
    spec = RepositorySpec(
        flavour="openvino",
        label="tiny_gemma",
        variant="none",
        enable_chunked_context=True,
        options=COMPUTES.model_dump(exclude_unset=True),
    )
    write_repository(
        root / "repository",
        engine_dir=root / "engine",
        tokenizer_dir=MODEL,
        settings=TritonSettings(**settings),
        spec=spec,
        made_from={},
    )
    return root / "repository"


def _sixteen_bit(folder: Path) -> None:
    calibration = CalibrationSettings(size=1, seq_len=16, batch_size=1)
    quantize(MODEL, folder, quant_spec(QFormat.NONE, KvFormat.AUTO), ["a"], calibration)


@dataclass
class Answer:
    """All responses to one request.

    Attributes:
        parts: tensors by name, one dict for each response with tensors.
        error: the error, or empty.
    """

    parts: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""

    @property
    def text(self) -> str:
        """Return all text, joined."""
        assert not self.error
        return "".join(part["text_output"].reshape(-1)[0].decode() for part in self.parts)

    @property
    def tokens(self) -> list[int]:
        """Return all token ids of the first beam, joined."""
        assert not self.error
        return [token for part in self.parts for token in part["output_ids"][0, 0].tolist()]


class Client:
    """Sends requests over one gRPC stream."""

    def __init__(self, url: str) -> None:
        self._client = grpc.InferenceServerClient(url)
        self._found: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._client.start_stream(lambda result, error: self._found.put((result, error)))

    def send(self, model: str, request_id: str, *, timeout_us: int | None = None, **inputs: Any) -> None:
        """Send a request without waiting for its answer; it may stay in the server's queue for `timeout_us`."""
        tensors = []
        for name, value in inputs.items():
            array = tensor(value)
            made = grpc.InferInput(name, array.shape, DTYPES[array.dtype.char])
            made.set_data_from_numpy(array)
            tensors.append(made)
        self._client.async_stream_infer(
            model, tensors, request_id=request_id, enable_empty_final_response=True, timeout=timeout_us
        )

    def take(self, *ids: str) -> dict[str, Answer]:
        """Wait for the ends of these requests."""
        answers = {name: Answer() for name in ids}
        open_ids = set(ids)
        while open_ids:
            result, error = self._found.get(timeout=60)
            if error is not None:
                # errors on a stream do not identify their request; tests that cause errors send one request at a time
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
        result, error = self._found.get(timeout=60)
        assert error is None
        return {o.name: result.as_numpy(o.name) for o in result.get_response().outputs}

    def first_or_error(self) -> None:
        """Wait for the first response or error."""
        self._found.get(timeout=60)

    def close(self, *, cancel: bool = False) -> None:
        """Close the stream."""
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()


DTYPES = {"i": "INT32", "f": "FP32", "?": "BOOL", "O": "BYTES", "L": "UINT64", "B": "UINT8"}


def tensor(value: Any) -> np.ndarray[Any, Any]:
    """Make an input tensor: a scalar or list becomes [1, n], two-dimensional values stay unchanged."""
    if isinstance(value, np.ndarray):
        return value
    values = value if isinstance(value, list) else [value]
    if isinstance(values[0], str | bytes):
        return np.array([[v.encode() if isinstance(v, str) else v for v in values]], dtype=object)
    kind = np.bool_ if isinstance(values[0], bool) else np.int32 if isinstance(values[0], int) else np.float32
    return np.array([values], dtype=kind)
