"""Client of the tritonserver behind: one gRPC stream per answer, always read to its end.

Cancelling a stream just as its last responses go out crashes tritonserver 2.51 (its gRPC service, not a model). So an
abandoned answer is stopped in the engine, by its id, and its stream then ends normally.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, Self

import grpc
import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from pipelines.host.token_socket import PARAMETER, TokenListener
from pipelines.serving.openai.errors import ApiError, from_triton
from pipelines.serving.openai.generation import TokenPart
from pipelines.serving.openai.inputs import FEW_LOG_PROBS, InputTensor, prompt_inputs
from pipelines.serving.openai.scoring import pairs
from pipelines.serving.repository import ENCODERS

NUMPY = {
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT64": np.uint64,
    "FP16": np.float16,
    "FP32": np.float32,
    "BOOL": np.bool_,
    "BYTES": np.object_,
}
CHANNEL = (
    # gRPC waits up to two minutes between attempts; a server that was started again is to be found at once
    ("grpc.max_reconnect_backoff_ms", 500),
    # tritonclient drops its own limits where options are given; gRPC's is 4 MiB, seven tokens of a large vocabulary
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
)
ENGINE = "tensorrt_llm"
"""The Triton model that computes; it takes tokens."""
ENSEMBLE = "ensemble"
STOP_S = (0.02, 0.5)
"""Seconds to wait for the end of a stream that nobody reads; after each, its request is stopped.

The engine may be at its end itself (a stop string that it knows too), and the first stop may come before the request.
"""
CANCEL_S = 5.0
"""Seconds after which such a stream is cancelled after all."""
AHEAD = 64
"""Responses that may wait for a slow client; gRPC's flow control then holds back the server. Plain tokens, of which an
answer has max_seq_len at most, all may."""
STOP = (*prompt_inputs((1,), 1), InputTensor("stop", "BOOL", (True,)))
PLAIN = ("output_ids", "sequence_length")
REUSED, LOG_PROBS, LOGITS = "kv_cache_reused_blocks", "output_log_probs", "generation_logits"
TOP = ("top_token_ids", "top_log_probs")
ENCODED = ("OUT_PROMPT_EMBEDDING_TABLE", "OUT_PROMPT_VOCAB_SIZE")
CONTEXT = ("context_log_probs", "context_top_token_ids", "context_top_log_probs")
TIMES = ("arrival_time_ns", "first_scheduled_time_ns")
"""Outputs that are asked for where an answer comes in one response; with each token they would cost too much."""
IN_ONE = InputTensor("streaming", "BOOL", (False,))
INTEGERS = dict.fromkeys((*PLAIN, REUSED)).keys()
"""In this order; all are INT32. Parts of an answer without other outputs may come through the token socket."""
ON_REQUEST = {
    "return_log_probs": (LOG_PROBS,),
    "return_generation_logits": (LOGITS,),
    FEW_LOG_PROBS: TOP,
    "return_perf_metrics": (REUSED,),
}
"""Input that asks for outputs -> the outputs."""


class Backend:
    """The Triton model `tensorrt_llm` as a source of tokens, in an `async with` block."""

    def __init__(self, url: str, *, token_socket: bool = True) -> None:
        """Remember the address; the block creates the connection in its event loop.

        Args:
            url: host:port of the gRPC service.
            token_socket: whether to offer the engine a socket of its own for tokens; see `host.token_socket`.
        """
        self._url, self._token_socket = url, token_socket
        self._client: Any = None
        self._running: set[asyncio.Task[None]] = set()
        self._tokens = TokenListener()

    async def __aenter__(self) -> Self:
        """Create the channel, which connects on first use."""
        loop = asyncio.get_running_loop()
        self._tokens.open(loop.add_reader, loop.remove_reader)
        self._client = triton.InferenceServerClient(self._url, channel_args=CHANNEL)
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Close the connection."""
        for task in self._running:
            task.cancel()
        self._tokens.close()
        await self._client.close()

    async def ready(self) -> bool:
        """Return whether the server responds and has all its models."""
        try:
            return bool(await self._client.is_server_ready(client_timeout=5))
        except InferenceServerException:
            return False

    async def alive(self) -> bool:
        """Return whether the server responds."""
        try:
            return bool(await self._client.is_server_live(client_timeout=5))
        except InferenceServerException:
            return False

    async def generate(self, inputs: Sequence[InputTensor]) -> AsyncIterator[TokenPart]:
        """Send one request; closing the iterator stops it on the server.

        Raises:
            ApiError: the server returned an error, or does not respond.
        """
        outputs = [*PLAIN, *(name for entry in inputs for name in ON_REQUEST.get(entry.name, ()))]
        outputs += TIMES if REUSED in outputs and IN_ONE in inputs else ()
        plain = self._token_socket and IN_ONE not in inputs and set(outputs) <= INTEGERS
        async with aclosing(self.stream(ENGINE, inputs, outputs, plain=plain)) as results:  # type: ignore[type-var]
            async for result in results:
                yield result if isinstance(result, TokenPart) else _part(result)

    async def features(self, pixels: Any) -> tuple[InputTensor, ...]:
        """Return the inputs of the engine for prepared pictures [pictures, 3, side, side].

        Raises:
            ApiError: the server returned an error, or does not respond.
        """
        inputs = [InputTensor("pixel_values", "FP16", pixels.reshape(-1), pixels.shape)]
        outputs = await self._outputs(inputs, ENCODED, ENCODERS)
        assert outputs is not None  # or there was an error
        table, rows = outputs
        return (
            InputTensor("prompt_embedding_table", "FP16", table.reshape(-1), table.shape),
            InputTensor("prompt_vocab_size", "INT32", rows.tolist()),
        )

    async def takes_few_log_probs(self) -> bool:
        """Return whether the engine's own model can be asked for the log probabilities of a few tokens.

        Raises:
            ApiError: the server returned an error, or does not respond.
        """
        try:
            answer = await self._client.get_model_config(ENGINE, client_timeout=5)
        except InferenceServerException as error:
            raise from_triton(error.message(), _code(error)) from None
        return any(entry.name == FEW_LOG_PROBS for entry in answer.config.input)

    async def context_logits(self, inputs: Sequence[InputTensor]) -> Any:
        """Return the logits of a prompt [tokens, vocabulary] from the engine's own model; None if it returns none.

        Raises:
            ApiError: the server returned an error, or does not respond.
        """
        outputs = await self._outputs(inputs, ("context_logits",))
        return outputs[0] if outputs is not None else None

    async def context_log_probs(self, inputs: Sequence[InputTensor]) -> Any:
        """Return log probabilities of a prompt's tokens after the first, [T - 1], and the likeliest after each, [T, K].

        Raises:
            ApiError: the server returned an error, or does not respond.
        """
        return await self._outputs(inputs, CONTEXT)

    async def _outputs(
        self, inputs: Sequence[InputTensor], names: Sequence[str], model: str = ENGINE
    ) -> list[Any] | None:
        """Return outputs that come once, without the dimension of the batch; None if the last of them does not."""
        outputs = None
        async with aclosing(self.stream(model, inputs, names)) as results:  # type: ignore[type-var]
            async for result in results:
                arrays = [result.as_numpy(name) for name in names]
                outputs = [each[0] for each in arrays] if arrays[-1] is not None and arrays[-1].size else outputs
        return outputs

    async def stream(
        self,
        model: str,
        inputs: Sequence[InputTensor],
        outputs: Sequence[str] = (),
        request_id: str = "",
        *,
        plain: bool = False,
    ) -> AsyncIterator[Any]:
        """Send one request to a model and yield its results; closing the iterator stops it on the server.

        Args:
            model: name of the Triton model.
            inputs: its tensors.
            outputs: names of the outputs that are wanted; none means all.
            request_id: the client's; without one, the request gets one of its own.
            plain: whether some of the results may come as a `TokenPart`, past tritonserver.

        Raises:
            ApiError: the server returned an error, or does not respond.
        """
        # not with the header triton_grpc_error, which would give errors a status: tritonserver 2.51 uses a stream that
        # ended that way after it has freed it, and dies of that after some hundred errors
        request = _request(model, inputs, outputs, request_id)
        results: asyncio.Queue[Any] = asyncio.Queue(0 if plain else AHEAD)
        key = None
        if plain:
            parameter, key = self._tokens.expect(lambda tokens: results.put_nowait(TokenPart(tokens)))
            request["parameters"] = {PARAMETER: parameter}
        call: Any = self._client.stream_infer(_once(request))
        # in a task of its own: cancelling a wait for gRPC's next response cancels the stream
        self._run(self._read(call, results))
        result: Any = ()
        try:
            while (result := await results.get()) is not None:
                if isinstance(result, ApiError):
                    raise result
                yield result
        finally:
            if key is not None:
                self._tokens.forget(key)
            if result is not None:
                self._run(self._leave(call, results, model, request["request_id"]))

    async def _leave(self, call: Any, results: asyncio.Queue[Any], model: str, request_id: str) -> None:
        ended = asyncio.create_task(_drain(results))
        # Triton tells a step of an ensemble that runs of no cancellation; an encoder is soon at its end
        if model in (ENGINE, ENSEMBLE, ENCODERS):
            for wait_s in STOP_S if model != ENCODERS else ():
                if (await asyncio.wait({ended}, timeout=wait_s))[0]:
                    return
                await self._stop(request_id)
            await asyncio.wait({ended}, timeout=CANCEL_S)
        call.cancel()
        await ended

    async def _stop(self, request_id: str) -> None:
        with contextlib.suppress(InferenceServerException, grpc.aio.AioRpcError):  # then the server has ended
            request = _request(ENGINE, STOP, ("output_ids",), request_id)
            async for _ in self._client.stream_infer(_once(request)):
                pass

    async def _read(self, call: Any, results: asyncio.Queue[Any]) -> None:
        """Put the results of a stream into the queue, errors as `ApiError`, and None at the end."""
        try:
            async for result, error in call:
                self._tokens.read()  # they are older
                await results.put(result if error is None else from_triton(error.message() or str(error), None))
        except grpc.aio.AioRpcError as error:
            await results.put(from_triton(error.details() or "no reason given", error.code().name))
        except InferenceServerException as error:
            await results.put(from_triton(error.message(), _code(error)))
        except asyncio.CancelledError:  # of the stream, which gRPC reports this way, unless it is ours
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
        await results.put(None)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)


async def _drain(results: asyncio.Queue[Any]) -> None:
    while await results.get() is not None:
        pass


def _request(model: str, inputs: Sequence[InputTensor], outputs: Sequence[str], request_id: str = "") -> dict[str, Any]:
    """Build the request before the stream opens, because tritonclient swallows errors raised inside its iterator."""
    requested = [triton.InferRequestedOutput(name) for name in outputs]
    return {
        "model_name": model,
        "inputs": [_tensor(entry) for entry in inputs],
        "outputs": requested or None,
        "request_id": request_id or uuid.uuid4().hex,
    }


async def _once(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield request


def _tensor(entry: InputTensor) -> Any:
    values = entry.values
    if not isinstance(values, np.ndarray):
        values = [value.encode() if isinstance(value, str) else value for value in values]
    array = np.array(values, dtype=NUMPY[entry.datatype]).reshape(1, *(entry.shape or (len(values),)))
    tensor = triton.InferInput(entry.name, list(array.shape), entry.datatype)
    tensor.set_data_from_numpy(array)
    return tensor


def _part(result: Any) -> TokenPart:
    """Read a response; of log probabilities, TensorRT-LLM sends all so far with each one."""
    response = result.get_response()
    raw = {out.name: content for out, content in zip(response.outputs, response.raw_output_contents, strict=False)}
    # INT32, without numpy's detours: there is one for each token
    ids, lengths, reused = (memoryview(raw.get(name, b"")).cast("i") for name in INTEGERS)
    if not len(ids):
        return TokenPart(())
    tokens = tuple(ids[: lengths[0]])
    reused_blocks = reused[0] if len(reused) else 0
    if raw.keys() <= INTEGERS:
        return TokenPart(tokens, reused_blocks=reused_blocks)
    log_probs, logits, top_tokens, top, arrival, scheduled = (
        result.as_numpy(name) for name in (LOG_PROBS, LOGITS, *TOP, *TIMES)
    )
    new = len(tokens)
    return TokenPart(
        tokens,
        None if log_probs is None or not new else tuple(log_probs.reshape(-1)[-new:].tolist()),
        None if logits is None or not new else logits.reshape(-1, logits.shape[-1])[-new:],
        None if top is None or not new else pairs(top_tokens[0], top[0]),
        reused_blocks,
        None if arrival is None or scheduled is None else float(scheduled.flat[0] - arrival.flat[0]) / 1e9,
    )


def _code(error: InferenceServerException) -> str | None:
    """Convert "StatusCode.UNAVAILABLE" to "UNAVAILABLE"."""
    status = error.status()
    return str(status).rpartition(".")[2] if status else None
