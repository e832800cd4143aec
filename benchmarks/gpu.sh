#!/bin/sh
# Everything that needs a GPU, in one command:   sh benchmarks/gpu.sh [tests | multigpu | sanitize | bench | all | session] [pytest arguments]
#   tests     tests/gpu, spread over the GPUs that are there; kernels build as tests need them, JOBS processes at a time (default: three
#             quarters of the cores). A test that hangs is ended with the stacks of its threads, also one that waits for the device
#   multigpu  what needs two GPUs: ranks that die on NCCL, two devices in one process
#   sanitize  a small case of each kernel (tests/gpu/test_small.py) under compute-sanitizer's memcheck and racecheck; logs to OUT.
#             Fails on any error or hazard. Needs a driver that lets debuggers in: gVisor's does not
#   bench     whole layers; JSON to OUT (default: benchmarks/results)
#   session   what a change of kernels or launches has to show, on one Hopper GPU in at most 25 minutes: tests/gpu, a part of sanitize,
#             the seven layers, host times, and with OLD_CUBINS=FOLDER kernels against another revision's (bench_cubins.py). JSON and
#             logs to OUT; a part that fails or takes too long costs only itself, and the exit status says so
# `all` is tests and bench. Two processes never build the same kernel, and the cache outlives the run: HEXA_FX_CACHE_DIR says where it is.
set -eu
cd "$(dirname "$0")/.."
what=${1:-all}
[ $# -gt 0 ] && shift
jobs=${JOBS:-$(($(nproc) * 3 / 4 + 1))}
out=${OUT:-benchmarks/results}
mkdir -p "$out"
hangs="--timeout-method thread"  # signals do not reach a thread that waits for the device
export HEXA_FX_WAIT_FOR_KERNELS=1 OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 CUBLAS_WORKSPACE_CONFIG=:4096:8 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

# Only our kernels are watched (torch's need not be), and only what they do to memory: one test wants a driver call to be refused.
# Each tensor gets an allocation of its own, so that memcheck sees the first byte past it.
sanitize() { # TOOL [pytest arguments]
  tool=$1 log="$out/sanitize_$1.log"
  shift
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --kernel-name kns=hexa_kernel --report-api-errors no \
    --error-exitcode 9 --target-processes application-only \
    python3 -m pytest tests/gpu/test_small.py -q --timeout 600 -p no:cacheprovider -p no:xdist "$@" >"$log" 2>&1 && code=0 || code=$?
  echo "$tool: exit code $code, log in $log"
  grep -E "SUMMARY|passed|failed" "$log" || true
  if grep -q "Device not supported" "$log"; then
    echo "compute-sanitizer cannot watch this device: the driver (gVisor's, for one) does not let it in" >&2
    return 3
  fi
  grep -q "SUMMARY: 0 " "$log" || code=9
  return $code
}

part() { # NAME SECONDS COMMAND...: its output to OUT/NAME.log, its last lines here
  name=$1 seconds=$2
  shift 2
  begin=$(date +%s)
  timeout -k 10 "$seconds" "$@" >"$out/$name.log" 2>&1 && code=0 || code=$?
  echo "== $name: exit code $code after $(($(date +%s) - begin)) s"
  tail -n 12 "$out/$name.log"
  [ "$code" = 0 ] || failed="$failed $name"
}

case $what in
session)
  failed=
  layers=mixtral,qwen3-30b,olmoe,dsv3,granite-fine,sonic-7b,sonic-30b
  part tests 420 sh "$0" tests
  part sanitize 240 sh "$0" sanitize -k "coop or sm80 or reindex or combine or low2"
  part layers 420 python3 benchmarks/bench_moe_layer.py --shapes $layers --impls hexa --turns 1 --json "$out/moe_layer.json"
  part host 150 python3 benchmarks/bench_host.py --json "$out/host.json"
  [ -z "${OLD_CUBINS:-}" ] || part cubins 120 python3 benchmarks/bench_cubins.py --old "$OLD_CUBINS" --json "$out/cubins.json"
  echo "failed:${failed:- none}"
  [ -z "$failed" ]
  exit
  ;;
multigpu)
  # three jobs share the GPUs; the first of each worker builds kernels
  # shellcheck disable=SC2086
  exec python3 -m pytest tests/distributed tests/gpu -m multigpu -n 3 -q --timeout 300 $hangs -p no:cacheprovider "$@"
  ;;
sanitize)
  PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin"
  command -v compute-sanitizer >/dev/null || { echo "no compute-sanitizer on PATH; it comes with the CUDA toolkit" >&2; exit 2; }
  python3 -m pytest tests/gpu/test_small.py -n "$jobs" -q --timeout 240 -p no:cacheprovider "$@" # builds the kernels
  sanitize memcheck "$@" &
  memcheck=$!
  racecheck=0
  sanitize racecheck "$@" || racecheck=$?
  wait $memcheck
  exit $racecheck
  ;;
esac
if [ "$what" != bench ]; then
  [ -n "${CUDA_VISIBLE_DEVICES:-}" ] || export TEST_GPUS="$(nvidia-smi -L | wc -l)"
  # shellcheck disable=SC2086
  python3 -m pytest tests/gpu -m gpu -n "$jobs" -q --timeout 240 $hangs -p no:cacheprovider "$@"
fi
if [ "$what" != tests ]; then
  python3 benchmarks/bench_moe_layer.py --json "$out/moe_layer.json"
fi
