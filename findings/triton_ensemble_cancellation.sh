#!/bin/bash
# A client that cancels a stream of a Triton ensemble does not stop the step that runs (server 2.51.0).
#
# One decoupled Python model sends a response every 50 ms and asks `is_cancelled()` each time, which is how a model learns
# that nobody waits any more. Seen on 2026-12-01 (nvidia-pytriton 0.7.0, tritonclient 2.69.0): asked by its own name, it is
# told right after the client has cancelled. As the only step of an ensemble it is not told at all: it runs to its end
# and keeps its place. So an LLM behind an ensemble goes on for clients that left. Nothing is logged. Needs a Python with
# a shared libpython, 1 GB of disk.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet nvidia-pytriton==0.7.0 'tritonclient[grpc]==2.69.0' 'numpy<2'
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from importlib.metadata import distribution, version
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpc

folder = Path(sys.argv[1])
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
site = Path(distribution("nvidia-pytriton").locate_file(""))
triton = site / "pytriton" / "tritonserver"
stub = f"{sys.version_info.major}.{sys.version_info.minor}"
shutil.copytree(triton / "backends" / "python", folder / "backends" / "python")
shutil.copy2(triton / "python_backend_stubs" / stub / "triton_python_backend_stub", folder / "backends" / "python")
MODEL = '''
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for sent in range(60):
                if sender.is_cancelled():
                    break
                output = pb_utils.Tensor("count", np.array([sent], np.int32))
                sender.send(pb_utils.InferenceResponse([output]))
                time.sleep(0.05)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            with open(REPORT, "w") as report:
                report.write(str(sent + 1))
'''
ENDS = 'input { name: "start" data_type: TYPE_INT32 dims: 1 } output { name: "count" data_type: TYPE_INT32 dims: 1 }'
DECOUPLED = "model_transaction_policy { decoupled: true }"
STEP = 'model_name: "counter" model_version: -1 input_map { key: "start" value: "start" }'
STEP += ' output_map { key: "count" value: "count" }'
report = folder / "report"
for name, kind in (
    ("counter", f'backend: "python" instance_group {{ kind: KIND_CPU }} {DECOUPLED}'),
    ("outer", f'platform: "ensemble" ensemble_scheduling {{ step {{ {STEP} }} }} {DECOUPLED}'),
):
    (folder / "models" / name / "1").mkdir(parents=True)
    (folder / "models" / name / "config.pbtxt").write_text(f'name: "{name}" {kind} {ENDS}')
(folder / "models" / "counter" / "1" / "model.py").write_text(f"REPORT = {str(report)!r}\n{MODEL}")


def responses_made(client, name):
    """How many responses the model makes for a client that cancels after the third."""
    report.unlink(missing_ok=True)
    got = []
    client.start_stream(lambda result, error: got.append(error or result))
    start = grpc.InferInput("start", [1], "INT32")
    start.set_data_from_numpy(np.zeros(1, np.int32))
    client.async_stream_infer(name, [start])
    until = time.monotonic() + 30
    while len(got) < 3:
        if time.monotonic() > until:
            sys.exit(f"{name} did not answer: {got}")
        time.sleep(0.01)
    client.stop_stream(cancel_requests=True)
    for _ in range(100):
        time.sleep(0.1)
        if report.exists() and report.read_text():
            return int(report.read_text())
    sys.exit(f"{name} did not end.")


env = dict(os.environ, PATH=f"{folder}/venv/bin:{os.environ['PATH']}")
env["LD_LIBRARY_PATH"] = f"{site}/nvidia_pytriton.libs:{sysconfig.get_config_var('LIBDIR')}"
words = [triton / "bin" / "tritonserver", f"--model-repository={folder}/models", f"--grpc-port={port}"]
words += [f"--backend-directory={folder}/backends", "--grpc-address=127.0.0.1", "--allow-http=false"]
words += ["--allow-metrics=false", "--disable-auto-complete-config"]
seen = {}
with subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
    try:
        client = grpc.InferenceServerClient(f"127.0.0.1:{port}")
        for _ in range(120):
            time.sleep(0.5)
            try:
                if client.is_server_ready():
                    break
            except grpc.InferenceServerException:
                pass
        seen = {name: responses_made(client, name) for name in ("counter", "outer")}
    finally:
        server.kill()
print(f"nvidia-pytriton {version('nvidia-pytriton')}, tritonclient {version('tritonclient')}: a client cancels after 3 of 60 responses.")
print(f"Asked by its name the model makes {seen['counter']}, as a step of an ensemble {seen['outer']}.")
if not (seen["counter"] < 20 and seen["outer"] == 60):
    sys.exit("The behaviour has changed.")
PYTHON
