#!/bin/bash
# Triton's Python backend (server 2.51.0 of nvidia-pytriton 0.7.0) cannot load a repository whose path has a blank.
#
# It starts its stub by a line for bash with the model's path in it as it is, so the path ends at the blank. Nothing says
# so: the server waits for the stub for minutes. Seen on 2026-11-29 with one Python model; from inside of the folder, with
# --model-repository=., the same repository is ready within seconds. Needs a Python with a shared libpython, 1 GB of disk.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet nvidia-pytriton==0.7.0 'numpy<2'
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import urllib.request
from importlib.metadata import distribution
from pathlib import Path

folder, port = Path(sys.argv[1]), 18431
site = Path(distribution("nvidia-pytriton").locate_file(""))
triton = site / "pytriton" / "tritonserver"
stub = f"{sys.version_info.major}.{sys.version_info.minor}"
shutil.copytree(triton / "backends" / "python", folder / "backends" / "python")
shutil.copy2(triton / "python_backend_stubs" / stub / "triton_python_backend_stub", folder / "backends" / "python")
model = folder / "my models" / "echo"
(model / "1").mkdir(parents=True)
(model / "config.pbtxt").write_text(
    'name: "echo" backend: "python" input { name: "a" data_type: TYPE_INT32 dims: 1 }'
    ' output { name: "b" data_type: TYPE_INT32 dims: 1 } instance_group { kind: KIND_CPU }'
)
(model / "1" / "model.py").write_text("class TritonPythonModel:\n    def execute(self, requests):\n        return []\n")
env = dict(os.environ, PATH=f"{folder}/venv/bin:{os.environ['PATH']}")
env["LD_LIBRARY_PATH"] = f"{site}/nvidia_pytriton.libs:{sysconfig.get_config_var('LIBDIR')}"


def is_ready(repository):
    """Whether the server is ready within 30 s."""
    words = [triton / "bin" / "tritonserver", f"--model-repository={repository}", f"--http-port={port}"]
    words += [f"--backend-directory={folder}/backends", "--http-address=127.0.0.1", "--allow-grpc=false"]
    words += ["--allow-metrics=false", "--disable-auto-complete-config"]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(words, cwd=model.parent, env=env, stdout=quiet, stderr=quiet) as server:
        try:
            for _ in range(60):
                time.sleep(0.5)
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=1):
                        return True
                except OSError:
                    pass
            return False
        finally:
            server.kill()


seen = {name: is_ready(name) for name in (str(model.parent), ".")}
print(f"nvidia-pytriton 0.7.0, ready within 30 s by --model-repository: {seen}")
if [*seen.values()] != [False, True]:
    sys.exit("The behaviour has changed.")
PYTHON
