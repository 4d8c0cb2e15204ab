#!/bin/sh
# Debian packages that tests use when they are there: a Slurm cluster of one node for tests/e2e/test_slurm_sweep.py.
# `make test` runs this first. It installs only as root (or in CI with sudo), and never fails: without the packages those
# tests are skipped and say so.
set -u

PACKAGES="slurm-wlm munge"
PROGRAMS="sbatch squeue slurmctld slurmd munged"

PATH="$PATH:/usr/sbin:/sbin"
missing=""
for program in $PROGRAMS; do
  command -v "$program" >/dev/null 2>&1 || missing="$missing $program"
done
[ -z "$missing" ] && exit 0

sudo=""
if [ "$(id -u)" -ne 0 ]; then
  if [ -n "${CI:-}" ] && command -v sudo >/dev/null 2>&1; then sudo="sudo -n"; else sudo="no"; fi
fi
if [ "$sudo" = "no" ] || ! command -v apt-get >/dev/null 2>&1; then
  echo "Not here:$missing. The tests that need them are skipped; as root: apt-get install $PACKAGES"
  exit 0
fi
echo "Installing $PACKAGES for the tests ..."
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086 # words on purpose
install() { timeout 300 $sudo apt-get install -y -qq --no-install-recommends $PACKAGES >/dev/null 2>&1; }
# shellcheck disable=SC2086
install || { timeout 120 $sudo apt-get update -qq >/dev/null 2>&1; install; } ||
  echo "They could not be installed; the tests that need them are skipped."
exit 0
