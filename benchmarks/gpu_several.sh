#!/bin/sh
# What needs several GPUs, on a machine of two or four, in one call of at most SECONDS (570):
#
#   sh benchmarks/gpu_several.sh [OUT] [SECONDS]
#
# On four:
#   1. until 60 %   bench_mesh.py: training steps by FSDP2, by every strategy, as CUDA graphs, by expert parallelism; routers by Zipf's
#                   law and trained ones; float32 weights under autocast, adapters, Trainer (all of it takes more than 530 s on four
#                   H200: pass 950 as SECONDS)
#   2. until 78 %   GPUs 0 and 1: gradients in bf16 and two unequal devices; GPUs 2 and 3: the tests marked multigpu, torchtitan's among
#                   them where it is installed
#   3. until 92 %   all four: gradients in bf16, four unequal devices, and what of Swin's gathers is hidden
#   4. the rest     all four: the sweep over modes and tokens, as far as it comes
# On two: the tests marked multigpu and bench_mesh.py until 97 %; gpu_partition.sh has the rest. PARTS (tests,mesh) says which of both.
# OUT (benchmarks/results) gets mesh_h200x{2,4}.json and partition_h200x{2,4}.json, in which what was not measured stays as it was, and
# one log, several.log. RESUME is a mesh_h200x*.json of an earlier call, behind whose rows bench_mesh.py goes on. GPUS says how many, if
# not all that are there.
# `python3 -m benchmarks.partition_docs` then writes the tables. benchmarks/swin_moe/gpu.sh is a call of its own.
# SMOKE=1: the same tiny, over Gloo on CPUs, in four minutes on two cores; without OUT, it writes to a folder that it names.
set -u
cd "$(dirname "$0")/.."
out=${1:-${SMOKE:+$(mktemp -d)}}
out=${out:-benchmarks/results}
[ -z "${SMOKE:-}" ] || echo "numbers of tiny sizes go to $out"
seconds=${2:-570}
gpus=${GPUS:-$([ -n "${SMOKE:-}" ] && echo 4 || nvidia-smi -L | wc -l)}
work=$(mktemp -d)
begin=$(date +%s)
mkdir -p "$out"
export HEXA_FX_WAIT_FOR_KERNELS=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} PYTHONUNBUFFERED=1 HEXA_FX_BUILD_JOBS=${HEXA_FX_BUILD_JOBS:-$(nproc)}
export NCCL_NVLS_ENABLE=0 CUBLAS_WORKSPACE_CONFIG=:4096:8 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
smoke=${SMOKE:+--smoke}
large="--layers 4" few=8192 some=65536 many=$((65536 * gpus)) steps=300 swin=:swin-moe-b
[ -z "$smoke" ] || { large="--shrink 32 --layers 2 --rounds 1" few=64 some=96 many=128 steps=3 swin=; }

. benchmarks/end_with_it.sh

launch() { # command, whose process is then $!
  "$@" &
  running="$running $!"
}

run() { # command
  launch "$@"
  wait $!
}

left() { # seconds until this share of all is over
  echo $((begin + seconds * $1 / 100 - $(date +%s)))
}

rows() { # share, options; a row that ends the job is left out by the next launch
  until=$1
  shift
  for _ in 1 2 3 4; do
    [ "$(left "$until")" -gt 40 ] || break
    # shellcheck disable=SC2086
    run timeout -k 10 "$(left "$until")" python3 -m torch.distributed.run --master_port 29800 --nproc_per_node "$gpus" benchmarks/bench_mesh.py \
      $large --seconds $(($(left "$until") - 25)) --json "$work/mesh.json" "$@" && break
  done
}

mesh() { # share
  two=qwen3-30b,mixtral-8x7b skewed=auto,ep_grouped_mm,fsdp2_hexa,ep_hexa
  graphed=fsdp2_grouped_mm,data_graphed,model_graphed,ep_grouped_mm
  [ -z "${RESUME:-}" ] || cp "$RESUME" "$work/mesh.json"
  rows "$1" --models $two --tokens $few,$some --rows fsdp2_hexa,auto
  rows "$1" --models qwen3-30b --tokens $some --rows $skewed --trained $steps
  rows "$1" --models qwen3-30b --tokens $few,$some --rows fsdp2_hexa,auto,fsdp2_grouped_mm,data,model --dtype float32
  rows "$1" --models $two --tokens $few,$some --rows mesh_data,mesh_model
  rows "$1" --models qwen3-30b --tokens $few,$some --rows fsdp2_hexa,fsdp2_grouped_mm --lora 16
  rows "$1" --models qwen3-30b --tokens $few --rows fsdp2_hexa,fsdp2_grouped_mm --trainer 20
  rows "$1" --models $two --tokens $few,$some --rows $graphed
  rows "$1" --models $two --tokens $some --rows $skewed --zipf 1.2
  rows "$1" --models $two --tokens $few,$some --rows data,model,ep_hexa
  rows "$1" --models olmoe --tokens $few,$some --rows fsdp2_hexa,auto,$graphed
  rows "$1" --models $two,olmoe --tokens $many --rows fsdp2_hexa,auto,fsdp2_grouped_mm,ep_grouped_mm
  [ ! -s "$work/mesh.json" ] || cp "$work/mesh.json" "$out/mesh_h200x$gpus.json"
}

part() { # file, port, GPUs, processes, share, sections; the caller waits
  # shellcheck disable=SC2086
  launch python3 benchmarks/partition_run.py --out "$work/$1" --port "$2" --gpus "$3" --processes "$4" --deadline "$(left "$5")" --sections "$6" $smoke
}

multigpu() { # share, GPUs
  [ -z "$smoke" ] || return 0
  run env CUDA_VISIBLE_DEVICES="$2" timeout -k 10 "$(left "$1")" sh benchmarks/gpu.sh multigpu
  run env CUDA_VISIBLE_DEVICES="$2" timeout -k 10 "$(left "$1")" python3 -m pytest tests/integrations/test_torchtitan.py -q -rs -p no:cacheprovider
}

merge() { # what is recorded so far, over what was there
  for n in 2 4; do
    ls "$work/$n"*.json >/dev/null 2>&1 || continue
    python3 benchmarks/merge_records.py "$out/partition_h200x$n.json" "$out/partition_h200x$n.json" "$work/$n"*.json
  done
}

on_two() {
  case ${PARTS:-tests,mesh} in *tests*) multigpu 30 0,1 ;; esac
  case ${PARTS:-tests,mesh} in *mesh*) mesh 97 ;; esac
}

on_four() {
  mesh 60
  part 2a 29501 0,1 2 78 correctness,unequal
  two=$!
  multigpu 78 2,3
  wait $two
  merge
  part 4a 29701 0,1,2,3 4 92 correctness,unequal,overlap$swin
  wait $!
  merge
  part 4b 29751 0,1,2,3 4 99 sweep
  wait $!
  merge
}

{
  if [ "$gpus" -lt 4 ]; then on_two; else on_four; fi
  echo "took $(($(date +%s) - begin)) s of $seconds"
} >"$out/several.log" 2>&1
grep -E '^\{|sections in|passed|failed|Error|took' "$out/several.log" | cut -c1-240
