#!/usr/bin/env bash
# Runs the compression tests with nvidia-modelopt 0.37.0 and transformers 4.57.3, the versions that TensorRT-LLM 1.2.1
# pins, in a separate virtual environment.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-modelopt037
if [ ! -e "$venv/.ready" ]; then
  echo "Creating $venv (only once, takes a few minutes) ..."
  "${SYSTEM_PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 nvidia-modelopt==0.37.0 \
    transformers==4.57.3 numpy==1.26.4 accelerate peft==0.21.2 safetensors ml_dtypes 'datasets<5' 'pyarrow<24' 'pandas<3' \
    hydra-core==1.3.8 'pydantic>=2.9,<3' filelock rich pyyaml pytest pytest-timeout
  touch "$venv/.ready"
fi
exec "$venv/bin/python" -m pytest tests/unit/compress tests/contract/compress "$@"
