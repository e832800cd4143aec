#!/bin/sh
# Whole models, of which each needs one GPU: queues of parts, one for each GPU, side by side in one call of at most SECONDS.
#
#   sh benchmarks/gpu_models.sh OUT SECONDS "checkpoint@300 use:qwen3-30b:4" "wide@200 few:olmoe,gpt-oss-20b:4 use:olmoe:4"
#
#   checkpoint         bench_fp8_checkpoint.py: 48 layers with experts in FP8, loaded, run and adapted, beside the dequantised model
#   wide, wide8        examples/train_small_moe.py at Qwen3-30B's widths: FP8 beside bf16 and grouped_mm, bf16 and float32 weights;
#                      wide8: with compiled layers, too, and eight batches a step
#   use:MODELS:LAYERS  bench_use.py of these models in all its set-ups; `few` instead of `use` in those of 8 tokens, `main` in six
#
# Behind @, the seconds that a part may take; what it has measured by then is kept. OUT gets
# PART_GPU_NUMBER.json and models.log. SMOKE=1: the same tiny, on a CPU.
set -u
cd "$(dirname "$0")/.."
out=$1 seconds=$2
shift 2
begin=$(date +%s)
mkdir -p "$out"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
tiny="" short="" size="--device cuda --size wide" steps=40 several=8
[ -z "${SMOKE:-}" ] || { tiny="--shrink 32 --device cpu --tokens 64" short="--layers 2 --new 4" size="--size tiny" steps=2 several=2; }

. benchmarks/end_with_it.sh

command_of() { # place, kind, models, layers
  use="python3 benchmarks/bench_use.py $tiny --models $3 --layers $4 --seconds 0.2 --json $out/$2_$1.json"
  train="python3 examples/train_small_moe.py $size"
  one="$train --steps $steps --impls hexa,hexa-fp8,grouped_mm"
  eight="$train --steps $several --micro 8 --impls hexa,hexa-fp8,grouped_mm,hexa-compiled,hexa-fp8-compiled,grouped_mm-compiled"
  case $2 in
    checkpoint) echo "python3 benchmarks/bench_fp8_checkpoint.py $tiny $short --json $out/checkpoint_$1.json" ;;
    wide) echo "$one --weights bfloat16 --json $out/wide_bf16_$1.json && $one --weights float32 --json $out/wide_f32_$1.json" ;;
    wide8) echo "$eight --weights bfloat16 --json $out/wide8_bf16_$1.json && $eight --weights float32 --json $out/wide8_f32_$1.json" ;;
    use) echo "$use" ;;
    main) echo "$use --cells 'bf16;float32, autocast;LoRA on experts;frozen experts;compiled;prefill'" ;;
    few) echo "$use --cells '8 tokens;packed, 8 tokens'" ;;
  esac
}

queue() { # GPU, parts
  end_with_it
  [ -n "${SMOKE:-}" ] || export CUDA_VISIBLE_DEVICES="$1"
  number=0
  for part in $2; do
    most=$((begin + seconds - $(date +%s))) since=$(date +%s)
    case $part in *@*) [ "${part#*@}" -gt "$most" ] || most=${part#*@} ;; esac
    [ "$most" -gt 20 ] || { echo "== GPU $1: no time for $part"; continue; }
    what=${part%@*}:: && kind=${what%%:*} && what=${what#*:}
    timeout -k 5 "$most" sh -c "$(command_of "$1_$number" "$kind" "${what%%:*}" "$(echo "$what" | cut -d: -f2)")" &
    running=$!
    wait $running
    code=$? number=$((number + 1))
    echo "== GPU $1: $part ended with $code after $(($(date +%s) - since)) s"
  done
}

gpu=0
for parts in "$@"; do
  queue "$gpu" "$parts" >>"$out/models.log" 2>&1 &
  running="$running $!"
  gpu=$((gpu + 1))
done
wait
grep -hE '^\{|^==|Error' "$out/models.log" | cut -c1-260
