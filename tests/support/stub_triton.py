"""A server with the ensemble's gRPC interface and no model; its answers, their timing and its log are known exactly.

Run as `python -m tests.support.stub_triton --itl-ms 5`; prints its port. Responses are serialised only once.
"""

import argparse
import asyncio
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import uvloop
from tritonclient.grpc import model_config_pb2, service_pb2

ROOT = Path(__file__).resolve().parents[2]
INPUTS = ("text_input", "max_tokens", "stream", "min_tokens", "exclude_input_in_output", "return_num_input_tokens")
INPUTS += ("return_num_output_tokens",)
UNARY = ("ServerLive", "ServerMetadata", "ModelReady", "RepositoryIndex", "ModelConfig", "ModelStatistics")
OUTPUTS = ("text_output", "num_output_tokens", "num_input_tokens")


class Stub:
    """Answers like a decoupled ensemble."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.stamps: list[tuple[str, int, int, int]] = []
        self.stopped: set[str] = set()
        self.active = self.finished = self.queue_ns = 0
        self.slots = asyncio.Semaphore(options.slots)

    async def ServerLive(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's names
        return service_pb2.ServerLiveResponse(live=True)

    async def ServerMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        return service_pb2.ServerMetadataResponse(name="stub", version="1.0")

    async def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        return service_pb2.ModelReadyResponse(ready=request.name == "ensemble")

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self.options.restricted:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "This protocol is restricted")
        index = service_pb2.RepositoryIndexResponse()
        index.models.add(name="ensemble", version="1", state="READY")
        index.models.add(name="broken", version="1", state="UNAVAILABLE", reason="no engine")
        return index

    async def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        if request.name != "ensemble":
            await context.abort(grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{request.name}'")
        config = model_config_pb2.ModelConfig(name="ensemble", max_batch_size=8)
        config.model_transaction_policy.decoupled = not self.options.not_decoupled
        for name in INPUTS:
            if name != self.options.without_input:
                config.input.add(name=name, optional=name not in ("text_input", "max_tokens"))
        for name in OUTPUTS:
            config.output.add(name=name)
        return service_pb2.ModelConfigResponse(config=config)

    async def ModelStatistics(self, request: Any, context: Any) -> Any:  # noqa: N802
        answer = service_pb2.ModelStatisticsResponse()
        model = answer.model_stats.add(name="ensemble", version="1", inference_count=self.finished)
        model.inference_stats.success.count = model.inference_stats.queue.count = self.finished
        model.inference_stats.queue.ns = self.queue_ns
        return answer

    async def stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Serve one stream; the responses to a request are sent in order."""
        async for data in requests:
            arrived = time.monotonic_ns()
            request = service_pb2.ModelInferRequest.FromString(data)
            if request.model_name == "tensorrt_llm":
                self.stopped.add(request.id)
                yield LAST
                continue
            if self.options.refuse or self.active >= self.options.max_active:
                yield self._refusal(request)
                continue
            self.active += 1
            try:
                async for response in self._answer(request, arrived):
                    yield response
            finally:
                self.active -= 1
                self.finished += 1

    async def _answer(self, request: Any, arrived: int) -> AsyncIterator[bytes]:
        options = self.options
        tokens = struct.unpack("<i", request.raw_input_contents[1])[0]
        async with self.slots:
            self.queue_ns += time.monotonic_ns() - arrived
            over = time.monotonic_ns() + options.ttft_ms * 1e6
            while (left := (over - time.monotonic_ns()) / 1e9) > 0 and request.id not in self.stopped:
                await asyncio.sleep(min(left, 0.05) if left > 0.1 else left)
            if not request.raw_input_contents[2][0]:
                await asyncio.sleep(options.itl_ms * (tokens - 1) / 1e3)
                yield response_of(tokens, True)
                return
            first = time.monotonic_ns()
            if options.joined:
                for size in range(2, tokens):
                    yield response_of(size, False)
            else:
                for _ in range(tokens - 1):
                    yield TOKEN
                    if options.itl_ms:
                        await asyncio.sleep(options.itl_ms / 1e3)
            self.stamps.append((request.id, arrived, first, time.monotonic_ns()))
            yield LAST

    def _refusal(self, request: Any) -> bytes:
        text = self.options.refuse or "Exceeds maximum queue size"
        response = service_pb2.ModelStreamInferResponse(error_message=text)
        response.infer_response.id = request.id
        return response.SerializeToString()


def response_of(tokens: int, final: bool) -> bytes:
    """Return a serialised response with `tokens` tokens of text."""
    response = service_pb2.ModelStreamInferResponse()
    answer = response.infer_response
    answer.model_name, answer.model_version = "ensemble", "1"
    answer.parameters["triton_final_response"].bool_param = final
    text = b" word" * tokens
    for name, raw in (("text_output", struct.pack("<I", len(text)) + text), ("num_output_tokens", _int(tokens))):
        answer.outputs.add(name=name, datatype="BYTES" if name == "text_output" else "INT32", shape=[1, 1])
        answer.raw_output_contents.append(raw)
    return response.SerializeToString()


def _int(value: int) -> bytes:
    return struct.pack("<i", value)


TOKEN, LAST = response_of(1, False), response_of(1, True)


def _unary(stub: Stub, name: str) -> Any:
    """Return the handler of a method with one request and one response."""
    return grpc.unary_unary_rpc_method_handler(
        getattr(stub, name),
        request_deserializer=getattr(service_pb2, f"{name}Request").FromString,
        response_serializer=getattr(service_pb2, f"{name}Response").SerializeToString,
    )


async def serve(options: argparse.Namespace) -> None:
    """Serve until standard input ends; a line `stamps` prints the recorded timestamps."""
    stub, server = Stub(options), grpc.aio.server()
    methods = {name: _unary(stub, name) for name in UNARY}
    methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(stub.stream)  # handles raw bytes
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("inference.GRPCInferenceService", methods),))
    port = server.add_insecure_port(f"127.0.0.1:{options.port}")
    await server.start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    while line := await asyncio.to_thread(sys.stdin.readline):
        if line.strip() == "stamps":
            sys.stdout.write(";".join(",".join(map(str, row)) for row in stub.stamps) + "\n")
            sys.stdout.flush()
    await server.stop(0)


class Running:
    """A stub server in a separate process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.process = process
        self.url = f"127.0.0.1:{process.stdout.readline().strip()}"

    def stamps(self) -> dict[int, tuple[int, int, int]]:
        """Return by index when it arrived and when its first and last token were sent, in ns on CLOCK_MONOTONIC."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("stamps\n")
        self.process.stdin.flush()
        rows = [row.split(",") for row in self.process.stdout.readline().strip().split(";") if row]
        return {int(row[0]) % 2**32 - 1: (int(row[1]), int(row[2]), int(row[3])) for row in rows}


@contextmanager
def running(*options: str) -> Iterator[Running]:
    """Start a stub server and end it afterwards."""
    command = [sys.executable, "-m", "tests.support.stub_triton", *options]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield Running(process)
        finally:
            process.kill()


def main() -> None:
    """Run the stub from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ttft-ms", type=float, default=0.0)
    parser.add_argument("--itl-ms", type=float, default=0.0)
    parser.add_argument("--slots", type=int, default=1_000_000, help="requests answered at the same time; others wait")
    parser.add_argument("--max-active", type=int, default=1_000_000, help="requests beyond this number are refused")
    parser.add_argument("--joined", action="store_true", help="responses of 2, 3, ... tokens, then one")
    parser.add_argument("--refuse", default="", help="answer every request with this error")
    parser.add_argument("--not-decoupled", action="store_true")
    parser.add_argument("--restricted", action="store_true", help="as tritonserver that is open to other machines")
    parser.add_argument("--without-input", default="")
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
