"""Call other models of this server, and release what the Python backend shares with us for each call.

The iterator of a decoupled call, with all its responses, is owned by us and by a housekeeping thread of the Python
backend (`Stub::SendCleanupId` in pb_stub.cc), which releases it some time after the last response. If that thread is
the last owner, it frees the responses' numpy arrays without the interpreter's lock and corrupts the heap: before 24.12
the process dies some hundred requests later (python_backend's pull request 390). Since then it waits for the
interpreter's lock while it holds another one that the next call needs. So calls are kept here until that thread is
known to be done with them: it processes one queue, and a query that went through the queue has been answered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from bls_inputs import RefusedError  # type: ignore[import-not-found]  # it lies beside this file

Array = np.ndarray[Any, Any]
PassQueue = Callable[[], bool]
"""Sends a query through the housekeeping thread's queue and waits for the answer; False if it could not be sent."""


class NestedCalls:
    """Calls of models that may answer more than once."""

    def __init__(self, *, decoupled: bool) -> None:
        """Prepare; `decoupled` is whether these models are."""
        self._decoupled = decoupled
        self._lock = threading.Lock()
        self._kept: list[Any] = []

    def ask(self, request: Any, pass_queue: PassQueue) -> Iterator[dict[str, Array]]:
        """Yield the outputs of each response that has some.

        Args:
            request: an InferenceRequest.
            pass_queue: of the client's request that this one is for.

        Raises:
            RefusedError: the model answered with an error.
        """
        if not self._decoupled:
            yield _checked(request.exec())
            return
        responses = request.exec(decoupled=True)
        unread = (response for response in responses)
        try:
            for response in unread:
                if found := _checked(response):
                    yield found
        finally:
            for _ in unread:  # the Python backend forgets a call only when its last response was read
                pass
            self._let_go(responses, pass_queue)

    def _let_go(self, responses: Any, pass_queue: PassQueue) -> None:
        with self._lock:
            kept, self._kept = [*self._kept, responses], []
        if not pass_queue():  # then another call releases these as well
            with self._lock:
                self._kept += kept


def ask_once(model: str, inputs: dict[str, Array], outputs: list[str]) -> dict[str, Array]:
    """Call a model that answers once.

    Raises:
        RefusedError: the model answered with an error.
    """
    return _checked(as_request(model, inputs, outputs).exec())


def as_request(
    model: str, inputs: dict[str, Array], outputs: list[str], request_id: str = "", timeout_us: int = 0
) -> Any:
    """An InferenceRequest; a timeout of 0 is none."""
    tensors = [pb_utils.Tensor(name, values) for name, values in inputs.items()]
    return pb_utils.InferenceRequest(
        model_name=model, requested_output_names=outputs, inputs=tensors, request_id=request_id, timeout=timeout_us
    )


def _checked(response: Any) -> dict[str, Array]:
    if response.has_error():
        raise RefusedError(response.error().message())
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
