#!/bin/sh
# bench_partition.py on a machine of four GPUs: on two of them in two halves at once, then on all four. About four minutes.
#   sh benchmarks/gpu_partition.sh           JSON to OUT (default: benchmarks/results), its parts and logs to OUT/partition_parts
#   SMOKE=1 sh benchmarks/gpu_partition.sh   the same tiny, over Gloo on CPUs; without OUT, it writes to a folder that it names
#   python3 -m benchmarks.partition_docs     then writes the tables of docs/partition_speed.md
# A section that fails or hangs costs only itself (partition_run.py); files of earlier runs stay if nothing was recorded.
set -eu
cd "$(dirname "$0")/.."
out=${OUT:-${SMOKE:+$(mktemp -d)}}
out=${out:-benchmarks/results}
[ -z "${SMOKE:-}" ] || echo "numbers of tiny sizes go to $out"
work=$out/partition_parts
rm -rf "$work" && mkdir -p "$work"
export HEXA_FX_WAIT_FOR_KERNELS=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} PYTHONUNBUFFERED=1 HEXA_FX_BUILD_JOBS=${HEXA_FX_BUILD_JOBS:-$(nproc)}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
smoke=${SMOKE:+--smoke}

[ -n "$smoke" ] || timeout -k 10 150 python3 benchmarks/bench_partition.py --prebuild 2,4 || echo "prebuild failed: kernels build as they are needed"

part() { # file, port, GPUs, processes, deadline in seconds, sections
  # shellcheck disable=SC2086
  python3 benchmarks/partition_run.py --out "$work/$1" --port "$2" --gpus "$3" --processes "$4" --deadline "$5" --sections "$6" $smoke
}
part 2a 29501 0,1 2 160 sweep &
part 2b 29601 2,3 2 160 unequal,overlap,correctness,memory &
wait
part 4a 29701 0,1,2,3 4 200 unequal,overlap,sweep,correctness,memory
for n in 2 4; do
  python3 benchmarks/merge_records.py "$out/partition_h200x$n.json" "$work/$n"*.json
done
