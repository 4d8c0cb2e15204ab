#!/bin/bash
# Wait until every worker lets us in: wait.sh SSH_CONFIG HOST [HOST ...]
# A worker that is not there yet has no address either, so mpirun would fail at once.
set -euo pipefail
config=$1
shift
for host in "$@"; do
  until ssh -F "$config" "$host" true; do
    echo "waiting for $host"
    sleep 2
  done
done
