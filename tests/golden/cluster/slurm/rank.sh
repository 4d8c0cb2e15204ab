#!/bin/bash
# One rank of the server: rank 0 answers, the others help with the engine. srun or mpirun starts it.
# Written by `make scripts`; checked by tests and by a real sbatch, but not run: that takes GPUs.
set -euo pipefail
rank=${SLURM_PROCID:-${OMPI_COMM_WORLD_RANK:?srun or mpirun must start this}}
export NCCL_DEBUG=INFO
cd /home/user/project/cluster/llama_3_1_70b-fp8.runs/repository  # relative paths of the engine start there
if [ "$rank" -eq 0 ]; then
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
    "--backend-config=python,shm-region-prefix-name=trtllm_pipelines_${rank}_" \
    --model-control-mode=explicit \
    --load-model=tensorrt_llm
