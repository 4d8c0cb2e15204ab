#!/bin/sh
# Installs Debian packages that some tests use if present: a Slurm cluster of one node for tests/e2e/test_slurm_sweep.py,
# a browser for the tests that open our HTML pages, and nginx for tests/contract/serving/test_nginx.py. `make test-all`
# runs this first. It installs only as root (or in CI with sudo) and never fails: without the packages those tests are
# skipped with a message. It also makes the environment of TensorRT Edge-LLM's exporter, as `make setup-edge`, and installs
# what runs the notebook with the python that is given.
set -u

PATH="$PATH:/usr/sbin:/sbin"
here() {
  for program in "$@"; do command -v "$program" >/dev/null 2>&1 && return 0; done
  return 1
}
"$(dirname "$0")/setup_edge.sh" || echo ".venv-edge could not be made; the tests of engine=tensorrt_edge are skipped."
[ $# -eq 0 ] || "$1" -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt nbclient ipykernel ||
  echo "nbclient and ipykernel could not be installed; the test of docs/notebook.ipynb is skipped."
packages=""
{ here sbatch && here squeue && here slurmctld && here slurmd && here munged; } || packages="slurm-wlm munge"
here chromium chromium-browser google-chrome || packages="$packages chromium"
here nginx || packages="$packages nginx"
[ -z "$packages" ] && exit 0

sudo=""
if [ "$(id -u)" -ne 0 ]; then
  if [ -n "${CI:-}" ] && here sudo; then sudo="sudo -n"; else sudo="no"; fi
fi
if [ "$sudo" = "no" ] || ! here apt-get; then
  echo "Not installed: $packages. The tests that need them are skipped; to install, as root: apt-get install $packages"
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
install() { timeout 300 $sudo apt-get install -y -qq --no-install-recommends "$1" >/dev/null 2>&1; }
for package in $packages; do
  echo "Installing $package for the tests ..."
  install "$package" || { timeout 120 $sudo apt-get update -qq >/dev/null 2>&1; install "$package"; } ||
    echo "$package could not be installed; the tests that need it are skipped."
done
exit 0
