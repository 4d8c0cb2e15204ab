#!/usr/bin/env bash
# Prints the trend report for a page that cannot show local pictures: scripts/nightly_summary.sh report.md
set -euo pipefail
grep --invert-match --extended-regexp '^!\[.*\]\(.*\.svg\)$' "$1" | head --bytes=900000 # a summary may have 1 MiB
