#!/bin/sh
# Everything that a GPU is needed for, in eight minutes: see bench/gpu_session.py. `--dry-run` is a small one on any machine.
cd "$(dirname "$0")/.." || exit 1
exec "${PYTHON:-python}" -m bench.gpu_session "$@"
