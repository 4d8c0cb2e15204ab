#!/bin/bash
# Builds the engines of all 16 ranks of llama_3_1_70b-fp8 on one node. Start it with: bash build.sh
# Written by `make scripts`; checked by tests and by a real sbatch, but not run: that takes GPUs.
set -euo pipefail
cd /home/user/project
python3 -m pipelines repository engine=tensorrt_llm model=llama_3_1_70b build.tp_size=16 triton.num_nodes=2 build.workers=8 | tee /home/user/project/cluster/llama_3_1_70b-fp8.runs/build.out
# Its closing lines say where the repository is.
made=$(sed -n 's/^repository: *//p' /home/user/project/cluster/llama_3_1_70b-fp8.runs/build.out | tail -n 1)
ln -sfn "$(realpath -e "$made")" /home/user/project/cluster/llama_3_1_70b-fp8.runs/repository
