#!/bin/bash
# huggingface_hub 2.4.0 rewrites a `response_format` of type json_schema, whatever the server.
#
# Input: a stand-in for an OpenAI-compatible server, which keeps what it was sent. Seen on 2026-11-30:
# `InferenceClient(base_url=...).chat_completion(response_format={"type": "json_schema", ...})`, the form of its own type
# ChatCompletionInputResponseFormatJSONSchema and of OpenAI, sends `{"type": "json_object", "value": SCHEMA}`, a form of
# Hugging Face's own servers: name and `strict` are lost. A server that reads OpenAI's fields alone answers with any
# object. Nothing of it is said.
# Needs 100 MB of disk and a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet huggingface_hub==2.4.0
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

from huggingface_hub import InferenceClient

asked = []


class Server(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        message = {"role": "assistant", "content": "{}"}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        head = {"id": "1", "object": "chat.completion", "created": 1, "model": "m"}
        self.wfile.write(json.dumps(head | {"choices": [choice]}).encode())

    def log_message(self, *_: object) -> None:
        """Stay silent."""


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = InferenceClient(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="none")
schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
given = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
client.chat_completion([{"role": "user", "content": "p"}], model="m", response_format=given)
sent = asked[-1]["response_format"]
print(f"huggingface_hub {version('huggingface_hub')}\ngiven: {given}\nsent:  {sent}")
sys.exit(0 if sent == {"type": "json_object", "value": schema} else 1)
PYTHON
