#!/usr/bin/env bash
# Fuzzes everything that reads bytes of others, one target after the other: scripts/fuzz.sh [SECONDS] [TARGET ...]
# In a virtual environment of its own, because atheris is no dependency of this project.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-fuzz
seconds=${1:-1800}
shift || true
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(config_json safetensors_header measured_result chat_template openai_body)
if [ ! -e "$venv/.ready" ]; then
  echo "Creating $venv (only once, takes a minute) ..."
  python3 -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check 'atheris>=2.3,<4' hydra-core==1.3.8 \
    'pydantic>=2.9,<3' filelock rich pyyaml 'numpy<2' jinja2 'tritonclient[grpc]>=2.55'
  touch "$venv/.ready"
fi
for target in "${targets[@]}"; do
  echo "$target: $seconds s"
  nice -n 19 "$venv/bin/python" -m tests.fuzz.run "$target" "$seconds"
done
