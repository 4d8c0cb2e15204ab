"""Example commands that `make serve` prints, ready to paste."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

TRITON_PYTHON = """\
{python} - <<'END'
import numpy as np, tritonclient.grpc as triton
client = triton.InferenceServerClient("{grpc_url}")
text = triton.InferInput("text_input", [1, 1], "BYTES")
text.set_data_from_numpy(np.array([[{prompt}]], dtype=object))
count = triton.InferInput("max_tokens", [1, 1], "INT32")
count.set_data_from_numpy(np.array([[16]], dtype=np.int32))
show = lambda result, error: print(error or result.as_numpy("text_output"))
client.start_stream(show)
client.async_stream_infer("{model}", [text, count])
client.stop_stream()
END"""


def curl_generate(http_url: str, model: str, prompt: str) -> str:
    """Return a curl command for Triton's generate endpoint."""
    body = json.dumps({"text_input": prompt, "max_tokens": 16})
    return f"curl -s {http_url}/v2/models/{model}/generate \\\n  -d {shlex.quote(body)}"


def python_stream(grpc_url: str, model: str, prompt: str) -> str:
    """Return the same request with NVIDIA's client, over the stream that a decoupled model needs."""
    return TRITON_PYTHON.format(python=shown_python(), grpc_url=grpc_url, model=model, prompt=json.dumps(prompt))


def curl_openai(openai_url: str, model: str, prompt: str) -> str:
    """Return a curl command for the OpenAI-compatible endpoint."""
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 16})
    header = "-H 'Content-Type: application/json'"
    return f"curl -s {openai_url}/completions \\\n  {header} \\\n  -d {shlex.quote(body)}"


def shown_python() -> str:
    """Return the shortest way to type this Python here."""
    path = Path(sys.executable)
    near = os.path.relpath(path)
    return shlex.quote(near if not near.startswith("..") else str(path))
