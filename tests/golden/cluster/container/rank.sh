#!/bin/bash
# One rank of the server: rank 0 answers, the others help with the engine. srun or mpirun starts it.
# Written by `make scripts`; checked by tests and by a real sbatch, but not run: that takes GPUs.
set -euo pipefail
rank=${SLURM_PROCID:-${OMPI_COMM_WORLD_RANK:?srun or mpirun must start this}}
key=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')  # told to nobody
cd /home/user/project/cluster/llama_3_1_70b-fp8.runs/repository  # relative paths of the engine start there
if [ "$rank" -eq 0 ]; then
  # The kernel ends it together with this shell, which becomes the server.
  PYTHONPATH=/home/user/project${PYTHONPATH:+:$PYTHONPATH} setpriv --pdeathsig TERM python3 -m pipelines.serving.openai --repository=. --grpc=127.0.0.1:8001 --metrics=http://127.0.0.1:8002/metrics --port=9000 --host=0.0.0.0 --drain-timeout-s=30 --max-body-bytes=4000000 --max-prompts=128 --request-timeout-s=600 &
  exec /opt/tritonserver/bin/tritonserver \
    --model-repository=. \
    --http-address=127.0.0.1 \
    --grpc-address=127.0.0.1 \
    --metrics-address=127.0.0.1 \
    --http-port=8000 \
    --grpc-port=8001 \
    --metrics-port=8002 \
    --allow-metrics=true \
    --disable-auto-complete-config \
    --exit-timeout-secs=30 \
    "--http-restricted-api=shared-memory,model-repository,trace,logging:admin-key=${key}" \
    "--grpc-restricted-protocol=shared-memory,model-repository,trace,logging:admin-key=${key}" \
    "--backend-config=python,shm-region-prefix-name=trtllm_pipelines_${rank}_"
fi
exec /opt/tritonserver/bin/tritonserver \
    --model-repository=. \
    --http-address=127.0.0.1 \
    --grpc-address=127.0.0.1 \
    --metrics-address=127.0.0.1 \
    --http-port=8000 \
    --grpc-port=8001 \
    --metrics-port=8002 \
    --allow-metrics=true \
    --disable-auto-complete-config \
    --exit-timeout-secs=30 \
    "--http-restricted-api=shared-memory,model-repository,trace,logging:admin-key=${key}" \
    "--grpc-restricted-protocol=shared-memory,model-repository,trace,logging:admin-key=${key}" \
    "--backend-config=python,shm-region-prefix-name=trtllm_pipelines_${rank}_" \
    --model-control-mode=explicit \
    --load-model=tensorrt_llm
