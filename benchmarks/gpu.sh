#!/bin/sh
# Everything that needs a GPU, in one command:   sh benchmarks/gpu.sh [tests | bench | all] [pytest arguments]
#   tests   tests/gpu; kernels build as tests need them, JOBS processes at a time (default: three quarters of the cores)
#   bench   the operators alone, then whole layers; JSON to OUT (default: benchmarks/results)
# Two processes never build the same kernel, and the cache outlives the run: HEXA_FX_CACHE_DIR says where it is.
set -eu
cd "$(dirname "$0")/.."
what=${1:-all}
[ $# -gt 0 ] && shift
jobs=${JOBS:-$(($(nproc) * 3 / 4 + 1))}
out=${OUT:-benchmarks/results}
mkdir -p "$out"
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 CUBLAS_WORKSPACE_CONFIG=:4096:8 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

if [ "$what" != bench ]; then
  python3 -m pytest tests/gpu -m gpu -n "$jobs" -q --timeout 240 -p no:cacheprovider "$@"
fi
if [ "$what" != tests ]; then
  python3 benchmarks/bench_ops.py --json "$out/ops.json"
  python3 benchmarks/bench_moe_layer.py --json "$out/moe_layer.json"
fi
