"""Measure the load generator over HTTP beside AIPerf and GuideLLM, in turns, against one trivial server of events.

python -m scripts.measure_http_clients     about ten minutes, on a quiet machine; needs PyPI
python -m scripts.measure_http_clients --url http://127.0.0.1:9000   the OpenAI service of model=tiny_llama instead

The server sends the tokens of an answer after fixed times and notes when each request came and its first token left,
so what a client adds to TTFT, and how late it sends, is known without believing any client.
"""

import argparse
import asyncio
import gzip
import json
import shlex
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httptools
import psutil
import uvloop

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = ROOT / "pipelines" / "bundled" / "models" / "tiny_llama"
MODEL, ISL, OSL = "stub", 32, 16
MS = 1e-6
Rows = list[tuple[float, float]]
"""TTFT and ITL of each request, ms."""


class Connection(asyncio.Protocol):
    """One connection to the server."""

    def __init__(self, ttft_s: float, itl_s: float, log: list[tuple[int, int]]) -> None:
        self.ttft_s, self.itl_s, self.log = ttft_s, itl_s, log

    def connection_made(self, transport: Any) -> None:
        """Begin."""
        self.transport, self.parser = transport, httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        """Note when it came."""
        self.arrived = time.monotonic_ns()
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        """Forget the request before."""
        self.path, self.body = b"", b""

    def on_url(self, url: bytes) -> None:
        """Collect."""
        self.path += url

    def on_body(self, body: bytes) -> None:
        """Collect."""
        self.body += body

    def on_message_complete(self) -> None:
        """Answer."""
        if self.path == b"/log":
            self._whole({"log": self.log})
            self.log.clear()
        elif self.body:
            request = json.loads(self.body)
            chat = "messages" in request
            count = request.get("max_completion_tokens") or request.get("max_tokens") or OSL
            self.isl = ISL if count == OSL else tokens_of(request)
            asyncio.get_running_loop().call_later(self.ttft_s, self._token, self.arrived, count, count, chat)
        else:
            self._whole({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    def _whole(self, reply: dict[str, Any]) -> None:
        body = json.dumps(reply).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)

    def _token(self, arrived: int, left: int, count: int, chat: bool) -> None:
        """Send one token, or all if there is no time between them, and in the end the counts."""
        if self.transport.is_closing():
            return
        data = b""
        if left == count:
            data = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            self.log.append((arrived, time.monotonic_ns()))
        sent = 1 if self.itl_s else count
        data += TOKENS[chat] * sent
        if left > sent:
            asyncio.get_running_loop().call_later(self.itl_s, self._token, arrived, left - sent, count, chat)
        else:
            usage = {"prompt_tokens": self.isl, "completion_tokens": count, "total_tokens": self.isl + count}
            data += event(chat, {"choices": [], "usage": usage}) + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
        self.transport.write(data)


def tokens_of(request: dict[str, Any]) -> int:
    """Count the input tokens of a question that is not of the load: a client gets to know a server with a few."""
    from pipelines.checkpoint.tokenizer import opened

    texts = [message["content"] for message in request.get("messages") or [{"content": request["prompt"]}]]
    return sum(len(opened(TOKENIZER).tokenizer.encode(text, add_special_tokens=False).ids) for text in texts)


def event(chat: bool, content: dict[str, Any]) -> bytes:
    """Return one event as a chunk of HTTP."""
    head = {"id": "1", "object": "chat.completion.chunk" if chat else "text_completion", "created": 1, "model": MODEL}
    data = b"data: " + json.dumps(head | content).encode() + b"\n\n"
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


TOKENS = [
    event(chat, {"choices": [{"index": 0, "finish_reason": None} | part]})
    for chat, part in ((False, {"text": " is"}), (True, {"delta": {"content": " is"}}))
]


async def serve(ttft_s: float, itl_s: float) -> None:
    """Serve until killed; print the port."""
    log: list[tuple[int, int]] = []
    server = await asyncio.get_running_loop().create_server(lambda: Connection(ttft_s, itl_s, log), "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


@contextmanager
def server(ttft_ms: float, itl_ms: float) -> Any:
    """Run the server as a process; yield its URL without /v1."""
    command = [sys.executable, "-m", "scripts.measure_http_clients", "--serve", str(ttft_ms), str(itl_ms)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


@dataclass
class Ran:
    """One client's run: seconds, the largest resident memory of its processes in MiB, and its folder."""

    seconds: float
    memory: float
    folder: Path


def run(command: str, folder: Path) -> Ran:
    """Run a client to its end and watch its memory."""
    folder.mkdir(parents=True, exist_ok=True)
    start, most = time.monotonic(), 0.0
    with (folder / "output.txt").open("w") as output:
        process = psutil.Popen(shlex.split(command), cwd=folder, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            total = 0.0
            for each in [process, *process.children(recursive=True)]:
                try:
                    total += each.memory_full_info().uss
                except psutil.Error:
                    continue
            most = max(most, total / 2**20)
            time.sleep(0.2)
    if process.returncode:
        raise SystemExit(f"{command}\nended with {process.returncode}; see {folder}/output.txt")
    return Ran(time.monotonic() - start, most, folder)


def ours(url: str, load: str, seconds: float, folder: Path) -> tuple[str, Callable[[Path], Rows]]:
    """Return our command and the reader of its TTFTs, s."""
    arrival = "benchmark.concurrency={}" if load.startswith("c") else "workload=constant benchmark.request_rate={}"
    command = (
        f"{sys.executable} -m pipelines benchmark benchmark.url={url}/v1 benchmark.api=chat model=tiny_llama"
        f" workload.isl={ISL} workload.osl={OSL} {arrival.format(load[1:])} benchmark.duration_s={seconds}"
        f" benchmark.warmup_s=1 paths.store={folder}/artifacts paths.runs={folder}/runs"
    )

    def read(where: Path) -> Rows:
        with gzip.open(next(where.rglob("requests-1.json.gz")), "rt") as file:
            columns = json.load(file)
        rows = zip(*(columns[name] for name in ("sent_ns", "first_token_ns", "end_ns", "osl")), strict=True)
        return [
            ((first - sent) * MS, (end - first) * MS / (osl - 1)) for sent, first, end, osl in rows if first is not None
        ]

    return command, read


def aiperf(url: str, load: str, seconds: float, binaries: Path) -> tuple[str, Callable[[Path], Rows]]:
    """Return AIPerf's command and reader."""
    how = (
        f"--concurrency {load[1:]}" if load.startswith("c") else f"--request-rate {load[1:]} --arrival-pattern constant"
    )
    command = (
        f"{binaries}/aiperf profile --model {MODEL} --url {url} --tokenizer {TOKENIZER} --streaming"
        f" --endpoint-type chat --synthetic-input-tokens-mean {ISL} --synthetic-input-tokens-stddev 0"
        f" --output-tokens-mean {OSL} --output-tokens-stddev 0 --extra-inputs ignore_eos:true"
        f" --extra-inputs min_tokens:{OSL} {how} --benchmark-duration {seconds:g} --ui simple"
    )

    def read(where: Path) -> Rows:
        lines = next(where.rglob("profile_export.jsonl")).read_text().splitlines()
        metrics = [json.loads(line)["metrics"] for line in lines]
        names = ("time_to_first_token", "inter_token_latency")
        return [tuple(each[name]["value"] for name in names) for each in metrics if each.keys() >= set(names)]

    return command, read


def guidellm(url: str, load: str, seconds: float, binaries: Path) -> tuple[str, Callable[[Path], Rows]]:
    """Return GuideLLM's command and reader."""
    how = f"kind=concurrent,streams={load[1:]}" if load.startswith("c") else f"kind=constant,rate={load[1:]}"
    command = (
        f"{binaries}/guidellm run --backend kind=openai_http,target={url},model={MODEL}"
        f" --tokenizer kind=hf_auto,model={TOKENIZER}"
        f" --data kind=synthetic_text,prompt_tokens={ISL},output_tokens={OSL} --profile {how}"
        f" --constraint kind=max_duration,seconds={seconds:g} --output kind=json,path=benchmarks.json"
        " --disable-console-interactive"
    )

    def read(where: Path) -> Rows:
        (benchmark,) = json.loads((where / "benchmarks.json").read_text())["benchmarks"]
        rows = benchmark["requests"]["successful"]
        names = ("time_to_first_token_ms", "inter_token_latency_ms")
        return [tuple(row[name] for name in names) for row in rows if all(row.get(name) for name in names)]

    return command, read


def off_schedule_ms(arrivals: list[int], rate: float) -> float:
    """Return the 99th percentile of deviations of arrivals from the even schedule that fits them best, ms."""
    gap = 1e9 / rate
    middle = arrivals[len(arrivals) // 5 : -len(arrivals) // 10 or None]
    phases = [stamp - place * gap for place, stamp in enumerate(middle)]
    zero = statistics.median(phases)
    late = sorted(abs(phase - zero) * MS for phase in phases)
    return late[int(0.99 * (len(late) - 1))]


def agree(options: argparse.Namespace, peers: dict[str, Path]) -> None:
    """Print TTFT and ITL of one real server as each client has them, in turns."""
    for load in ("r4", "c4"):
        for number in range(options.rounds):
            for name, make in (("ours", ours), ("AIPerf", aiperf), ("GuideLLM", guidellm)):
                folder = options.work / "results" / f"real-{load}-{name}-{number}-{time.time():.0f}"
                command, read = make(options.url, load, options.seconds, peers.get(name, folder))
                run(command.replace(f" {MODEL}", " tiny_llama").replace(f"model={MODEL}", "model=tiny_llama"), folder)
                ttft, itl = (statistics.median(column) for column in zip(*read(folder), strict=True))
                sys.stdout.write(f"{load} {name:8} TTFT {ttft:6.2f} ms  ITL {itl:6.3f} ms\n")
                sys.stdout.flush()


def main() -> None:
    """Measure all clients under each load and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", nargs=2, type=float, metavar=("TTFT_MS", "ITL_MS"), help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "clients", help="environments and results")
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--url", help="without /v1: ask a real server of tiny_llama instead, and compare what all say")
    options = parser.parse_args()
    if options.serve:
        uvloop.run(serve(options.serve[0] / 1e3, options.serve[1] / 1e3))
        return
    from scripts.foreign.clients import CLIENTS
    from scripts.foreign_clients import environment

    peers = {
        client.name: environment(client, options.work)[0] for client in CLIENTS if client.name in ("AIPerf", "GuideLLM")
    }
    if options.url:
        agree(options, peers)
        return
    for load, ttft_ms, itl_ms in (("c64", 0, 0), ("r100", 20, 5)):
        for number in range(options.rounds):
            for name, make in (("ours", ours), ("AIPerf", aiperf), ("GuideLLM", guidellm)):
                folder = options.work / "results" / f"{load}-{name}-{number}-{time.time():.0f}"
                with server(ttft_ms, itl_ms) as url:
                    command, read = make(url, load, options.seconds, peers.get(name, folder))
                    done = run(command, folder)
                    with urllib.request.urlopen(f"{url}/log", timeout=30) as answer:
                        log = sorted(map(tuple, json.load(answer)["log"]))
                times, own = [ttft for ttft, _ in read(folder)], [(first - arrived) * MS for arrived, first in log]
                arrivals = [arrived for arrived, _ in log]
                busiest = [a for a in arrivals if a > arrivals[-1] - 0.6 * options.seconds * 1e9]
                rate = (len(busiest) - 1) / ((busiest[-1] - busiest[0]) / 1e9)
                bias = statistics.median(times) - statistics.median(own)
                text = f"{load} {name:8} {rate:8.0f} requests/s  TTFT bias {bias:6.2f} ms  {done.memory:5.0f} MiB"
                if load.startswith("r"):
                    text += f"  p99 off schedule {off_schedule_ms(arrivals, float(load[1:])):.2f} ms"
                sys.stdout.write(f"{text}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
