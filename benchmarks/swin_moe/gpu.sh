#!/bin/sh
# Every experiment on one machine with four GPUs, in one command:   sh benchmarks/swin_moe/gpu.sh OUT [SECONDS]
#
# Takes at most nine minutes (SECONDS: 540). What has not started by then is recorded as skipped; run it again, and `collect` keeps
# what each run measured. The order, with the share of SECONDS after which a part starts no more cases:
#   1. GPUs 0 and 1: memory_base (36 %), then ablation_memory (52 %)
#      GPUs 2 and 3: memory_small (31 %), then heterogeneity_model (52 %)
#      beside both, one GPU each: the seven trainings of convergence (40 %). They slow their neighbours down, so times of the
#      memory tables and of ablation_memory are not for publication; peaks of memory are counted per process.
#   2. all four GPUs: latency_base, ablation_latency, crossover, latency_small, saturated (100 %)
#   3. GPUs 0 and 1: heterogeneity_data, in what is left
# The first case of a process takes a minute where nothing is built yet: it verifies the rewrite and builds its kernels, with
# HEXA_FX_BUILD_JOBS compilers at once (all cores). The others take seconds.
# OUT gets swin.tar, renewed as results come, and log.txt; `python -m benchmarks.swin_moe collect OUT` takes the results over.
# HEXA_SWIN_TINY=1: the same in small on the CPU, one after the other (give it SECONDS accordingly, 1500 on two cores).
set -u
cd "$(dirname "$0")/../.."
out=${1:-/tmp/swin_results}
seconds=${2:-540}
work=$(mktemp -d)
begin=$(date +%s)
mkdir -p "$out"
tiny=${HEXA_SWIN_TINY:+--tiny}
python=${PYTHON:-python3}
export HEXA_FX_WAIT_FOR_KERNELS=1 PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export HEXA_FX_BUILD_JOBS=${HEXA_FX_BUILD_JOBS:-$(nproc)}
export NCCL_NVLS_ENABLE=0 TORCH_NCCL_ASYNC_ERROR_HANDLING=1

. benchmarks/end_with_it.sh

keep() { # what there is so far, in two files
  (cd "$work" && tar cf "$work/.tar_$1" $(ls | grep -E '^(swin_.*[.]json|log_.*)$') 2>/dev/null
    cp "$work/.tar_$1" "$out/swin.tar")
  cat "$work"/log_* 2>/dev/null | grep -E '^\[|ranks ended|gave up|Error|error' | cut -c1-240 >"$out/log.txt"
}

run() { # visible GPUs, log, second until which a case may start, arguments
  gpus=$1 log=$2 end=$3
  shift 3
  rest=$((begin + end - $(date +%s)))
  [ "$rest" -gt 10 ] || { echo "gave up: $* (no time)" >>"$work/log_$log"; return; }
  CUDA_VISIBLE_DEVICES=$gpus timeout -k 3 $((rest + 12)) "$python" -m benchmarks.swin_moe "$@" $tiny --out "$work" \
    --until $((begin + end)) --timeout 40 --case-seconds 120 >>"$work/log_$log" 2>&1 &
  running=$!
  wait $running || echo "gave up: $* ended early" >>"$work/log_$log"
  keep "$log"
}

first=$((seconds * 52 / 100))
all=
trainings() {
  for variant in 0 1 2 3 4 5 6; do
    beside run $((variant % 4)) convergence$variant $((seconds * 40 / 100)) convergence --variant $variant --tag _v$variant
  done
}
left() {
  run 0,1 base $((first * 70 / 100)) memory_base --tag _base
  run 0,1 ablation $first ablation_memory
}
right() {
  run 2,3 small $((first * 60 / 100)) memory_small --tag _small
  run 2,3 model $first heterogeneity_model --tag _model
}
beside() { # at the same time; one after the other on a CPU
  if [ -n "$tiny" ]; then "$@"; return; fi
  { end_with_it; "$@"; } &
  all="$all $!"
}

trainings
beside left
beside right
running=$all
wait
run 0,1,2,3 four "$seconds" latency_base ablation_latency crossover latency_small saturated
rest=$((begin + seconds - $(date +%s)))
[ "$rest" -gt 25 ] && run 0,1 data "$seconds" heterogeneity_data --tag _data
keep end
echo "took $(($(date +%s) - begin)) s"
cat "$out/log.txt"
