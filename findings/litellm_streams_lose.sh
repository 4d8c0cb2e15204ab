#!/bin/bash
# LiteLLM 1.110.2 drops the log probabilities of a streamed completion and a finish reason of a streamed chat.
#
# Input: a stand-in for an OpenAI-compatible server, which streams two answers, their words in turn, each event with its
# `index`, a completion's with its log probability. Seen on 2026-11-30: `text_completion(stream=True, logprobs=1)` asks the
# server for log probabilities, gets them, and gives none, for the providers text-completion-openai, openai and
# hosted_vllm. `completion(stream=True, n=2)` gives both answers, but a finish reason (`length`) for the first one alone,
# so that the cut of the other is not seen. `responses(max_output_tokens=5)` asks the server for 16 tokens. Nothing of it
# is said. (1.108.7 also gave all words of a completion's answers the index 0.)
# Needs 1 GB of disk and two minutes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet litellm==1.110.2
LITELLM_LOCAL_MODEL_COST_MAP=True "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import json
import sys
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

import litellm

asked = []


def events(chat: bool):
    """Yield the events of two answers, "a0 a1 a2 " and "b0 b1 b2 "."""
    head = {"id": "1", "object": "chat.completion.chunk" if chat else "text_completion", "created": 1, "model": "m"}
    for number in range(4):
        for index, letter in enumerate("ab"):
            word = f"{letter}{number} " if number < 3 else ""
            choice = {"index": index, "finish_reason": None if word else "length", "logprobs": None}
            if chat:
                choice["delta"] = {"content": word} if word else {}
            else:
                scores = {"tokens": [word], "token_logprobs": [-0.5], "top_logprobs": [{word: -0.5}], "text_offset": [0]}
                choice |= {"text": word, "logprobs": scores if word else None}
            yield head | {"choices": [choice]}


class Server(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if not asked[-1].get("stream"):
            return self.answer("application/json", b'{"error": {"message": "no"}}', 400)
        data = [json.dumps(event) for event in events("chat" in self.path)] + ["[DONE]"]
        return self.answer("text/event-stream", "".join(f"data: {each}\n\n" for each in data).encode())

    def answer(self, media: str, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", media)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Stay silent."""


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
common = {"api_base": f"http://127.0.0.1:{server.server_port}/v1", "api_key": "none", "max_retries": 0}


def read(stream) -> dict:
    """Return text by index, the finish reasons by index, and whether there were log probabilities."""
    text, ends, scored = defaultdict(str), {}, False
    for chunk in stream:
        for choice in chunk.choices:
            delta = getattr(choice, "delta", None)
            text[choice.index] += (delta.content if delta else choice.text) or ""
            scored = scored or bool(getattr(choice, "logprobs", None))
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    return {"text": dict(text), "ends": ends, "logprobs": scored}


print(f"litellm {version('litellm')}")
texts, found = {0: "a0 a1 a2 ", 1: "b0 b1 b2 "}, []
for provider in ("text-completion-openai", "openai", "hosted_vllm"):
    for wanted in ({"prompt": ["p", "q"]}, {"prompt": "p", "n": 2}):
        got = read(litellm.text_completion(model=f"{provider}/m", stream=True, logprobs=1, **wanted, **common))
        print(f"{provider}, {wanted}: {got}; the server was asked for logprobs={asked[-1]['logprobs']}")
        found.append(got["text"] == texts and not got["logprobs"] and asked[-1]["logprobs"] == 1)
messages = [{"role": "user", "content": "p"}]
got = read(litellm.completion(model="openai/m", stream=True, n=2, messages=messages, **common))
print(f"chat, n=2: {got}")
found.append(got["text"] == texts and got["ends"] == {0: "length"})
try:
    litellm.responses(model="openai/m", input="p", max_output_tokens=5, **common)
except litellm.BadRequestError:
    print(f"responses, max_output_tokens=5: the server was asked for {asked[-1]['max_output_tokens']}")
found.append(asked[-1]["max_output_tokens"] == 16)
sys.exit(0 if all(found) else 1)
PYTHON
