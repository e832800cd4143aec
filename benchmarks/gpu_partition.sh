#!/bin/sh
# bench_partition.py on a machine of four GPUs: on two of them in two halves at once, then on all four. About three minutes.
#   sh benchmarks/gpu_partition.sh [missing]      JSON to OUT (default: benchmarks/results)
#   missing   only what the recorded files lack: qwen3-30b, and unequal devices; added to them
set -eu
cd "$(dirname "$0")/.."
out=${OUT:-benchmarks/results}
mkdir -p "$out"
export OMP_NUM_THREADS=4 PYTHONUNBUFFERED=1 HEXA_FX_BUILD_JOBS=${HEXA_FX_BUILD_JOBS:-$(nproc)} PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
bench=benchmarks/bench_partition.py
if [ "${1:-}" = missing ]; then
  shapes=qwen3-30b first=sweep,overlap second=unequal old=benchmarks/results
else
  shapes=mixtral,qwen3-30b,swin-moe-b first=sweep second=correctness,overlap,memory,unequal old=
fi
python3 $bench --prebuild 2,4 --shapes $shapes

part() { # devices, port, processes, sections, file
  CUDA_VISIBLE_DEVICES=$1 timeout 150 torchrun --master_port "$2" --nproc_per_node "$3" $bench --shapes $shapes --sections "$4" --out "$5" \
    > "$5.log" 2>&1 || { echo "$4 on $3 GPUs failed:"; grep -v '^{' "$5.log" | tail -30; }
}
work=$(mktemp -d)
part 0,1 29501 2 $first "$work/2a.json" &
part 2,3 29502 2 $second "$work/2b.json" &
wait
part 0,1,2,3 29503 4 $first,$second "$work/4a.json"
for n in 2 4; do
  # shellcheck disable=SC2086
  python3 benchmarks/merge_records.py "$out/partition_h200x$n.json" ${old:+$old/partition_h200x$n.json} "$work"/$n*.json
done
