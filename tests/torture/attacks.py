"""Hostile requests against a served tiny model: does it still answer a good client, how fast, and what stays in memory.

Everything is sent to the service in front of tritonserver, which is all that other machines can reach.
"""

import http.client
import json
import random
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from pipelines.serving.config import ServingSettings
from pipelines.serving.frontend import OpenAiFrontend
from pipelines.serving.process import TritonServer
from tests.support.served_gemma import LIMITS, write_gemma
from tests.torture.row import Row

LIMIT_S = 10.0  # within which a good client must have its answer whatever else happens; a long body took 63 s
MIB = 2**20
SETTLE_S = 60.0
GROWTH = 1.2
PROMPT = {"model": "tiny_gemma", "prompt": "The capital of", "max_tokens": 4, "temperature": 0}
SIZES = (3, 40, 1000, -1, 0)
SETTINGS = {"max_queue_size": 256, "triton_max_batch_size": 8, "max_tokens_in_paged_kv_cache": 8192}


@dataclass(frozen=True, slots=True)
class Front:
    """Where the service listens."""

    host: str
    port: int

    def post(self, path: str, body: bytes, kind: str = "application/json") -> int:
        """Send a request and return the status of its answer; 0 if the connection was closed instead."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=120)
        try:
            connection.request("POST", path, body, {"Content-Type": kind})
            answer = connection.getresponse()
            answer.read()
            return answer.status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()

    def connect(self) -> socket.socket:
        """Open a connection."""
        return socket.create_connection((self.host, self.port), timeout=30)

    def ask(self) -> str:
        """Ask as a good client does, and return the text."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=120)
        try:
            connection.request("POST", "/v1/completions", json.dumps(PROMPT), {"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())
            return str(answer["choices"][0]["text"] if "choices" in answer else answer)
        finally:
            connection.close()


Attack = Callable[[Front, random.Random], Sequence[int]]
"""Sends requests and returns the statuses of their answers; 0 is a closed connection."""


def wrong_shapes(front: Front, rng: random.Random) -> list[int]:
    """Shapes that do not match their values, at the models behind and at those for clients."""
    found = []
    for model in ("postprocessing", "preprocessing", "tensorrt_llm", "ensemble"):
        shape = [rng.choice(SIZES) for _ in range(rng.randint(1, 3))]
        tensor = {"name": "TOKENS_BATCH", "datatype": "INT32", "shape": shape, "data": [1, 2]}
        body = json.dumps({"inputs": [tensor]}).encode()
        found.append(front.post(f"/v2/models/{model}/infer", body))
    return found


def wild_fields(front: Front, rng: random.Random) -> list[int]:
    """Fields of the generate endpoint with wild values."""
    values = (2**80, -1, 1e308, [1] * 5000, [[1]], {"a": 1}, None, "x" * 70_000, float("nan"), 10**9)
    found = []
    for name in rng.sample(["max_tokens", "beam_width", "num_return_sequences", "top_k", "seed", "stop_words"], 3):
        body = {"text_input": "a", "max_tokens": 1, name: rng.choice(values)}
        found.append(front.post("/v2/models/ensemble/generate", json.dumps(body).encode()))
    return found


def huge_body(front: Front, rng: random.Random) -> list[int]:
    """200 MB, announced in the head and sent until the connection breaks."""
    with front.connect() as connection, suppress(OSError):
        connection.sendall(_head(200 * MIB))
        block = rng.randbytes(MIB)
        for _ in range(200):
            connection.sendall(block)
        connection.recv(4096)
    return [front.post("/v1/completions", b'{"prompt": "' + b"a" * 10 * MIB + b'"}')]


def tiny_chunks(front: Front, rng: random.Random) -> list[int]:
    """A chunked body of one byte per chunk."""
    with front.connect() as connection, suppress(OSError):
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(8):
            connection.sendall(b"1\r\na\r\n" * 50_000)
        return [_status(connection)]
    return [0]


def slow_clients(front: Front, rng: random.Random) -> list[int]:
    """Many connections with half a head or half a body, held for a moment."""
    held = []
    for number in range(100):
        connection = front.connect()
        connection.sendall(_head(MIB)[: 30 if number % 2 else None] + b"{" * (number % 2))
        held.append(connection)
    time.sleep(rng.uniform(0.2, 1.0))
    for connection in held:
        connection.close()
    return []


def deep_json(front: Front, rng: random.Random) -> list[int]:
    """Nested deeper than the service reads, small and as a body that a process of its own reads."""
    body = b" " * rng.choice((0, 20_000, 1_000_000)) + rng.choice((b"[", b'{"a":')) * 2_000
    return [front.post("/v1/chat/completions", body), front.post("/v2/models/ensemble/generate", body)]


def many_prompts(front: Front, rng: random.Random) -> list[int]:
    """5,000 prompts, and a few with many answers each."""
    many = {"model": "tiny_gemma", "prompt": ["a the"] * 5000, "max_tokens": 4}
    several = {"model": "tiny_gemma", "prompt": ["a"] * rng.randint(2, 100), "n": 128, "max_tokens": 4}
    return [front.post("/v1/completions", json.dumps(asked).encode()) for asked in (many, several)]


def long_chats(front: Front, rng: random.Random) -> list[int]:
    """One message of 10 MB and one just below the bound, without max_tokens, so that they must be counted."""
    found = []
    for size in (10_000_000, 3_900_000):
        word = rng.choice(("a the ", "x", " ", "\u4e2d", "Zz9 "))
        content = (word * (size // len(word.encode())))[:size]
        asked = {"model": "tiny_gemma", "messages": [{"role": "user", "content": content}]}
        found.append(front.post("/v1/chat/completions", json.dumps(asked, ensure_ascii=False).encode()))
    return found


def wrong_kinds(front: Front, rng: random.Random) -> list[int]:
    """Long lists of the wrong type, each entry of which is a fault."""
    entries: list[object] = [rng.choice((1, None, "x", {}))] * 400_000
    messages = {"model": "tiny_gemma", "messages": entries}
    prompts = {"model": "tiny_gemma", "prompt": [[None], *entries]}
    return [
        front.post("/v1/chat/completions", json.dumps(messages).encode()),
        front.post("/v1/completions", json.dumps(prompts).encode()),
    ]


def broken_http(front: Front, rng: random.Random) -> list[int]:
    """Random bytes, and heads that are too long or contradict themselves."""
    found = []
    for head in (
        rng.randbytes(2000),
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000,
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    ):
        with front.connect() as connection, suppress(OSError):
            connection.sendall(head + b"\r\n\r\n")
            found.append(_status(connection))
    return found


ATTACKS: tuple[Attack, ...] = (
    wrong_shapes,
    wild_fields,
    huge_body,
    tiny_chunks,
    slow_clients,
    deep_json,
    many_prompts,
    long_chats,
    wrong_kinds,
    broken_http,
)


@dataclass(slots=True)
class Tally:
    """Counts of one attack."""

    tried: int = 0
    survived: int = 0
    worst_s: float = 0.0
    fault: str = ""


def run(seed: int, seconds: float) -> list[Row]:
    """Attack for about so many seconds and report, for each attack, whether good clients noticed."""
    rng = random.Random(seed)
    with served() as front:
        expected = front.ask()
        for attack in ATTACKS:  # what is loaded or allocated once is no leak
            attack(front, random.Random(seed))
        pids = _processes()
        before = settled_memory(pids)
        tallies = {attack: Tally() for attack in ATTACKS}
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for attack in rng.sample(ATTACKS, len(ATTACKS)):
                if time.monotonic() < until:
                    _try(attack, front, rng, expected, tallies[attack])
        begun = time.monotonic()
        after = settled_memory(pids, at_most=int(before * GROWTH))
        took = time.monotonic() - begun
        rows = [_row(attack, tally) for attack, tally in tallies.items() if tally.tried]
    note = f"{before / MIB:.0f} MiB before, {after / MIB:.0f} MiB after"
    return [*rows, Row("attack: memory within 20 % a minute later", 1, int(after <= before * GROWTH), took, note)]


@contextmanager
def served(host: str = "127.0.0.1") -> Iterator[Front]:
    """Serve the bundled Gemma with the service in front of it, and nginx where `host` is not this machine only."""
    settings = ServingSettings(openai=True, host=host, drain_timeout_s=5, startup_timeout_s=120)
    with tempfile.TemporaryDirectory(prefix="attacks-") as root:
        repository = write_gemma(Path(root), limits=replace(LIMITS, max_batch_size=8), **SETTINGS)
        with TritonServer(repository, settings) as server, OpenAiFrontend(server):
            yield Front(settings.front_host, server.ports["openai_port"])


def settled_memory(pids: Sequence[int], at_most: int | None = None) -> int:
    """Return the memory of processes once it has fallen to `at_most`, or stopped falling, or a minute has passed."""
    until = time.monotonic() + SETTLE_S
    size = memory(pids)
    while time.monotonic() < until:
        time.sleep(3)
        before, size = size, memory(pids)
        if size <= at_most if at_most is not None else size > before - MIB:
            break
    return size


def memory(pids: Sequence[int]) -> int:
    """Sum the resident memory of processes and of what they have started since."""
    found = 0
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for one in (process, *process.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    found += one.memory_full_info().pss
    return found


def _processes() -> list[int]:
    """Return the direct children of this process, below which server and service run."""
    return [child.pid for child in psutil.Process().children()]


def _try(attack: Attack, front: Front, rng: random.Random, expected: str, tally: Tally) -> None:
    """Attack from two sides and ask as a good client meanwhile and afterwards."""
    statuses: list[int] = []
    seeds = [rng.getrandbits(32) for _ in range(2)]
    threads = [
        threading.Thread(target=lambda seed=seed: statuses.extend(attack(front, random.Random(seed)))) for seed in seeds
    ]
    for thread in threads:
        thread.start()
    good, worst = True, 0.0
    while True:
        running = any(thread.is_alive() for thread in threads)
        begun = time.monotonic()
        try:
            good &= front.ask() == expected
        except (OSError, http.client.HTTPException, ValueError):
            good = False
        worst = max(worst, time.monotonic() - begun)
        if not running:
            break
    for thread in threads:
        thread.join()
    refused = all(status == 0 or 200 <= status < 500 for status in statuses)
    tally.tried += 1
    tally.survived += good and refused and worst < LIMIT_S
    tally.worst_s = max(tally.worst_s, worst)
    if not (good and refused):
        tally.fault = f"good client: {'right' if good else 'wrong'} answer; statuses {sorted(set(statuses))}"


def _row(attack: Attack, tally: Tally) -> Row:
    name = getattr(attack, "__name__", "").replace("_", " ")
    return Row(f"attack: {name}", tally.tried, tally.survived, tally.worst_s, tally.fault)


def _head(length: int) -> bytes:
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % length
    )


def _status(connection: socket.socket) -> int:
    """Read the status of an answer; 0 if there is none."""
    words = connection.recv(64).split(b" ")
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
