#!/usr/bin/env bash
# Makes .venv-edge, the environment of TensorRT Edge-LLM's exporter, which needs other packages than this project.
# Only what exports on a CPU is installed; the versions are those that tensorrt-edgellm 0.11.0 itself asks for.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-edge
if [ ! -e "$venv/.ready" ]; then
  echo "Creating $venv (only once, takes a few minutes) ..."
  "${SYSTEM_PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile 'tensorrt-edgellm[export]==0.11.0'
  "$venv/bin/python" -W ignore -m compileall -qq -j 0 -x 'site-packages/.*/tests?/' "$venv/lib" || true
  touch "$venv/.ready"
fi
