#!/bin/sh
# Tests and benchmarks that need a GPU. Run from anywhere on a machine with one: sh benchmarks/gpu.sh [pytest arguments]
# Kernels build as tests need them, in parallel: JOBS processes (default: half the cores). Results go to $OUT if it is set.
set -eu
cd "$(dirname "$0")/.."
jobs=${JOBS:-$(($(nproc) / 2))}
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 CUBLAS_WORKSPACE_CONFIG=:4096:8
export HEXA_FX_CACHE_DIR="${HEXA_FX_CACHE_DIR:-${TMPDIR:-/tmp}/hexa_fx_gpu_cache}"
python3 -m pytest tests/gpu -m gpu -n "$jobs" -q --timeout 240 -p no:cacheprovider "$@"
