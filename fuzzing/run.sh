#!/usr/bin/env bash
# All targets for SECONDS each (default 60): fuzzing/run.sh 20
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m fuzzing "$@"
