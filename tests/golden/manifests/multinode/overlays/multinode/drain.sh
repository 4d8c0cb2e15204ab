#!/bin/bash
# Before the leader ends: drain.sh SECONDS_STILL_ACCEPTING SECONDS_TO_DRAIN
# SIGTERM goes to the rank that answers. mpirun, given it, would kill every rank a second later.
set -euo pipefail
sleep "$1"
for process in /proc/[0-9]*; do
  if [[ $(cat "$process/comm" 2> /dev/null) == tritonserver ]] &&
    grep -qsz '^OMPI_COMM_WORLD_RANK=0$' "$process/environ"; then
    kill -TERM "${process#/proc/}"
    for ((second = 0; second < $2; second++)); do
      kill -0 "${process#/proc/}" 2> /dev/null || break
      sleep 1
    done
  fi
done
