#!/bin/bash
# Triton's response cache (server 2.51.0 of nvidia-pytriton 0.7.0) looks at a request's inputs alone.
#
# Two requests with equal inputs share a response although their parameters differ, or although they ask for different
# outputs: the second one gets the first one's response, status 200. Seen on 2026-12-01 with one Python model that
# multiplies `a` by the request's parameter `factor` and returns it as `b` and `c`, with --cache-config=local. A model that
# takes sampling options or a LoRA adapter's name as parameters must not be cached. Needs a Python with a shared
# libpython, 1 GB of disk.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet nvidia-pytriton==0.7.0 'numpy<2'
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from importlib.metadata import distribution
from pathlib import Path

folder = Path(sys.argv[1])
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
site = Path(distribution("nvidia-pytriton").locate_file(""))
triton = site / "pytriton" / "tritonserver"
stub = f"{sys.version_info.major}.{sys.version_info.minor}"
shutil.copytree(triton / "backends" / "python", folder / "backends" / "python")
shutil.copy2(triton / "python_backend_stubs" / stub / "triton_python_backend_stub", folder / "backends" / "python")
config = (
    'backend: "python" max_batch_size: 4 %s input { name: "a" data_type: TYPE_INT32 dims: 1 }'
    ' output { name: "b" data_type: TYPE_INT32 dims: 1 } output { name: "c" data_type: TYPE_INT32 dims: 1 }'
    " instance_group { kind: KIND_CPU }"
)
code = """
import json
import triton_python_backend_utils as pb
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            factor = int(json.loads(request.parameters()).get("factor", 1))
            product = pb.get_input_tensor_by_name(request, "a").as_numpy() * factor
            responses.append(pb.InferenceResponse([pb.Tensor(name, product) for name in request.requested_output_names()]))
        return responses
"""
for name, cache in (("cached", "response_cache { enable: true }"), ("plain", "")):
    model = folder / "models" / name
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(f'name: "{name}" ' + config % cache)
    (model / "1" / "model.py").write_text(code)
env = dict(os.environ, PATH=f"{folder}/venv/bin:{os.environ['PATH']}")
env["LD_LIBRARY_PATH"] = f"{site}/nvidia_pytriton.libs:{sysconfig.get_config_var('LIBDIR')}"
words = [triton / "bin" / "tritonserver", "--model-repository=models", f"--http-port={port}"]
words += [f"--backend-directory={folder}/backends", f"--cache-directory={triton}/caches"]
words += ["--cache-config=local,size=1048576", "--disable-auto-complete-config"]
words += ["--http-address=127.0.0.1", "--allow-grpc=false", "--allow-metrics=false"]


def infer(model, number, outputs=("b",), **parameters):
    """The values of the outputs in the response, by name."""
    tensor = {"name": "a", "shape": [1, 1], "datatype": "INT32", "data": [number]}
    body = {"inputs": [tensor], "outputs": [{"name": name} for name in outputs], "parameters": parameters}
    url = f"http://127.0.0.1:{port}/v2/models/{model}/infer"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=30) as answer:
        return {output["name"]: output["data"][0] for output in json.load(answer)["outputs"]}


def is_ready():
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=1):
            return True
    except OSError:
        return False


quiet = subprocess.DEVNULL
with subprocess.Popen(words, cwd=folder, env=env, stdout=quiet, stderr=quiet) as server:
    try:
        deadline = time.monotonic() + 60
        while not is_ready() and time.monotonic() < deadline:
            time.sleep(0.5)
        seen = {
            model: [infer(model, 5, factor=2), infer(model, 5, factor=3), infer(model, 7), infer(model, 7, ("c",))]
            for model in ("plain", "cached")
        }
    finally:
        server.kill()
print("nvidia-pytriton 0.7.0, a=5 with factor 2 and 3, then a=7 asking for b and for c:")
for model, responses in seen.items():
    print(f"{model}: {responses}")
if seen != {
    "plain": [{"b": 10}, {"b": 15}, {"b": 7}, {"c": 7}],
    "cached": [{"b": 10}, {"b": 10}, {"b": 7}, {"b": 7}],
}:
    sys.exit("The behaviour has changed.")
PYTHON
