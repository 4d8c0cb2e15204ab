#!/bin/bash
# Serves llama_3_1_70b-fp8 with 16 GPUs on 2 nodes. The first host answers. Start it with: bash serve.sh
# Written by `make scripts`; checked by tests and by a real sbatch, but not run: that takes GPUs.
set -euo pipefail
mpirun --allow-run-as-root --hostfile /home/user/project/cluster/llama_3_1_70b-fp8/hosts -n 16 --map-by slot --bind-to none bash /home/user/project/cluster/llama_3_1_70b-fp8/rank.sh
