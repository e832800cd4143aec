#!/bin/sh
# Every experiment on one machine with four GPUs, in one command of about five minutes:   sh benchmarks/swin_moe/gpu.sh OUT
# First two pairs of GPUs side by side, then all four. Results reach OUT case by case, as swin_<experiment>.json.
set -u
cd "$(dirname "$0")/../.."
out=${1:-benchmarks/results}
mkdir -p "$out"
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
run() { # visible GPUs, tag, seconds, experiments: what has not started after that many seconds is recorded as skipped
  gpus=$1 tag=$2 limit=$3
  shift 3
  CUDA_VISIBLE_DEVICES=$gpus timeout -k 5 $((limit + 25)) \
    python3 -m benchmarks.swin_moe "$@" --out "$out" --tag "$tag" --seconds "$limit" --timeout 45 >>"$out/log$tag" 2>&1 ||
    echo "$gpus: $* ended early, see $out/log$tag"
}
(run 0,1 _base 75 memory_base && run 0,1 _data 75 heterogeneity_data && run 0,1 "" 45 ablation_memory) &
(run 2,3 _small 75 memory_small && run 2,3 _model 75 heterogeneity_model) &
wait
run 0,1,2,3 "" 150 latency ablation_latency crossover saturated convergence
grep -h '^\[' "$out"/log* | cut -c1-200
