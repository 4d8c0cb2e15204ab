"""Query the server through Triton's gRPC interface: its models, statistics and versions."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from pipelines.domain.errors import UserError, did_you_mean
from pipelines.loadgen.triton_stream import IMAGES, TEXT, TritonInterface

_NEEDED = ("text_input", "max_tokens")
_ENCODERS = "multimodal_encoders"
_TIMEOUT_S = 10.0
_COUNTERS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")


class Server:
    """One Triton server, at the host:port of its gRPC."""

    def __init__(self, url: str, images: int = 0, visual_tokens: int = 1) -> None:
        self.url, self._images, self._added = url, images, images * (visual_tokens - 1)
        self._client = triton.InferenceServerClient(url)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def is_live(self) -> bool:
        """Return whether the server responds."""
        try:
            return bool(self._client.is_server_live(client_timeout=_TIMEOUT_S))
        except InferenceServerException:
            return False

    def describe(self, model_name: str, *, streaming: bool) -> TritonInterface:
        """Check that a model can be benchmarked, and return its interface.

        Raises:
            UserError: no server responds, or the model is missing, not ready, has another interface or cannot stream.
        """
        if not self.is_live():
            raise UserError(
                f"No Triton server responds at {self.url} (gRPC).",
                todo="Check benchmark.url: it must name the gRPC port, usually 8001, not HTTP's 8000.",
            )
        with self._faults():
            self._check_model(model_name)
            if self._images and not self._client.is_model_ready(_ENCODERS, client_timeout=_TIMEOUT_S):
                raise UserError(
                    f"The server at {self.url} has no model {_ENCODERS}, so it takes no pictures"
                    f" (workload.images={self._images}).",
                    todo="Serve a model that sees, e.g. model=tiny_llava, or set workload.images=0.",
                )
            config = self._client.get_model_config(model_name, client_timeout=_TIMEOUT_S).config
            interface = TritonInterface(
                model_name=model_name,
                batched=config.max_batch_size > 0,
                decoupled=config.model_transaction_policy.decoupled or self._any_step_decoupled(config),
                inputs=frozenset(item.name for item in config.input),
                outputs=frozenset(item.name for item in config.output),
                add_special_tokens=self._adds_special_tokens(),
                added_tokens=self._added,
            )
        _check_interface(interface, streaming, [item.name for item in config.input if not item.optional])
        if self._images and IMAGES not in interface.inputs:
            todo = "Leave out benchmark.model_name, or set it to tensorrt_llm_bls."
            raise UserError(
                f"Model '{model_name}' has no input '{IMAGES}' for workload.images={self._images}.", todo=todo
            )
        return interface

    def facts(self, model_name: str) -> dict[str, Any]:
        """Return versions and names, for the result."""
        with self._faults():
            about = self._client.get_server_metadata(client_timeout=_TIMEOUT_S)
            # a server that is open to other machines closes the index of its repository
            models = self._client.get_inference_statistics(client_timeout=_TIMEOUT_S).model_stats
        versions = {model.name: model.version for model in models}
        return {
            "url": self.url,
            "model_name": model_name,
            "name": about.name,
            "version": about.version,
            "model_versions": versions,
        }

    def counters(self) -> dict[str, dict[str, int]]:
        """Return cumulative statistics per model: counts and ns; empty if the server does not respond."""
        try:
            answer = self._client.get_inference_statistics(client_timeout=_TIMEOUT_S)
        except InferenceServerException:
            return {}
        return {model.name: _row(model) for model in answer.model_stats}

    def _check_model(self, name: str) -> None:
        if self._client.is_model_ready(name, client_timeout=_TIMEOUT_S):
            return
        try:
            index = {m.name: m for m in self._client.get_model_repository_index(client_timeout=_TIMEOUT_S).models}
        except InferenceServerException as error:
            if "restricted" not in error.message():
                raise
            ready = sorted(self.counters())  # a server that is open to other machines closes its index
            raise UserError(
                f"benchmark.model_name='{name}' is not ready on the server at {self.url}, or not a model.",
                allowed=f"Ready are {', '.join(ready)}." if ready else "",
                todo=did_you_mean(name, ready),
            ) from None
        if name in index:
            state = index[name].state or "not loaded"
            why = f" ({index[name].reason})" if index[name].reason else ""
            raise UserError(f"Model '{name}' on {self.url} is not ready: {state}{why}.", todo="See the server's log.")
        raise UserError(
            f"benchmark.model_name='{name}' is not a model on the server at {self.url}.",
            allowed=f"It has {', '.join(sorted(index)) or 'none'}.",
            todo=did_you_mean(name, index),
        )

    def _any_step_decoupled(self, config: Any) -> bool:
        """Return whether any model of an ensemble is decoupled, which its own configuration does not state."""
        for step in config.ensemble_scheduling.step:
            inner = self._client.get_model_config(step.model_name, client_timeout=_TIMEOUT_S).config
            if inner.model_transaction_policy.decoupled:
                return True
        return False

    def _adds_special_tokens(self) -> bool:
        """Return whether the model `preprocessing` adds special tokens; by default, and where it is missing, yes."""
        if not self._client.is_model_ready("preprocessing", client_timeout=_TIMEOUT_S):
            return True
        config = self._client.get_model_config("preprocessing", client_timeout=_TIMEOUT_S).config
        value = str(config.parameters["add_special_tokens"].string_value).strip().lower()
        return value not in ("false", "0", "no", "n", "off")

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except InferenceServerException as error:
            raise UserError(f"The server at {self.url} says: {error.message()}.") from None


def _check_interface(interface: TritonInterface, streaming: bool, required: list[str]) -> None:
    name = interface.model_name
    if missing := [key for key in _NEEDED if key not in interface.inputs]:
        raise UserError(
            f"Model '{name}' has no input '{missing[0]}'.",
            allowed=f"The load generator needs the inputs {' and '.join(_NEEDED)}; this model has "
            f"{', '.join(sorted(interface.inputs)) or 'no inputs'}.",
            todo="Set benchmark.model_name to ensemble or tensorrt_llm_bls.",
        )
    if extra := [key for key in required if key not in _NEEDED]:
        raise UserError(f"Model '{name}' needs the input '{extra[0]}', which the load generator does not send.")
    if TEXT not in interface.outputs:
        raise UserError(f"Model '{name}' has no output '{TEXT}'.", allowed=", ".join(sorted(interface.outputs)))
    if streaming and "stream" not in interface.inputs:
        raise UserError(f"Model '{name}' has no input 'stream'.", todo="Add benchmark.streaming=false.")
    if streaming and not interface.decoupled:
        raise UserError(
            f"Model '{name}' is not decoupled, so it sends one response per request and cannot stream.",
            todo="Add benchmark.streaming=false, or write the repository with decoupled mode.",
        )


def _row(model: Any) -> dict[str, int]:
    stats = model.inference_stats
    row = {"inferences": int(model.inference_count), "executions": int(model.execution_count)}
    for name in _COUNTERS:
        part = getattr(stats, name)
        row |= {f"{name}_count": int(part.count), f"{name}_ns": int(part.ns)}
    return row


def statistics_between(
    before: Mapping[str, Mapping[str, int]], after: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, float]]:
    """Return each model's statistics between two readings: counts, mean seconds per request in queue and compute."""
    rows = {}
    for name, late in after.items():
        early = before.get(name, {})
        delta = {key: value - early.get(key, 0) for key, value in late.items()}
        row: dict[str, float] = {key: delta[key] for key in ("inferences", "executions")}
        row |= {"succeeded": delta["success_count"], "failed": delta["fail_count"]}
        for part in _COUNTERS[2:]:
            count = delta[f"{part}_count"]
            if count:
                row[f"{part}_mean_s"] = delta[f"{part}_ns"] / count / 1e9
        rows[name] = row
    return rows
